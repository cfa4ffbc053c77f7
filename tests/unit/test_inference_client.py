"""The ingress's side of a request: frames in, an answer or a failure out, and every count back at zero."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from serai.ingress import inference_client as client_module
from serai.ingress.inference_client import CANCELS_KEPT_S, PROBE_AFTER_S, InferenceClient, InferenceStream, StreamFailed
from serai.runtime.bus import Message, MessageTooLarge
from unit.fakes import Clock, FakeBus

WINDOW = 64 * 1024
ACCEPT_S, SILENCE_S = 3.0, 5.0
HEAD, DATA, END, ERROR = FrameKind.HEAD, FrameKind.DATA, FrameKind.END, FrameKind.ERROR
HEAD_PAYLOAD = encode(ResponseHead(200, {"content-type": "text/plain"}))


class Gateway:
    """A client with a bus without agents; the test plays them."""

    def __init__(self, message_bytes_max: int = 900_000) -> None:
        self.bus = FakeBus(message_bytes_max)
        self.unreachable: list[str] = []
        self.client = InferenceClient(
            self.bus,
            accept_timeout_s=ACCEPT_S,
            silence_timeout_s=SILENCE_S,
            on_unreachable=self.unreachable.append,
        )

    async def start(self) -> Gateway:
        await self.client.start()
        return self

    def stream(self, session: str = "s", body: bytes = b"{}", attempt: int = 1, **said: Any) -> InferenceStream:
        request = InferenceRequest(
            request_id="r",
            path="/v1/completions",
            body_bytes=len(body),
            body_frames=self.client.body_frames(len(body)),
            window_bytes=WINDOW,
            deadline_s=600.0,
            **said,
        )
        return self.client.stream(session, attempt, request, body)

    def deliver(self, *frames: Frame) -> None:
        """One message on the ingress's inbox."""
        (handler,) = self.bus.handlers.values()
        handler(Message("_INBOX_test.x.stream.0", encode_frames(frames)))

    def nobody_there(self, stream: InferenceStream) -> None:
        """The server's word that nobody received what `stream` sent."""
        (handler,) = self.bus.handlers.values()
        handler(Message(stream.reply, b"", no_responders=True))

    def told(self, kind: FrameKind) -> list[Frame]:
        return [frame for frame in self.bus.take_frames() if frame.kind == kind]


def answer(stream: InferenceStream, *parts: bytes, attempt: int | None = None) -> list[Frame]:
    """A whole answer to `stream`."""
    attempt = stream.attempt if attempt is None else attempt
    payloads = [HEAD_PAYLOAD, *parts, encode(ResponseEnd(len(b"".join(parts))))]
    kinds = [HEAD, *[DATA] * len(parts), END]
    return [
        Frame(kind, stream.id, attempt, number, payload)
        for number, (kind, payload) in enumerate(zip(kinds, payloads, strict=True))
    ]


async def read_all(stream: InferenceStream) -> bytes:
    parts = []
    while (part := await stream.data()) is not None:
        parts.append(part)
    return b"".join(parts)


async def failure_of(stream: InferenceStream) -> FailureCode:
    with pytest.raises(StreamFailed) as failed:
        await read_all(stream)
    return failed.value.failure.code


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, client_module)
    return clock


