"""Calls from a client's socket to the bus and back: when they are tried again, how they break off and are given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from serai.contracts.codec import decode, encode, encode_frames
from serai.contracts.inference import (
    FailureCode,
    Frame,
    FrameKind,
    InferenceFailure,
    InferenceRequest,
    ResponseEnd,
    ResponseHead,
)
from serai.ingress import calls as calls_module
from serai.ingress import inference_client as client_module
from serai.ingress import service as service_module
from serai.ingress.access import Access
from serai.ingress.calls import Calls
from serai.ingress.http_server import HttpServer
from serai.ingress.inference_client import StreamFailed
from serai.ingress.openai_format import DONE
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.runtime.bus import Message
from serai.runtime.telemetry import Tracing
from unit.fakes import Clock, FakeBus, record_of
from unit.raw_http import Client, answer, answer_chunk, answer_head, connected, post
from unit.test_inference_client import Gateway

ASKED = b'{"model":"m","stream":true}'
ASKED_WHOLE = b'{"model":"m"}'
EVENT = b'data: {"choices":[{"text":"one"}]}\n\n'
EVENTS, JSON = {"content-type": "text/event-stream"}, {"content-type": "application/json"}

Part = tuple[FrameKind, bytes]
NOBODY: list[Part] | None = None
"""What an agent says that is not there."""


def head(status: int = 200, headers: dict[str, str] = EVENTS) -> Part:
    return FrameKind.HEAD, encode(ResponseHead(status, headers))


def data(text: bytes = EVENT) -> Part:
    return FrameKind.DATA, text


def end(data_bytes: int) -> Part:
    return FrameKind.END, encode(ResponseEnd(data_bytes))


def error(code: FailureCode, *, retry_safe: bool = False) -> Part:
    return FrameKind.ERROR, encode(InferenceFailure(code, "it broke", retry_safe=retry_safe))


def whole(status: int, body: bytes) -> list[Part]:
    """An answer that is no stream."""
    return [head(status, JSON), data(body), end(len(body))]


STREAMED = [head(), data(EVENT), data(DONE), end(len(EVENT + DONE))]


class AgentsBus(FakeBus):
    """A bus with agents that answer each request with what `says` tells of their session."""

    def __init__(self, says: dict[str, list[Part] | None]) -> None:
        super().__init__()
        self.says = says
        self.asked: list[tuple[str, InferenceRequest]] = []
        self.cancelled = asyncio.Queue[tuple[str, Frame]]()

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        super().publish(subject, payload, reply)
        hop, _, session = subject.partition(".")
        frame = self.published[-1].frames[0]
        if hop == "cancel":
            self.cancelled.put_nowait((session, frame))
        elif frame.kind == FrameKind.REQUEST:
            self.asked.append((session, decode(InferenceRequest, frame.payload)))
            self._reply(frame, reply, self.says[session])

    def _reply(self, asked: Frame, reply: str, parts: list[Part] | None) -> None:
        if parts is None:
            message = Message(reply, b"", no_responders=True)
        else:
            frames = [
                Frame(kind, asked.stream, asked.attempt, number, payload)
                for number, (kind, payload) in enumerate(parts)
            ]
            message = Message(reply, encode_frames(frames))
        (handler,) = self.handlers.values()
        asyncio.get_running_loop().call_soon(handler, message)

    @property
    def sessions_asked(self) -> list[str]:
        return [session for session, _ in self.asked]


Talk = Callable[[Client, AgentsBus, Ingress], Awaitable[None]]


class Serve(Protocol):
    def __call__(self, says: dict[str, list[Part] | None], talk: Talk, **metadata: Any) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, calls_module, client_module, service_module)
    return clock


@pytest.fixture
def serve(clock: Clock) -> Serve:
    """Serves a client with an ingress whose agents say what they are told to."""

    async def main(says: dict[str, list[Part] | None], talk: Talk, metadata: dict[str, Any]) -> None:
        bus = AgentsBus(says)
        access = Access(None, anonymous=True)
        ingress = Ingress(IngressSettings(anonymous=True), bus, access, Tracing("test", None, 0.0))
        await ingress._client.start()
        for session in says:
            ingress.replica.merge(record_of(session, **metadata), clock.now_s, heard=True)
        server = HttpServer(ingress.on_http, body_bytes_max=10_000)
        await server.start("127.0.0.1", 0)
        client = await connected(server)
        try:
            async with asyncio.timeout(10):
                await talk(client, bus, ingress)
                assert ingress._client.open_streams == 0
        finally:
            client[1].close()
            await server.aclose()

    def run(says: dict[str, list[Part] | None], talk: Talk, **metadata: Any) -> None:
        asyncio.run(main(says, talk, metadata))

    return run


async def ask(client: Client, *headers: str, body: bytes = ASKED) -> tuple[int, dict[str, str], bytes]:
    client[1].write(post(body, *headers, path="/v1/completions"))
    return await answer(client[0])


def told(body: bytes) -> dict[str, Any]:
    """The error object of a body or an event."""
    found: dict[str, Any] = json.loads(body.removeprefix(b"data: "))["error"]
    return found


# -- trying again ----------------------------------------------------------------------------------------------------

LOST_BEFORE_THE_FIRST_BYTE: dict[str, list[Part] | None] = {
    "nobody there": NOBODY,
    "busy": [error(FailureCode.BUSY, retry_safe=True)],
    "engine gone": [error(FailureCode.ENGINE_CUT)],
    "status 503": whole(503, b"loading"),
    "broken before it was whole": [head(200, JSON), data(b"{"), error(FailureCode.ENGINE_CUT)],
}


@pytest.mark.parametrize("first", LOST_BEFORE_THE_FIRST_BYTE.values(), ids=LOST_BEFORE_THE_FIRST_BYTE)
@pytest.mark.parametrize("second", [STREAMED, whole(200, b"{}")], ids=["stream", "no stream"])
def test_a_request_of_which_the_client_has_seen_nothing_is_tried_on_another_session(
    serve: Serve, first: list[Part] | None, second: list[Part]
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client, body=ASKED if second is STREAMED else ASKED_WHOLE)
        assert (status, headers["x-serai-session"]) == (200, "s2")
        assert body == (EVENT + DONE if second is STREAMED else b"{}")
        assert bus.sessions_asked == ["s1", "s2"]
        attempts = [message.frames[0].attempt for message in bus.published if message.subject.startswith("inference.")]
        assert attempts == [1, 2]

    serve({"s1": first, "s2": second}, talk)


@pytest.mark.parametrize(
    ("says", "code", "tries"),
    [(NOBODY, "no_responders", 3), ([error(FailureCode.BUSY, retry_safe=True)], "busy", 2)],
    ids=["nobody there", "busy"],
)
def test_a_request_is_tried_twice_and_oftener_only_where_nobody_was_burdened(
    serve: Serve, says: list[Part] | None, code: str, tries: int
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client)
        assert (status, told(body)["code"]) == (503, code)
        assert headers["retry-after"] == "1"
        assert len(set(bus.sessions_asked)) == len(bus.sessions_asked) == tries

    serve({"s1": says, "s2": says, "s3": says}, talk)


@pytest.mark.parametrize("sessions", [["s1"], ["s1", "s2"]])
def test_an_engines_503_is_passed_on_when_no_other_session_is_left(serve: Serve, sessions: list[str]) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client)
        assert (status, headers["x-serai-session"], body) == (503, sessions[-1], b"loading")
        assert bus.sessions_asked == sessions

    serve({session: whole(503, b"loading") for session in sessions}, talk)


def test_a_busy_engine_costs_one_other_try_and_is_then_left_in_peace(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        assert (await ask(client))[0] == 200
        assert bus.sessions_asked == ["s1", "s2"]
        for _ in range(3):
            assert (await ask(client))[0] == 200
        assert bus.sessions_asked == ["s1"] + ["s2"] * 4

    serve({"s1": whole(429, b"{}"), "s2": STREAMED}, talk)


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (ASKED, "application/json", b"{}"),
        (ASKED, "text/html", b"<html>Please log in</html>"),
        (ASKED_WHOLE, "text/html", b"<html>Please log in</html>"),
        (ASKED_WHOLE, "application/json", b'{"choices": [{'),
    ],
)
def test_what_is_no_answer_is_not_passed_on_as_one(serve: Serve, body: bytes, content_type: str, says: bytes) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, _, answered = await ask(client, body=body)
        assert (status, told(answered)["code"]) == (502, "engine_protocol")

    serve({"s1": [head(200, {"content-type": content_type}), data(says), end(len(says))]}, talk)


def test_a_fleet_that_is_busy_is_asked_twice_per_request_at_most(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        assert (await ask(client))[0] == 429
        assert len(bus.sessions_asked) == 2

    serve({f"s{number}": whole(429, b"{}") for number in range(4)}, talk)


def test_what_answered_is_told_and_what_was_demanded_is_kept(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, _ = await ask(client, "x-serai-providers: local")
        assert (status, headers["x-serai-provider"], headers["x-serai-attempts"]) == (200, "local", "1")
        status, _, body = await ask(client, "x-serai-providers: -local")
        assert (status, told(body)["code"]) == (503, "requirements_not_met")
        status, _, body = await ask(client, "x-serai-require: context>>1")
        assert (status, told(body)["param"]) == (400, "x-serai-require")
        assert bus.sessions_asked == ["s1"]

    serve({"s1": STREAMED}, talk)


@pytest.mark.parametrize(
    ("says", "status"),
    [(whole(400, b"{}"), 400), (whole(500, b"{}"), 500), ([error(FailureCode.ENGINE_SILENT)], 504)],
    ids=["status 400", "status 500", "engine silent"],
)
def test_what_another_session_could_not_do_better_is_final(serve: Serve, says: list[Part], status: int) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        assert (await ask(client))[0] == status
        assert bus.sessions_asked == ["s1"]

    serve({"s1": says, "s2": STREAMED}, talk)


# -- streams that break ----------------------------------------------------------------------------------------------

HALF = b'data: {"choices":[{"te'
BROKEN: dict[str, tuple[list[Part], str]] = {
    "behind the head": ([head(), error(FailureCode.ENGINE_CUT)], "engine_cut"),
    "behind an event": ([head(), data(), error(FailureCode.AGENT_LEFT, retry_safe=True)], "agent_left"),
    "inside an event": ([head(), data(EVENT + HALF), error(FailureCode.ENGINE_CUT)], "engine_cut"),
    "ended without the end marker": ([head(), data(), end(len(EVENT))], "stream_unfinished"),
    "ended inside an event": ([head(), data(EVENT + HALF), end(len(EVENT + HALF))], "stream_unfinished"),
    "bytes missing": ([head(), data(), end(len(EVENT) + 1)], "frame_gap"),
}


@pytest.mark.parametrize(("says", "code"), BROKEN.values(), ids=BROKEN)
def test_a_stream_that_breaks_ends_with_one_error_event_and_is_not_tried_again(
    serve: Serve, says: list[Part], code: str
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client)
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        passed = EVENT if len(says) == 3 else b""
        assert body.startswith(passed)
        problem, marker, rest = body.removeprefix(passed).split(b"\n\n")
        assert told(problem)["code"] == code
        assert (marker, rest) == (b"data: [DONE]", b"")
        assert bus.sessions_asked == ["s1"]
        assert (await ask(client))[0] == 200, "the connection can be used again"

    serve({"s1": says, "s2": STREAMED}, talk)


def test_a_whole_stream_passes_as_it_came_and_is_not_cancelled(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client)
        assert (status, body) == (200, EVENT + DONE)
        assert headers["cache-control"] == "no-cache"
        assert bus.cancelled.empty()

    serve({"s1": STREAMED}, talk)


# -- streams that go on elsewhere ------------------------------------------------------------------------------------

PROMPT = b'{"model":"m","stream":true,"temperature":0,"prompt":"Once"}'
WORDS = [f" w{number}" for number in range(12)]


def word(text: str, finish: str | None = None, id_: str = "a") -> bytes:
    fields = {"id": id_, "created": 1, "model": "m", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


SENT = b"".join(map(word, WORDS))
"""Of these the first four become prompt; the others are asked for again."""
AGAIN = b"".join(word(text, id_="b") for text in WORDS[4:])
BREAKS = [head(), data(SENT), error(FailureCode.ENGINE_CUT)]
END = word(" end", "stop", "b") + DONE


def going_on(*events: bytes) -> list[Part]:
    return [head(), *map(data, events), end(sum(map(len, events)))]


def bodies(bus: AgentsBus) -> list[dict[str, Any]]:
    frames = [frame for sent in bus.published if sent.subject.startswith("inference.") for frame in sent.frames]
    return [json.loads(frame.payload) for frame in frames if frame.kind == FrameKind.BODY]


@pytest.mark.parametrize(
    "breaks",
    [
        BREAKS,
        [head(), data(SENT + HALF), error(FailureCode.AGENT_LEFT, retry_safe=True)],
        [head(), data(SENT), end(len(SENT))],
        [head(), data(SENT), end(len(SENT) + 1)],
    ],
    ids=["engine cut", "agent left inside an event", "no end marker", "bytes missing"],
)
def test_a_stream_that_breaks_goes_on_at_another_session_that_serves_the_same(serve: Serve, breaks: list[Part]) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client, body=PROMPT)
        assert (status, headers["x-serai-session"]) == (200, "s1")
        assert body == SENT + b": serai continued on s2\n\n" + body[-len(END) :]
        assert [json.loads(part[6:])["id"] for part in body[-len(END) :].split(b"\n\n")[:1]] == ["a"]
        assert body.endswith(DONE)
        first, second = bodies(bus)
        assert second == first | {"prompt": "Once" + "".join(WORDS[:4])}
        attempts = [sent.frames[0].attempt for sent in bus.published if sent.subject.startswith("inference.")]
        assert attempts[-1] == 2

    serve({"s1": breaks, "s2": going_on(AGAIN, END)}, talk, fingerprint="f")


@pytest.mark.parametrize(
    ("second", "passed"),
    [
        ([error(FailureCode.BUSY, retry_safe=True)], 0),
        (whole(503, b"loading"), 0),
        ([head(), data(AGAIN), error(FailureCode.ENGINE_CUT)], 1),
    ],
    ids=["cannot be taken", "status 503", "broken again"],
)
def test_a_stream_may_go_on_twice(serve: Serve, second: list[Part], passed: int) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        _, _, body = await ask(client, body=PROMPT)
        assert body.startswith(SENT)
        assert body.count(b": serai continued") == 1 + passed
        assert body.endswith(DONE)
        assert b"error" not in body
        assert bus.sessions_asked == ["s1", "s3", "s2"]

    serve({"s1": BREAKS, "s3": second, "s2": going_on(AGAIN, END)}, talk, fingerprint="f")


STAYS_BROKEN: dict[str, dict[str, list[Part] | None]] = {
    "nobody else": {},
    "another text": {"s2": going_on(AGAIN.replace(b"w7", b"w8"), END)},
    "all break": {"s2": BREAKS[:1] + BREAKS[2:], "s3": NOBODY, "s4": going_on(AGAIN, END)},
    "another's error": {"s2": going_on(b'data: {"error":{"code":"theirs"}}\n\n', DONE)},
}


@pytest.mark.parametrize("others", STAYS_BROKEN.values(), ids=STAYS_BROKEN)
def test_a_stream_that_cannot_go_on_ends_with_the_error_that_broke_it(
    serve: Serve, others: dict[str, list[Part] | None]
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        _, _, body = await ask(client, body=PROMPT)
        comment = b": serai continued on s2\n\n"
        problem, marker, rest = (
            body.removeprefix(SENT).removeprefix(comment).removeprefix(comment.replace(b"s2", b"s3")).split(b"\n\n")
        )
        assert told(problem)["code"] == "engine_cut"
        assert (marker, rest) == (b"data: [DONE]", b"")
        assert "s4" not in bus.sessions_asked

    serve({"s1": BREAKS, **others}, talk, fingerprint="f")


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (FailureCode.DEADLINE, PROMPT),
        (FailureCode.CREDIT_STARVED, PROMPT),
        (FailureCode.BUS_LOST, PROMPT),
        (FailureCode.STOPPED, PROMPT),
        (FailureCode.ENGINE_CUT, PROMPT.replace(b'"stream"', b'"n":2,"stream"')),
        (FailureCode.ENGINE_CUT, PROMPT.replace(b"prompt", b"input")),
    ],
)
def test_a_stream_is_not_continued_where_that_would_not_help_or_not_be_sound(
    serve: Serve, code: FailureCode, body: bytes
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        _, _, heard = await ask(client, body=body)
        assert heard.startswith(SENT + b'data: {"error"')
        assert bus.sessions_asked == ["s1"]

    serve({"s1": [head(), data(SENT), error(code)], "s2": going_on(AGAIN, END)}, talk, fingerprint="f")


def test_a_stream_is_not_continued_where_something_else_is_served(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        ingress.replica.merge(record_of("s2", version=2, fingerprint="other"), 1000.0, heard=True)
        _, _, heard = await ask(client, body=PROMPT)
        assert heard.startswith(SENT + b'data: {"error"')
        assert bus.sessions_asked == ["s1"]

    serve({"s1": BREAKS, "s2": going_on(AGAIN, END)}, talk, fingerprint="f")


def test_a_stream_is_not_continued_when_its_time_is_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        (handler,) = bus.handlers.values()
        client[1].write(post(PROMPT, path="/v1/completions"))
        await answer_head(client[0])
        assert await answer_chunk(client[0]) == SENT
        monkeypatch.setattr("serai.ingress.calls.time", SimpleNamespace(monotonic=lambda: 1601.0))
        ingress.replica.merge(record_of("s2", version=2, fingerprint="f"), 1601.0, heard=True)
        asked = bus.published[0].frames[0]
        handler(Message(bus.published[0].reply, encode_frames([Frame(FrameKind.ERROR, asked.stream, 1, 2, LEFT)])))
        assert b"agent_left" in await answer_chunk(client[0])
        assert bus.sessions_asked == ["s1"]

    serve({"s1": [head(), data(SENT)], "s2": going_on(AGAIN, END)}, talk, fingerprint="f")


LEFT = encode(InferenceFailure(FailureCode.AGENT_LEFT, "it left"))


def test_a_client_that_leaves_while_its_stream_goes_on_cancels_it_there(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        reader, writer = client
        writer.write(post(PROMPT, path="/v1/completions"))
        await answer_head(reader)
        while bus.sessions_asked != ["s1", "s2"]:
            await asyncio.sleep(0)
        assert (await bus.cancelled.get())[0] == "s1", "what broke off may still be at work"
        assert bus.cancelled.empty()
        writer.close()
        session, frame = await bus.cancelled.get()
        assert (session, frame.attempt) == ("s2", 2)

    serve({"s1": BREAKS, "s2": [head()]}, talk, fingerprint="f")


def test_the_usage_so_far_is_told_before_the_error_when_the_engine_kept_telling_it(serve: Serve) -> None:
    counted = SENT[:-3] + b',"usage":{"prompt_tokens":3,"completion_tokens":12,"total_tokens":15}}\n\n'

    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        _, _, body = await ask(client, body=PROMPT)
        usage, problem, *_ = body.removeprefix(counted).split(b"\n\n")
        fields = json.loads(usage[6:])
        assert (fields["choices"], fields["usage"]["completion_tokens"]) == ([], 12)
        assert told(problem)["code"] == "engine_cut"

    serve({"s1": [head(), data(counted), error(FailureCode.ENGINE_CUT)]}, talk, fingerprint="f")


# -- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [[], [head()], [head(), data()]], ids=["before the head", "behind it", "in the data"])
def test_a_client_that_leaves_cancels_its_request_at_the_agent(serve: Serve, says: list[Part]) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        reader, writer = client
        writer.write(post(ASKED, path="/v1/completions"))
        if says:
            await answer_head(reader)
        if len(says) > 1:
            assert await answer_chunk(reader) == EVENT
        while not bus.asked:
            await asyncio.sleep(0)
        assert bus.cancelled.empty()
        writer.close()
        session, frame = await bus.cancelled.get()
        assert (session, frame.kind, frame.attempt) == ("s1", FrameKind.CANCEL, 1)
        assert bus.published[-1].reply == bus.published[0].reply
        assert bus.sessions_asked == ["s1"]

    serve({"s1": says, "s2": STREAMED}, talk)


# -- request ids -----------------------------------------------------------------------------------------------------


def test_a_request_id_is_kept_on_the_way_to_the_engine_and_back(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        _, headers, _ = await ask(client, "X-Request-Id: mine-1")
        ((_, asked),) = bus.asked
        assert headers["x-request-id"] == asked.request_id == asked.headers["x-request-id"] == "mine-1"

    serve({"s1": STREAMED}, talk)


def test_a_request_id_is_in_the_answer_to_a_request_that_failed(serve: Serve) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        status, headers, _ = await ask(client, "X-Request-Id: mine-1")
        assert (status, headers["x-request-id"]) == (503, "mine-1")

    serve({"s1": NOBODY}, talk)


@pytest.mark.parametrize("given", [[], ["X-Request-Id:"], ["X-Request-Id: two words"], ["X-Request-Id: " + "x" * 129]])
def test_a_request_id_is_made_when_none_can_be_kept(serve: Serve, given: list[str]) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        made = [(await ask(client, *given))[1]["x-request-id"] for _ in range(3)]
        assert all(id_.isalnum() for id_ in made)
        assert len(set(made)) == 3
        assert [asked.request_id for _, asked in bus.asked] == made

    serve({"s1": STREAMED}, talk)


# -- signs of life ---------------------------------------------------------------------------------------------------

ALIVE = b": keep-alive\n\n"
SILENT: list[Part] = []
CHAT = "/v1/chat/completions"


def say(bus: AgentsBus, *parts: Part, number: int = 0) -> None:
    """What the agent that was asked last says now; `number` of its frames have come before."""
    sent = next(sent for sent in reversed(bus.published) if sent.subject.startswith("inference."))
    asked = sent.frames[0]
    frames = [
        Frame(kind, asked.stream, asked.attempt, number + place, payload) for place, (kind, payload) in enumerate(parts)
    ]
    (handler,) = bus.handlers.values()
    handler(Message(sent.reply, encode_frames(frames)))


async def asked(bus: AgentsBus, times: int = 1) -> None:
    while len(bus.asked) < times:
        await asyncio.sleep(0)


def passes(ingress: Ingress, clock: Clock, seconds: float) -> None:
    """Time, with looks at both ends of it; all sessions are heard meanwhile."""
    ingress._calls.keep_alive()
    clock.advance(seconds)
    for record in ingress.replica.records():
        ingress.replica.merge(record.advanced(record.lifecycle), clock.now_s, heard=True)
    ingress._calls.keep_alive()


@pytest.mark.parametrize(
    ("path", "sign", "events"),
    [
        (CHAT, ALIVE, EVENT + DONE),
        ("/v1/responses", ALIVE, b'data: {"type":"response.completed","response":{}}\n\n'),
        ("/v1/messages", b'event: ping\ndata: {"type": "ping"}\n\n', b'data: {"type":"message_stop"}\n\n'),
    ],
)
def test_a_client_that_waits_for_events_hears_that_its_request_lives(
    serve: Serve, clock: Clock, path: str, sign: bytes, events: bytes
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        reader, writer = client
        writer.write(post(ASKED, "x-request-id: r", path=path))
        await asked(bus)
        passes(ingress, clock, 14.9)
        assert not reader._buffer  # type: ignore[attr-defined]
        passes(ingress, clock, 0.1)
        status, headers = await answer_head(reader)
        assert (status, headers["x-request-id"], headers["x-accel-buffering"]) == (200, "r", "no")
        assert headers["content-type"].startswith("text/event-stream")
        assert await answer_chunk(reader) == sign
        passes(ingress, clock, 15)
        assert await answer_chunk(reader) == sign

        say(bus, head(), data(EVENT))
        assert await answer_chunk(reader) == EVENT
        for number in (2, 3):
            passes(ingress, clock, 14.9)
            say(bus, data(EVENT), number=number)
            assert await answer_chunk(reader) == EVENT
        passes(ingress, clock, 15)
        assert await answer_chunk(reader) == sign
        say(bus, data(HALF), number=4)
        passes(ingress, clock, 15)
        assert await answer_chunk(reader) == sign, "between two events, not inside one"
        say(bus, data(b'xt":1}]}\n\n' + events), end(len(EVENT * 3 + HALF + b'xt":1}]}\n\n' + events)), number=5)
        assert await answer_chunk(reader) == HALF + b'xt":1}]}\n\n' + events
        assert await answer_chunk(reader) == b""
        assert not ingress._calls._keep_alive._open

    native = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
    serve({"s1": SILENT}, talk, endpoints=native)


def test_signs_of_life_are_translated_with_the_rest(serve: Serve, clock: Clock) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        reader, writer = client
        body = b'{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"x"}]}'
        writer.write(post(body, path="/v1/messages"))
        await asked(bus)
        passes(ingress, clock, 15)
        assert (await answer_head(reader))[0] == 200
        assert (await answer_chunk(reader)).endswith(b'event: ping\ndata: {"type":"ping"}\n\n')
        say(bus, error(FailureCode.ENGINE_SILENT))
        problem = await answer_chunk(reader)
        assert problem.startswith(b'event: error\ndata: {"type":"error"')
        assert await answer_chunk(reader) == b""

    serve({"s1": SILENT}, talk, endpoints=[CHAT])


def test_who_does_not_wait_for_events_is_left_in_peace(serve: Serve, clock: Clock) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        client[1].write(post(b'{"model":"m"}', path=CHAT))
        await asked(bus)
        passes(ingress, clock, 100)
        say(bus, *whole(200, b"{}"))
        assert (await answer(client[0]))[2] == b"{}"

    serve({"s1": SILENT}, talk)


def test_a_request_is_still_tried_again_when_its_client_has_heard_only_that_it_lives(
    serve: Serve, clock: Clock
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        client[1].write(post(ASKED, path=CHAT))
        await asked(bus)
        passes(ingress, clock, 15)
        say(bus, error(FailureCode.ENGINE_CUT))
        status, _, body = await answer(client[0])
        assert (status, body) == (200, ALIVE + EVENT + DONE)
        assert bus.sessions_asked == ["s1", "s2"]

    serve({"s1": SILENT, "s2": STREAMED}, talk)


THEIRS = b'{"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}'


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ([error(FailureCode.ENGINE_SILENT)], "engine_silent"),
        (whole(400, THEIRS), "context_length_exceeded"),
        (whole(200, b"{}"), "engine_protocol"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_an_error_that_comes_after_a_sign_of_life_is_an_event(
    serve: Serve, clock: Clock, path: str, says: list[Part], code: str
) -> None:
    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        client[1].write(post(ASKED, path=path))
        await asked(bus)
        passes(ingress, clock, 15)
        say(bus, *says)
        status, _, body = await answer(client[0])
        assert status == 200
        if path == CHAT:
            _, problem, marker, rest = body.split(b"\n\n")
            assert told(problem)["code"] == code
            assert (marker, rest) == (b"data: [DONE]", b"")
        else:
            assert body.count(b"event: error\ndata: ") == 1
            assert b"[DONE]" not in body
            assert b"message_stop" not in body
        status, _, _ = await ask(client)
        assert status == 200, "the connection can be used again"

    serve({"s1": SILENT, "s2": STREAMED}, talk, endpoints=[path, "/v1/completions"])


def test_a_stream_that_came_in_one_piece_says_nothing_of_a_sessions_speed(serve: Serve) -> None:
    told_usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":10,"total_tokens":11}}\n\n'

    async def talk(client: Client, bus: AgentsBus, ingress: Ingress) -> None:
        assert (await ask(client))[0] == 200
        assert ingress._chooser.speeds._measured == {}

    whole_stream = EVENT + told_usage + DONE
    serve({"s1": [head(), data(whole_stream), end(len(whole_stream))]}, talk)


def test_what_cannot_be_passed_on_ends_its_stream_and_does_not_reach_the_bus() -> None:
    def take(data: bytes) -> bytes:
        raise TypeError("not foreseen")

    async def main() -> None:
        gateway = await Gateway().start()
        call: Any = SimpleNamespace(first_byte_s=1.0, request_id="r")
        events: Any = SimpleNamespace(take=take, out=None, contradicted=False)
        with gateway.stream("s1") as stream, gateway.stream("s2") as other:
            pumping = asyncio.create_task(Calls._pump(None, call, stream, events))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            gateway.deliver(
                Frame(*_first(stream.id)), Frame(FrameKind.DATA, stream.id, 1, 1, b"x"), Frame(*_first(other.id))
            )
            with pytest.raises(StreamFailed) as failed:
                await pumping
            assert failed.value.failure.code is FailureCode.ENGINE_PROTOCOL
            assert (await other.head()).status == 200

    asyncio.run(main())


def _first(stream_id: int) -> tuple[FrameKind, int, int, int, bytes]:
    kind, payload = head()
    return kind, stream_id, 1, 0, payload
