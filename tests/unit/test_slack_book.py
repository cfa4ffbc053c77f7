"""The slack book against a plain list of streams."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.worker_agent.slack_book import Place, SlackBook

TARGETS = st.sampled_from([0.05, 0.1, 0.25])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), TARGETS, st.floats(-5, 5)),
        st.tuples(st.just("step"), TARGETS, st.just(0.0)),
        st.tuples(st.just("remove"), TARGETS, st.floats(0, 1, exclude_max=True)),
    ),
    max_size=40,
)


@dataclass
class Plain:
    slo_s: float
    zero_s: float
    place: Place


@given(ACTIONS, st.floats(-3, 3), st.floats(0, 0.5))
def test_a_book_says_what_a_pass_over_all_streams_would(
    actions: list[tuple[str, float, float]], now_s: float, low_share: float
) -> None:
    book, streams = SlackBook(), list[Plain]()
    for number, (action, slo_s, value) in enumerate(actions):
        if action == "add":
            streams.append(Plain(slo_s, value, book.add(number, slo_s, value)))
        elif action == "step":
            book.step()
            for stream in streams:
                stream.zero_s += stream.slo_s
        elif streams:
            gone = streams.pop(int(value * len(streams)))
            assert book.remove(gone.place) == pytest.approx(gone.zero_s)
    zeros = sorted(stream.zero_s for stream in streams)
    found = book.spread(now_s, low_share)
    assert book.count == found.count == len(zeros)
    assert (
        book.behind(now_s) == sum(1 for zero in zeros if zero < now_s)
        or not zeros
        or min(abs(zero - now_s) for zero in zeros) < 1e-6
    )
    if zeros:
        assert found.mean_s == pytest.approx(sum(zeros) / len(zeros) - now_s, abs=1e-6)
        assert found.least_s == pytest.approx(zeros[0] - now_s, abs=1e-6)
        assert found.most_s == pytest.approx(zeros[-1] - now_s, abs=1e-6)
        assert found.low_s == pytest.approx(zeros[int(low_share * len(zeros))] - now_s, abs=1e-6)
        expected = sum(min(1.0, max(0.0, now_s - zero) / 2.0) for zero in zeros)
        assert book.misses(now_s, 2.0) == pytest.approx(expected, abs=1e-6)


def test_streams_of_another_book_keep_their_slack() -> None:
    one, other = SlackBook(), SlackBook()
    one.add(1, 0.1, 1.0)
    one.step()
    other.add(2, 0.1, 5.0)
    other.step()
    places = one.absorb(other)
    assert (one.count, other.count) == (2, 0)
    assert one.zero_s(places[2]) == pytest.approx(5.1)
    assert one.spread(0.0, 0.0).least_s == pytest.approx(1.1)


def test_more_targets_than_are_kept_apart_count_as_stricter_ones() -> None:
    book = SlackBook()
    for number in range(16):
        book.add(number, 0.1 + number / 100, 1.0)
    place = book.add(99, 0.155, 1.0)
    assert place[0] == pytest.approx(0.15)
