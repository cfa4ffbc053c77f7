"""The tests that OpenAI's Python library is tested with, asked of the ingress: chat, completions, embeddings, models.

They come with the library's source (`make clients`) and run there unchanged. Answers are read strictly: a field of a
wrong type fails. What is not asked, and why, stands in `sdk_exclusions.txt`.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from clients.conftest import TRANSLATED
from clients.test_conversations import CONVERSATIONS, environment, run
from integration.system import System

EXCLUSIONS = Path(__file__).parent / "sdk_exclusions.txt"
FILES = ("chat/test_completions.py", "test_completions.py", "test_embeddings.py", "test_models.py")
TEST_ID = re.compile(r"^tests/api_resources/(?:chat/)?(?P<file>\w+\.py)::\w+::(?P<name>\w+)\[?(?P<parameter>\w*)\]?$")
LEAST_PASSED = 100
"""There are more; fewer would mean that they were not found."""


def exclusions() -> list[str]:
    """Patterns of file:test:parameter."""
    lines = [line.split() for line in EXCLUSIONS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(len(words) > 2 for words in lines), "each exclusion has a reason"
    return [words[0] for words in lines]


def excluded(ids: list[str]) -> list[str]:
    """Those of the tests that are not asked. Fails when an exclusion excludes nothing."""
    chosen: set[str] = set()
    found = {
        match.group(): f"{match['file']}:{match['name']}:{match['parameter']}"
        for match in map(TEST_ID.match, ids)
        if match
    }
    assert len(found) == len(ids), "every test has an id that is understood"
    for pattern in exclusions():
        fitting = {one for one, short in found.items() if fnmatch(short, pattern)}
        assert fitting, f"{EXCLUSIONS.name}: no test matches {pattern}"
        chosen |= fitting
    return sorted(chosen)


@pytest.mark.timeout(300)
def test_openais_own_tests_pass(serving: System, clients: Path, tmp_path: Path) -> None:
    folder = clients / "openai-python"
    variables = environment(serving, clients, TRANSLATED, tmp_path)
    del variables["OPENAI_API_KEY"], variables["OPENAI_BASE_URL"]
    variables |= {"TEST_API_BASE_URL": f"{serving.url}/v1"}
    python = str(clients / "python" / "bin" / "python")
    command = [python, "-m", "pytest", "-c", str(CONVERSATIONS / "conversations.ini"), "--rootdir", str(folder)]
    command += [f"tests/api_resources/{file}" for file in FILES]
    listed = run([*command, "--collect-only"], variables=variables, folder=folder)
    ids = [line for line in listed.splitlines() if line.startswith("tests/")]
    unasked = [f"--deselect={one}" for one in excluded(ids)]
    output = run([*command, *unasked], variables=variables, folder=folder, timeout_s=280)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    assert set(counts) == {"passed"}, output[-2000:]
    assert counts["passed"] == len(ids) - len(unasked) >= LEAST_PASSED
    print(f"OpenAI's own tests: {counts['passed']} passed, {len(unasked)} not asked")
