"""Says what a macro-scheduler decided on a request, and why; without one, how the groups stand and how the windows of
their instances roll.

Exit codes: 0 done · 1 NATS or the macro-scheduler does not answer · 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import orjson

from serai.cli.registry_reader import DONE, NO_ANSWER, ReaderSettings, add_reader_arguments
from serai.contracts.admission import MacroExplainRequest, MacroWord
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.subjects import MACRO_EXPLAIN
from serai.runtime.bus import BusError, NoResponders
from serai.runtime.nats_bus import NatsBus
from serai.runtime.settings import read_settings
from serai.runtime.telemetry import set_up_logs

TIMEOUT_S = 3.0
WATCH_EVERY_S = 0.25
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser)
    parser.add_argument("request", metavar="REQUEST", nargs="?", default="", help="its `x-request-id`")
    parser.add_argument("--model", default="", help="only this model's group")
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(ReaderSettings, arguments)
    set_up_logs("tools", "error")
    question = MacroExplainRequest(arguments.request, arguments.model)

    async def ask(bus: NatsBus) -> list[str]:
        message = await bus.request(MACRO_EXPLAIN.of_site(settings.site), encode(question), TIMEOUT_S)
        return decode(MacroWord, message.data).lines

    async def talk() -> None:
        bus = await NatsBus.connect(settings.nats, "tools")
        try:
            while True:
                lines = await ask(bus)
                if arguments.json:
                    print(orjson.dumps({"lines": lines}).decode(), flush=True)
                else:
                    _show(lines, again=arguments.watch)
                if not arguments.watch:
                    return
                await asyncio.sleep(WATCH_EVERY_S)
        finally:
            await bus.aclose()

    try:
        asyncio.run(talk())
    except NoResponders:
        sys.stderr.write(f"serai macro explain: no macro-scheduler runs for site {settings.site!r}\n")
        return NO_ANSWER
    except (BusError, MalformedMessage) as error:
        sys.stderr.write(f"serai macro explain: {error}\n")
        return NO_ANSWER
    return DONE


def _show(lines: list[str], *, again: bool) -> None:
    if again and sys.stdout.isatty():
        print(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW, end="", flush=True)
    else:
        print("\n".join(lines), flush=True)
