"""However a stream is cut into pieces, only whole events pass, nothing is changed, and nothing is lost or made up."""

from __future__ import annotations

import json
import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress import sse_relay
from serai.ingress.endpoints import Dialect
from serai.ingress.openai_format import DONE, read_usage
from serai.ingress.sse_relay import SseRelay, relay_of


def boundaries(stream: bytes) -> list[int]:
    """Where an event may have ended: at the start, and behind every empty line. Lines end with LF, CR LF or CR."""
    return [0, *[end.end() for end in re.finditer(rb"(?<=\n)\r?\n|(?<=\r)\r", stream)]]


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    return [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]


def check(stream: bytes, cuts: list[int], dialect: Dialect = Dialect.OPENAI) -> tuple[SseRelay, bytes]:
    """Feeds `stream` in pieces. After each one, the whole events of what came so far have passed, and nothing else;
    only empty lines between events may wait for what follows them, and the end for the word that it is one."""
    relay, seen, passed = relay_of(dialect), b"", b""
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
newlines = st.sampled_from(["\n", "\r\n", "\r"])
events = st.builds(
    event, texts, newline=newlines, name=st.sampled_from(["", "message"]), space=st.sampled_from(["", " "])
)
comments = newlines.map(lambda newline: f": still here{newline * 2}".encode())
ends = st.sampled_from([DONE, b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n", b"data: [DONE]\r\r"])
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
    [
        "data: é\n\ndata: 🐪\n\n".encode(),
        b"a\r\n\r\nb\r\n\r\n",
        b"a\r\rb\r\r\rc\r",
        b": c\n\r\nx\n\n\n",
        b"a\n\nb\r\n\r\n\n",
    ],
    ids=["utf-8", "crlf", "cr", "comment", "mixed"],
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


def test_every_cutting_of_events_that_are_held_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_relay, "_LONG_BYTES", 1)
    stream = b"abc\r\n\r\nde\n\nf\n\n" + DONE
    for cuts in combinations(range(len(stream) + 1), 3):
        check(stream, list(cuts))
    check(stream, list(range(1, len(stream))))


def test_a_last_event_with_a_long_answer_in_it_ends_the_answer() -> None:
    """OpenAI's Responses say all once more, and the request's instructions and tools with it."""
    response = {"output": "x" * 3_000_000, "usage": {"input_tokens": 1, "output_tokens": 2}}
    last = b"data: " + json.dumps({"type": "response.completed", "response": response}).encode() + b"\n\n"
    relay = relay_of(Dialect.RESPONSES)
    passed = b"".join([relay.feed(last[at : at + 1000]) for at in range(0, len(last), 1000)])
    assert (passed, relay.done) == (b"", True)
    assert relay.usage() == response["usage"]
    assert relay.rest() == last


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
    endless = b"data: " + b"x" * (8 * 1024 * 1024)
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


# -- other dialects --------------------------------------------------------------------------------------------------

Events = list[dict[str, object]]
tricky = texts | st.sampled_from(['"message_stop"', '{"type":"message_stop"}', '"response"', "response.completed"])
COMPLETED = {"usage": {"input_tokens": 3, "output_tokens": 5}}


def anthropic(words: list[str]) -> Events:
    deltas = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": word}} for word in words]
    told = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 0}}}
    return [start, *deltas, {"type": "ping"}, told, {"type": "message_stop"}]


def responses(words: list[str], end: str) -> Events:
    deltas = [{"type": "response.output_text.delta", "delta": word} for word in words]
    created = {"type": "response.created", "response": {"id": "r", "usage": None}}
    return [created, *deltas, {"type": end, "response": COMPLETED}]


def written(events: Events, newline: str) -> bytes:
    return b"".join(
        f"event: {event['type']}{newline}data: {json.dumps(event, ensure_ascii=False)}{newline * 2}".encode()
        for event in events
    )


words = st.lists(tricky, max_size=4)
answers = st.one_of(
    st.tuples(st.just(Dialect.ANTHROPIC), st.builds(anthropic, words)),
    st.tuples(
        st.just(Dialect.RESPONSES),
        st.builds(
            responses,
            words,
            st.sampled_from(["response.completed", "response.failed", "response.incomplete"]),
        ),
    ),
)


@given(answers, newlines, st.data())
def test_other_dialects_are_done_with_their_own_last_event_and_not_before(
    answer: tuple[Dialect, Events], newline: str, data: st.DataObject
) -> None:
    dialect, said = answer
    stream, unfinished = written(said, newline), written(said[:-1], newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    relay, passed = check(stream, cuts, dialect)
    assert relay.done
    assert relay.usage() == COMPLETED["usage"]
    assert written(said[-1:], newline) not in passed, "held until the answer is known to be whole"
    assert passed + relay.rest() == stream

    for broken in (unfinished, stream[: data.draw(st.integers(0, len(stream) - len(newline) - 1))]):
        relay, passed = check(broken, [at for at in cuts if at <= len(broken)], dialect)
        assert not relay.done
        assert passed + relay.rest() == broken


@pytest.mark.parametrize("behind", [DONE, b": bye\n\n", b"event: ping\ndata: {}\n\n", b"data: [DO"])
@pytest.mark.parametrize("dialect", [Dialect.ANTHROPIC, Dialect.RESPONSES])
def test_what_follows_the_last_event_changes_nothing(dialect: Dialect, behind: bytes) -> None:
    said = anthropic(["x"]) if dialect is Dialect.ANTHROPIC else responses(["x"], "response.completed")
    stream = written(said, "\n")
    for cut in range(len(stream), len(stream + behind) + 1):
        relay = relay_of(dialect)
        whole = stream + behind
        passed = relay.feed(whole[:cut]) + relay.feed(whole[cut:])
        assert relay.done
        assert passed + relay.rest() == whole


def test_an_end_marker_of_another_dialect_is_none() -> None:
    for dialect in (Dialect.ANTHROPIC, Dialect.RESPONSES):
        assert not check(event("x") + DONE, [], dialect)[0].done
    assert not check(written(anthropic(["x"]), "\n"), [])[0].done


@pytest.mark.parametrize(
    "noise", [b'data: {"type":"message_stop"\n\n', b"data: message_stop\n\n", b'data: ["message_stop"]\n\n']
)
def test_what_only_looks_like_the_last_event_is_none(noise: bytes) -> None:
    assert not check(noise, [], Dialect.ANTHROPIC)[0].done
