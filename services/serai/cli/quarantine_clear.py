"""Tells the registry that a host is well again: what happened there is no longer held against it."""

from __future__ import annotations

import argparse

import orjson

from serai.cli.registry_reader import DONE, NOT_FOUND, Failed, Reader, add_reader_arguments, run_reader
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import HostCleared
from serai.contracts.subjects import CLEARED
from serai.runtime.settings import refuse

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    codes = "Exit codes: 0 done, 1 NATS or the registry does not answer, 2 wrong usage, 3 nothing was held against it."
    add_reader_arguments(parser, codes)
    parser.add_argument("host", metavar="HOST", help="as `serai registry quarantine ls` names it")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.host:
        refuse("HOST must not be empty")

    async def main(reader: Reader) -> int:
        site, host = reader.settings.site, arguments.host
        answer = await reader.bus.request(CLEARED.of_site(site), encode(HostCleared(site, host)), TIMEOUT_S)
        try:
            cleared = decode(HostCleared, answer.data)
        except MalformedMessage as error:
            raise Failed(str(error)) from error
        if not cleared.sessions:
            raise Failed(f"no session that has left host {host!r} had a fault; nothing is changed", NOT_FOUND)
        if arguments.json:
            print(orjson.dumps(cleared).decode())
        else:
            print(f"site {site}: host {host} is cleared, {cleared.sessions} session(s) had faults there")
        return DONE

    return run_reader("registry quarantine clear", arguments, main)
