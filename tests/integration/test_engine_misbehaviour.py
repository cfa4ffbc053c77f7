"""Engines that misbehave, H48–H50: whatever they do, the client's answer has an honest end, and others notice nothing.

The engines are emulated ones with faults, and scripted ones that live in the test.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest

from integration.system import Process, System, wait_for
from serai.bench.faults.raw_client import WHOLE, Answer, Connection, request
from serai.bench.faults.scripted_engine import MARK, Call, Script, ScriptedEngine, finish, say, words
from serai.ingress.session_health import HealthSettings
from serai.worker_agent.engine.process import free_port

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}], "max_tokens": 6}
STREAM = CHAT | {"stream": True}
QUICK_S = 5.0


def ask(system: System, body: dict[str, object], timeout_s: float = 30.0) -> Answer:
    """One request, whose answer is told as it came."""

    async def main() -> Answer:
        raw = httpx2.Request("POST", "http://x", json=body).content
        async with Connection(int(system.url.rpartition(":")[2])) as connection:
            headers = {"Authorization": f"Bearer {system.key}"}
            await connection.send(request("POST", "/v1/chat/completions", raw, headers))
            return await connection.answer(timeout_s)

    return asyncio.run(main())


@contextmanager
def others_notice_nothing(system: System, agent: Process) -> Iterator[httpx2.Client]:
    """A stream of somebody else runs beside the block, at the same engine, of which a client is given."""
    answers: list[Answer] = []
    beside = threading.Thread(target=lambda: answers.append(ask(system, STREAM | {"max_tokens": 500})))
    beside.start()
    with system.engine(agent) as engine:
        try:
            wait_for(lambda: engine.get("/emulator/state").json()["running"] == 1, "one beside")
            yield engine
        finally:
            beside.join(60)
    assert answers[0].is_done
    assert not answers[0].has_error_event


# -- faults of emulated engines --------------------------------------------------------------------------------------

HONEST_ENDS: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "wrong content type, stream": ({"kind": "wrong-content-type"}, STREAM, "status 502"),
    "wrong content type, whole": ({"kind": "wrong-content-type"}, CHAT, "status 502"),
    "malformed answer": ({"kind": "malformed"}, CHAT, "status 502"),
    "malformed event": ({"kind": "malformed", "tokens": 2}, STREAM, "passes"),
    "error event": ({"kind": "error-event", "tokens": 2}, STREAM, "error event"),
    "error instead of an answer": ({"kind": "error-event"}, CHAT, "status 500"),
    "cut": ({"kind": "cut", "tokens": 2}, STREAM, "error event"),
    "cut before anything": ({"kind": "cut", "tokens": 0}, STREAM, "status 502"),
    "reset": ({"kind": "reset", "tokens": 2}, STREAM, "error event"),
    "no end marker": ({"kind": "no-done", "tokens": 2}, STREAM, "error event"),
    "busy": ({"kind": "status", "status": 503}, STREAM, "status 503"),
}


def test_every_misbehaviour_of_an_engine_has_an_honest_end_and_harms_nobody_else(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "20")
    small_system.wait_for_sessions(1)
    with others_notice_nothing(small_system, agent) as engine:
        for name, (fault, body, expected) in HONEST_ENDS.items():
            assert engine.post("/emulator/faults", json=fault | {"count": 1}).status_code == 200
            began_s = time.monotonic()
            answer = ask(small_system, body)
            assert time.monotonic() - began_s < QUICK_S, name
            assert answer.end == WHOLE, name
            if expected.startswith("status"):
                assert answer.status == int(expected.removeprefix("status ")), name
                assert answer.error is not None, name
            else:
                assert answer.is_done, name
                assert answer.has_error_event == (expected == "error event"), name


# -- scripted engines ------------------------------------------------------------------------------------------------


@contextmanager
def scripted(system: System, script: Script, *more_flags: str) -> Iterator[ScriptedEngine]:
    """A session whose engine obeys `script` for requests that are marked."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work: Awaitable[None]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(_awaited(work), loop)
        done.result(10)

    engine = ScriptedEngine(free_port())
    engine.script = script
    there(engine.start())
    flags = ["--model", "m", "--engine-model", "emulated", "--allocation", "scripted", *more_flags]
    agent = system.service("agent", *flags, "--engine-url", f"http://127.0.0.1:{engine.port}")
    try:
        wait_for(lambda: "agent.serving" in agent.log, "agent serves")
        system.wait_for_sessions(1)
        yield engine
    finally:
        there(engine.kill())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _awaited(work: Awaitable[None]) -> None:
    await work


