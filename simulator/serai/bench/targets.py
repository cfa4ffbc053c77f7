"""Which targets take part in a comparison, and the flags that say so."""

from __future__ import annotations

import argparse
import signal
import sys

from serai.bench.peers import find_peers

OURS = ("direct", "serai")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of benchmarks that compare targets."""
    parser.add_argument(
        "--targets",
        help="comma-separated: direct, serai, and peers; without it, all that are installed in .peers/ or in the "
        "folder that SERAI_PEERS names",
    )
    parser.add_argument("--rounds", type=int, help="how often each target is measured")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="multiplies all measuring times: longer is steadier (%(default)s)"
    )
    parser.add_argument(
        "--keep-awake",
        action="store_true",
        help="keep idle cores from sleeping with loops of the lowest priority; virtual cores wake slowly",
    )


def chosen_targets(arguments: argparse.Namespace, *, peers: bool = True) -> list[str]:
    """The names of the targets: those asked for, or all there are; without `peers`, only our own. Direct comes first:
    everything is compared with it."""
    installed = [peer.name for peer in find_peers()]
    if not arguments.targets:
        return [*OURS, *(installed if peers else ())]
    asked = arguments.targets.split(",")
    unknown = [name for name in asked if name not in (*OURS, *installed)]
    if unknown:
        known = ", ".join((*OURS, *installed))
        sys.exit(f"--targets: no {', '.join(unknown)} here; there are {known} (`make peers` installs more)")
    return ["direct", *[name for name in asked if name != "direct"]]


def check_target_arguments(arguments: argparse.Namespace) -> None:
    """Ends the program, with a line that says why, when a flag cannot be."""
    if not 0.05 <= arguments.stretch <= 100:
        sys.exit(f"--stretch must be from 0.05 to 100, not {arguments.stretch:g}")
    if arguments.rounds is not None and not 1 <= arguments.rounds <= 100:
        sys.exit(f"--rounds must be from 1 to 100, not {arguments.rounds}")


def end_on_sigterm() -> None:
    """Have SIGTERM unwind the stack, so that all child processes are ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
