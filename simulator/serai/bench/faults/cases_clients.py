"""Cases of clients: they leave, they speak HTTP in unusual ways, they send what cannot be."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

from serai.bench.faults.case import Case, Finding
from serai.bench.faults.raw_client import CUT, REFUSED, WHOLE, Answer, Connection
from serai.bench.faults.scripted_engine import MARK, Call, chunk, good, never
from serai.bench.faults.stage import Stage, body_of
from serai.bench.stand import CHAT_PATH, MODEL

_ABORT_MAX_MS = 1000.0
_ABORT_WAIT_S = 3.0
_ABORT_CLOSE_MS = 300.0
"""Times to abort that differ by less are the machine's."""
_QUICK_MS = 2000.0
_BODY_BYTES = 20_000_000
_OVER_BYTES = 32 * 1024 * 1024 + 1
_LORISES = 200


# -- clients that leave ----------------------------------------------------------------------------------------------


async def _left(stage: Stage, call: Call | None, left_at_s: float) -> Finding:
    if call is None:
        return Finding(False, "the request never reached the engine")
    try:
        await asyncio.wait_for(call.gone.wait(), _ABORT_WAIT_S)
    except TimeoutError:
        return Finding(False, f"not aborted in {_ABORT_WAIT_S:g} s")
    took_ms = max(0.0, (call.gone_at_s - left_at_s) * 1000)
    return Finding(took_ms <= _ABORT_MAX_MS, f"aborted after {took_ms:.0f} ms", took_ms)


async def _endless(call: Call) -> None:
    await call.begin()
    while True:
        await call.event(chunk({"content": " w"}))
        await asyncio.sleep(0.02)


async def leaves_mid_stream(stage: Stage) -> Finding:
    stage.play(_endless)
    async with Connection(stage.port) as connection:
        await connection.send(stage.bytes_of(body_of(stream=True)))
        stage.note(await connection.answer(5, lambda seen: len(seen.body) > 500))
    return await _left(stage, await stage.wait_for_call(), time.monotonic())


async def _leaves_before_anything(stage: Stage, *, stream: bool) -> Finding:
    stage.play(never)
    async with Connection(stage.port) as connection:
        await connection.send(stage.bytes_of(body_of(stream=stream)))
        call = await stage.wait_for_call()
        await asyncio.sleep(0.2)
    return await _left(stage, call, time.monotonic())


async def leaves_before_first_token(stage: Stage) -> Finding:
    return await _leaves_before_anything(stage, stream=True)


async def leaves_unary(stage: Stage) -> Finding:
    return await _leaves_before_anything(stage, stream=False)


# -- HTTP ------------------------------------------------------------------------------------------------------------


async def pipelined(stage: Stage) -> Finding:
    stage.play(good)
    async with Connection(stage.port) as connection:
        await connection.send(stage.bytes_of(body_of()) + stage.bytes_of(body_of(stream=True)))
        first, second = stage.note(await connection.answer(5)), stage.note(await connection.answer(5))
    both = first.status == second.status == 200 and first.json is not None and second.is_done
    return Finding(
        both, "both answered, in order" if both else f"{first.status} {first.end}, {second.status} {second.end}"
    )


async def keep_alive(stage: Stage) -> Finding:
    stage.play(good)
    async with Connection(stage.port) as connection:
        answers = []
        for _ in range(5):
            await connection.send(stage.bytes_of(body_of()))
            answers.append(stage.note(await connection.answer(5)))
    fine = sum(answer.status == 200 for answer in answers)
    return Finding(fine == len(answers), f"{fine} of {len(answers)} on one connection")


async def head_and_options(stage: Stage) -> Finding:
    head = await stage.ask(path="/v1/models", method="HEAD")
    options = await stage.ask(path=CHAT_PATH, method="OPTIONS")
    quick = max(head.ms, options.ms) < _QUICK_MS
    honest = head.status in (200, 405) and options.status in (200, 204, 405)
    return Finding(quick and honest, f"HEAD {head.status}, OPTIONS {options.status}")