def marked(stream: bool) -> dict[str, object]:
    return {**CHAT, "stream": stream, "messages": [{"role": "user", "content": MARK}]}


async def end_without_a_word(call: Call) -> None:
    await call.begin()
    await call.end()


async def only_the_marker(call: Call) -> None:
    await call.begin()
    await call.piece(b"data: [DONE]\n\n")
    await call.end()


async def no_tokens(call: Call) -> None:
    await call.begin()
    await finish(call)


async def cut_after_the_marker(call: Call) -> None:
    """All is said; what breaks off is only the framing."""
    await call.begin()
    await say(call, words())
    await call.piece(b"data: [DONE]\n\n")
    call.cut()


async def cut_inside_an_event(call: Call) -> None:
    await call.begin()
    await say(call, words()[:2])
    await call.piece(b'data: {"choices": [{"delta": {"content": "half')
    call.cut()


async def half_a_character(call: Call) -> None:
    await call.begin()
    await say(call, words()[:2])
    await call.piece('data: {"choices": [{"delta": {"content": "ü'.encode()[:-1])
    await call.end()


async def broken_chunks(call: Call) -> None:
    await call.begin()
    await say(call, words()[:2])
    await call.send(b"zzzz\r\nnot a chunk\r\n")


async def an_empty_answer(call: Call) -> None:
    if call.streamed:
        await end_without_a_word(call)
    else:
        await call.answer(200, b"")


async def something_else_than_http(call: Call) -> None:
    await call.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (end_without_a_word, True),
        (only_the_marker, False),
        (no_tokens, False),
        (cut_after_the_marker, False),
        (cut_inside_an_event, True),
        (half_a_character, True),
        (broken_chunks, True),
        (an_empty_answer, True),
        (something_else_than_http, True),
    ],
)
def test_h49_a_stream_is_whole_or_its_client_is_told(small_system: System, script: Script, told: bool) -> None:
    with scripted(small_system, script):
        answer = ask(small_system, marked(stream=True))
        assert answer.end == WHOLE
        if answer.status == 200:
            assert answer.is_done
            assert answer.has_error_event == told
            assert all(is_json(event) for event in answer.events[:-1]), "half an event must not reach the client"
        else:
            assert told
            assert (answer.status, answer.error is not None) == (502, True)
        if script in (an_empty_answer, something_else_than_http):
            answer = ask(small_system, marked(stream=False))
            assert (answer.status, answer.error is not None) == (502, True)


def is_json(event: str) -> bool:
    try:
        return bool(httpx2.Response(200, text=event).json())
    except ValueError:
        return False


def test_h49_a_cut_stream_is_logged_as_broken_and_its_usage_so_far_is_told(small_system: System) -> None:
    async def tells_usage_then_breaks(call: Call) -> None:
        await call.begin()
        usage = '"usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}'
        await call.piece(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}], %s}\n\n' % usage.encode())
        call.cut()

    ingress = next(process for process in small_system.processes if process.name == "ingress")
    with scripted(small_system, tells_usage_then_breaks):
        answer = ask(small_system, marked(stream=True) | {"stream_options": {"include_usage": True}})
    assert answer.has_error_event
    assert answer.objects[-2]["usage"]["total_tokens"] == 4
    wait_for(lambda: "inference.broken_stream" in ingress.log, "logged as broken")


