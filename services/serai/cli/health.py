"""Says whether NATS and this site's registry answer, and how many models serve. For a container's health check."""

from __future__ import annotations

import argparse
import time

import orjson

from serai.cli.registry_reader import DONE, Failed, Reader, add_reader_arguments, run_reader
from serai.runtime.session_state import SessionState, state_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    codes = "Exit codes: 0 healthy, 1 NATS or the registry does not answer, or too few models, 2 wrong usage."
    add_reader_arguments(parser, codes)
    parser.add_argument("--models-min", type=int, default=0, metavar="N", help="fail when fewer serve (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    async def main(reader: Reader) -> int:
        now, replica = time.monotonic(), reader.copy.replica
        models = replica.models(now)
        states = [state_of(replica, session, now) for session in replica.sessions]
        open_sessions = sum(state is not SessionState.LEFT for state in states)
        serving = sum(state is SessionState.SERVING for state in states)
        if arguments.json:
            facts = {"site": reader.settings.site, "models": models, "sessions": open_sessions, "serving": serving}
            print(orjson.dumps(facts).decode())
        else:
            print(
                f"the registry of site {reader.settings.site} answers; "
                f"models served: {len(models)}; sessions serving: {serving} of {open_sessions}"
            )
        if len(models) < arguments.models_min:
            raise Failed(f"models served: {len(models)}; wanted at least {arguments.models_min}")
        return DONE

    return run_reader("health", arguments, main)
