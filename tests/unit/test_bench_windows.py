"""Figures of `serai bench windows`: windows from reports, tokens held against them."""

from __future__ import annotations

from pathlib import Path

import pytest

from serai.bench.window_times import Heard, Windows, figures_of, picture
from serai.contracts.admission import GateMode, InstanceReport, Spread


def report(session: str, prefilling: bool, window_s: float) -> InstanceReport:
    return InstanceReport(
        session, 1, 1, 0, GateMode.PADG, prefilling, window_s, Spread(0), 0, 0.0, 0.0, 0, 0
    )  # fmt: skip


@pytest.fixture
def windows() -> Windows:
    """From 100 to 110 s: `a` prefills from 101 to 102 and from 103.5 to the end, `b` from 104 to 106."""
    made = Windows()
    made.began_s, made.ended_s = 100.0, 110.0
    for session, at_s, prefilling, window_s in (
        ("a", 99.0, False, 1.0),
        ("a", 101.3, True, 0.3),
        ("a", 101.6, True, 0.6),
        ("a", 102.5, False, 0.5),
        ("b", 104.5, True, 0.5),
        ("b", 106.0, False, 0.0),
        ("a", 104.0, True, 0.5),
    ):
        made.heard(report(session, prefilling, window_s), at_s)
    return made


def heard(session: str, sent_s: float, *token_s: float) -> Heard:
    return Heard(sent_s, 10, 100.0, session, 200, whole=bool(token_s), token_s=list(token_s))


def test_windows_are_what_reports_say(windows: Windows) -> None:
    assert windows.of("a") == [(pytest.approx(1.0), pytest.approx(2.0)), (pytest.approx(3.5), pytest.approx(10.0))]
    assert windows.of("b") == [(pytest.approx(4.0), pytest.approx(6.0))]
    assert windows.raw() == {"a": [[1000, 2000], [3500, 10000]], "b": [[4000, 6000]]}


def test_a_window_that_closed_and_opened_between_two_reports_is_two(windows: Windows) -> None:
    windows.heard(report("a", True, 0.2), 105.0)
    assert windows.of("a")[1:] == [
        (pytest.approx(3.5), pytest.approx(4.8)), (pytest.approx(4.8), pytest.approx(10.0))
    ]  # fmt: skip


def test_figures_hold_tokens_against_windows(windows: Windows) -> None:
    answered = [heard("a", 0.5, 1.5, 1.6, 2.6, 2.7), heard("b", 3.0, 5.0, 6.5), heard("b", 6.0, 7.0, 7.1)]
    figures = figures_of(windows, [*answered, heard("a", 9.0)], 1.5, 0.5)
    assert (figures["requests"], figures["failed"], figures["windows"]) == (4, 1, 3)
    assert figures["open_share"] == pytest.approx((1 + 6.5 + 2) / 20)
    assert figures["some_window_open_share"] == pytest.approx(7.5 / 10)
    assert figures["first_tokens_in_or_after_own_window_share"] == pytest.approx(2 / 3)
    assert figures["tokens_in_own_window_share"] == pytest.approx(1 / 5)
    assert figures["ttft_p50_ms"] == pytest.approx(1000)
    assert figures["attainment"] == pytest.approx(2 / 4)


def test_it_is_drawn(windows: Windows, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture(windows, [heard("a", 0.5, 1.5, 1.6)], tmp_path / "windows.png", "a title")
    assert (tmp_path / "windows.png").read_bytes().startswith(b"\x89PNG")
