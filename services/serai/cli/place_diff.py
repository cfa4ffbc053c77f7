"""Shows what the placer's last plan would change of what runs now."""

from __future__ import annotations

import argparse

import orjson

from serai.cli.place_reader import ask_placer, diff_lines, header
from serai.cli.registry_reader import add_reader_arguments
from serai.contracts.placement import ActionKind, PlacementRequest
from serai.contracts.subjects import PLACEMENT_EXPLAIN

CHANGES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exit_codes = (
        "Exit codes: 0 nothing changes, 1 NATS or the placer does not answer, 2 wrong usage, "
        "3 the placer has a problem, 4 something changes."
    )
    add_reader_arguments(parser, exit_codes)
    parser.add_argument("--anew", action="store_true", help="make a new plan first; it may take seconds")


def run(arguments: argparse.Namespace) -> int:
    request = PlacementRequest(anew=arguments.anew)
    word, code = ask_placer("place diff", arguments, PLACEMENT_EXPLAIN, request, slow=arguments.anew)
    if word is None or word.problem:
        return code
    if arguments.json:
        print(orjson.dumps(word.plan, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join([header(word), *(diff_lines(word.plan) if word.plan else ["there is no plan yet"])]))
    open_steps = [one for one in (word.plan.actions if word.plan else []) if not one.done]
    return CHANGES if any(one.kind is not ActionKind.KEEP for one in open_steps) else code
