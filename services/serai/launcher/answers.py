"""What the launcher is asked: by people, by the placer, by macro-schedulers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog

from serai.contracts.admission import ScaleWish
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.launcher import ExplainRequest, LauncherWord, ScaleRequest, WakeRequest
from serai.contracts.subjects import LAUNCHER_EXPLAIN, LAUNCHER_SCALE, LAUNCHER_WAKE, MACRO_WISH
from serai.launcher.job_book import JobBook
from serai.launcher.scaled import Scaled
from serai.runtime.bus import Bus, BusError, Message, Subscription

log = structlog.get_logger()


class Asked(Protocol):
    """The launcher, as those who ask see it."""

    def word(self, asked: str) -> LauncherWord:
        """The last plan, of the slots asked for."""
        ...

    def acts(self) -> bool:
        """Whether it holds the site's lease."""
        ...

    def speaks(self) -> bool:
        """Whether this launcher is the one to answer, when there are several."""
        ...


class Answers:
    """Of one launcher. `news` is called when it should look at once."""

    def __init__(
        self,
        bus: Bus,
        site: str,
        launcher: Asked,
        scaled: Scaled,
        book: JobBook,
        news: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._site = site
        self._launcher = launcher
        self._scaled = scaled
        self._book = book
        self._news = news

    async def start(self) -> list[Subscription]:
        """Listens from now on."""
        handlers = (
            (LAUNCHER_EXPLAIN.of_site(self._site), self.on_explain),
            (LAUNCHER_WAKE.of_site(self._site), self.on_wake),
            (LAUNCHER_SCALE.of_site(self._site), self.on_scale),
            (MACRO_WISH.of_site(self._site), self.on_wish),
        )
        return [await self._bus.subscribe(subject, handler) for subject, handler in handlers]

    def on_explain(self, message: Message) -> None:
        """A person wants to know."""
        try:
            request = decode(ExplainRequest, message.data)
        except MalformedMessage as error:
            self._refuse(message, str(error))
            return
        self._answer(message, self._launcher.word(request.slot))

    def on_wake(self, message: Message) -> None:
        """A person wants a deployment to run that was let go, or has failed."""
        try:
            request = decode(WakeRequest, message.data)
        except MalformedMessage as error:
            self._refuse(message, str(error))
            return
        if request.deployment not in self._scaled.now:
            self._refuse(message, f"there is no deployment {request.deployment!r} (there is {self._scaled.names})")
        elif self._launcher.acts():
            self._book.wake(request.deployment, time.monotonic())
            log.info("launcher.woken", deployment=request.deployment)
            self._news()
            self._answer(message, self._launcher.word(request.deployment))

    def on_scale(self, message: Message) -> None:
        """The placer's wish for more or fewer."""
        try:
            request = decode(ScaleRequest, message.data)
        except MalformedMessage as error:
            self._refuse(message, str(error))
            return
        if problem := self._scaled.why_not(request):
            self._refuse(message, problem)
        elif self._launcher.acts():
            self._scale(request.deployment, request.count, request.why)
            self._news()
            self._answer(message, self._launcher.word(""))

    def on_wish(self, message: Message) -> None:
        """How many instances a model's macro-scheduler wants: its deployment gets as many slots, as far as it may be
        scaled. Who runs beside it, of other deployments, counts."""
        try:
            wish = decode(ScaleWish, message.data)
        except MalformedMessage as error:
            log.warning("launcher.bad_wish", error=str(error), effect="ignored")
            return
        if wish.owner != "launcher" or not self._launcher.acts():
            return
        scaled = self._scaled.wished(wish.model, wish.instances)
        if scaled is None:
            log.debug("launcher.wish_ignored", model=wish.model, why="no deployment of it may be scaled (`scale_to`)")
        elif self._scale(*scaled, wish.why):
            self._news()

    def _scale(self, name: str, count: int, why: str) -> bool:
        changed = self._scaled.to(name, count)
        if changed:
            log.info("launcher.scaled", deployment=name, count=count, why=why)
        return changed

    def _refuse(self, message: Message, problem: str) -> None:
        self._answer(message, replace(self._launcher.word(""), slots=[], problem=problem))

    def _answer(self, message: Message, word: LauncherWord) -> None:
        if not message.reply or not self._launcher.speaks():
            return
        try:
            self._bus.publish(message.reply, encode(word))
        except BusError as error:
            log.warning("launcher.not_answered", error=str(error))
