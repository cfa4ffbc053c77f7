"""What the `serai registry …` tools share: a short-lived reader with a copy of the registry of its own.

Exit codes of all of them: 0 done · 1 NATS or the registry does not answer · 2 wrong usage · 3 no such session.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from serai.contracts.session_record import SessionRecord
from serai.runtime.bus import Bus, BusError
from serai.runtime.connection_settings import NatsSettings
from serai.runtime.nats_bus import NatsBus
from serai.runtime.registry_copy import RegistryCopy
from serai.runtime.session_state import SessionState, state_of
from serai.runtime.settings import add_settings, read_settings, setting
from serai.runtime.telemetry import set_up_logs

DONE, NO_ANSWER, WRONG_USAGE, NOT_FOUND = 0, 1, 2, 3

LISTEN_S = 1.25
"""Long enough to hear a status of every session that says one a second."""
EXIT_CODES = "Exit codes: 0 done, 1 NATS or the registry does not answer, 2 wrong usage, 3 no such session."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings(NatsSettings):
    site: str = setting("local", "the site that is asked", flag="--registry", env="SERAI_SITE")


class Failed(Exception):
    """The tool cannot do it. The text is one line."""

    def __init__(self, message: str, exit_code: int = NO_ANSWER) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_reader_arguments(parser: argparse.ArgumentParser, exit_codes: str = EXIT_CODES) -> None:
    """How to reach NATS, and `--json`."""
    add_settings(parser, ReaderSettings)
    parser.add_argument("--json", action="store_true", help="JSON instead of text for people")
    parser.epilog = exit_codes


@dataclass(frozen=True, slots=True)
class Reader:
    """A connected tool with a copy that has been filled once."""

    bus: Bus
    copy: RegistryCopy
    settings: NatsSettings

    async def listen(self) -> None:
        """Until each session that is alive has said how it is, or for `LISTEN_S`."""
        replica = self.copy.replica
        give_up_at_s = time.monotonic() + LISTEN_S
        while (now := time.monotonic()) < give_up_at_s:
            alive = [session for session in replica.sessions if not replica.suspected(session, now)]
            if all(replica.status(session) is not None for session in alive):
                return
            await asyncio.sleep(0.02)

    def found(self, text: str) -> SessionRecord:
        """The session whose id is, or alone begins with, `text`. Raises Failed."""
        replica = self.copy.replica
        if record := replica.get(text):
            return record
        fitting = [record for record in replica.records() if record.session.startswith(text)] if text else []
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise Failed(
                f"no session {text!r} is known at site {self.settings.site!r}; `serai registry ls --all`", NOT_FOUND
            )
        some = ", ".join(record.session for record in fitting[:5]) + (", …" if len(fitting) > 5 else "")
        raise Failed(f"{text!r} is the beginning of {len(fitting)} sessions: {some}", NOT_FOUND)


@asynccontextmanager
async def reading(settings: NatsSettings) -> AsyncIterator[Reader]:
    """Connects and fills a copy. Raises Failed or BusError, with one line that says what to do."""
    bus = await NatsBus.connect(settings.nats, "tools")
    try:
        copy = RegistryCopy(bus, settings.site)
        await copy.start()
        await bus.barrier()
        await copy.snapshot()
        if not copy.synced:
            raise Failed(
                f"the registry of site {settings.site!r} does not answer ({copy.problem}); "
                "is it running, and is --registry right?"
            )
        yield Reader(bus, copy, settings)
    finally:
        await bus.aclose()


def run_reader(name: str, arguments: argparse.Namespace, main: Callable[[Reader], Coroutine[Any, Any, int]]) -> int:
    """Runs `main` with a reader; the exit code. What goes wrong is one line on standard error."""

    async def read() -> int:
        async with reading(settings) as reader:
            return await main(reader)

    settings = read_settings(ReaderSettings, arguments)
    set_up_logs("tools", "error")
    try:
        return asyncio.run(read())
    except Failed as error:
        sys.stderr.write(f"serai {name}: {error}\n")
        return error.exit_code
    except BusError as error:
        sys.stderr.write(f"serai {name}: {error}\n")
        return NO_ANSWER
    except BrokenPipeError:  # `… | head`
        sys.stderr.close()
        return DONE


@dataclass(frozen=True, slots=True)
class SeenSession:
    """One session as this reader sees it, for a line of a table or of JSON."""

    session: str
    model: str
    state: SessionState
    lifecycle: str
    version: int
    site: str
    provider: str
    allocation: str
    host: str
    age_s: float | None
    """Since it was last heard by any path; None = it has not been."""
    in_flight: int | None
    queued: int | None
    why_not_routed: str | None
    loading_phase: str
    loading_progress: float | None
    failure: str
    """Why its engine ended, when nobody wanted it to."""
    engine: str
    engine_version: str
    quantization: str
    dtype: str


def seen(copy: RegistryCopy, record: SessionRecord, now: float) -> SeenSession:
    """`record`'s session at `now`, by this reader's copy."""
    said, replica = record.metadata, copy.replica
    status = replica.status(record.session)
    age_s = replica.heard_ago_s(record.session, now)
    return SeenSession(
        record.session,
        said.model,
        state_of(replica, record.session, now),
        record.lifecycle.name,
        record.version,
        said.site,
        said.provider,
        said.allocation,
        said.host,
        None if age_s is None else round(age_s, 2),
        status.in_flight if status else None,
        status.queued if status else None,
        replica.why_not_routable(record.session, now),
        said.loading_phase,
        said.loading_progress,
        said.failure,
        said.engine,
        said.engine_version,
        said.quantization,
        said.dtype,
    )


def age_text(seconds: float | None) -> str:
    """A duration for people: `0.4 s`, `12 s`, `3 min`, `5 h`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def knowledge_text(copy: RegistryCopy, now: float) -> str:
    """How old what was printed is."""
    return f"the registry's last word: {age_text(copy.knowledge_age_s(now))} ago"
