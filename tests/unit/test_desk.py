"""Requests at the agent, from their first frame to their last: every state in which they can end, every order."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.codec import decode, encode, encode_frames
from serai.contracts.inference import (
    WINDOW_BYTES_MAX,
    FailureCode,
    Frame,
    FrameKind,
    InferenceFailure,
    InferenceRequest,
    ResponseEnd,
    ResponseHead,
)
from serai.runtime.bus import Message
from serai.runtime.http1 import BadAnswer, Cut, HttpFailure, Unreachable
from serai.runtime.telemetry import Tracing
from serai.worker_agent import desk as desk_module
from serai.worker_agent import exchange as exchange_module
from serai.worker_agent.desk import ALIVE_EVERY_S, BODY_FRAMES_AHEAD, CREDIT_STARVED_S, Desk, DeskLimits
from serai.worker_agent.exchange import DATA_FRAME_BYTES_MAX
from serai.worker_agent.outbox import Outbox
from unit.fakes import Clock, FakeBus, FakeConnection, FakePool, Posted

WINDOW = 64 * 1024
FAILURES = {
    FailureCode.ENGINE_UNREACHABLE: Unreachable("refused"),
    FailureCode.ENGINE_CUT: Cut("closed"),
    FailureCode.ENGINE_PROTOCOL: BadAnswer("no HTTP"),
}


class Agent:
    """A desk with a bus without ingress and a pool without engine; the test plays both."""

    def __init__(self, limits: DeskLimits | None = None) -> None:
        self.bus = FakeBus()
        self.pool = FakePool()
        limits = limits or DeskLimits()
        tracing = Tracing("test", None, 0.0)
        self.desk = Desk(self.pool, Outbox(self.bus), limits, tracing, {"authorization": "Bearer k"})  # type: ignore[arg-type]
        self.loop = asyncio.get_running_loop()

    def send(self, stream: int, *frames: Frame, ingress: str = "i", reply: str | None = None) -> None:
        subject = f"_INBOX_{ingress}.stream.{stream}" if reply is None else reply
        self.desk.on_inference(Message("inference.s", encode_frames(frames), subject))

    def request(self, stream: int = 1, body: bytes = b"{}", *, attempt: int = 1, **said: Any) -> None:
        """A request whose body is one frame."""
        self.send(
            stream,
            request_frame(stream, attempt, body_bytes=len(body), **said),
            Frame(FrameKind.BODY, stream, attempt, 0, body),
        )

    def cancel(self, stream: int = 1, attempt: int = 1, ingress: str = "i") -> None:
        frame = Frame(FrameKind.CANCEL, stream, attempt, 0)
        self.desk.on_cancel(Message("cancel.s", encode_frames([frame]), f"_INBOX_{ingress}.stream.{stream}"))

    def credit(self, kib: int, stream: int = 1) -> None:
        self.send(stream, Frame(FrameKind.CREDIT, stream, 1, kib))

    async def frames(self) -> list[Frame]:
        """What has left for ingresses since the last call."""
        await asyncio.sleep(0)
        return self.bus.take_frames()

    @property
    def posted(self) -> Posted:
        return self.pool.posted[-1]


def request_frame(stream: int, attempt: int = 1, **said: Any) -> Frame:
    filled: dict[str, Any] = {
        "request_id": f"r{stream}",
        "path": "/v1/completions",
        "body_bytes": 2,
        "body_frames": 1,
        "window_bytes": WINDOW,
        "deadline_s": 600.0,
    }
    return Frame(FrameKind.REQUEST, stream, attempt, 0, encode(InferenceRequest(**filled | said)))


def failure_in(frame: Frame) -> InferenceFailure:
    assert frame.kind == FrameKind.ERROR
    return decode(InferenceFailure, frame.payload)


def kinds(frames: list[Frame]) -> list[str]:
    return [FrameKind(frame.kind).name for frame in frames]


def numbering(frames: list[Frame]) -> list[int]:
    return [frame.sequence for frame in frames]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, desk_module, exchange_module)
    return clock


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def in_loop(test: Callable[..., Any]) -> Any:
    """Runs an async test in a loop of its own, with the fixtures it names."""

    def run(loop: asyncio.Runner, clock: Clock) -> None:
        loop.run(test(clock))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_an_answer_goes_back_as_head_data_end_numbered_from_zero(clock: Clock) -> None:
    agent = Agent()
    agent.request(body=b'{"a":1}', headers={"x": "y"}, traceparent="tp")
    clock.advance(0.001)
    agent.posted.lend()
    clock.advance(0.05)
    agent.posted.head(200, **{"content-type": "text/event-stream", "transfer-encoding": "chunked", "date": "now"})
    agent.posted.data(b"one")
    first = await agent.frames()
    agent.posted.data(b"two")
    agent.posted.data(b"three")
    clock.advance(0.1)
    agent.posted.complete()
    frames = first + await agent.frames()
    assert kinds(frames) == ["HEAD", "DATA", "DATA", "END"]
    assert numbering(frames) == [0, 1, 2, 3]
    assert decode(ResponseHead, frames[0].payload) == ResponseHead(200, {"content-type": "text/event-stream"})
    assert [frame.payload for frame in frames[1:3]] == [b"one", b"twothree"]
    end = decode(ResponseEnd, frames[3].payload)
    assert end.data_bytes == len(b"onetwothree")
    head, _, body = agent.posted.request.partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    assert {"x: y", "traceparent: tp", "authorization: Bearer k", "content-length: 7"} <= set(lines)
    assert (agent.desk.in_flight, agent.desk.requests_total, agent.desk.output_bytes_total) == (0, 1, 11)


@in_loop
async def test_data_larger_than_a_frame_is_split_and_numbered_without_a_gap(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    agent.posted.lend()
    agent.posted.head()
    whole = random.Random(1).randbytes(2 * DATA_FRAME_BYTES_MAX + 5)
    agent.posted.data(whole)
    agent.posted.complete()
    frames = await agent.frames()
    assert kinds(frames) == ["HEAD", "DATA", "DATA", "DATA", "END"]
    assert numbering(frames) == [0, 1, 2, 3, 4]
    assert b"".join(frame.payload for frame in frames[1:4]) == whole


@in_loop
async def test_data_frames_fit_into_a_message_of_a_server_that_takes_less(clock: Clock) -> None:
    agent = Agent()
    agent.bus.message_bytes_max = DATA_FRAME_BYTES_MAX // 2
    agent.request()
    agent.posted.lend()
    agent.posted.head()
    whole = random.Random(1).randbytes(DATA_FRAME_BYTES_MAX)
    agent.posted.data(whole)
    agent.posted.complete()
    frames = await agent.frames()
    assert numbering(frames) == list(range(len(frames)))
    assert b"".join(frame.payload for frame in frames if frame.kind == FrameKind.DATA) == whole


@in_loop
async def test_a_request_without_a_body_is_posted_at_once(clock: Clock) -> None:
    agent = Agent()
    agent.send(1, request_frame(1, body_bytes=0, body_frames=0, method="GET", path="/v1/models"))
    assert agent.posted.request.startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert agent.posted.body == b""


# -- bodies in several frames ----------------------------------------------------------------------------------------


def body_frame(number: int, payload: bytes = b"xy", stream: int = 1) -> Frame:
    return Frame(FrameKind.BODY, stream, 1, number, payload)


@in_loop
async def test_a_body_is_asked_for_in_portions_and_posted_when_it_is_whole(clock: Clock) -> None:
    agent, count = Agent(), 3 * BODY_FRAMES_AHEAD
    agent.send(1, request_frame(1, body_bytes=2 * count, body_frames=count), body_frame(0))
    allowed, sent = 1, 1
    while sent < count:
        for frame in await agent.frames():
            assert frame.kind == FrameKind.BODY_CREDIT
            allowed = frame.sequence
        assert sent < allowed <= sent + BODY_FRAMES_AHEAD
        assert agent.pool.posted == []
        while sent < min(allowed, count):
            agent.send(1, body_frame(sent, b"%02d" % sent))
            sent += 1
    assert agent.posted.body == b"xy" + b"".join(b"%02d" % number for number in range(1, count))


@pytest.mark.parametrize("numbers", [[1], [0, 2], [0, 1, 3]])
def test_body_frames_out_of_order_end_the_request(loop: asyncio.Runner, numbers: list[int]) -> None:
    async def test() -> None:
        agent = Agent()
        agent.send(1, request_frame(1, body_bytes=6, body_frames=3), *map(body_frame, numbers))
        frames = await agent.frames()
        assert failure_in(frames[-1]).code is FailureCode.FRAME_GAP
        assert agent.desk.in_flight == 0
        assert agent.pool.posted == []

    loop.run(test())


@pytest.mark.parametrize("announced", [5, 7])
def test_a_body_of_another_size_than_announced_is_not_posted(loop: asyncio.Runner, announced: int) -> None:
    async def test() -> None:
        agent = Agent()
        agent.send(1, request_frame(1, body_bytes=announced, body_frames=3), *map(body_frame, range(3)))
        assert failure_in((await agent.frames())[-1]).code is FailureCode.BAD_REQUEST_FRAME
        assert (agent.desk.in_flight, agent.pool.posted) == (0, [])

    loop.run(test())


@in_loop
async def test_a_body_that_grows_beyond_what_was_announced_is_not_kept_until_its_last_frame(clock: Clock) -> None:
    agent = Agent()
    agent.send(1, request_frame(1, body_bytes=5, body_frames=1_000_000), *map(body_frame, range(3)))
    assert failure_in((await agent.frames())[-1]).code is FailureCode.BAD_REQUEST_FRAME
    assert (agent.desk.in_flight, agent.pool.posted) == (0, [])


# -- what is refused -------------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_twice_runs_once(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    agent.send(1, request_frame(1, body_frames=0, body_bytes=0))
    assert (agent.desk.in_flight, len(agent.pool.posted)) == (1, 1)
    assert await agent.frames() == []
    agent.request(attempt=2)
    assert (agent.desk.in_flight, len(agent.pool.posted)) == (2, 2)


@in_loop
async def test_nobody_to_answer_means_no_request(clock: Clock) -> None:
    agent = Agent()
    agent.send(1, request_frame(1), reply="")
    assert agent.desk.in_flight == 0


@in_loop
async def test_more_requests_than_allowed_are_refused_as_busy_until_one_ends(clock: Clock) -> None:
    agent = Agent(DeskLimits(concurrency_max=2))
    agent.request(1)
    agent.request(2)
    agent.request(3)
    (frame,) = await agent.frames()
    failure = failure_in(frame)
    assert (frame.stream, failure.code, failure.retry_safe) == (3, FailureCode.BUSY, True)
    assert failure.retry_after_s is not None
    agent.cancel(1)
    agent.request(4)
    assert (await agent.frames(), agent.desk.in_flight) == ([], 2)


@in_loop
async def test_a_closed_desk_refuses_with_its_reason_and_finishes_what_runs(clock: Clock) -> None:
    agent = Agent()
    agent.request(1)
    agent.desk.closed_because = (FailureCode.DRAINING, "this session is draining")
    agent.request(2)
    (frame,) = await agent.frames()
    assert failure_in(frame) == InferenceFailure(FailureCode.DRAINING, "this session is draining", retry_safe=True)
    empty = []
    agent.desk.on_empty = lambda: empty.append(True)
    agent.posted.lend()
    agent.posted.head()
    agent.posted.complete()
    assert kinds(await agent.frames()) == ["HEAD", "END"]
    assert empty == [True]


@in_loop
async def test_a_body_over_the_limit_is_refused_before_it_comes(clock: Clock) -> None:
    agent = Agent(DeskLimits(body_bytes_max=10))
    agent.send(1, request_frame(1, body_bytes=11, body_frames=2), body_frame(0))
    failure = failure_in((await agent.frames())[0])
    assert (failure.code, failure.retry_safe) == (FailureCode.BODY_TOO_LARGE, False)
    assert agent.desk.in_flight == 0


@in_loop
async def test_bodies_on_their_way_count_against_what_is_held_at_once(clock: Clock) -> None:
    agent = Agent(DeskLimits(body_bytes_total_max=3000))
    for stream in range(1, 5):
        agent.send(stream, request_frame(stream, body_bytes=1000, body_frames=2), body_frame(0, b"x" * 500, stream))
    refused = (await agent.frames())[-1]
    failure = failure_in(refused)
    assert (refused.stream, failure.code, failure.retry_safe) == (4, FailureCode.BUSY, True)
    agent.cancel(1)
    agent.send(5, request_frame(5, body_bytes=1000, body_frames=2), body_frame(0, b"x" * 500, 5))
    assert agent.desk.in_flight == 3


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (Frame(FrameKind.REQUEST, 1, 1, 0, b"{"), FailureCode.BAD_REQUEST_FRAME),
        (request_frame(1, body_frames=0, body_bytes=0, headers={"a": "b\r\nc: d"}), FailureCode.BAD_REQUEST_FRAME),
        (request_frame(1, body_frames=0, body_bytes=0, headers={"a": "駱駝"}), FailureCode.BAD_REQUEST_FRAME),
        (request_frame(1, body_frames=0, body_bytes=0, path="/a HTTP/1.1"), FailureCode.BAD_REQUEST_FRAME),
        (request_frame(1, body_frames=0, body_bytes=5), FailureCode.BAD_REQUEST_FRAME),
        (request_frame(1, body_frames=1, body_bytes=0), FailureCode.BAD_REQUEST_FRAME),
    ],
    ids=["no json", "header split", "header not latin-1", "path split", "body without frames", "frames without body"],
)
def test_a_request_that_cannot_be_posted_is_answered(loop: asyncio.Runner, frame: Frame, code: FailureCode) -> None:
    async def test() -> None:
        agent = Agent()
        agent.send(1, frame)
        (answer,) = await agent.frames()
        assert failure_in(answer).code is code
        assert (agent.desk.in_flight, agent.pool.posted) == (0, [])

    loop.run(test())


@in_loop
async def test_bytes_that_are_no_frames_and_frames_of_unknown_requests_do_nothing(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    for handler in (agent.desk.on_inference, agent.desk.on_cancel):
        handler(Message("x", b"garbage", "_INBOX_i.stream.1"))
    agent.cancel(9)
    agent.cancel(1, attempt=2)
    agent.cancel(1, ingress="another")
    agent.credit(5, stream=9)
    agent.send(9, body_frame(0, stream=9))
    assert (await agent.frames(), agent.desk.in_flight) == ([], 1)


# -- how requests end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "failure"), FAILURES.items(), ids=str)
def test_a_failing_engine_is_told_apart(loop: asyncio.Runner, code: FailureCode, failure: HttpFailure) -> None:
    async def test() -> None:
        agent = Agent()
        agent.request()
        agent.posted.fail(failure)
        (frame,) = await agent.frames()
        told = failure_in(frame)
        assert (frame.sequence, told.code) == (0, code)
        assert told.retry_safe == (code is FailureCode.ENGINE_UNREACHABLE)
        assert agent.desk.in_flight == 0

    loop.run(test())


@in_loop
async def test_an_answer_that_breaks_off_is_sent_so_far_and_then_the_error(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    agent.posted.lend()
    agent.posted.head()
    agent.posted.data(b"half")
    agent.posted.fail(Cut("closed"))
    frames = await agent.frames()
    assert kinds(frames) == ["HEAD", "DATA", "ERROR"]
    assert numbering(frames) == [0, 1, 2]
    assert frames[1].payload == b"half"
    assert failure_in(frames[2]).code is FailureCode.ENGINE_CUT


STATES = ("body to come", "connecting", "lent", "head", "data", "paused")


def bring_to(agent: Agent, state: str) -> FakeConnection | None:
    """Request 1, in that state; its connection when it has one."""
    if state == "body to come":
        agent.send(1, request_frame(1, body_bytes=4, body_frames=2), body_frame(0))
        return None
    agent.request()
    if state == "connecting":
        return None
    connection = agent.posted.lend()
    if state != "lent":
        agent.posted.head()
    if state == "data":
        agent.posted.data(b"x")
    if state == "paused":
        agent.posted.data(b"x" * WINDOW)
    return connection


@pytest.mark.parametrize("state", STATES)
def test_a_cancelled_request_closes_its_engine_connection_and_sends_nothing_more(
    loop: asyncio.Runner, state: str
) -> None:
    async def test() -> None:
        agent = Agent()
        connection = bring_to(agent, state)
        agent.cancel()
        agent.cancel()
        assert agent.desk.in_flight == 0
        assert await agent.frames() == []
        if state == "connecting":
            connection = agent.posted.lend()
        assert connection is None or connection.aborted
        agent.desk.watch()
        agent.credit(10**6)
        agent.send(1, body_frame(1))
        assert await agent.frames() == []
        assert agent.desk.requests_total == 1

    loop.run(test())


@pytest.mark.parametrize("state", STATES)
def test_when_the_desk_fails_all_each_request_ends_with_one_error(loop: asyncio.Runner, state: str) -> None:
    async def test() -> None:
        agent = Agent()
        connection = bring_to(agent, state)
        await agent.frames()
        agent.desk.fail_all(FailureCode.AGENT_LEFT, "the session ended", retry_safe=True)
        agent.desk.fail_all(FailureCode.AGENT_LEFT, "again")
        (frame,) = await agent.frames()
        failure = failure_in(frame)
        assert failure.code is FailureCode.AGENT_LEFT
        assert failure.retry_safe == (state in ("body to come", "connecting", "lent"))
        if state == "connecting":
            connection = agent.posted.lend()
        assert connection is None or connection.aborted
        assert agent.desk.in_flight == 0

    loop.run(test())


def test_what_an_engine_says_after_the_end_is_not_sent(loop: asyncio.Runner) -> None:
    async def test() -> None:
        agent = Agent()
        agent.request()
        agent.posted.lend()
        handler = agent.posted.handler
        agent.cancel()
        handler.on_head(200, {})
        handler.on_data(b"late")
        handler.on_complete()
        handler.on_failure(Cut("late"))
        assert await agent.frames() == []
        assert agent.desk.requests_total == 1

    loop.run(test())


@in_loop
async def test_a_replaced_connection_is_the_one_that_is_closed(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    stale = agent.posted.lend()
    fresh = agent.posted.lend()
    agent.cancel()
    assert (stale.aborted, fresh.aborted) == (False, True)


# -- the window ------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_full_window_stops_the_reading_and_credit_lets_it_go_on(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    connection = agent.posted.lend()
    agent.posted.head()
    agent.posted.data(b"x" * (WINDOW - 1))
    assert connection.reading
    agent.posted.data(b"x")
    assert not connection.reading
    agent.credit(0)
    assert not connection.reading
    agent.credit(1)
    assert connection.reading
    agent.posted.data(b"x" * 1024)
    assert not connection.reading
    agent.credit(1)  # Told again, it confirms nothing new.
    assert not connection.reading
    agent.credit(64)
    agent.credit(2)  # Overtaken on its way: nothing is taken back.
    assert connection.reading
    agent.posted.data(b"x" * (WINDOW - 1024 - 1))
    assert connection.reading


@in_loop
async def test_windows_of_two_requests_are_two(clock: Clock) -> None:
    agent = Agent()
    agent.request(1)
    one = agent.posted.lend()
    agent.posted.data(b"x" * WINDOW)
    agent.request(2)
    other = agent.posted.lend()
    agent.posted.data(b"x")
    assert (one.reading, other.reading) == (False, True)


@in_loop
async def test_a_window_without_bounds_is_refused(clock: Clock) -> None:
    """What an agent holds of one stream is never more than it is ready to."""
    for window_bytes in (0, -1, WINDOW_BYTES_MAX + 1):
        agent = Agent()
        agent.request(window_bytes=window_bytes)
        failure = failure_in((await agent.frames())[-1])
        assert (failure.code, agent.desk.in_flight) == (FailureCode.BAD_REQUEST_FRAME, 0)
        assert failure.message == f"window of {window_bytes} bytes; at least 1, at most {WINDOW_BYTES_MAX}"


# -- watching --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_quiet_request_shows_that_it_is_alive_outside_the_numbering(clock: Clock) -> None:
    agent = Agent()
    agent.request()
    agent.desk.watch()
    assert await agent.frames() == []
    clock.advance(ALIVE_EVERY_S + 0.01)
    agent.desk.watch()
    assert kinds(await agent.frames()) == ["ALIVE"]
    agent.desk.watch()
    assert await agent.frames() == []
    agent.posted.lend()
    agent.posted.head()
    clock.advance(ALIVE_EVERY_S + 0.01)
    agent.posted.data(b"x")
    agent.posted.complete()
    frames = await agent.frames()
    assert (kinds(frames), numbering(frames)) == (["HEAD", "DATA", "END"], [0, 1, 2])


@pytest.mark.parametrize("state", STATES)
def test_a_request_ends_at_its_deadline_in_every_state(loop: asyncio.Runner, clock: Clock, state: str) -> None:
    async def test() -> None:
        agent = Agent()
        connection = bring_to(agent, state)
        clock.advance(600.0)
        if state != "paused":
            agent.desk.watch()
            assert agent.desk.in_flight == 1
        await agent.frames()
        clock.advance(0.01)
        agent.desk.watch()
        (frame,) = await agent.frames()
        assert failure_in(frame).code is FailureCode.DEADLINE
        assert agent.desk.in_flight == 0
        assert connection is None or connection.aborted

    loop.run(test())


@in_loop
async def test_a_silent_engine_is_given_up_but_not_one_that_speaks(clock: Clock) -> None:
    agent = Agent(DeskLimits(engine_silence_s=10.0))
    agent.request()
    agent.posted.lend()
    for _ in range(3):
        clock.advance(9)
        agent.posted.data(b"x")
        agent.desk.watch()
    assert agent.desk.in_flight == 1
    await agent.frames()
    clock.advance(10.01)
    agent.desk.watch()
    assert failure_in((await agent.frames())[-1]).code is FailureCode.ENGINE_SILENT
    assert agent.desk.in_flight == 0


@in_loop
async def test_an_engine_that_was_held_back_is_silent_only_from_then_on(clock: Clock) -> None:
    agent = Agent(DeskLimits(engine_silence_s=10.0))
    bring_to(agent, "paused")
    clock.advance(20)
    agent.credit(64)
    agent.desk.watch()
    assert agent.desk.in_flight == 1
    await agent.frames()
    clock.advance(10.01)
    agent.desk.watch()
    assert failure_in((await agent.frames())[-1]).code is FailureCode.ENGINE_SILENT


@in_loop
async def test_a_reader_that_takes_nothing_starves_the_request_and_the_engine_is_not_blamed(clock: Clock) -> None:
    agent = Agent(DeskLimits(engine_silence_s=10.0))
    connection = bring_to(agent, "paused")
    assert connection is not None
    clock.advance(CREDIT_STARVED_S)
    agent.desk.watch()
    assert agent.desk.in_flight == 1
    clock.advance(0.01)
    agent.desk.watch()
    assert failure_in((await agent.frames())[-1]).code is FailureCode.CREDIT_STARVED
    assert connection.aborted
    assert agent.desk.in_flight == 0


# -- every order -----------------------------------------------------------------------------------------------------

streams = st.integers(1, 3)
actions = st.one_of(
    st.tuples(
        st.sampled_from(["open", "body", "lend", "head", "complete", "cancel", "watch", "turn", "fail_all"]),
        streams,
    ),
    st.tuples(st.just("data"), streams, st.integers(1, WINDOW)),
    st.tuples(st.just("credit"), streams, st.integers(0, 200)),
    st.tuples(st.just("break"), streams, st.sampled_from(sorted(FAILURES))),
)


@given(st.lists(actions, max_size=40))
def test_in_whatever_order_things_happen_frames_have_no_gap_and_every_request_ends(
    history: list[tuple[Any, ...]],
) -> None:
    asyncio.run(walk(history))


async def walk(history: list[tuple[Any, ...]]) -> None:
    """Two requests at once at most; each of the three is opened once."""
    agent = Agent(DeskLimits(concurrency_max=2))
    opened: set[int] = set()
    said: dict[int, bytes] = defaultdict(bytes)
    frames: list[Frame] = []
    for action in [*history, ("cancel", 1), ("fail_all", 0)]:
        posted = {one.handler.stream: one for one in agent.pool.posted}  # type: ignore[attr-defined]
        match action:
            case ("open", stream) if stream not in opened:
                opened.add(stream)
                agent.send(stream, request_frame(stream, body_bytes=4, body_frames=2), body_frame(0, b"{ ", stream))
            case ("body", stream) if stream not in posted:
                agent.send(stream, body_frame(1, b" }", stream))
            case ("lend", stream) if stream in posted and posted[stream].connection is None:
                posted[stream].lend()
            case ("head", stream) if stream in posted:
                posted[stream].head()
            case ("data", stream, size) if stream in posted and posted[stream].live:
                said[stream] += b"%d" % stream * size
                posted[stream].data(b"%d" % stream * size)
            case ("complete", stream) if stream in posted:
                posted[stream].complete()
            case ("break", stream, code) if stream in posted:
                posted[stream].fail(FAILURES[code])
            case ("credit", stream, kib):
                agent.credit(kib, stream)
            case ("cancel", stream):
                agent.cancel(stream)
            case ("watch", _):
                agent.desk.watch()
            case ("fail_all", _):
                agent.desk.fail_all(FailureCode.BUS_LOST, "lost")
            case ("turn", _):
                frames += await agent.frames()
        assert agent.desk.in_flight <= 2
    assert agent.desk.in_flight == 0
    assert agent.desk.requests_total == len(opened)
    frames += await agent.frames()
    for stream in opened:
        check_frames([frame for frame in frames if frame.stream == stream], said[stream])
    for one in agent.pool.posted:
        assert one.over or one.connection is None or one.connection.aborted


def check_frames(frames: list[Frame], said: bytes) -> None:
    """0, 1, 2 … until one END or ERROR, then nothing; DATA is what the engine said, whole when END says so."""
    numbered = [frame for frame in frames if frame.kind not in (FrameKind.ALIVE, FrameKind.BODY_CREDIT)]
    assert numbering(numbered) == list(range(len(numbered)))
    assert not {FrameKind.END, FrameKind.ERROR} & {frame.kind for frame in frames[:-1]}
    data = b"".join(frame.payload for frame in numbered if frame.kind == FrameKind.DATA)
    assert said.startswith(data)
    if numbered and numbered[-1].kind == FrameKind.END:
        assert data == said
        assert decode(ResponseEnd, numbered[-1].payload).data_bytes == len(said)


@in_loop
async def test_progress_is_what_engines_say_of_answers_and_not_heads_or_errors(clock: Clock) -> None:
    agent = Agent()
    agent.request(1)
    assert agent.desk.at_the_engine() == []  # No connection yet.
    posted = agent.posted
    posted.lend()
    (exchange,) = agent.desk.at_the_engine()
    clock.advance(1)
    posted.head()
    assert agent.desk.progress_at_s() == float("-inf")
    clock.advance(1)
    posted.data(b"token")
    assert agent.desk.progress_at_s() == clock.now_s
    said_at_s = clock.now_s
    agent.request(2)
    agent.posted.lend()
    agent.posted.head(400)
    clock.advance(1)
    agent.posted.data(b"no")
    agent.posted.complete()
    posted.complete()
    assert exchange.done
    assert agent.desk.progress_at_s() == said_at_s


@in_loop
async def test_a_request_whose_reader_is_slow_is_not_the_engine_s_to_finish(clock: Clock) -> None:
    agent = Agent()
    agent.request(window_bytes=4)
    agent.posted.lend()
    agent.posted.head()
    agent.posted.data(b"too much")
    assert agent.desk.at_the_engine() == []
    clock.advance(30)
    agent.credit(1)
    assert len(agent.desk.at_the_engine()) == 1
    assert agent.desk.progress_at_s() == clock.now_s
