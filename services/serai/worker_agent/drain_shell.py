"""Carries out what `drain` decides: from the word that a session is to end until nothing of it is left to do.

Whoever learns that the end is near says so to a `Notice`: signals and the allocation's clock to the process's
(`Endings`), a message on its drain subject to the session's own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.drain import DrainAnswer, DrainRequest
from serai.contracts.session_record import TEXT_CHARACTERS_MAX, Draining
from serai.contracts.subjects import DRAIN
from serai.runtime.bus import Bus, BusDisconnected, Message, Subscription
from serai.runtime.metrics import Counts
from serai.worker_agent.allocation import AllocationEnd
from serai.worker_agent.desk import Desk
from serai.worker_agent.drain import (
    LEAVING_S,
    Announce,
    Drain,
    Effect,
    Ending,
    HandOver,
    Leave,
    Look,
    Reason,
    Refuse,
    Told,
)
from serai.worker_agent.settings import AgentSettings

log = structlog.get_logger()

LOOK_EVERY_S = 0.05
CLOCK_EVERY_S = 1.0
CLOCK_MARGIN_S = 5.0
"""Batch systems count in whole seconds, and kill when it suits them."""
WITHIN_S_MAX = 30 * 86_400.0

DRAINS = Counts("serai_agent_drains", "Sessions that were told to end, by reason", ["reason"])
HANDED_OVER = Counts("serai_agent_handed_over", "Requests that were ended here so that others go on with them", [])


class Notice:
    """That a session is to end. `given` is set with the first word; each word is kept for the session's drain."""

    def __init__(self) -> None:
        self.given = asyncio.Event()
        self.changed = asyncio.Event()
        """There is news, or a reason to look again."""
        self._words: list[tuple[Told, float]] = []
        self._followers: list[Notice] = []

    def give(self, ending: Ending, *, final: bool = False) -> None:
        """To this one and to those that follow it. `final`: see `Told`."""
        log.info("agent.told_to_end", reason=ending.reason, left_s=round(ending.left_s), why=ending.why)
        self._hear(Told(ending, final), time.monotonic())

    def follower(self) -> Notice:
        """One that hears all that this one does, and what is given to it alone. To be ended with `forget`."""
        follower = Notice()
        for told, at_s in self._words:
            follower._hear(told, at_s)
        self._followers.append(follower)
        return follower

    def forget(self, follower: Notice) -> None:
        """Its session is over."""
        self._followers.remove(follower)

    def words(self, after: int) -> list[tuple[Told, float]]:
        """Those after the first `after`, each with when it was given."""
        return self._words[after:]

    def _hear(self, told: Told, at_s: float) -> None:
        self._words.append((told, at_s))
        self.given.set()
        self.changed.set()
        for follower in self._followers:
            follower._hear(told, at_s)


async def drain(desk: Desk, notice: Notice, say: Callable[[Draining], None], engine_stop_s: float) -> None:
    """Until all requests have ended here, or their time is up. `say` puts it into the session's record."""
    plan = Drain(engine_stop_s)
    desk.on_empty = notice.changed.set
    heard = 0
    reason = Reason.STOPPING
    while not plan.is_over:
        notice.changed.clear()
        for told, at_s in notice.words(heard):
            heard += 1
            reason = told.ending.reason
            _obey(plan.handle(told, at_s), desk, say, told.ending.why)
        _obey(plan.handle(Look(desk.running()), time.monotonic()), desk, say)
        if not plan.is_over:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await notice.changed.wait()
            except TimeoutError:
                pass
    DRAINS.of(str(reason)).add()


def _obey(effects: list[Effect], desk: Desk, say: Callable[[Draining], None], why: str = "") -> None:
    for effect in effects:
        match effect:
            case Announce(reason, requests_s):
                say(Draining((why or str(reason))[:TEXT_CHARACTERS_MAX], round(requests_s, 1)))
                log.info("agent.draining", reason=reason, in_flight=desk.in_flight, at_most_s=round(requests_s, 1))
            case Refuse():
                desk.refuse_new()
            case HandOver(keys):
                HANDED_OVER.of().add(len(keys))
                log.info("agent.hands_over", requests=len(keys), others=desk.in_flight - len(keys))
                desk.hand_over(frozenset(keys))
            case Leave():
                pass
            case _:
                assert_never(effect)


