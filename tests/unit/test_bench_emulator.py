"""`serai bench emulator`: from arrival times to lateness."""

from __future__ import annotations

import pytest

from serai.bench.emulator import Round, figures_of, lateness_batched_ms, lateness_fixed_ms


def test_a_token_is_late_by_what_it_comes_after_its_place_in_the_stream() -> None:
    times = [10.0, 10.05, 10.13, 10.15]
    assert lateness_fixed_ms(times, times[0], 0.05, 0.0) == pytest.approx([0, 30, 0], abs=1e-6)
    assert lateness_fixed_ms(times, 9.99, 0.05, 10.1) == pytest.approx([40, 10], abs=1e-6)


def test_tokens_of_a_step_are_late_by_what_they_come_after_its_first() -> None:
    streams = [[1.000, 1.050, 1.101], [1.004, 1.051, 1.100]]
    assert lateness_batched_ms(streams, 0.05, 0.0) == pytest.approx([0, 4, 0, 1, 0, 1], abs=1e-6)
    assert lateness_batched_ms(streams, 0.05, 1.06) == pytest.approx([0, 1], abs=1e-6)


def test_figures_are_medians_and_the_quietest_round() -> None:
    def one(timing: str, lateness: float) -> Round:
        return Round(timing, [lateness] * 3, [lateness + 1], 0.2, 0.1, 1.01, 1, 0.5)

    figures = figures_of([one("fixed", 3), one("fixed", 9), one("fixed", 4), one("batched", 7)])
    assert figures["token_lateness_p99_ms"] == 4
    assert figures["token_lateness_p99_ms_quietest"] == 3
    assert figures["token_lateness_from_sent_p99_ms"] == 5
    assert (figures["batched_token_lateness_p50_ms"], figures["batched_step_stretch"]) == (7, 1.01)
