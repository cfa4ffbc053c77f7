"""Says what a placer thinks of a model: what is asked of it, what serves it, what changes and why, what is missing."""

from __future__ import annotations

import argparse

import orjson

from serai.cli.place_reader import ask_placer, header
from serai.cli.registry_reader import NOT_FOUND, add_reader_arguments
from serai.contracts.placement import ModelWord, PlacementRequest
from serai.contracts.subjects import PLACEMENT_EXPLAIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exit_codes = "Exit codes: 0 done, 1 NATS or the placer does not answer, 2 wrong usage, 3 no such model."
    add_reader_arguments(parser, exit_codes)
    parser.add_argument("model", metavar="MODEL", help="as the placement file names it")


def run(arguments: argparse.Namespace) -> int:
    word, code = ask_placer("place explain", arguments, PLACEMENT_EXPLAIN, PlacementRequest(arguments.model))
    if word is None:
        return code
    if arguments.json:
        print(orjson.dumps(word.models, option=orjson.OPT_INDENT_2).decode())
        return code
    for one in word.models:
        print("\n".join([header(word), "", *_lines(one)]))
    if not word.models and not word.problem:
        print(f"{header(word)}\n\nnothing has been planned for {arguments.model} yet")
        return NOT_FOUND
    return code


def _lines(one: ModelWord) -> list[str]:
    serve = f"{one.instances} of {one.wanted} engines that the plan wants serve now"
    asked = f"{one.demand_requests_s:.2f} requests/s planned for, {one.capacity_requests_s:.2f} can be served now"
    return [f"{one.model}: {serve}; {asked}.", "", *[f"  {line}" for line in one.text]]
