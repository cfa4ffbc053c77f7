"""Cases of engines that refuse, fail, hang, die and come back, with a second one that may be well."""

from __future__ import annotations

import asyncio
import json
import time

from serai.bench.faults.case import Case, Finding
from serai.bench.faults.raw_client import Answer
from serai.bench.faults.scripted_engine import Call, Script, good
from serai.bench.faults.stage import Stage, body_of

_TRIES_MAX = 2
_RESTART_MAX_S = 10.0
_RESTART_WAIT_S = 75.0
_RESTART_CLOSE_S = 3.0
"""Times to come back that differ by less are those of somebody's timer, and of the machine."""
_HANG_S, _HANG_SETTLED_S = 18.0, 8.0


def _status(status: int, message: str = "no", headers: dict[str, str] | None = None) -> Script:
    async def answer(call: Call) -> None:
        error = {"error": {"message": message, "type": "x", "param": None, "code": "told_by_engine"}}
        await call.answer(status, json.dumps(error).encode(), headers)

    return answer


async def busy_then_good(stage: Stage) -> Finding:
    stage.play(_status(429))
    for _ in range(24):
        await stage.ask(body_of())
    stage.play(good)
    answer = await stage.ask(body_of())
    return Finding(answer.status == 200, f"{answer.status}")


async def one_busy(stage: Stage) -> Finding:
    stage.play(_status(429))
    answer = await stage.ask(body_of())
    calls = len(stage.calls)
    return Finding(answer.status == 429 and calls <= _TRIES_MAX, f"{answer.status}, {calls} calls", calls)


async def retry_after(stage: Stage) -> Finding:
    stage.play(_status(429, headers={"Retry-After": "7"}))
    answer = await stage.ask(body_of())
    kept = answer.headers.get("retry-after")
    return Finding(
        answer.status == 429 and kept == "7", f"{answer.status}, {'kept' if kept == '7' else kept or 'lost'}"
    )


async def _second_is_well(stage: Stage, first: Script) -> Finding:
    stage.play(first, good)
    answer = await stage.ask(body_of())
    calls = len(stage.calls)
    return Finding(answer.status == 200 and calls <= _TRIES_MAX, f"{answer.status}, {calls} calls")


async def fails_500(stage: Stage) -> Finding:
    return await _second_is_well(stage, _status(500, headers={"x-should-retry": "true"}))


async def fails_502(stage: Stage) -> Finding:
    return await _second_is_well(stage, _status(502))


async def fails_503(stage: Stage) -> Finding:
    return await _second_is_well(stage, _status(503))


async def fails_504(stage: Stage) -> Finding:
    return await _second_is_well(stage, _status(504))


async def cut_before_first_byte(stage: Stage) -> Finding:
    async def cut(call: Call) -> None:
        call.cut(reset=True)

    return await _second_is_well(stage, cut)


async def no_http(stage: Stage) -> Finding:
    async def gibberish(call: Call) -> None:
        await call.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        call.cut()

    stage.play(gibberish)
    answer = await stage.ask(body_of())
    return Finding(
        answer.status >= 500 and answer.error is not None, f"{answer.status or answer.end}, {len(stage.calls)} calls"
    )


async def poison(stage: Stage) -> Finding:
    """A request that breaks whatever engine it meets must not go through the whole fleet."""
    stage.play(_status(500, "CUDA error"))
    answer = await stage.ask(body_of())
    calls = len(stage.calls)
    return Finding(answer.status == 500 and calls <= _TRIES_MAX, f"{answer.status}, {calls} calls", calls)


async def refusal_passes(stage: Stage) -> Finding:
    body = b'{"object": "error", "message": "too long",  "code": 400, "error": {"message": "too long", "param": null}}'

    async def refuse(call: Call) -> None:
        await call.answer(400, body)

    stage.play(refuse)
    answer = await stage.ask(body_of())
    same, calls = answer.status == 400 and answer.body == body, len(stage.calls)
    told = "unchanged" if same else "changed"
    return Finding(same and calls == 1, f"{answer.status}, {told}, {calls} calls")


async def slow_head(stage: Stage) -> Finding:
    async def slow(call: Call) -> None:
        await asyncio.sleep(3)
        await good(call)

    stage.play(slow)
    answer = await stage.ask(body_of())
    return Finding(answer.status == 200 and len(stage.calls) == 1, f"{answer.status}, {len(stage.calls)} calls")


