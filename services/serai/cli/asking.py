"""What tools that ask one service of a site share: a connection, a question, and what is said when nobody answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from serai.cli.registry_reader import DONE, NO_ANSWER, NOT_FOUND, ReaderSettings
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.subjects import Subject
from serai.runtime.bus import BusError, NoResponders
from serai.runtime.nats_bus import NatsBus
from serai.runtime.settings import read_settings
from serai.runtime.telemetry import set_up_logs

TIMEOUT_S = 5.0

Question = TypeVar("Question")


class Answered(Protocol):
    """A service's answer."""

    @property
    def problem(self) -> str:
        """Why the question could not be answered; empty = it was."""


Word = TypeVar("Word", bound=Answered)


def talk(
    tool: str, service: str, arguments: argparse.Namespace, main: Callable[[NatsBus, str], Coroutine[Any, Any, None]]
) -> int:
    """Runs `main` with a connection and the site's name; the tool's exit code. What goes wrong is one line on standard
    error."""
    settings = read_settings(ReaderSettings, arguments)
    set_up_logs("tools", "error")

    async def connected() -> None:
        bus = await NatsBus.connect(settings.nats, "tools")
        try:
            await main(bus, settings.site)
        finally:
            await bus.aclose()

    try:
        asyncio.run(connected())
    except NoResponders:
        sys.stderr.write(f"serai {tool}: no {service} runs for site {settings.site!r}\n")
        return NO_ANSWER
    except (BusError, MalformedMessage) as error:
        sys.stderr.write(f"serai {tool}: {error}\n")
        return NO_ANSWER
    return DONE


def ask(
    tool: str,
    service: str,
    arguments: argparse.Namespace,
    subject: Subject[Question],
    question: Question,
    answer: type[Word],
    timeout_s: float = TIMEOUT_S,
) -> tuple[Word | None, int]:
    """The answer, when there is one, and the tool's exit code."""
    words: list[Word] = []

    async def main(bus: NatsBus, site: str) -> None:
        message = await bus.request(subject.of_site(site), encode(question), timeout_s)
        words.append(decode(answer, message.data))

    code = talk(tool, service, arguments, main)
    word = words[0] if words else None
    if word is not None and word.problem:
        sys.stderr.write(f"serai {tool}: {word.problem}\n")
        return word, NOT_FOUND
    return word, code
