"""`serai engine emulate`: flags, and from flags to a running emulated engine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

import uvloop

from serai.engine_emulator import service
from serai.engine_emulator.faults import BadFault, Fault, FaultKind, parse_fault
from serai.engine_emulator.settings import BadSettings, EmulatorSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai engine emulate`."""
    parser.description = "An OpenAI-compatible engine without a model: fixed timing, faults on demand."
    parser.add_argument("--model", required=True, help="the name it serves")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (%(default)s)")
    parser.add_argument("--ttft-ms", type=float, default=50.0, help="time to first token (%(default)s)")
    parser.add_argument("--tpot-ms", type=float, default=20.0, help="time per output token (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=1.0, help="tokens come in steps this long (%(default)s)")
    parser.add_argument("--max-concurrency", type=int, default=256, help="requests that run at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the text (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="answer length without max_tokens (%(default)s)")
    parser.add_argument("--context-tokens", type=int, default=16_777_216, help="prompt and answer (%(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=1_048_576, help="KV cache size, for metrics (%(default)s)")
    parser.add_argument("--body-limit-mb", type=float, default=64.0, help="larger bodies get 413 (%(default)s)")
    parser.add_argument("--start-delay-s", type=float, default=0.0, help="time before it listens (%(default)s)")
    parser.add_argument(
        "--fault",
        dest="faults",
        metavar="KIND[:key=value,…]",
        type=_fault,
        action="append",
        default=[],
        help=f"may be given more than once; kinds: {', '.join(FaultKind)}; keys: tokens, factor, status, "
        "retry_after_s, count, skip",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the emulated engine until a signal. Exit status: 0 stopped, 1 could not start, 2 bad flags."""
    values = {field.name: getattr(arguments, field.name) for field in fields(EmulatorSettings)}
    try:
        settings = EmulatorSettings(**{**values, "faults": tuple(arguments.faults)})
    except BadSettings as error:
        return _complain(str(error), 2)
    try:
        uvloop.run(service.run(settings))
    except service.StartFailed as error:
        return _complain(str(error), 1)
    return 0


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except BadFault as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _complain(text: str, status: int) -> int:
    sys.stderr.write(f"serai engine emulate: {text}\n")
    return status
