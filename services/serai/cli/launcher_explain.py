"""Says what the launcher of a site does for each slot, or waits for, and why."""

from __future__ import annotations

import argparse

import orjson

from serai.cli.asking import ask
from serai.cli.registry_reader import add_reader_arguments
from serai.contracts.launcher import ExplainRequest, LauncherWord
from serai.contracts.subjects import LAUNCHER_EXPLAIN
from serai.launcher.words import word_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exit_codes = "Exit codes: 0 done, 1 NATS or the launcher does not answer, 2 wrong usage, 3 no such slot."
    add_reader_arguments(parser, exit_codes)
    parser.add_argument("slot", metavar="SLOT", nargs="?", default="", help="DEPLOYMENT or DEPLOYMENT/NUMBER")


def run(arguments: argparse.Namespace) -> int:
    question = ExplainRequest(arguments.slot)
    word, code = ask("launcher explain", "launcher", arguments, LAUNCHER_EXPLAIN, question, LauncherWord)
    if word is not None and not word.problem:
        print(orjson.dumps(word, option=orjson.OPT_INDENT_2).decode() if arguments.json else word_text(word))
    return code
