"""The pages of this project, and what stands in them: for the tests that hold them against the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
"""What a newcomer follows: it has to be true today."""
PAGES = [
    *GUIDES,
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*/**/*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
"""All of them; decisions and the changelog also tell what was."""

_FENCE = re.compile(r"^ *```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")


def name_of(page: Path) -> str:
    """As it is called in messages."""
    return str(page.relative_to(ROOT))


def prose_of(text: str) -> str:
    """Without blocks of code."""
    return _FENCE.sub("", text)


def blocks_of(text: str) -> Iterator[tuple[str, str]]:
    """Blocks of code, each with its kind (`sh`, `yaml`, or nothing)."""
    for found in _FENCE.finditer(text):
        yield found["kind"], found["body"]


def words_of(text: str) -> list[str]:
    """What stands in backticks, a line break in it taken for a space; a pipe in a table is no end of it."""
    return [found.replace("\n", " ") for found in _CODE.findall(re.sub(r"(?<=\S)\n(?=\S)", " ", prose_of(text)))]
