"""`serai bench convergence`: how long a change of one session takes to be in every copy of the registry.

OpenTela's protocol: so many sessions, each with a copy of the registry; 20 writes by random sessions, 500 ms apart;
every copy is looked at. Here each copy notes itself when the record is in it, instead of being asked every 5 ms. All
on one machine and so on one clock: from just before the agent publishes its record until a copy has merged it. Agents
are real ones, which also show life every second, and copies are those that ingresses route from. The copies of one
process share a connection, each with its own subscriptions, unless each is to have its own.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.bench.fleet_stand import FleetStand, Member, fleet_stand
from serai.bench.percentiles import percentile
from serai.bench.processes import BenchFailed
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.targets import end_on_sigterm

_WRITES = 20
_GAP_S = 0.5
_ROUNDS = 3
_PROCESSES = 4
_SETTLE_S = 3.0
_LAST_S = 2.0


@dataclass(frozen=True, slots=True)
class Write:
    """One change, and after how many milliseconds each copy had it; `missed` copies never did."""

    agent: int
    after_ms: list[float]
    missed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench convergence`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument(
        "--sessions", type=_counts, default=[128], metavar="N[,N…]", help="how many; the largest is the headline (128)"
    )
    parser.add_argument("--rounds", type=int, help=f"of {_WRITES} writes each ({_ROUNDS}; quick: 1)")
    parser.add_argument(
        "--own-connections", action="store_true", help="one per copy: adds what as many sockets cost one machine"
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the writers (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    rounds = arguments.rounds
    if rounds is None:
        rounds = 1 if arguments.quick else _ROUNDS
    if not 1 <= rounds <= 100:
        sys.exit(f"--rounds must be from 1 to 100, not {rounds}")
    measured: dict[int, list[Write]] = {}
    try:
        for sessions in arguments.sessions:
            measured[sessions] = _measure(sessions, rounds, arguments)
    except BenchFailed as failure:
        say(f"serai bench convergence: {failure}")
        return 1
    config = {
        "sessions": arguments.sessions,
        "rounds": rounds,
        "writes": _WRITES,
        "gap_s": _GAP_S,
        "own_connections": arguments.own_connections,
    }
    raw = {
        str(sessions): [{"agent": w.agent, "after_ms": [round(ms, 3) for ms in w.after_ms]} for w in writes]
        for sessions, writes in measured.items()
    }
    figures = figures_of(measured)
    hand_out(Report("bench convergence", config, figures, _table(measured), _notes(measured), raw), arguments)
    return 0


def figures_of(measured: Mapping[int, Sequence[Write]]) -> dict[str, float]:
    """Figures by number of sessions, and without one those of the largest number."""
    figures: dict[str, float] = {}
    for sessions, writes in sorted(measured.items()):
        for name, value in _of(writes).items():
            figures[f"{name}_{sessions}"] = figures[name] = value
    return figures


def _of(writes: Sequence[Write]) -> dict[str, float]:
    after_ms = [ms for write in writes for ms in write.after_ms]
    return {
        "p50_ms": percentile(after_ms, 0.5),
        "p75_ms": percentile(after_ms, 0.75),
        "p95_ms": percentile(after_ms, 0.95),
        "p99_ms": percentile(after_ms, 0.99),
        "max_ms": max(after_ms, default=float("nan")),
        "missed": sum(write.missed for write in writes),
    }


def _measure(sessions: int, rounds: int, arguments: argparse.Namespace) -> list[Write]:
    with fleet_stand() as stand:
        members = _members(stand, sessions, own_connections=arguments.own_connections)
        owners = [(member, agent) for member, agents in members for agent in range(agents)]
        _wait_until_all_are_known([member for member, _ in members], sessions)
        time.sleep(_SETTLE_S)
        say(f"{sessions} sessions and {sessions} copies are up")
        chance = random.Random(arguments.seed)
        began_ns: dict[str, int] = {}
        writers: dict[str, int] = {}
        for number in range(rounds * _WRITES):
            writers[str(number)] = writer = chance.randrange(sessions)
            member, agent = owners[writer]
            began_ns[str(number)] = member.ask("write", agent=agent, write=str(number))
            time.sleep(_GAP_S)
        time.sleep(_LAST_S)
        copies: list[dict[str, int]] = [copy for member, _ in members for copy in member.ask("came")]
    assert len(copies) == sessions
    writes = [_write(writers[name], began, name, copies) for name, began in began_ns.items()]
    shown = _of(writes)
    say(
        f"{sessions} sessions: p50 {shown['p50_ms']:.2f} ms, p99 {shown['p99_ms']:.2f} ms, max {shown['max_ms']:.1f} ms"
    )
    return writes


def _write(agent: int, began_ns: int, name: str, copies: Sequence[Mapping[str, int]]) -> Write:
    after_ms = [(copy[name] - began_ns) / 1e6 for copy in copies if name in copy]
    return Write(agent, after_ms, len(copies) - len(after_ms))


def _members(stand: FleetStand, sessions: int, *, own_connections: bool) -> list[tuple[Member, int]]:
    """Members, and how many agents, and as many copies, each has."""
    engine_url = stand.start_engine()
    count = min(_PROCESSES, sessions)
    shares = [sessions // count + (number < sessions % count) for number in range(count)]
    members = []
    for number, share in enumerate(shares):
        flags = ["--engine-url", engine_url, "--name", f"m{number}", "--agents", str(share), "--copies", str(share)]
        if own_connections:
            flags.append("--own-connections")
        members.append((stand.start_member(f"member-{number}", *flags), share))
    for member, _ in members:
        member.ask("ready")
    return members


def _wait_until_all_are_known(members: Sequence[Member], sessions: int) -> None:
    give_up_at_s = time.monotonic() + 60
    while any(known != sessions for member in members for known in member.ask("known")):
        if time.monotonic() > give_up_at_s:
            raise BenchFailed(f"not all copies know {sessions} sessions: {[member.ask('known') for member in members]}")
        time.sleep(0.2)


def _notes(measured: Mapping[int, Sequence[Write]]) -> list[str]:
    missed = {sessions: sum(write.missed for write in writes) for sessions, writes in measured.items()}
    return [f"{count} copies never had a record, at {sessions} sessions" for sessions, count in missed.items() if count]


def _table(measured: Mapping[int, Sequence[Write]]) -> list[list[str]]:
    head = ["sessions", "p50 ms", "p75 ms", "p95 ms", "p99 ms", "max ms"]
    names = ("p50_ms", "p75_ms", "p95_ms", "p99_ms", "max_ms")
    return [head, *[[str(n), *[f"{_of(writes)[name]:.2f}" for name in names]] for n, writes in measured.items()]]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or any(not 1 <= count <= 1024 for count in counts):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to 1024 with commas between them, not {text!r}")
    return counts
