"""Prefill windows of instances and tokens of streams: what was measured, figures of it, and the picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from serai.bench.percentiles import percentile
from serai.contracts.admission import GateMode, InstanceReport

_BIN_S = 0.1


@dataclass(slots=True)
class Heard:
    """One request, as its client saw it; seconds since the measurement began."""

    sent_s: float
    words: int
    began_s: float
    session: str = ""
    status: int = 0
    failure: str = ""
    whole: bool = False
    token_s: list[float] = field(default_factory=list)

    def add(self, tokens: int, now_s: float) -> None:
        """So many came together."""
        self.token_s.extend([now_s - self.began_s] * tokens)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    def raw(self) -> dict[str, Any]:
        """As JSON has it, in milliseconds; the times between tokens in one line, since there are very many."""
        at_ms = [round(at_s * 1000) for at_s in self.token_s]
        return {
            "session": self.session,
            "words": self.words,
            "sent_ms": round(self.sent_s * 1000),
            "failure": self.failure,
            "first_token_ms": at_ms[0] if at_ms else None,
            "between_tokens_ms": " ".join(str(later - earlier) for earlier, later in pairwise(at_ms)),
        }


class Windows:
    """When each instance prefilled, by its reports."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.ended_s = 0.0
        self.reports = 0
        self.gated = 0
        """Reports of instances whose gate held back what it had to."""
        self._open: dict[str, float] = {}
        self._closed: dict[str, list[tuple[float, float]]] = {}

    def heard(self, report: InstanceReport, now_s: float) -> None:
        """One report. A window that opened and closed between two of them is not seen."""
        self.reports += 1
        self.gated += report.mode is GateMode.PADG
        session, since_s = report.session, now_s - report.window_s
        self._closed.setdefault(session, [])
        opened_s = self._open.get(session)
        if report.prefilling and opened_s is None:
            self._open[session] = since_s
        elif not report.prefilling and opened_s is not None:
            del self._open[session]
            self._closed[session].append((opened_s, max(opened_s, min(since_s, now_s))))
        elif report.prefilling and opened_s is not None and since_s > opened_s + 0.02:
            # Closed and opened again since the last report: by how long it was closed nobody knows.
            self._closed[session].append((opened_s, since_s))
            self._open[session] = since_s

    @property
    def sessions(self) -> list[str]:
        return sorted(self._closed)

    def of(self, session: str) -> list[tuple[float, float]]:
        """Its windows, in seconds since the measurement began, within it."""
        found = list(self._closed[session])
        if session in self._open:
            found.append((self._open[session], self.ended_s))
        length_s = self.ended_s - self.began_s
        cut = [(max(0.0, a - self.began_s), min(length_s, b - self.began_s)) for a, b in found]
        return [(a, b) for a, b in cut if a < b]

    def raw(self) -> dict[str, list[list[int]]]:
        """As JSON has it, in milliseconds."""
        return {s: [[round(a * 1000), round(b * 1000)] for a, b in self.of(s)] for s in self.sessions}


def figures_of(windows: Windows, heard: Sequence[Heard], slo_ttft_s: float, slo_tpot_s: float) -> dict[str, float]:
    """What can be said of it in numbers. Shares are of 1."""
    length_s = windows.ended_s - windows.began_s
    answered = [one for one in heard if one.whole and one.token_s]
    lengths = [b - a for session in windows.sessions for a, b in windows.of(session)]
    open_share = sum(lengths) / (length_s * max(1, len(windows.sessions)))
    figures = {
        "requests": float(len(heard)),
        "failed": float(len(heard) - len(answered)),
        "reports_per_s_and_instance": windows.reports / length_s / max(1, len(windows.sessions)),
        "gated_share": windows.gated / max(1, windows.reports),
        "windows": float(len(lengths)),
        "window_p50_ms": percentile(lengths, 0.5) * 1000 if lengths else float("nan"),
        "window_p90_ms": percentile(lengths, 0.9) * 1000 if lengths else float("nan"),
        "open_share": open_share,
        "first_tokens_in_or_after_own_window_share": _first_share(windows, answered),
        "tokens_in_own_window_share": _token_share(windows, answered),
        "some_window_open_share": _some_open(windows) / length_s,
    }
    if answered:
        met = [one for one in answered if one.ttft_s <= slo_ttft_s and one.tpot_s <= slo_tpot_s]
        figures |= {
            "ttft_p50_ms": percentile([one.ttft_s for one in answered], 0.5) * 1000,
            "ttft_p90_ms": percentile([one.ttft_s for one in answered], 0.9) * 1000,
            "tpot_p50_ms": percentile([one.tpot_s for one in answered], 0.5) * 1000,
            "tpot_p90_ms": percentile([one.tpot_s for one in answered], 0.9) * 1000,
            "attainment": len(met) / len(heard),
        }
    return figures