async def gzip_body(stage: Stage) -> Finding:
    stage.play(good)
    packed = gzip.compress(json.dumps(body_of()).encode())
    answer = await stage.ask(packed, headers={"Content-Encoding": "gzip"})
    call = stage.calls[0] if stage.calls else None
    understood = answer.status == 200 and call is not None and isinstance(call.json, dict)
    return Finding(understood, "understood" if understood else f"{answer.status}")


async def expects_100(stage: Stage) -> Finding:
    stage.play(good)
    whole = stage.bytes_of(body_of(), headers={"Expect": "100-continue"})
    head, _, body = whole.partition(b"\r\n\r\n")
    async with Connection(stage.port) as connection:
        await connection.send(head + b"\r\n\r\n")
        await connection.answer(1.0, lambda seen: seen.continued)
        await connection.send(body)
        answer = stage.note(await connection.answer(5))
    return Finding(answer.status == 200, f"{'100, then ' if answer.continued else 'no 100, then '}{answer.status}")


async def slash_at_the_end(stage: Stage) -> Finding:
    stage.play(good)
    answer = await stage.ask(body_of(), path=CHAT_PATH + "/")
    return Finding(answer.status == 200, f"{answer.status}")


async def unknown_path(stage: Stage) -> Finding:
    answer = await stage.ask(b"{}", path="/v1/nothing")
    return Finding(answer.status == 404 and answer.error is not None, _refusal(answer))


async def wrong_method(stage: Stage) -> Finding:
    answer = await stage.ask(path=CHAT_PATH, method="GET")
    return Finding(answer.status == 405 and answer.error is not None, _refusal(answer))


# -- bodies ----------------------------------------------------------------------------------------------------------


def _refusal(answer: Answer) -> str:
    if answer.status == 0:
        return answer.end
    kind = answer.headers.get("content-type", "no type").partition(";")[0]
    return f"{answer.status}" if answer.error else f"{answer.status} {kind}, no error object"


def _is_400(answer: Answer) -> bool:
    return answer.status in (400, 422) and answer.error is not None and answer.ms < _QUICK_MS


async def _all_400(stage: Stage, *bodies: bytes) -> Finding:
    stage.play(good)
    answers = [await stage.ask(body) for body in bodies]
    return Finding(all(map(_is_400, answers)), ", ".join(dict.fromkeys(map(_refusal, answers))))


async def malformed_json(stage: Stage) -> Finding:
    return await _all_400(stage, b'{"model": "emulated", ', b"not json", b'{"model": "emulated"}}')


async def no_object(stage: Stage) -> Finding:
    return await _all_400(stage, b"[]", b"null", b'"text"')


async def wrong_types(stage: Stage) -> Finding:
    wrong: list[dict[str, Any]] = [{"model": 7}, {"model": None}, {"stream": "yes"}]
    return await _all_400(stage, *[json.dumps(body_of() | one).encode() for one in wrong])


async def invalid_utf8(stage: Stage) -> Finding:
    return await _all_400(stage, json.dumps(body_of()).encode().replace(b"caravan", b"\xff\xfe\xc3"))


async def raw_nul(stage: Stage) -> Finding:
    return await _all_400(stage, json.dumps(body_of()).encode().replace(b"caravan", b"a\x00b"), b"\x00" * 100)


async def escaped_nul(stage: Stage) -> Finding:
    stage.play(good)
    answer = await stage.ask(json.dumps(body_of()).encode().replace(b"caravan", b"a\\u0000b"))
    fine = answer.status == 200 or _is_400(answer)
    return Finding(fine, _refusal(answer) if answer.status != 200 else "passes")


async def unknown_model(stage: Stage) -> Finding:
    stage.play(good)
    answer = await stage.ask(body_of() | {"model": "no/such-model"})
    error = answer.error or {}
    fine = answer.status == 404 and error.get("code") == "model_not_found"
    return Finding(
        fine, f"404 `{error.get('code')}`" if answer.status == 404 else f"{_refusal(answer)}, {len(stage.calls)} calls"
    )