def in_loop(test: Callable[..., Any]) -> Any:
    """Runs an async test in a loop of its own, with a gateway and a clock."""

    def run(clock: Clock) -> None:
        async def inside() -> None:
            await test(await Gateway().start(), clock)

        asyncio.run(inside())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_the_request_goes_out_with_its_body_and_the_answer_comes_back(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream("s7", b'{"a":1}') as stream:
        (message,) = gateway.bus.take()
        request, body = message.frames
        assert (message.subject, message.reply) == ("inference.s7", stream.reply)
        assert decode(InferenceRequest, request.payload) == stream.request
        assert (request.kind, body.kind, body.sequence, body.payload) == (
            FrameKind.REQUEST,
            FrameKind.BODY,
            0,
            b'{"a":1}',
        )
        gateway.deliver(*answer(stream, b"one", b"two"))
        assert await stream.head() == ResponseHead(200, {"content-type": "text/plain"})
        assert await read_all(stream) == b"onetwo"
        assert stream.end is not None
    assert gateway.bus.take() == []


@in_loop
async def test_data_wakes_the_reader_as_it_comes(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        reading = asyncio.ensure_future(stream.head())
        await asyncio.sleep(0)
        frames = answer(stream, b"one", b"two", b"three")
        gateway.deliver(frames[0])
        await reading
        reading = asyncio.ensure_future(stream.data())
        await asyncio.sleep(0)
        gateway.deliver(*frames[1:3])
        assert await reading == b"onetwo"
        gateway.deliver(*frames[3:])
        assert (await stream.data(), await stream.data()) == (b"three", None)


@in_loop
async def test_frames_of_several_streams_in_one_message_find_their_own(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as one, gateway.stream() as other:
        mixed = [frame for pair in zip(answer(one, b"a"), answer(other, b"b"), strict=True) for frame in pair]
        gateway.deliver(*mixed, Frame(DATA, 999, 1, 0, b"of nobody"))
        assert (await read_all(one), await read_all(other)) == (b"a", b"b")


# -- bodies ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(-1, 1), st.lists(st.integers(0, 9), max_size=6))
def test_body_frames_go_out_as_they_are_credited(full_frames: int, more: int, credits: list[int]) -> None:
    async def test() -> None:
        gateway = await Gateway(message_bytes_max=16 * 1024 + 100).start()
        size = gateway.client.body_frame_bytes
        body = bytes(number % 251 for number in range(max(0, full_frames * size + more)))
        count = -(-len(body) // size)
        with gateway.stream(body=body) as stream:
            sent, allowed = gateway.told(FrameKind.BODY), 1
            for upto in credits:
                allowed = max(allowed, upto)
                gateway.deliver(Frame(FrameKind.BODY_CREDIT, stream.id, 1, upto))
                sent += gateway.told(FrameKind.BODY)
                assert [frame.sequence for frame in sent] == list(range(len(sent)))
                assert len(sent) == min(count, allowed)
            gateway.deliver(Frame(FrameKind.BODY_CREDIT, stream.id, 1, count))
            sent += gateway.told(FrameKind.BODY)
            assert b"".join(frame.payload for frame in sent) == body
            assert len(sent) == count == stream.request.body_frames

    asyncio.run(test())


@in_loop
async def test_credit_for_the_body_after_the_end_sends_nothing(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream(body=b"x" * (gateway.client.body_frame_bytes + 1)) as stream:
        gateway.bus.take()
        stream.fail(InferenceFailure(FailureCode.BUSY, "x"))
        stream.send_body(2)
        assert gateway.bus.take() == []


# -- credit ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_credit_is_told_each_time_half_a_window_has_been_read(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        half = WINDOW // 2
        frames = answer(stream, b"x" * (half - 1), b"x", b"x" * 100, b"x" * half, b"x")
        gateway.deliver(*frames[:2])
        gateway.bus.take()
        await stream.data()
        assert gateway.told(FrameKind.CREDIT) == []
        gateway.deliver(frames[2])
        assert gateway.bus.take() == []  # It has come, but nobody has read it.
        await stream.data()
        assert [frame.sequence for frame in gateway.told(FrameKind.CREDIT)] == [32]
        gateway.deliver(frames[3])
        await stream.data()
        assert gateway.told(FrameKind.CREDIT) == []
        gateway.deliver(frames[4])
        await stream.data()
        assert [frame.sequence for frame in gateway.told(FrameKind.CREDIT)] == [64]
        gateway.deliver(*frames[5:])
        await stream.data()
        assert gateway.bus.take() == []


@given(st.lists(st.integers(1, WINDOW), min_size=1, max_size=30))
def test_an_agent_that_obeys_the_window_is_never_stuck(sizes: list[int]) -> None:
    """Whatever the pieces: when all that was sent is read, what the agent knows of leaves room in the window."""

    async def test() -> None:
        gateway = await Gateway().start()
        with gateway.stream() as stream:
            gateway.deliver(answer(stream)[0])
            sent = confirmed = 0
            for number, size in enumerate(sizes, start=1):
                assert sent - confirmed < WINDOW
                gateway.deliver(Frame(DATA, stream.id, 1, number, b"x" * size))
                sent += size
                await stream.data()
                for frame in gateway.told(FrameKind.CREDIT):
                    assert confirmed < frame.sequence * 1024 <= sent
                    confirmed = frame.sequence * 1024
            assert sent - confirmed < WINDOW

    asyncio.run(test())


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_gap_is_an_error_after_all_that_came_before_it(lost: int) -> None:
    async def test() -> None:
        gateway = await Gateway().start()
        with gateway.stream() as stream:
            frames = answer(stream, b"one", b"two", b"three")
            del frames[lost]
            gateway.deliver(*frames)
            came = b"".join(frame.payload for frame in frames[:lost] if frame.kind == DATA)
            if came:
                assert await stream.data() == came
            assert await failure_of(stream) is FailureCode.FRAME_GAP
            assert stream.end is None

    asyncio.run(test())


@in_loop
async def test_an_agent_that_minds_no_credit_does_not_fill_the_memory(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.deliver(answer(stream)[0])
        for number in range(1, 20):
            gateway.deliver(Frame(DATA, stream.id, 1, number, b"x" * 500_000))
        assert await failure_of(stream) is FailureCode.FRAME_GAP
        assert not stream._chunks
    assert gateway.told(FrameKind.CANCEL)


@in_loop
async def test_a_frame_twice_is_an_error_too(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        frames = answer(stream, b"one")
        gateway.deliver(*frames[:2], frames[1])
        assert await stream.data() == b"one"
        assert await failure_of(stream) is FailureCode.FRAME_GAP


@in_loop
async def test_an_end_without_a_head_fails_whoever_waits_for_one(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        reading = asyncio.ensure_future(stream.head())
        await asyncio.sleep(0)
        gateway.deliver(Frame(END, stream.id, 1, 0, encode(ResponseEnd(0))))
        with pytest.raises(StreamFailed, match="without a beginning") as failed:
            await reading
        assert failed.value.failure.code is FailureCode.FRAME_GAP


@in_loop
async def test_an_end_that_counts_other_bytes_than_came_is_no_whole_end(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.deliver(*answer(stream, b"x")[:2], Frame(END, stream.id, 1, 2, encode(ResponseEnd(99))))
        assert await stream.data() == b"x"
        assert await failure_of(stream) is FailureCode.FRAME_GAP
        assert stream.end is None


@in_loop
async def test_signs_of_life_and_body_credit_stand_outside_the_numbering(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        for frame in answer(stream, b"x"):
            gateway.deliver(
                Frame(FrameKind.ALIVE, stream.id, 1, 0), frame, Frame(FrameKind.BODY_CREDIT, stream.id, 1, 9)
            )
        assert await read_all(stream) == b"x"


@in_loop
async def test_late_frames_of_an_earlier_attempt_are_ignored(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream(attempt=2) as stream:
        gateway.deliver(*answer(stream, b"late", attempt=1))
        assert not stream.over
        assert not stream.first_frame_at_s
        gateway.deliver(*answer(stream, b"mine"))
        assert await read_all(stream) == b"mine"


@in_loop
async def test_nothing_comes_after_the_end(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.deliver(*answer(stream, b"x"), Frame(DATA, stream.id, 1, 3, b"more"))
        gateway.deliver(Frame(ERROR, stream.id, 1, 4, encode(InferenceFailure(FailureCode.BUSY, "x"))))
        stream.fail(InferenceFailure(FailureCode.BUSY, "x"))
        assert await read_all(stream) == b"x"
        assert stream.failure is None


@in_loop
async def test_the_agents_error_is_raised_as_it_was_said(gateway: Gateway, clock: Clock) -> None:
    failure = InferenceFailure(FailureCode.BUSY, "full", retry_safe=True, retry_after_s=1.5)
    with gateway.stream() as stream:
        gateway.deliver(Frame(ERROR, stream.id, 1, 0, encode(failure)))
        with pytest.raises(StreamFailed, match="full") as failed:
            await stream.head()
        assert failed.value.failure == failure


@pytest.mark.parametrize("kind", [HEAD, END, ERROR])
def test_a_frame_that_cannot_be_read_ends_the_stream(kind: FrameKind) -> None:
    async def test() -> None:
        gateway = await Gateway().start()
        with gateway.stream() as stream:
            gateway.deliver(Frame(kind, stream.id, 1, 0, b"{"))
            assert await failure_of(stream) is FailureCode.FRAME_GAP
            assert stream.end is None

    asyncio.run(test())


@in_loop
async def test_bytes_that_are_no_frames_harm_nobody(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        (handler,) = gateway.bus.handlers.values()
        handler(Message("_INBOX_test.x.stream.1", b"garbage"))
        handler(Message("_INBOX_test.x.stream.other", b"", no_responders=True))
        handler(Message("_INBOX_test.x.stream.999", b"", no_responders=True))
        assert not stream.over


@in_loop
async def test_nobody_received_the_request(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream("gone") as stream, gateway.stream("there") as other:
        gateway.nobody_there(stream)
        assert await failure_of(stream) is FailureCode.NO_RESPONDERS
        assert gateway.unreachable == ["gone"]
        assert not other.over


@in_loop
async def test_an_agent_that_leaves_while_it_works_is_told_apart(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.deliver(*answer(stream, b"x")[:2])
        gateway.nobody_there(stream)
        assert await stream.data() == b"x"
        assert await failure_of(stream) is FailureCode.AGENT_LEFT


@in_loop
async def test_losing_the_bus_fails_what_runs_and_what_is_started_then(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.bus.lose_connection()
        assert await failure_of(stream) is FailureCode.BUS_LOST
        with gateway.stream() as late:
            assert await failure_of(late) is FailureCode.BUS_LOST
    assert gateway.client.open_streams == 0


# -- watching --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_silent_session_is_asked_after_and_then_given_up(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.bus.take()
        clock.advance(PROBE_AFTER_S - 0.01)
        gateway.client.watch()
        assert gateway.bus.take() == []
        clock.advance(0.02)
        gateway.client.watch()
        assert [frame.kind for frame in gateway.bus.take_frames()] == [FrameKind.CREDIT]
        clock.advance(ACCEPT_S)
        gateway.client.watch()
        assert await failure_of(stream) is FailureCode.AGENT_SILENT
        assert gateway.unreachable == ["s"]
        gateway.bus.take()
        gateway.client.watch()
        assert gateway.bus.take() == []


@in_loop
async def test_a_session_that_works_may_be_silent_for_longer(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        gateway.deliver(Frame(FrameKind.ALIVE, stream.id, 1, 0))
        clock.advance(SILENCE_S)
        gateway.client.watch()
        assert not stream.over
        clock.advance(0.01)
        gateway.client.watch()
        assert await failure_of(stream) is FailureCode.AGENT_SILENT


@in_loop
async def test_signs_of_life_keep_a_stream_going(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream:
        for _ in range(20):
            clock.advance(1.0)
            gateway.deliver(Frame(FrameKind.ALIVE, stream.id, 1, 0))
            gateway.client.watch()
        assert not stream.over


@in_loop
async def test_a_client_that_takes_nothing_is_found(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream() as stream, gateway.stream():
        stream.blocked_since_s = clock.now_s
        clock.advance(60)
        assert gateway.client.stalled(60) == []
        clock.advance(0.01)
        assert gateway.client.stalled(60) == [stream]


# -- the end ---------------------------------------------------------------------------------------------------------


async def end_whole(gateway: Gateway, stream: InferenceStream) -> None:
    gateway.deliver(*answer(stream, b"x"))


async def end_failed(gateway: Gateway, stream: InferenceStream) -> None:
    gateway.nobody_there(stream)


async def end_early(gateway: Gateway, stream: InferenceStream) -> None:
    gateway.deliver(*answer(stream, b"x")[:2])


@pytest.mark.parametrize(("ending", "cancels"), [(end_whole, False), (end_failed, True), (end_early, True)])
def test_closing_cancels_at_the_agent_unless_its_end_has_come(ending: Callable[..., Any], cancels: bool) -> None:
    async def test() -> None:
        gateway = await Gateway().start()
        with gateway.stream("s3") as stream:
            gateway.bus.take()
            await ending(gateway, stream)
        sent = gateway.bus.take()
        assert [(message.subject, message.reply) for message in sent] == [("cancel.s3", stream.reply)] * cancels
        for message in sent:
            assert message.frames == [Frame(FrameKind.CANCEL, stream.id, 1, 0)]

    asyncio.run(test())


@in_loop
async def test_a_request_too_large_to_be_sent_leaves_no_count(gateway: Gateway, clock: Clock) -> None:
    with pytest.raises(MessageTooLarge), gateway.stream(headers={"accept": "x" * gateway.bus.message_bytes_max}):
        pass
    assert (gateway.client.open_streams, gateway.client.in_flight("s")) == (0, 0)


@in_loop
async def test_a_cancelled_reader_cancels_at_the_agent_wherever_it_waits(gateway: Gateway, clock: Clock) -> None:
    async def read(come: int) -> None:
        with gateway.stream() as stream:
            gateway.deliver(*answer(stream, b"x")[:come])
            await stream.head()
            await read_all(stream)

    for come in (0, 1, 2):
        reading = asyncio.ensure_future(read(come))
        for _ in range(3):
            await asyncio.sleep(0)
        gateway.bus.take()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [message.subject for message in gateway.bus.take()] == ["cancel.s"]
        assert (gateway.client.open_streams, gateway.client.in_flight("s")) == (0, 0)


@in_loop
async def test_waiting_for_idle_ends_with_the_last_stream_or_in_time(gateway: Gateway, clock: Clock) -> None:
    await gateway.client.until_idle(10)
    with gateway.stream():
        await gateway.client.until_idle(0)
        with gateway.stream():
            waiting = asyncio.ensure_future(gateway.client.until_idle(10))
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


actions = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(["s1", "s2"])),
    st.tuples(
        st.sampled_from(["answer", "next", "gap", "error", "nobody", "close", "read", "stale"]), st.integers(0, 5)
    ),
    st.tuples(st.sampled_from(["lose", "watch"]), st.just(0)),
)


@given(st.lists(actions, max_size=30))
def test_in_whatever_order_things_happen_the_counts_are_those_of_the_open_streams(
    history: list[tuple[str, Any]],
) -> None:
    asyncio.run(walk(history))


async def walk(history: list[tuple[str, Any]]) -> None:
    gateway = await Gateway().start()
    opened: list[InferenceStream] = []
    for action, which in [*history, *[("close", 0)] * len(history)]:
        if action == "open":
            opened.append(gateway.stream(which).__enter__())
        elif action == "lose":
            gateway.bus.lose_connection()
            gateway.bus.connected = True
        elif action == "watch":
            gateway.client.watch()
        elif opened:
            stream = opened[which % len(opened)]
            if action == "close":
                gateway.bus.take()
                stream.__exit__(None, None, None)
                opened.remove(stream)
                cancelled = [message.subject for message in gateway.bus.take()]
                assert cancelled == [f"cancel.{stream.session}"] * (stream.end is None)
                gateway.deliver(*answer(stream, b"late"))
            else:
                await do(gateway, stream, action)
        for session in ("s1", "s2"):
            assert gateway.client.in_flight(session) == sum(stream.session == session for stream in opened)
        assert gateway.client.open_streams == len(opened)
        for stream in opened:
            assert stream.end is None or stream.failure is None
    assert gateway.client.open_streams == 0


async def do(gateway: Gateway, stream: InferenceStream, action: str) -> None:
    match action:
        case "answer":
            gateway.deliver(*answer(stream, b"x"))
        case "next":
            gateway.deliver(answer(stream)[0])
        case "gap":
            gateway.deliver(Frame(DATA, stream.id, 1, 9, b"x"))
        case "error":
            gateway.deliver(Frame(ERROR, stream.id, 1, 0, encode(InferenceFailure(FailureCode.BUSY, "x"))))
        case "nobody":
            gateway.nobody_there(stream)
        case "stale":
            gateway.deliver(*answer(stream, b"x", attempt=0))
        case "read" if stream.over:
            try:
                await read_all(stream)
            except StreamFailed:
                assert stream.failure is not None


@in_loop
async def test_a_cancel_lost_with_the_connection_is_said_again_for_a_while(gateway: Gateway, clock: Clock) -> None:
    with gateway.stream("s4"):
        gateway.bus.lose_connection()
    gateway.bus.take()
    gateway.bus.reconnect()
    assert [message.subject for message in gateway.bus.take()] == ["cancel.s4"]
    clock.advance(CANCELS_KEPT_S + 1)
    gateway.bus.reconnect()
    assert gateway.bus.take() == []


@in_loop
async def test_streams_of_a_session_whose_connection_closed_are_asked_after_at_once(
    gateway: Gateway, clock: Clock
) -> None:
    with gateway.stream("s5") as stream, gateway.stream("s6"):
        gateway.bus.take()
        gateway.client.ask_after("s5")
        asked = gateway.bus.take()
        assert [(message.subject, message.reply) for message in asked] == [("inference.s5", stream.reply)]
        assert asked[0].frames[0].kind == FrameKind.CREDIT
        gateway.client.ask_after("s7")
        assert gateway.bus.take() == []