async def closes_after_each(stage: Stage) -> Finding:
    """An engine that closes idle connections without a word: the next request meets a dead one."""

    async def close(call: Call) -> None:
        await call.answer(200, b'{"choices": []}')
        call.cut()

    stage.play(close)
    answers = [await stage.ask(body_of()) for _ in range(20)]
    return _all_fine(answers)


def _all_fine(answers: list[Answer]) -> Finding:
    fine = sum(answer.status == 200 for answer in answers)
    slowest_ms = max(answer.ms for answer in answers)
    return Finding(fine == len(answers), f"{fine} of {len(answers)} ok, slowest {slowest_ms:.0f} ms")


async def killed(stage: Stage) -> Finding:
    stage.play(good)
    await stage.engines[0].kill()
    try:
        return _all_fine([await stage.ask(body_of()) for _ in range(20)])
    finally:
        await stage.engines[0].start()


async def comes_back(stage: Stage) -> Finding:
    """The first is dead for ten seconds under load, as long as a restart may take; then it listens again."""
    stage.play(good)
    engine = stage.engines[0]
    await engine.kill()
    dead_until_s = time.monotonic() + 10
    while time.monotonic() < dead_until_s:
        await stage.ask(body_of())
        await asyncio.sleep(0.1)
    await engine.start()
    began_s, before = time.monotonic(), len(engine.calls)
    while len(engine.calls) == before:
        if time.monotonic() > began_s + _RESTART_WAIT_S:
            return Finding(False, f"not within {_RESTART_WAIT_S:g} s")
        await stage.ask(body_of())
        await asyncio.sleep(0.05)
    took_s = time.monotonic() - began_s
    return Finding(took_s <= _RESTART_MAX_S, f"{took_s:.1f} s", took_s)


async def hangs(stage: Stage) -> Finding:
    """The first takes every request and says nothing; requests go on coming."""
    engine = stage.engines[0]
    stage.play(good)
    engine.hung = True
    began_s = time.monotonic()
    asked: list[tuple[float, asyncio.Task[Answer]]] = []
    while (now := time.monotonic()) < began_s + _HANG_S:
        asked.append((now - began_s, asyncio.ensure_future(stage.ask(body_of(), timeout_s=3))))
        await asyncio.sleep(0.25)
    engine.hung = False
    late = [await task for at_s, task in asked if at_s >= _HANG_S - _HANG_SETTLED_S]
    await asyncio.gather(*[task for _, task in asked])
    fine = sum(answer.status == 200 for answer in late)
    return Finding(fine == len(late), f"of those after {_HANG_S - _HANG_SETTLED_S:g} s {fine} of {len(late)} ok")


CASES = (
    Case("refusal_passes", "engine answers 400", "unchanged, asked once", refusal_passes),
    Case("one_busy", "upstream calls for one 429", "at most 2", one_busy, needs_both=True),
    Case("retry_after", "the engine's Retry-After", "kept", retry_after),
    Case(
        "busy_then_good",
        "24 requests answered 429 by the engines, then a good one",
        "200",
        busy_then_good,
        needs_both=True,
    ),
    Case(
        "fails_500",
        "engine answers 500 marked as safe to repeat, the second is well",
        "200, at most 2 calls",
        fails_500,
        needs_both=True,
    ),
    Case("fails_502", "the same with 502", "the same", fails_502, needs_both=True),
    Case("fails_503", "the same with 503", "the same", fails_503, needs_both=True),
    Case("fails_504", "the same with 504", "the same", fails_504, needs_both=True),
    Case(
        "cut_before_first_byte",
        "engine resets before the first byte, the second is well",
        "the same",
        cut_before_first_byte,
        needs_both=True,
    ),
    Case("poison", "a request that every engine answers with 500", "500, at most 2 calls", poison),
    Case("no_http", "engine answers with something that is no HTTP", "5xx with an error object", no_http),
    Case("slow_head", "3 s until the engine's head", "200, asked once", slow_head),
    Case("closes_after_each", "engine closes its connections without a word, 20 requests", "20 ok", closes_after_each),
    Case("killed", "one of two engines killed, 20 requests", "20 ok", killed, beside=False, needs_both=True),
    Case(
        "hangs",
        "one of two engines takes requests and says nothing",
        "after 10 s no request goes there",
        hangs,
        needs_both=True,
        quick=False,
    ),
    Case(
        "comes_back",
        "killed for 10 s under load, then back: seconds until it is used again",
        f"at most {_RESTART_MAX_S:g}",
        comes_back,
        needs_both=True,
        quick=False,
        beside=False,
        close_enough=_RESTART_CLOSE_S,
    ),
)