async def deep_nesting(stage: Stage) -> Finding:
    stage.play(good)
    depth = 1_000_000
    body = b'{"model": "%s", "messages": %s%s}' % (MODEL.encode(), b"[" * depth, b"]" * depth)
    answer = await stage.ask(body)
    fine = _is_400(answer) and (await stage.ask(body_of())).status == 200
    return Finding(fine, f"{_refusal(answer)}, {answer.ms:.0f} ms")


async def huge_numbers(stage: Stage) -> Finding:
    stage.play(good)
    fields = (b'"temperature": 1e400', b'"seed": ' + b"9" * 100_000, b'"top_p": 1E-999999999')
    bodies = [json.dumps(body_of()).encode()[:-1] + b", " + field + b"}" for field in fields]
    answers = [await stage.ask(body) for body in bodies]
    fine = all(answer.status == 200 or _is_400(answer) for answer in answers)
    return Finding(fine, ", ".join("passes" if one.status == 200 else _refusal(one) for one in answers))


async def large_body(stage: Stage) -> Finding:
    stage.play(good)
    text = f"{MARK} " + "x" * _BODY_BYTES
    answer = await stage.ask({**body_of(), "messages": [{"role": "user", "content": text}]}, timeout_s=30)
    call = stage.calls[0] if stage.calls else None
    arrived = call is not None and len(call.body) >= _BODY_BYTES
    return Finding(answer.status == 200 and arrived, f"{answer.status}, {answer.ms:.0f} ms")


async def body_over_limit(stage: Stage) -> Finding:
    """A peer whose limit is higher may serve it."""
    stage.play(good)
    text = f"{MARK} " + "x" * _OVER_BYTES
    answer = await stage.ask({**body_of(), "messages": [{"role": "user", "content": text}]}, timeout_s=30)
    told = answer.status == 413 and answer.error is not None
    return Finding(
        told or answer.status == 200, "served" if answer.status == 200 else f"{_refusal(answer)}, {answer.end}"
    )


async def announced_enormous(stage: Stage) -> Finding:
    async with Connection(stage.port) as connection:
        await connection.send(stage.bytes_of(b"", headers={"Content-Length": "99999999999"}) + b'{"model"')
        answer = stage.note(await connection.answer(5))
    fine = answer.status == 413 and answer.error is not None
    return Finding(fine, _refusal(answer) + (f", {answer.ms:.0f} ms" if answer.status else " for 5 s"))


# -- attacks ---------------------------------------------------------------------------------------------------------


