"""The fault table, for a terminal and for a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serai.bench.faults.case import Case, Finding

_CELL_MAX = 44


def rows(cases: Sequence[Case], findings: Mapping[str, Mapping[str, Finding]], names: Sequence[str]) -> list[list[str]]:
    """For a terminal: a mark and what was seen."""
    header = ["", *names]
    return [header, *[[case.name, *[_cell(findings[case.name].get(name)) for name in names]] for case in cases]]


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "–"
    text = finding.text if len(finding.text) <= _CELL_MAX else finding.text[: _CELL_MAX - 1] + "…"
    return f"{'✓' if finding.holds else '✗'} {text}"


def markdown(cases: Sequence[Case], findings: Mapping[str, Mapping[str, Finding]], names: Sequence[str]) -> str:
    """For a page: with the rule of each row."""
    lines = [f"| | what must be seen | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for case in cases:
        cells = [_markdown_cell(findings[case.name].get(name)) for name in names]
        lines.append(f"| {case.title} | {case.rule} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _markdown_cell(finding: Finding | None) -> str:
    if finding is None:
        return "–"
    text = finding.text.replace("|", "\\|").replace("\n", " ")
    return f"✓ {text}" if finding.holds else f"**✗ {text}**"
