"""Sleep instead of the end: an engine that can frees its GPUs and is back within seconds, and its session stays.

It drains first, as a session that ends does; then its record says that it is asleep, and nobody sends it anything.
Whoever looks after the model asks for both (`sleep.<session>`); of two wishes the later one counts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import orjson
import structlog
from prometheus_client import Gauge

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.drain import SleepAnswer, SleepRequest
from serai.contracts.session_record import TEXT_CHARACTERS_MAX, Draining, SessionMetadata
from serai.contracts.subjects import SLEEP
from serai.runtime.bus import Bus, BusDisconnected, Message, Subscription
from serai.runtime.http1 import HttpFailure, HttpPool, fetch
from serai.worker_agent.drain import WITHDRAWAL_S
from serai.worker_agent.engine.base import NotServing, SleepCalls

log = structlog.get_logger()

CALL_TIMEOUT_S = 120.0
"""Weights of hundreds of GB go to main memory, and come back."""
LOOK_EVERY_S = 0.1
WITHIN_S_MAX = 3600.0

ASLEEP = Gauge("serai_agent_engine_asleep", "1 while the engine sleeps")


class CannotSleep(Exception):
    """The engine did not do what it was asked for; the text says how it answered."""


@dataclass(frozen=True, slots=True)
class EngineSleep:
    """One engine's sleep, over HTTP."""

    pool: HttpPool
    headers: dict[str, str]
    calls: SleepCalls

    async def fall(self) -> None:
        """Returns when it sleeps. Raises CannotSleep."""
        await self._post(self.calls.sleep)
        await self._until(True)

    async def wake(self) -> None:
        """Returns when it is awake. Raises CannotSleep."""
        await self._post(self.calls.wake)
        await self._until(False)

    async def _post(self, path: str) -> None:
        try:
            answer = await fetch(
                self.pool,
                "POST",
                path,
                body=b"{}",
                headers={"content-type": "application/json"} | self.headers,
                timeout_s=CALL_TIMEOUT_S,
            )
        except (HttpFailure, TimeoutError) as error:
            raise CannotSleep(f"{path}: {error or 'no answer'}") from error
        if answer.status != 200:
            raise CannotSleep(f"{path} was answered {answer.status}")

    async def _until(self, asleep: bool) -> None:
        """What the engine says of itself, where it does."""
        give_up_at_s = time.monotonic() + CALL_TIMEOUT_S
        while self.calls.asks and await self._says() is not asleep:
            if time.monotonic() > give_up_at_s:
                raise CannotSleep(f"{self.calls.asks} has not changed for {CALL_TIMEOUT_S:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _says(self) -> bool:
        try:
            answer = await fetch(self.pool, "GET", self.calls.asks, headers=self.headers)
            return bool(orjson.loads(answer.body)["is_sleeping"])
        except (HttpFailure, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CannotSleep(f"{self.calls.asks}: {error!r}") from error


class SleepingDesk(Protocol):
    """Of the desk, what sleep needs."""

    @property
    def in_flight(self) -> int: ...

    def refuse_new(self) -> None: ...

    def take_again(self) -> None: ...

    def hand_over_all(self) -> None: ...


class Sleeping:
    """One session's. `start`, then let `running` run."""

    def __init__(
        self,
        bus: Bus,
        session: str,
        desk: SleepingDesk,
        engine: EngineSleep | None,
        canary: Callable[[], Awaitable[None]],
        metadata: Callable[[], SessionMetadata],
        change: Callable[[SessionMetadata], None],
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        """`engine`: None when it cannot sleep. `canary`: whether it serves; raises NotServing, HttpFailure or
        TimeoutError. `change` puts it into the session's record. `ends`: whether the session has been told to end,
        which no wish outweighs."""
        self._bus = bus
        self._session = session
        self._desk = desk
        self._engine = engine
        self._canary = canary
        self._metadata = metadata
        self._change = change
        self._ends = ends
        self._wanted = False
        self._within_s = 0.0
        self._why = ""
        self._news = asyncio.Event()
        self.asleep = False

    async def start(self) -> Subscription:
        """Listens on the session's subject."""
        return await self._bus.subscribe(SLEEP.of(self._session), self.on_sleep)

    def on_sleep(self, message: Message) -> None:
        """What is asked for is begun; the session's record says when it is done."""
        try:
            request = decode(SleepRequest, message.data)
            why = self._why_not(request)
        except MalformedMessage as error:
            why = str(error)
        else:
            if not why and request.asleep is not self._wanted:
                log.info("agent.told_to_sleep" if request.asleep else "agent.told_to_wake", why=request.reason)
                self._wanted, self._why = request.asleep, request.reason
                self._within_s = min(request.within_s, WITHIN_S_MAX)
                self._news.set()
        if message.reply:
            try:
                self._bus.publish(message.reply, encode(SleepAnswer(self._session, not why, why)))
            except BusDisconnected:
                pass  # Whoever asked sees our record.

    def _why_not(self, request: SleepRequest) -> str:
        """Empty: it can be done."""
        if self._engine is None:
            return "its engine cannot sleep, or was not started so that it can"
        if not 0 <= request.within_s < math.inf:
            return f"within_s {request.within_s:g}: must be a number of seconds, not below 0"
        if self._ends():
            return "its session ends"
        draining = self._metadata().draining
        if draining is not None and not self._wanted:
            return f"it is draining: {draining.reason}"
        return ""

    async def running(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._engine is not None and self._wanted is not self.asleep:
                await (self._fall(self._engine) if self._wanted else self._wake(self._engine))

    # -- inside --------------------------------------------------------------------------------------------------

    async def _fall(self, engine: EngineSleep) -> None:
        if self._ends():
            self._wanted = False
            return
        self._say(draining=Draining(self._why[:TEXT_CHARACTERS_MAX], self._within_s))
        await asyncio.sleep(WITHDRAWAL_S)
        self._desk.refuse_new()
        await self._until_empty()
        if self._ends():  # What is left may have longer than sleep would give it.
            self._wanted = False
            return
        if not self._wanted:  # Wanted again before it slept.
            self._serves()
            return
        self._desk.hand_over_all()
        try:
            await engine.fall()
        except CannotSleep as error:
            log.error("engine.sleepless", error=str(error), effect="it serves on")
            self._wanted = False
            self._serves()
            return
        self.asleep = True
        ASLEEP.set(1)
        self._say(asleep=True)
        log.info("agent.asleep", session=self._session)

    async def _until_empty(self) -> None:
        """Or until time is up, or it is wanted again."""
        give_up_at_s = time.monotonic() + self._within_s
        while True:
            left_s = give_up_at_s - time.monotonic()
            if not self._desk.in_flight or left_s <= 0 or not self._wanted:
                return
            await asyncio.sleep(min(LOOK_EVERY_S, left_s))

    async def _wake(self, engine: EngineSleep) -> None:
        began_s = time.monotonic()
        while True:
            try:
                await engine.wake()
                await self._canary()
                break
            except (CannotSleep, NotServing, HttpFailure, TimeoutError) as error:
                if time.monotonic() - began_s > CALL_TIMEOUT_S:
                    log.error("engine.not_awake", error=str(error), effect="tried again")
                    began_s = time.monotonic()
                await asyncio.sleep(LOOK_EVERY_S)
        self.asleep = False
        ASLEEP.set(0)
        self._serves()
        log.info("agent.awake", session=self._session, took_s=round(time.monotonic() - began_s, 1))

    def _serves(self) -> None:
        if self._ends():
            return  # It would be sent what it can only hand over.
        self._desk.take_again()
        self._say()

    def _say(self, *, draining: Draining | None = None, asleep: bool = False) -> None:
        self._change(replace(self._metadata(), draining=draining, asleep=asleep))
