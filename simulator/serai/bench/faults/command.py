"""`serai bench faults`: the same faults for Serai and for each peer that is installed, in one run, as a table.

Each gateway stands before two scripted engines of its own. A case is a fault, what a client does, and a plain rule for
what it must see. While it is played a stream of somebody else runs beside, which must not be harmed. Gateways take
turns, one case each; only those that mostly wait are played side by side. A gateway that does not answer before a case,
or does not use both engines before one that needs them, is started anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serai.bench.faults import cases_clients, cases_engines, cases_streams, stage, table
from serai.bench.faults.case import SERAI, Case, Finding, better_peers
from serai.bench.faults.scripted_engine import ScriptedEngine
from serai.bench.faults.stage import PeerGateway, SeraiGateway, Stage
from serai.bench.fleet_stand import FleetStand, fleet_stand
from serai.bench.peers import find_peers
from serai.bench.processes import BenchFailed
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.targets import end_on_sigterm
from serai.worker_agent.engine.process import free_port

CASES: tuple[Case, ...] = (
    *[dataclasses.replace(case, group="streams") for case in cases_streams.CASES],
    *[dataclasses.replace(case, group="clients") for case in cases_clients.CASES],
    *[dataclasses.replace(case, group="engines") for case in cases_engines.CASES],
)
_CASE_S = 150.0
"""A case that takes longer has failed."""

Findings = dict[str, dict[str, Finding]]
"""By case, then by gateway."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench faults`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--cases", metavar="NAME,…", help=f"only these of: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--targets", metavar="NAME,…", help="only these: serai, and peers that are installed")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown, too")


def run(arguments: argparse.Namespace) -> int:
    """Play and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    cases = _chosen_cases(arguments)
    names = _chosen_targets(arguments)
    try:
        with fleet_stand() as stand:
            findings, notes = asyncio.run(_play_all(stand, cases, names))
    except BenchFailed as failure:
        say(f"serai bench faults: {failure}")
        return 1
    played = [name for name in names if any(name in row for row in findings.values())]
    figures = figures_of(cases, findings, played)
    if arguments.markdown is not None:
        arguments.markdown.write_text(table.markdown(cases, findings, played))
    better = [f"{case.name}: {', '.join(them)}" for case in cases if (them := better_peers(case, findings[case.name]))]
    notes += [f"a peer does better in {row}" for row in better]
    config = {"quick": arguments.quick, "targets": played, "rules": {case.name: case.rule for case in cases}}
    raw = {name: {who: dataclasses.asdict(one) for who, one in row.items()} for name, row in findings.items()}
    hand_out(Report("bench faults", config, figures, table.rows(cases, findings, played), notes, raw), arguments)
    return 0


def figures_of(cases: Sequence[Case], findings: Findings, names: Sequence[str]) -> dict[str, float]:
    """Goals: `serai_failed` and `rows_where_a_peer_does_better` 0."""
    failed: dict[str, float] = {
        f"{name}_failed": sum(not findings[case.name][name].holds for case in cases if name in findings[case.name])
        for name in names
    }
    better = sum(bool(better_peers(case, findings[case.name])) for case in cases)
    return {"cases": len(cases), **failed, "rows_where_a_peer_does_better": better}


def _chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.cases is None:
        return [case for case in CASES if case.quick or not arguments.quick]
    names = arguments.cases.split(",")
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--cases: no {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


def _chosen_targets(arguments: argparse.Namespace) -> list[str]:
    there = [SERAI, *([] if arguments.quick else [peer.name for peer in find_peers()])]
    if arguments.targets is None:
        return there
    there = [SERAI, *[peer.name for peer in find_peers()]]
    names: list[str] = arguments.targets.split(",")
    if unknown := [name for name in names if name not in there]:
        sys.exit(f"--targets: no {', '.join(unknown)} here; there are {', '.join(there)} (`make peers` installs more)")
    return names


async def _play_all(stand: FleetStand, cases: Sequence[Case], names: Sequence[str]) -> tuple[Findings, list[str]]:
    findings: Findings = {case.name: {} for case in cases}
    notes: list[str] = []
    stages = _stages(stand, names)
    ups = await asyncio.gather(*[stage.start(one) for one in stages])
    notes += [f"did not take part: {one.name}" for one, is_up in zip(stages, ups, strict=True) if not is_up]
    if any(one.name == SERAI and not is_up for one, is_up in zip(stages, ups, strict=True)):
        raise BenchFailed("Serai did not come up")
    up = [one for one, is_up in zip(stages, ups, strict=True) if is_up]
    say(f"ready: {', '.join(one.name for one in up)}")
    turn = asyncio.Lock()  # What one case takes of the machine must not count as another's delay.
    await asyncio.gather(*[_play_cases(one, cases, findings, notes, turn) for one in up])
    notes += [f"{one.name} was started anew {one.restarts} times to come round" for one in up if one.restarts]
    return findings, notes


def _stages(stand: FleetStand, names: Sequence[str]) -> list[Stage]:
    peers = {peer.name: peer for peer in find_peers()}
    stages = []
    for name in names:
        engines = [ScriptedEngine(free_port()) for _ in range(2)]
        if name == SERAI:
            stages.append(Stage(SeraiGateway(stand, engines), engines))
        else:
            stages.append(Stage(PeerGateway(peers[name], stand.processes, stand.work, engines), engines))
    return stages


async def _play_cases(
    one: Stage, cases: Sequence[Case], findings: Findings, notes: list[str], turn: asyncio.Lock
) -> None:
    for case in cases:
        try:
            await one.settle(both=case.needs_both)
        except BenchFailed as failure:
            say(str(failure))
            notes.append(f"{failure}; its cases from {case.name} on are missing")
            return
        async with turn if case.quick else contextlib.nullcontext():
            finding = await play(one, case)
        findings[case.name][one.name] = finding
        say(f"{one.name:12} {case.name:26} {'ok  ' if finding.holds else 'FAIL'} {finding.text}")


async def play(one: Stage, case: Case) -> Finding:
    """One case at one gateway, with a stream beside it."""
    one.evidence = []
    began_s = time.monotonic()
    harm = ""
    try:
        async with asyncio.timeout(_CASE_S):
            if case.beside:
                async with one.steady_stream() as beside:
                    finding = await case.play(one)
                harm = beside.harm()
            else:
                finding = await case.play(one)
    except TimeoutError:
        finding = Finding(False, f"not over in {_CASE_S:g} s")
    text = f"{finding.text}; {harm}" if harm else finding.text
    calls: list[dict[str, Any]] = [{"engine_calls": len(one.calls)}]
    return dataclasses.replace(
        finding,
        holds=finding.holds and not harm,
        text=text,
        evidence=[*one.evidence, *calls],
        seconds=round(time.monotonic() - began_s, 2),
    )