def test_h48_six_seconds_of_silence_are_no_end_and_are_not_silent_for_the_client(system: System) -> None:
    async def pauses(call: Call) -> None:
        await call.begin()
        await say(call, words()[:2])
        await asyncio.sleep(6)
        await say(call, words()[2:])
        await finish(call)

    system.start_registry()
    system.start_ingress("--keep-alive-s", "1")
    with scripted(system, pauses):
        answer = ask(system, marked(stream=True))
    assert answer.is_done
    assert not answer.has_error_event
    assert answer.text == "".join(words())
    assert 3 <= len(answer.comments) <= 7


def test_h50_a_wait_before_the_first_byte_is_not_silent_and_its_error_is_still_told(system: System) -> None:
    fails = False

    async def waits(call: Call) -> None:
        await asyncio.sleep(4)
        if fails:
            await call.answer(500, b'{"error": {"message": "out of memory", "type": "x", "param": null, "code": null}}')
            return
        await call.begin()
        await say(call, words())
        await finish(call)

    system.start_registry()
    system.start_ingress("--keep-alive-s", "1")
    with scripted(system, waits):
        first_s: list[float] = []
        answer = asyncio.run(first_byte(system, first_s))
        assert first_s[0] < 3.5, "the head leaves with the first sign of life"
        assert answer.is_done
        assert answer.text == "".join(words())
        assert answer.comments
        fails = True
        answer = ask(system, marked(stream=True))
        assert answer.is_done
        assert answer.has_error_event
        assert "out of memory" in answer.body.decode()


def test_h50_a_wait_in_the_queue_is_not_silent_either(system: System) -> None:
    async def takes_three_seconds(call: Call) -> None:
        await call.begin()
        await say(call, words()[:2])
        await asyncio.sleep(3)
        await say(call, words()[2:])
        await finish(call)

    system.start_registry()
    system.start_ingress("--keep-alive-s", "1")
    with scripted(system, takes_three_seconds, "--concurrency-max", "1") as engine, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(system, marked(stream=True)), range(2)))
    assert len(engine.calls) == 2
    assert engine.calls[1].came_at_s - engine.calls[0].came_at_s > 2.5, "the second had to wait"
    assert [answer.text for answer in answers] == ["".join(words())] * 2
    assert all(answer.is_done and answer.comments for answer in answers)
    waited = max(answers, key=lambda answer: answer.ms)
    assert waited.body.startswith(b":"), "the first thing it heard was a sign of life"


async def first_byte(system: System, when_s: list[float]) -> Answer:
    raw = httpx2.Request("POST", "http://x", json=marked(stream=True)).content
    async with Connection(int(system.url.rpartition(":")[2])) as connection:
        await connection.send(request("POST", "/v1/chat/completions", raw, {"Authorization": f"Bearer {system.key}"}))
        began_s = time.monotonic()

        def look(seen: Answer) -> bool:
            if seen.status and not when_s:
                when_s.append(time.monotonic() - began_s)
            return False

        return await connection.answer(20, look)


# -- the replica that fails fastest ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "failed_max"), [(502, 0), (500, 5)])
def test_the_replica_that_fails_fastest_gets_least(small_system: System, status: int, failed_max: int) -> None:
    """It always looks idle, and would get most; a fair share of three is 100 of 300 requests. A 500 that is not marked
    as safe is not repeated elsewhere, so those that open the circuit are seen, and each trial: after 5 s, 10 s, …"""
    agents = [small_system.start_agent("--ttft-ms", "30", "--tpot-ms", "5") for _ in range(3)]
    small_system.wait_for_sessions(3)
    with small_system.engine(agents[0]) as ill:
        assert ill.post("/emulator/faults", json={"kind": "status", "status": status}).status_code == 200
        before = ill.get("/emulator/state").json()["requests_total"]
        began_s = time.monotonic()
        with ThreadPoolExecutor(8) as pool, small_system.client() as client:
            answers = list(pool.map(lambda _: client.post("/v1/chat/completions", json=CHAT).status_code, range(300)))
        trials = int(math.log2(1 + (time.monotonic() - began_s) / HealthSettings().open_s))
        touched = ill.get("/emulator/state").json()["requests_total"] - before
    assert 0 < touched <= 20
    assert sum(answer != 200 for answer in answers) <= (failed_max + trials if failed_max else 0)