async def endless_header(stage: Stage) -> Finding:
    async with Connection(stage.port) as connection:
        await connection.send(f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nX-Endless: ".encode())
        sent = 0
        while sent < 16_000_000 and await connection.send(b"a" * 65536):
            sent += 65536
            if (answer := await connection.answer(0.01)).end != "silent":
                break
        else:
            answer = await connection.answer(2)
    stage.note(answer)
    stopped = answer.status in (400, 431) or (answer.status == 0 and sent < 4_000_000)
    return Finding(stopped, f"{answer.status or answer.end} after {sent / 1e6:.1f} MB")


async def slow_loris(stage: Stage) -> Finding:
    stage.play(good)
    lorises = [Connection(stage.port) for _ in range(_LORISES)]
    await asyncio.gather(*[loris.__aenter__() for loris in lorises])
    try:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n".encode()
        await asyncio.gather(*[loris.send(head) for loris in lorises])
        answers = [await stage.ask(body_of()) for _ in range(5)]
    finally:
        for loris in lorises:
            loris.leave()
    slowest_ms = max(answer.ms for answer in answers)
    fine = all(answer.status == 200 for answer in answers) and slowest_ms < _QUICK_MS
    return Finding(
        fine, f"others: {slowest_ms:.0f} ms" if fine else f"others: {answers[-1].status}, {slowest_ms:.0f} ms"
    )


async def garbage(stage: Stage) -> Finding:
    sent = (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50, b"GET\r\n\r\n", b"\x00" * 2000 + b"\r\n\r\n")
    answers = []
    for data in sent:
        async with Connection(stage.port) as connection:
            await connection.send(data)
            answers.append(stage.note(await connection.answer(3)))
    fine = all(answer.status in (400, 431) or answer.end == CUT or not answer.status for answer in answers)
    ended = all(answer.end in (WHOLE, CUT, REFUSED) for answer in answers)
    return Finding(fine and ended, ", ".join(dict.fromkeys(str(one.status or one.end) for one in answers)))


async def two_lengths(stage: Stage) -> Finding:
    """Content-Length and Transfer-Encoding at once: what one reader takes for a body, the next takes for a request."""
    stage.play(good)
    body = json.dumps(body_of()).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with Connection(stage.port) as connection:
        head = stage.bytes_of(b"", headers={"Content-Length": "4", "Transfer-Encoding": "chunked"})
        await connection.send(head + chunked + stage.bytes_of(b"", path="/health", method="GET"))
        answer = stage.note(await connection.answer(5))
        second = stage.note(await connection.answer(0.5))
    refused = answer.status == 400 or not answer.status
    # RFC 9112, 6.1: may be served by the chunks alone, but then the connection has to be closed.
    return Finding(
        refused or not second.status, f"{answer.status or answer.end}{', goes on after it' if second.status else ''}"
    )


CASES = (
    Case(
        "leaves_mid_stream",
        "client leaves mid-stream",
        "engine aborted within 1 s",
        leaves_mid_stream,
        close_enough=_ABORT_CLOSE_MS,
    ),
    Case(
        "leaves_before_first_token",
        "client leaves before the first token",
        "the same",
        leaves_before_first_token,
        close_enough=_ABORT_CLOSE_MS,
    ),
    Case(
        "leaves_unary",
        "client leaves while a whole answer is made",
        "the same",
        leaves_unary,
        close_enough=_ABORT_CLOSE_MS,
    ),
    Case("pipelined", "two requests sent ahead on one connection", "both answered, in order", pipelined),
    Case("keep_alive", "five requests on one connection", "all answered", keep_alive),
    Case("head_and_options", "HEAD and OPTIONS", "at once, with an honest status", head_and_options),
    Case("gzip_body", "body compressed with gzip", "understood", gzip_body),
    Case("expects_100", "`Expect: 100-continue`", "200", expects_100),
    Case("slash_at_the_end", "a slash behind the path", "200", slash_at_the_end),
    Case("unknown_path", "a path that is not there", "404 with an error object", unknown_path),
    Case("wrong_method", "GET instead of POST", "405 with an error object", wrong_method),
    Case("malformed_json", "malformed JSON", "400 with an error object", malformed_json),
    Case("no_object", "JSON that is no object", "the same", no_object),
    Case("wrong_types", "`model` or `stream` of a wrong type", "the same", wrong_types),
    Case("invalid_utf8", "invalid UTF-8", "the same", invalid_utf8),
    Case("raw_nul", "NUL bytes", "the same", raw_nul),
    Case("escaped_nul", "an escaped NUL in a text", "passes, or 400 with an error object", escaped_nul),
    Case("unknown_model", "unknown model", "404 `model_not_found`", unknown_model),
    Case("deep_nesting", "JSON nested 10⁶ deep", "400 with an error object within 2 s, and all goes on", deep_nesting),
    Case(
        "huge_numbers",
        "1e400, a number of 10⁵ digits, 1e-999999999",
        "they pass, or 400 with an error object",
        huge_numbers,
    ),
    Case("large_body", "a body of 20 MB", "200", large_body),
    Case("body_over_limit", "a body over 32 MiB", "413 with an error object, or served", body_over_limit),
    Case(
        "announced_enormous",
        "a body of 100 GB is announced",
        "413 with an error object before it is sent",
        announced_enormous,
    ),
    Case("endless_header", "a header that does not end", "431, 400 or closed before 4 MB", endless_header),
    Case("slow_loris", f"{_LORISES} connections whose head never ends", "others are served within 2 s", slow_loris),
    Case("garbage", "bytes that are no HTTP", "400, or closed", garbage),
    Case("two_lengths", "Content-Length and Transfer-Encoding at once", "400, or served and then closed", two_lengths),
)
