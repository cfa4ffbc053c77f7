"""However a stream is cut into pieces, only whole events pass, nothing is changed, and nothing is lost or made up."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.openai_format import DONE, SseRelay, read_usage


def boundaries(stream: bytes) -> list[int]:
    """Where an event may have ended: at the start, and behind every empty line."""
    found, start = [0], 0
    while (end := stream.find(b"\n", start)) >= 0:
        if stream[start:end] in (b"", b"\r"):
            found.append(end + 1)
        start = end + 1
    return found


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    return [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]


def check(stream: bytes, cuts: list[int]) -> tuple[SseRelay, bytes]:
    """Feeds `stream` in pieces. After each one, the whole events of what came so far have passed, and nothing else;
    only empty lines between events may wait for what follows them, and the end for the word that it is one."""
    relay, seen, passed = SseRelay(), b"", b""
    for piece in pieces(stream, cuts):
        seen += piece
        passed += relay.feed(piece)
        assert passed == seen[: len(passed)]
        assert len(passed) in boundaries(seen)
        if not relay.done:
            assert seen[len(passed) : boundaries(seen)[-1]].strip(b"\r\n") == b""
    return relay, passed


def event(text: str, *, newline: str = "\n", name: str = "", space: str = " ") -> bytes:
    lines = [f"event: {name}"] * bool(name)
    lines.append(f"data:{space}" + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False))
    return (newline.join(lines) + newline * 2).encode()


texts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["grüezi", "駱駝", "🐪", "[DONE]", "\r\n\r\n"]
)
newlines = st.sampled_from(["\n", "\r\n"])
events = st.builds(
    event, texts, newline=newlines, name=st.sampled_from(["", "message"]), space=st.sampled_from(["", " "])
)
comments = newlines.map(lambda newline: f": still here{newline * 2}".encode())
ends = st.sampled_from([DONE, b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n"])
bodies = st.lists(events | comments, min_size=1, max_size=5).map(b"".join)


@st.composite
def cut_streams(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> tuple[bytes, list[int]]:
    stream = draw(streams)
    return stream, sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))


@given(cut_streams(st.tuples(bodies, ends).map(b"".join)))
def test_a_whole_stream_passes_unchanged_and_is_done(cut: tuple[bytes, list[int]]) -> None:
    relay, passed = check(*cut)
    assert relay.done
    assert DONE.strip() not in passed.splitlines()
    assert passed + relay.rest() == cut[0]
    assert relay.rest() == b""


@given(cut_streams(st.tuples(bodies, ends).map(b"".join)), st.data())
def test_a_stream_that_breaks_off_has_passed_whole_events_and_is_done_only_behind_its_end_marker(
    cut: tuple[bytes, list[int]], data: st.DataObject
) -> None:
    stream, cuts = cut
    broken = stream[: data.draw(st.integers(0, len(stream) - 1))]
    relay, _ = check(broken, [at for at in cuts if at <= len(broken)])
    assert not relay.done
    assert relay.rest() == broken[boundaries(broken)[-1] :]


@pytest.mark.parametrize(
    "stream",
    ["data: é\n\ndata: 🐪\n\n".encode(), b"a\r\n\r\nb\r\n\r\n", b": c\n\r\nx\n\n\n", b"a\n\nb\r\n\r\n\n"],
    ids=["utf-8", "crlf", "comment", "mixed"],
)
def test_every_cutting_into_three_pieces_and_every_single_byte(stream: bytes) -> None:
    for cuts in combinations(range(len(stream) + 1), 2):
        check(stream, list(cuts))
    check(stream, list(range(1, len(stream))))


def test_every_possible_cutting_of_a_short_stream() -> None:
    stream = b"a\r\n\r\nb\n\nc\n"
    inner = range(1, len(stream))
    for count in range(len(stream)):
        for cuts in combinations(inner, count):
            check(stream, list(cuts))


def test_an_event_of_ours_can_follow_what_has_passed() -> None:
    relay = SseRelay()
    passed = relay.feed(event("one") + event("two")[:-4])
    ended = passed + b'data: {"error": {}}\n\n' + DONE
    assert [line for line in ended.split(b"\n\n") if line] == [
        event("one").strip(),
        b'data: {"error": {}}',
        b"data: [DONE]",
    ]


def test_the_end_marker_counts_only_at_the_end() -> None:
    relay = SseRelay()
    assert relay.feed(DONE) == b""
    assert relay.done
    more = event("a word after the end")
    assert relay.feed(more) == DONE + more
    assert not relay.done


@pytest.mark.parametrize("text", ["data: [DONE]", "data:[DONE]"])
def test_the_words_of_the_end_marker_in_a_text_are_no_end(text: str) -> None:
    relay = SseRelay()
    relay.feed(event(text))
    assert not relay.done
    relay.feed(f": {text}\n\n".encode())
    assert not relay.done


def test_what_is_held_back_is_bounded() -> None:
    relay = SseRelay()
    endless = b"data: " + b"x" * (1024 * 1024)
    assert relay.feed(endless[:-7]) == b""
    assert relay.feed(endless[-7:]) == endless
    assert relay.rest() == b""


USAGE = {"prompt_tokens": 7, "completion_tokens": 30, "prompt_tokens_details": {"cached_tokens": 4}, "total_tokens": 37}


@given(
    cut_streams(
        st.tuples(bodies, st.just(b"data: " + json.dumps({"usage": USAGE}).encode() + b"\n\n"), ends).map(b"".join)
    )
)
def test_usage_is_found_however_the_stream_is_cut(cut: tuple[bytes, list[int]]) -> None:
    assert check(*cut)[0].usage() == USAGE


def test_usage_of_the_last_event_counts() -> None:
    """Some engines report usage so far with every event."""
    relay = SseRelay()
    for tokens in range(200):
        relay.feed(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens)
    relay.feed(b'data: {"usage":null}\n\n' + DONE)
    assert relay.usage() == {"completion_tokens": 199}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"usage": null}',
        b'{"usage": {"prompt_tokens": 1',
        b'{"usage": {"prompt_tokens": oops}}',
        rb'{"content": "\"usage\": {\"prompt_tokens\": 1}"}',
    ],
    ids=["nothing", "null", "cut", "no json", "in text"],
)
def test_no_usage_is_made_up(data: bytes) -> None:
    assert read_usage(data) is None
