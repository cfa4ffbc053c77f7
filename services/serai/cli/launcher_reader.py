"""What the `serai launcher …` tools share: one question, one answer."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TypeVar

from serai.cli.registry_reader import DONE, NO_ANSWER, NOT_FOUND, ReaderSettings
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.launcher import LauncherWord
from serai.contracts.subjects import Subject
from serai.runtime.bus import BusError, NoResponders
from serai.runtime.nats_bus import NatsBus
from serai.runtime.settings import read_settings
from serai.runtime.telemetry import set_up_logs

Question = TypeVar("Question")

TIMEOUT_S = 5.0


def ask_launcher(
    tool: str, arguments: argparse.Namespace, subject: Subject[Question], question: Question
) -> tuple[LauncherWord | None, int]:
    """The answer, when there is one, and the tool's exit code."""
    settings = read_settings(ReaderSettings, arguments)
    set_up_logs("tools", "error")

    async def asked() -> LauncherWord:
        bus = await NatsBus.connect(settings.nats, "tools")
        try:
            message = await bus.request(subject.of_site(settings.site), encode(question), TIMEOUT_S)
            return decode(LauncherWord, message.data)
        finally:
            await bus.aclose()

    try:
        word = asyncio.run(asked())
    except NoResponders:
        sys.stderr.write(f"serai {tool}: no launcher runs for site {settings.site!r}\n")
        return None, NO_ANSWER
    except (BusError, MalformedMessage) as error:
        sys.stderr.write(f"serai {tool}: {error}\n")
        return None, NO_ANSWER
    if word.problem:
        sys.stderr.write(f"serai {tool}: {word.problem}\n")
        return word, NOT_FOUND
    return word, DONE
