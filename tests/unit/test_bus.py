"""Payloads are joined into few messages, in order, within the size limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.bus import split_by_size

payloads = st.lists(st.binary(min_size=1, max_size=12), max_size=12)
limits = st.integers(1, 30)


@given(payloads, limits)
def test_no_byte_is_lost_or_moved(parts: list[bytes], bytes_max: int) -> None:
    assert b"".join(split_by_size(parts, bytes_max)) == b"".join(parts)


@given(payloads, limits)
def test_messages_are_cut_between_payloads_and_only_where_they_must_be(parts: list[bytes], bytes_max: int) -> None:
    waiting = list(parts)
    for message in split_by_size(parts, bytes_max):
        joined = [waiting.pop(0)]
        while len(b"".join(joined)) < len(message):
            joined.append(waiting.pop(0))
        assert message == b"".join(joined)
        assert len(message) <= bytes_max or len(joined) == 1
        assert not waiting or len(message) + len(waiting[0]) > bytes_max
    assert waiting == []


def test_a_payload_that_fits_exactly_is_joined() -> None:
    assert split_by_size([b"abc", b"de", b"f"], 5) == [b"abcde", b"f"]
    assert split_by_size([], 5) == []