async def answer_drain_requests(bus: Bus, session: str, notice: Notice, in_flight: Callable[[], int]) -> Subscription:
    """Listens on the session's drain subject; what is asked there is given to `notice`."""

    def on_drain(message: Message) -> None:
        why = ""
        try:
            request = decode(DrainRequest, message.data)
            if not 0 <= request.within_s < math.inf:
                why = f"within_s {request.within_s:g}: must be a number of seconds, not below 0"
            else:
                notice.give(Ending(Reason.ASKED, min(request.within_s, WITHIN_S_MAX), request.reason))
        except MalformedMessage as error:
            why = str(error)
        if message.reply:
            try:
                bus.publish(message.reply, encode(DrainAnswer(session, not why, in_flight(), why)))
            except BusDisconnected:
                pass  # Whoever asked will see that we drain.

    return await bus.subscribe(DRAIN.of(session), on_drain)


class Endings:
    """What ends the whole agent: signals, and the allocation's clock. All of it is given to `notice`."""

    def __init__(self, settings: AgentSettings, allocation: AllocationEnd | None) -> None:
        self.notice = Notice()
        self._settings = settings
        self._allocation = allocation

    async def watching(self, stop: asyncio.Event, warned: asyncio.Event) -> None:
        """Until it is cancelled. `stop`: SIGTERM or SIGINT has come; `warned`: SIGUSR1."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._when_stopped(stop))
            tasks.create_task(self._when_warned(warned))
            if self._allocation is not None:
                tasks.create_task(self._when_time_is_up(self._allocation))

    async def _when_stopped(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.notice.give(Ending(Reason.STOPPING, self._grace_s, requests_s=self._settings.drain_s))
        # It has begun; whose wish it was, and when the process will be killed, the batch system can tell.
        told = await self._allocation.ending() if self._allocation is not None else None
        if told is None:
            return
        if told.reason is Reason.ALLOCATION_END and told.left_s > self._wanted_s + CLOCK_MARGIN_S:
            told = Ending(Reason.STOPPING, self._wanted_s, told.why)  # By hand: there is no other reason.
        if told.reason is Reason.STOPPING:
            told = replace(told, requests_s=self._settings.drain_s)
        self.notice.give(told, final=True)

    async def _when_warned(self, warned: asyncio.Event) -> None:
        await warned.wait()
        why = "the batch system warns of the end"
        known_s = self._allocation.remaining_s() if self._allocation is not None else None
        self.notice.give(Ending(Reason.ALLOCATION_END, self._wanted_s if known_s is None else known_s, why))
        if self._allocation is not None and (told := await self._allocation.ending()) is not None:
            self.notice.give(told if told.reason is Reason.PREEMPTED else replace(told, why=why), final=True)

    async def _when_time_is_up(self, allocation: AllocationEnd) -> None:
        start_s: float | None = None
        while (remaining_s := allocation.remaining_s()) is None or start_s is None or remaining_s > start_s:
            if remaining_s is not None and start_s is None:
                # Of an allocation that is shorter than its drain, half of the time is for serving.
                start_s = min(self._wanted_s + CLOCK_MARGIN_S, remaining_s / 2)
            await asyncio.sleep(CLOCK_EVERY_S)
        left_s = max(0.0, remaining_s - min(CLOCK_MARGIN_S, remaining_s / 2))
        self.notice.give(Ending(Reason.ALLOCATION_END, left_s, "its allocation ends"))

    @property
    def _wanted_s(self) -> float:
        """From the word to the end, when nobody is in a hurry."""
        return self._settings.drain_s + self._settings.engine_stop_s + LEAVING_S

    @property
    def _grace_s(self) -> float:
        """From SIGTERM to SIGKILL, as far as is known here."""
        grace_s = self._settings.grace_s or (self._allocation.grace_s() if self._allocation is not None else None)
        return self._wanted_s if grace_s is None else min(grace_s, self._wanted_s)
