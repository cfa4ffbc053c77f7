"""Says yes to the placer's proposed plan: it is carried out then, step by step. Without a number it is the last plan,
and that is shown first.
"""

from __future__ import annotations

import argparse
import sys

from serai.cli.place_reader import ask_placer, diff_lines
from serai.cli.registry_reader import NOT_FOUND, add_reader_arguments
from serai.contracts.placement import ApplyRequest, PlacementRequest, PlanState
from serai.contracts.subjects import PLACEMENT_APPLY, PLACEMENT_EXPLAIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exit_codes = (
        "Exit codes: 0 under way, 1 NATS or the placer does not answer, 2 wrong usage, 3 the plan is stale, "
        "or there is none."
    )
    add_reader_arguments(parser, exit_codes)
    parser.add_argument("plan", metavar="PLAN", type=int, nargs="?", help="its number; another one is refused as stale")


def run(arguments: argparse.Namespace) -> int:
    number = arguments.plan
    if number is None:
        word, code = ask_placer("place apply", arguments, PLACEMENT_EXPLAIN, PlacementRequest())
        if word is None or word.problem:
            return code
        if word.plan is None or word.plan.state is not PlanState.PROPOSED:
            sys.stderr.write("serai place apply: no plan waits for a yes; see `serai place plan`\n")
            return NOT_FOUND
        print("\n".join(diff_lines(word.plan)))
        number = word.plan.generation
    word, code = ask_placer("place apply", arguments, PLACEMENT_APPLY, ApplyRequest(number))
    if word is not None and not word.problem:
        print(f"plan {number} is under way; `serai place plan` shows how far it is")
    return code
