"""What people ask the placer, by `serai place …`: its last plan, a new one, and the yes to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog

from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.placement import ApplyRequest, PlacementRequest, PlacementWord
from serai.contracts.subjects import PLACEMENT_APPLY, PLACEMENT_EXPLAIN
from serai.runtime.bus import Bus, BusError, Message, Subscription

log = structlog.get_logger()


class Asked(Protocol):
    """The placer, as those who ask see it."""

    def word(self) -> PlacementWord:
        """How things stand."""
        ...

    def known_models(self) -> list[str]:
        """Those of the placement file."""
        ...

    def apply(self, request: ApplyRequest) -> str:
        """Begins to carry out the plan; why not, or nothing."""
        ...

    def plans_anew(self) -> bool:
        """Whether a new plan will be made soon, and `Answers.planned` be called."""
        ...

    def speaks(self) -> bool:
        """Whether this placer is the one to answer, when there are several."""
        ...


class Answers:
    """Of one placer."""

    def __init__(self, bus: Bus, site: str, placer: Asked, news: Callable[[], None]) -> None:
        self._bus = bus
        self._site = site
        self._placer = placer
        self._news = news
        self._waiting: list[Message] = []

    async def start(self) -> list[Subscription]:
        """Listens from now on."""
        return [
            await self._bus.subscribe(PLACEMENT_EXPLAIN.of_site(self._site), self.on_explain),
            await self._bus.subscribe(PLACEMENT_APPLY.of_site(self._site), self.on_apply),
        ]

    @property
    def waited_for(self) -> bool:
        """Somebody waits for a new plan."""
        return bool(self._waiting)

    def on_explain(self, message: Message) -> None:
        """The last plan, or a new one."""
        try:
            request = decode(PlacementRequest, message.data)
        except MalformedMessage as error:
            self._answer(message, replace(self._placer.word(), problem=str(error)))
            return
        if request.anew and self._placer.plans_anew():
            self._waiting.append(message)
            self._news()
        else:
            self._answer(message, self._word_on(request))

    def planned(self) -> None:
        """A new plan was made, or could not be."""
        asked, self._waiting = self._waiting, []
        for message in asked:
            self._answer(message, self._word_on(decode(PlacementRequest, message.data)))

    def _word_on(self, request: PlacementRequest) -> PlacementWord:
        word, known = self._placer.word(), self._placer.known_models()
        if not request.model:
            return word
        models = [one for one in word.models if one.model == request.model]
        if request.model in known:
            return replace(word, models=models, problem="")
        there = ", ".join(known)
        problem = f"there is no model {request.model!r} in the placement file (there is {there})"
        return replace(word, models=models, problem=problem)

    def on_apply(self, message: Message) -> None:
        """A person says yes to a plan."""
        try:
            problem = self._placer.apply(decode(ApplyRequest, message.data))
        except MalformedMessage as error:
            problem = str(error)
        self._answer(message, replace(self._placer.word(), problem=problem))

    def _answer(self, message: Message, word: PlacementWord) -> None:
        if not message.reply or not self._placer.speaks():
            return
        try:
            self._bus.publish(message.reply, encode(word))
        except BusError as error:
            log.warning("placer.not_answered", error=str(error))