def _inside(spans: Sequence[tuple[float, float]], at_s: float, after_s: float = 0.0) -> bool:
    place = bisect_right(spans, (at_s, float("inf"))) - 1
    return place >= 0 and at_s <= spans[place][1] + after_s


def _first_share(windows: Windows, answered: Sequence[Heard]) -> float:
    """Of first tokens, those that came while their instance's window was open, or within 0.1 s of its end."""
    spans = {session: windows.of(session) for session in windows.sessions}
    found = [_inside(spans.get(one.session, []), one.token_s[0], 0.1) for one in answered]
    return sum(found) / len(found) if found else float("nan")


def _token_share(windows: Windows, answered: Sequence[Heard]) -> float:
    """Of further tokens, those that came while their instance's window was open: what prefill and decode share."""
    spans = {session: windows.of(session) for session in windows.sessions}
    found = [_inside(spans.get(one.session, []), at_s) for one in answered for at_s in one.token_s[1:]]
    return sum(found) / len(found) if found else float("nan")


def _some_open(windows: Windows) -> float:
    """Seconds in which some instance's window was open."""
    edges = sorted(span for session in windows.sessions for span in windows.of(session))
    total_s, until_s = 0.0, 0.0
    for a, b in edges:
        total_s += max(0.0, b - max(a, until_s))
        until_s = max(until_s, b)
    return total_s


def picture(windows: Windows, heard: Sequence[Heard], file: Path, title: str) -> None:
    """A row an instance: windows shaded, first tokens as dots, tokens a second as a line."""
    from matplotlib.figure import Figure

    sessions = windows.sessions
    length_s = windows.ended_s - windows.began_s
    figure = Figure(figsize=(12, 1.2 + 1.5 * len(sessions)), layout="constrained")
    rows = figure.subplots(len(sessions), 1, sharex=True, squeeze=False)[:, 0]
    bins = [_BIN_S * n for n in range(int(length_s / _BIN_S) + 2)]
    for number, (session, row) in enumerate(zip(sessions, rows, strict=True)):
        for a, b in windows.of(session):
            row.axvspan(a, b, color="#f2a65a", alpha=0.55, linewidth=0)
        mine = [one for one in heard if one.session == session and one.token_s]
        rate = [0.0] * len(bins)
        for one in mine:
            for at_s in one.token_s[1:]:
                rate[min(len(bins) - 1, int(at_s / _BIN_S))] += 1 / _BIN_S
        row.plot(bins, rate, color="#2b6cb0", linewidth=0.8, drawstyle="steps-post")
        firsts = [one.token_s[0] for one in mine]
        row.plot(firsts, [0.0] * len(firsts), "o", color="#9b2c2c", markersize=3.5, clip_on=False)
        row.set_ylabel(f"instance {number + 1}\ntokens/s")
        row.set_ylim(bottom=0)
    rows[-1].set_xlabel("seconds; shaded: prefill window; dots: first tokens; line: decoded tokens")
    lasts = [one.token_s[0] for one in heard if one.token_s]
    rows[-1].set_xlim(0, min(length_s, max(lasts, default=length_s) + 2.0))  # The rest is but decoding.
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
