"""A client that asks unary requests steadily, whatever becomes of them, and looks at the list of models beside.

A script of its own, so that it runs anywhere, in another network namespace too: `python steady_client.py URL KEY MODEL
PER_SECOND`. It prints a JSON line for each answer and each look; SIGTERM ends the asking, and it waits for the answers
that are due. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

ANSWER_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.1


@dataclass
class Told:
    """What a client has told so far, in the file its output goes to."""

    file: Path
    answers: list[dict[str, Any]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0

    def read(self) -> Told:
        """The same, with what has come since."""
        new = self.file.read_bytes()[self._read_bytes :]
        new = new[: new.rfind(b"\n") + 1]  # Whole lines only.
        self._read_bytes += len(new)
        for line in new.splitlines():
            told = json.loads(line)
            (self.answers if told["kind"] == "answer" else self.looks).append(told)
        return self

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [one for one in self.answers if one["status"] != 200]


def sessions_in(look: dict[str, Any], model: str) -> dict[str, int]:
    """How many sessions of `model` were in each state then; those that left are none."""
    found: dict[str, int] = look["models"].get(model, {}).get("sessions", {})
    return {state: count for state, count in found.items() if count and state != "left"}


def tell(kind: str, **facts: Any) -> None:
    print(json.dumps({"kind": kind} | facts), flush=True)


async def ask(client: httpx2.AsyncClient, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me of caravans."}], "max_tokens": 4}
    began_s = time.monotonic()
    facts: dict[str, Any] = {"status": 0}
    try:
        answer = await client.post("/v1/chat/completions", json=body)
        facts = {
            "status": answer.status_code,
            "session": answer.headers.get("x-serai-session", ""),
            "retry_after": answer.headers.get("retry-after"),
            "tokens": answer.json().get("usage", {}).get("completion_tokens"),
            "text": "" if answer.status_code == 200 else answer.text,
        }
    except (httpx2.HTTPError, ValueError) as error:
        facts["text"] = repr(error)
    tell("answer", began_s=began_s, took_s=time.monotonic() - began_s, **facts)


async def look(client: httpx2.AsyncClient) -> None:
    while True:
        began_s = time.monotonic()
        try:
            answer = await client.get("/v1/models?all=true")
            models = {entry["id"]: entry for entry in answer.json()["data"]}
            tell("look", at_s=began_s, took_s=time.monotonic() - began_s, status=answer.status_code, models=models)
        except (httpx2.HTTPError, ValueError) as error:
            tell("look", at_s=began_s, took_s=time.monotonic() - began_s, status=0, models={}, text=repr(error))
        await asyncio.sleep(LOOK_EVERY_S)


async def main(url: str, key: str, model: str, per_second: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=1000)
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_TIMEOUT_S, limits=limits) as client:
        looking = asyncio.ensure_future(look(client))
        asked: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            task = asyncio.ensure_future(ask(client, model))
            asked.add(task)
            task.add_done_callback(asked.discard)
            try:
                await asyncio.wait_for(stop.wait(), 1 / per_second)
            except TimeoutError:
                pass
        await asyncio.gather(*asked)
        looking.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
