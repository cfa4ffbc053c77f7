"""The windows of a group's instances as they roll: a picture of the last seconds, from their reports. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from serai.contracts.admission import GateMode, InstanceReport

SPAN_S = 12.0
COLUMNS = 60
KEPT_MAX = 2000
"""Reports of one instance: at one each 20 ms, more than the span."""

PREFILL, DECODE, IDLE, MIXED, UNKNOWN = "█", "▁", " ", "▒", "·"
LEGEND = f"{PREFILL} prefill  {DECODE} decode  {MIXED} both (ordinary batching)  blank: idle  {UNKNOWN} no report"


class _Seen(NamedTuple):
    at_s: float
    sign: str


class Windows:
    """Those of one group."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[_Seen]] = {}

    def note(self, report: InstanceReport, now_s: float) -> None:
        """A report has come."""
        kept = self._seen.get(report.session)
        if kept is None:
            kept = self._seen[report.session] = deque(maxlen=KEPT_MAX)
        kept.append(_Seen(now_s, sign(report)))

    def forget(self, session: str) -> None:
        self._seen.pop(session, None)

    def picture(
        self, now_s: float, names: Mapping[str, str], span_s: float = SPAN_S, columns: int = COLUMNS
    ) -> list[str]:
        """One line an instance, in the order of `names` (session → what it is called); the right end is now."""
        width = max([len(name) for name in names.values()], default=0)
        step_s = span_s / columns
        lines = [
            f"{name:<{width}} {self._line(session, now_s - span_s, step_s, columns)}" for session, name in names.items()
        ]
        return [*lines, f"{'':<{width}} {f'the last {span_s:g} s: {LEGEND}'}"] if lines else []

    def _line(self, session: str, from_s: float, step_s: float, columns: int) -> str:
        """What was said last in each column's time; a prefill shows however short it was."""
        shown, last = [""] * columns, [""] * columns
        before = UNKNOWN
        for seen in self._seen.get(session, ()):
            column = int((seen.at_s - from_s) // step_s)
            if column < 0:
                before = seen.sign
            elif column < columns:
                last[column] = seen.sign
                if shown[column] != PREFILL:
                    shown[column] = seen.sign
        for column in range(columns):
            shown[column] = shown[column] or before
            before = last[column] or before
        return "".join(shown)


def sign(report: InstanceReport) -> str:
    """What the instance does, in one character."""
    if not report.decoding.count and not report.waiting:
        return IDLE
    if report.mode is GateMode.ORDINARY:
        return MIXED
    return PREFILL if report.prefilling else DECODE
