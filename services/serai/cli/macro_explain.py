"""Says what a macro-scheduler decided on a request, and why; without one, how the groups stand and how the windows of
their instances roll.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import orjson

from serai.cli.asking import talk
from serai.cli.registry_reader import add_reader_arguments
from serai.contracts.admission import MacroExplainRequest, MacroWord
from serai.contracts.codec import decode, encode
from serai.contracts.subjects import MACRO_EXPLAIN
from serai.runtime.nats_bus import NatsBus

TIMEOUT_S = 3.0
WATCH_EVERY_S = 0.25
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser, "Exit codes: 0 done, 1 NATS or the macro-scheduler does not answer, 2 wrong usage.")
    parser.add_argument("request", metavar="REQUEST", nargs="?", default="", help="its `x-request-id`")
    parser.add_argument("--model", default="", help="only this model's group")
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    question = encode(MacroExplainRequest(arguments.request, arguments.model))

    async def main(bus: NatsBus, site: str) -> None:
        while True:
            message = await bus.request(MACRO_EXPLAIN.of_site(site), question, TIMEOUT_S)
            lines = decode(MacroWord, message.data).lines
            if arguments.json:
                print(orjson.dumps({"lines": lines}).decode(), flush=True)
            else:
                _show(lines, again=arguments.watch)
            if not arguments.watch:
                return
            await asyncio.sleep(WATCH_EVERY_S)

    return talk("macro explain", "macro-scheduler", arguments, main)


def _show(lines: list[str], *, again: bool) -> None:
    if again and sys.stdout.isatty():
        print(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW, end="", flush=True)
    else:
        print("\n".join(lines), flush=True)
