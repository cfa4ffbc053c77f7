"""Each known way in which services on clusters fail (H01, H02, …: docs/testing.md) has a test that is named by it, and
the table in the docs names tests that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "testing.md"

ALLOCATION = (1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20)
NODE_AND_NETWORK = (21, 22, 23, 24, 26, 27, 28, 29, 31, 33, 34, 35)
ENGINE = (36, 37, 39, 40, 41, 43, 44, 45, 46)
CASES = [f"H{number:02}" for number in (*ALLOCATION, *NODE_AND_NETWORK, *ENGINE)]

_TEST = re.compile(r"^(?:    )?(?:async )?def (test_\w+)\(", re.MULTILINE)
_ROW = re.compile(r"^\| (H\d\d) \|.*\| `([\w/.]+)::(\w+)` \|$", re.MULTILINE)


@cache
def names_by_file() -> dict[str, list[str]]:
    """Names of tests by file, as a path in the folder of tests."""
    return {
        str(path.relative_to(TESTS)): _TEST.findall(path.read_text()) for path in sorted(TESTS.glob("*/**/test_*.py"))
    }


@pytest.mark.parametrize("case", CASES)
def test_a_test_is_named_by_the_case(case: str) -> None:
    named = [name for names in names_by_file().values() for name in names if case.lower() in name.split("_")]
    assert named, f"no test is named by {case}: def test_{case.lower()}_…"


def test_the_table_names_a_test_that_is_there_for_each_case() -> None:
    rows = _ROW.findall(TABLE.read_text())
    assert [case for case, _, _ in rows] == CASES
    wrong = [f"{case}: tests/{file}::{name}" for case, file, name in rows if name not in names_by_file().get(file, [])]
    assert wrong == []
