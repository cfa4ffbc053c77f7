"""`serai bench failover`: what a stream's lines amount to, and how it is counted."""

from __future__ import annotations

import json

import pytest

from serai.bench.failover import Tally, count_stream, figures_of, stream_seen

Lines = list[bytes]
DONE = b"data: [DONE]"
RESUMED = b": serai continued on s2"


def said(text: str, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish}]}).encode()


def broke() -> bytes:
    return b'data: {"error": {"code": "engine_cut"}}'


@pytest.mark.parametrize(
    ("lines", "counted"),
    [
        ([said("a"), said("b", "stop"), DONE], set()),
        ([said("a"), RESUMED, said("b", "stop"), DONE], {"streams_resumed"}),
        ([said("a"), RESUMED, said("c", "stop"), DONE], {"streams_resumed", "resume_mismatches"}),
        ([said("a", "stop"), DONE], {"resume_mismatches"}),
        ([said("a"), broke(), DONE], {"stream_errors"}),
        ([said("a"), broke()], {"stream_errors", "streams_unmarked"}),
        ([said("a"), DONE], {"streams_unmarked"}),
        ([said("a"), said("b", "stop")], {"streams_unmarked"}),
        ([], {"streams_unmarked"}),
    ],
)
def test_a_stream_is_counted_by_how_it_ended(lines: Lines, counted: set[str]) -> None:
    tally = Tally()
    count_stream(tally, stream_seen([(float(number), line) for number, line in enumerate(lines)]), "ab")
    figures = figures_of(tally)
    assert figures.pop("streams") == 1
    assert {name for name, value in figures.items() if value and "gap" not in name} == counted


def test_the_longest_silence_of_a_resumed_stream_is_between_two_events() -> None:
    tally = Tally()
    count_stream(tally, stream_seen([(1.0, said("a")), (1.1, RESUMED), (1.5, said("b", "stop")), (9.0, DONE)]), "ab")
    assert figures_of(tally)["resume_gap_ms_p50"] == pytest.approx(500)
