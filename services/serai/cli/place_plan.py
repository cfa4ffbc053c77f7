"""Shows the placer's last plan: each model, what changes, and what does not and why. With --anew it makes one first."""

from __future__ import annotations

import argparse

import orjson

from serai.cli.place_reader import ask_placer, plan_text
from serai.cli.registry_reader import add_reader_arguments
from serai.contracts.placement import PlacementRequest
from serai.contracts.subjects import PLACEMENT_EXPLAIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exit_codes = (
        "Exit codes: 0 done, 1 NATS or the placer does not answer, 2 wrong usage, "
        "3 the placer has a problem, which it tells."
    )
    add_reader_arguments(parser, exit_codes)
    parser.add_argument("--anew", action="store_true", help="make a new plan first; it may take seconds")


def run(arguments: argparse.Namespace) -> int:
    request = PlacementRequest(anew=arguments.anew)
    word, code = ask_placer("place plan", arguments, PLACEMENT_EXPLAIN, request, slow=arguments.anew)
    if word is not None:
        print(orjson.dumps(word, option=orjson.OPT_INDENT_2).decode() if arguments.json else plan_text(word))
    return code
