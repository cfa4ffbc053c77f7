"""Sends requests at their times to OpenAI-compatible addresses in turn, and notes when the tokens came.

Each has a connection of its own and a prompt that the emulated tokenizer counts as asked for. What is refused with 503
counts as refused; anything else that is not the whole answer ends the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from serai.bench.processes import BenchFailed
from serai.simulator.fast.run import NS
from serai.simulator.outcomes import Outcome, Outcomes
from serai.simulator.workloads.workload import Arrival

TOKEN = b'"text":" '
"""Each token of the emulated engine begins with a space, and its stream has no spaces after colons."""
_SESSION = b"x-serai-session: "


async def send_all(
    ports: Sequence[int], model: str, headers: Mapping[str, str], arrivals: Sequence[Arrival]
) -> tuple[Outcomes, float]:
    """What became of them, and the longest that one was sent after its time, in seconds: the client's own fault. The
    instance of each is Serai's session, or the one of `ports` where no Serai answers. Raises BenchFailed."""
    loop = asyncio.get_running_loop()
    messages = [_request(model, headers, arrival) for arrival in arrivals]
    begin_s = loop.time() + 0.5
    results: list[Outcome | None] = [None] * len(arrivals)
    sessions: dict[bytes, int] = {}
    late_s = 0.0
    try:
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                due_s = begin_s + arrival.at_ns / NS
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                late_s = max(late_s, loop.time() - due_s)
                group.create_task(_ask(ports, messages[number], arrival, begin_s, sessions, number, results))
    except ExceptionGroup as errors:
        raise BenchFailed(str(errors.exceptions[0])) from errors
    return Outcomes(result for result in results if result is not None), late_s


async def _ask(
    ports: Sequence[int],
    message: bytes,
    arrival: Arrival,
    begin_s: float,
    sessions: dict[bytes, int],
    number: int,
    results: list[Outcome | None],
) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", ports[number % len(ports)])
    writer.write(message)
    tokens, first_s, last_s, longest_s, tail = 0, 0.0, 0.0, 0.0, b""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 503"):
            results[number] = Outcome(arrival.at_ns, arrival.prompt_tokens, arrival.output_tokens, refused=True)
            return
        while data := await reader.read(65536):
            now_s = loop.time()
            seen = tail + data
            said = seen.count(TOKEN)
            tail = seen[1 - len(TOKEN) :]
            if said:
                if tokens:
                    longest_s = max(longest_s, now_s - last_s)
                else:
                    first_s = now_s
                tokens, last_s = tokens + said, now_s
    finally:
        writer.close()
    if tokens != arrival.output_tokens:
        raise BenchFailed(f"request {number}: {tokens} tokens came of {arrival.output_tokens}; {head[:200]!r}")
    session = head.partition(_SESSION)[2].partition(b"\r\n")[0]
    results[number] = Outcome(
        arrival.at_ns,
        arrival.prompt_tokens,
        arrival.output_tokens,
        sessions.setdefault(session, len(sessions)) if session else number % len(ports),
        round((first_s - begin_s) * NS),
        None,
        round((last_s - begin_s) * NS),
        itl_max_ns=round(longest_s * NS),
    )


def _request(model: str, headers: Mapping[str, str], arrival: Arrival) -> bytes:
    fields = {"model": model, "prompt": "abc " * arrival.prompt_tokens, "max_tokens": arrival.output_tokens}
    body = json.dumps(fields | {"stream": True}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *[f"{name}: {value}" for name, value in headers.items()],
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
