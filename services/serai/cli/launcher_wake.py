"""Has the launcher of a site start a deployment again that it let go since it was idle, or stopped since it failed."""

from __future__ import annotations

import argparse

from serai.cli.asking import ask
from serai.cli.registry_reader import add_reader_arguments
from serai.contracts.launcher import LauncherWord, WakeRequest
from serai.contracts.subjects import LAUNCHER_WAKE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exit_codes = "Exit codes: 0 done, 1 NATS or the launcher does not answer, 2 wrong usage, 3 no such deployment."
    add_reader_arguments(parser, exit_codes)
    parser.add_argument("deployment", metavar="DEPLOYMENT", help="as the site file names it")


def run(arguments: argparse.Namespace) -> int:
    question = WakeRequest(arguments.deployment)
    word, code = ask("launcher wake", "launcher", arguments, LAUNCHER_WAKE, question, LauncherWord)
    if word is not None and not word.problem:
        print(f"site {word.site}: {arguments.deployment} is wanted again")
    return code
