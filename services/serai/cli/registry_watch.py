"""Prints changes of the registry as they come, one a line, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import orjson

from serai.cli.registry_reader import (
    DONE,
    Failed,
    Reader,
    SeenSession,
    add_reader_arguments,
    run_reader,
    seen,
)
from serai.runtime.registry_copy import LOOK_EVERY_S, RegistryCopy

PAUSE_S = 0.05
"""Changes that come together are looked at together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser)
    parser.add_argument("--model", help="only sessions of this model")


def run(arguments: argparse.Namespace) -> int:
    async def main(reader: Reader) -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        watch = Watch(reader.copy, arguments.model)
        for _ in watch.changes(time.monotonic()):
            pass  # What is there already is no change.
        _say(f"watching {len(watch.seen)} sessions; Ctrl-C ends it")
        reader.bus.on_disconnect(lambda: _say("lost NATS; trying again"))
        reader.bus.on_reconnect(lambda: _say("NATS is back"))
        async with asyncio.TaskGroup() as tasks:
            following = [
                tasks.create_task(reader.copy.run()),
                tasks.create_task(_follow(watch, as_json=arguments.json)),
            ]
            closed = getattr(reader.bus, "closed", None) or loop.create_future()
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait({stopping, closed}, return_when=asyncio.FIRST_COMPLETED)
            for task in [*following, stopping]:
                task.cancel()
        if closed.done():
            raise Failed(str(closed.exception()))
        return DONE

    return run_reader("registry watch", arguments, main)


class Watch:
    """What was last printed of each session."""

    def __init__(self, copy: RegistryCopy, model: str | None = None) -> None:
        self._copy = copy
        self._model = model
        self.seen: dict[str, SeenSession] = {}
        self.wake = asyncio.Event()
        copy.on_change = self.wake.set

    def changes(self, now: float) -> Iterator[tuple[SeenSession | None, SeenSession]]:
        """What each session that is another than last time was, and is."""
        for record in self._copy.replica.records():
            if self._model is not None and record.metadata.model != self._model:
                continue
            new, old = seen(self._copy, record, now), self.seen.get(record.session)
            self.seen[record.session] = new
            if old is None or (new.state, new.version, new.model) != (old.state, old.version, old.model):
                yield old, new


async def _follow(watch: Watch, *, as_json: bool) -> None:
    while True:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await watch.wake.wait()
        except TimeoutError:
            pass
        await asyncio.sleep(PAUSE_S)
        watch.wake.clear()
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        for old, new in watch.changes(time.monotonic()):
            print(_json_line(at, old, new) if as_json else _line(at, old, new), flush=True)


def _json_line(at: str, old: SeenSession | None, new: SeenSession) -> str:
    return orjson.dumps({"at": at, "was": None if old is None else old.state, "now": new}).decode()


def _line(at: str, old: SeenSession | None, new: SeenSession) -> str:
    was = "new" if old is None else old.state
    step = f"{was} → {new.state}" if was != new.state else f"{new.state}, version {new.version}"
    why = f"  {new.why_not_routed}" if new.why_not_routed else ""
    return f"{at}  {new.session}  {new.model}  {step}{why}"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
