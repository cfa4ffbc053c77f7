"""Cases of streams and of what passes through: what the client gets is what the engine said, to its real end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serai.bench.faults.case import Case, Finding
from serai.bench.faults.raw_client import WHOLE, Answer
from serai.bench.faults.scripted_engine import Call, Script, chunk, completion, finish, good, say, usage, words
from serai.bench.faults.stage import Stage, body_of, whole_and_told

_SILENCE_S = 18.0
"""Longer than the 15 s after which a keep-alive is expected."""


# -- broken streams --------------------------------------------------------------------------------------------------


def _cut(*, after: int, reset: bool = False, clean: bool = False) -> Script:
    async def cut(call: Call) -> None:
        if not call.streamed:
            await call.send(b'HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"id": ')
            call.cut()
            return
        await call.begin()
        await say(call, words()[:after])
        if clean:
            await call.end()
        else:
            call.cut(reset=reset)

    return cut


def _how_told(answer: Answer) -> str:
    if whole_and_told(answer):
        return "error event, then `[DONE]`"
    if answer.has_error_event:
        return f"error event, no `[DONE]`, {answer.end}"
    if answer.end == WHOLE:
        return "ends as if it were whole" if answer.status == 200 else f"status {answer.status}"
    return {"cut": "the socket breaks", "silent": "silence"}.get(answer.end, answer.end)


async def _told(stage: Stage, script: Script) -> Finding:
    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    refused = answer.status >= 400 and answer.error is not None  # Before the first byte a status can be sent still.
    return Finding(whole_and_told(answer) or refused, _how_told(answer))


async def cut_mid_stream(stage: Stage) -> Finding:
    return await _told(stage, _cut(after=3))


async def reset_mid_stream(stage: Stage) -> Finding:
    return await _told(stage, _cut(after=3, reset=True))


async def ended_early(stage: Stage) -> Finding:
    return await _told(stage, _cut(after=3, clean=True))


async def empty_stream(stage: Stage) -> Finding:
    return await _told(stage, _cut(after=0, clean=True))


async def goes_on_elsewhere(stage: Stage) -> Finding:
    stage.play(_cut(after=5), good)
    answer = await stage.ask(body_of(stream=True))
    same = answer.is_done and not answer.has_error_event and answer.text == "".join(words())
    return Finding(same, "the same text, whole" if same else _how_told(answer))


async def cut_unary(stage: Stage) -> Finding:
    stage.play(_cut(after=0))
    answer = await stage.ask(body_of())
    told = answer.status >= 500 and answer.error is not None
    return Finding(told, f"{answer.status}, {answer.end}{'' if answer.error else ', no error object'}")


async def cut_unary_healthy_second(stage: Stage) -> Finding:
    stage.play(_cut(after=0), good)
    answer = await stage.ask(body_of())
    return Finding(answer.status == 200 and answer.json is not None, f"{answer.status}, {answer.end}")


async def error_event(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        await say(call, words()[:3])
        await call.event({"error": {"message": "out of memory", "type": "server_error", "param": None, "code": "x"}})
        await call.piece(b"data: [DONE]\n\n")
        await call.end()

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    once = whole_and_told(answer) and answer.events.count("[DONE]") == 1
    return Finding(once and "out of memory" in str(answer.events), _how_told(answer))


async def error_event_then_cut(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        await say(call, words()[:3])
        await call.event({"error": {"message": "out of memory", "type": "server_error", "param": None, "code": "x"}})
        call.cut()

    return await _told(stage, script)


async def malformed_event(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        await say(call, words()[:3])
        await call.piece(b'data: {"id": "chatcmpl-1", "choices": [{"delta": {"cont\n\n')
        await say(call, words()[3:])
        await finish(call)

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    passed = answer.is_done and answer.text == "".join(words()) and any(_is_broken(one) for one in answer.events)
    return Finding(passed or whole_and_told(answer), "passes, the rest too" if passed else _how_told(answer))


def _is_broken(event: str) -> bool:
    try:
        json.loads(event)
    except ValueError:
        return event != "[DONE]"
    return False


async def wrong_content_type(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.answer(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})

    stage.play(script)
    streamed, whole = await stage.ask(body_of(stream=True)), await stage.ask(body_of())
    told = all((one.status >= 500 and one.error) or whole_and_told(one) for one in (streamed, whole))
    return Finding(told, f"stream {streamed.status}, whole {whole.status}")


async def whole_instead_of_stream(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.answer(200, json.dumps(completion()).encode())

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    is_stream = "event-stream" in answer.headers.get("content-type", "")
    told = (answer.status >= 500 and answer.error is not None) or (is_stream and answer.is_done)
    how = "made into a stream" if is_stream and answer.is_done else _how_told(answer)
    return Finding(told, how)


async def broken_unary(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.answer(200, json.dumps(completion()).encode()[:-40])

    stage.play(script)
    answer = await stage.ask(body_of())
    return Finding(answer.status >= 500 and answer.error is not None, f"{answer.status}")


async def no_tokens(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        await finish(call)

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    whole = answer.is_done and not answer.has_error_event and answer.text == ""
    return Finding(whole and _finish_reason(answer) == "stop", _how_told(answer) if not whole else "whole, and empty")


def _finish_reason(answer: Answer) -> str:
    found = [choice.get("finish_reason") for one in answer.objects for choice in one.get("choices") or ()]
    return next((reason for reason in reversed(found) if reason), "")


async def silence_mid_stream(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        await say(call, words()[:3])
        await asyncio.sleep(_SILENCE_S)
        await say(call, words()[3:])
        await finish(call)

    stage.play(script)
    answer = await stage.ask(body_of(stream=True), timeout_s=_SILENCE_S + 10)
    kept = answer.is_done and answer.text == "".join(words())
    return Finding(kept and bool(answer.comments), _alive(answer) if kept else _how_told(answer))


async def long_prefill(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await asyncio.sleep(_SILENCE_S)
        await good(call)

    stage.play(script)
    answer = await stage.ask(body_of(stream=True), timeout_s=_SILENCE_S + 10)
    kept = answer.is_done and answer.text == "".join(words())
    return Finding(kept and bool(answer.comments), _alive(answer) if kept else _how_told(answer))


def _alive(answer: Answer) -> str:
    return "whole, with signs of life" if answer.comments else "whole, but silent until then"


# -- what passes -----------------------------------------------------------------------------------------------------


async def utf8_bytes(stage: Stage) -> Finding:
    text = "Grüße, мир, 砂漠の隊商, 🐪🏜️ é"

    async def script(call: Call) -> None:
        await call.begin()
        for byte in b"data: " + json.dumps(chunk({"content": text}), ensure_ascii=False).encode() + b"\n\n":
            await call.piece(bytes([byte]))
        await finish(call)

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    return Finding(answer.is_done and answer.text == text, "intact" if answer.text == text else "changed")


async def comments_pass(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        await say(call, words()[:2])
        await call.piece(b": engine is thinking\n\n")
        await say(call, words()[2:])
        await finish(call)

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    passed = ": engine is thinking" in answer.comments and answer.is_done
    return Finding(passed, "passes" if passed else "dropped")


async def usage_kept(stage: Stage) -> Finding:
    stage.play(good)
    answer = await stage.ask(body_of(stream=True, stream_options={"include_usage": True}))
    last = answer.objects[-1] if answer.objects else {}
    kept = answer.is_done and (last.get("usage") or {}).get("total_tokens") == WORDS_USED
    return Finding(kept, "kept" if kept else "lost")


WORDS_USED = usage()["total_tokens"]


async def usage_unasked(stage: Stage) -> Finding:
    stage.play(good)
    answer = await stage.ask(body_of(stream=True))
    shown = any(one.get("usage") or one.get("choices") == [] for one in answer.objects)
    return Finding(answer.is_done and not shown, "shown" if shown else "not shown")


_STRANGE: dict[str, Any] = {
    "user": "u", "store": False, "guided_json": {"type": "object", "properties": {}},
    "vllm_xargs": {"a": 1, "b": [None, 2.5]}, "structured_outputs": {"regex": "[a-z]+"}, "priority": -3,
    "metadata": {"k": "v"}, "logit_bias": {"50256": -100}, "big": 12345678901234567890123, "unheard_of": {"x": [{}]},
}  # fmt: skip


async def request_fields(stage: Stage) -> Finding:
    stage.play(good)
    await stage.ask(body_of(**_STRANGE))
    call = await stage.wait_for_call()
    seen = call.json if call is not None and isinstance(call.json, dict) else {}
    lost = [name for name, value in _STRANGE.items() if name not in seen or seen[name] != value]
    return Finding(not lost, "all kept" if not lost else f"lost: {', '.join(lost)}")


_SAID: dict[str, Any] = {
    "content": None, "reasoning_content": "hm", "refusal": None, "audio": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}],
}  # fmt: skip
_MORE: dict[str, Any] = {"kv_transfer_params": {"block": 7}, "service_tier": None, "prompt_logprobs": None, "own": [1]}


async def response_fields(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.answer(200, json.dumps(completion(_SAID, **_MORE)).encode())

    stage.play(script)
    body = (await stage.ask(body_of())).json
    seen = body if isinstance(body, dict) else {}
    message = (seen.get("choices") or [{}])[0].get("message") or {}
    lost = [name for name, value in _MORE.items() if seen.get(name, "") != value]
    lost += [f"message.{name}" for name, value in _SAID.items() if message.get(name, "") != value]
    return Finding(not lost, "all kept" if not lost else f"lost: {', '.join(lost)}")


_DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "reasoning_content": "let me see"},
    {"content": None, "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]},
    {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": "{\"a\":"}}]},
    {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}], "own_field": [1]},
]  # fmt: skip


async def delta_fields(stage: Stage) -> Finding:
    async def script(call: Call) -> None:
        await call.begin()
        for delta in _DELTAS:
            await call.event(chunk(delta, token_ids=[1, 2]))
        await call.event(chunk({}, "tool_calls"))
        await call.piece(b"data: [DONE]\n\n")
        await call.end()

    stage.play(script)
    answer = await stage.ask(body_of(stream=True))
    deltas = [choice.get("delta") for one in answer.objects for choice in one.get("choices") or ()]
    kept = [delta for delta in _DELTAS if delta in deltas]
    tokens = all(one.get("token_ids") == [1, 2] for one in answer.objects[: len(_DELTAS)])
    lost = [f"{len(_DELTAS) - len(kept)} deltas changed"] if len(kept) < len(_DELTAS) else []
    lost += [] if tokens else ["token_ids lost"]
    whole = answer.is_done and _finish_reason(answer) == "tool_calls"
    return Finding(not lost and whole, ", ".join(lost) or ("all kept" if whole else "not whole"))


CASES = (
    Case(
        "cut_mid_stream",
        "engine cuts a stream mid-way, no other engine can help",
        "error event, `[DONE]`, clean end of the body",
        cut_mid_stream,
    ),
    Case("reset_mid_stream", "the same with a TCP reset", "the same", reset_mid_stream),
    Case("ended_early", "engine ends the body cleanly, without finish reason and `[DONE]`", "the same", ended_early),
    Case(
        "empty_stream",
        "engine begins a stream and ends it without a byte",
        "an error, by event or status",
        empty_stream,
    ),
    Case(
        "goes_on_elsewhere",
        "engine cuts a greedy stream mid-way, the second is well",
        "the text goes on and is the same",
        goes_on_elsewhere,
        needs_both=True,
    ),
    Case("cut_unary", "engine cuts a whole answer", "5xx with an error object", cut_unary),
    Case("cut_unary_healthy_second", "the same, the second is well", "200", cut_unary_healthy_second, needs_both=True),
    Case("error_event", "engine sends an error event, then `[DONE]`", "both pass, once", error_event),
    Case(
        "error_event_then_cut",
        "engine sends an error event, then cuts",
        "error event, `[DONE]`, clean end",
        error_event_then_cut,
    ),
    Case(
        "malformed_event",
        "one event of a stream is no JSON",
        "it passes with all others, or the stream ends with an error event",
        malformed_event,
    ),
    Case(
        "wrong_content_type", "engine answers 200 with a page of HTML", "5xx with an error object", wrong_content_type
    ),
    Case(
        "whole_instead_of_stream",
        "engine answers a stream's request in one piece",
        "5xx with an error object, or a stream",
        whole_instead_of_stream,
    ),
    Case("broken_unary", "engine answers 200 with broken JSON", "5xx with an error object", broken_unary),
    Case("no_tokens", "a stream of no tokens", "whole, with its finish reason, no error", no_tokens),
    Case(
        "silence_mid_stream",
        f"{_SILENCE_S:g} s of silence mid-stream, then the rest",
        "whole, with keep-alive comments",
        silence_mid_stream,
        quick=False,
    ),
    Case(
        "long_prefill",
        f"{_SILENCE_S:g} s until the first byte of a stream",
        "whole, with keep-alive comments",
        long_prefill,
        quick=False,
    ),
    Case("utf8_bytes", "UTF-8 in one-byte pieces", "text intact", utf8_bytes),
    Case("comments_pass", "the engine's own SSE comments", "they pass", comments_pass),
    Case("usage_kept", "final usage event and `[DONE]`, when asked for", "kept", usage_kept),
    Case("usage_unasked", "usage, when not asked for", "not shown", usage_unasked),
    Case("request_fields", "fields of a request that only the engine knows", "all reach it unchanged", request_fields),
    Case(
        "response_fields",
        "fields of an answer, `content: null`, `reasoning_content`, tool calls",
        "all reach the client unchanged",
        response_fields,
    ),
    Case("delta_fields", "the same in a stream's deltas", "the same", delta_fields),
)
