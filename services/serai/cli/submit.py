"""Submits Slurm jobs that serve a model: the site file says how jobs look at this site, the flags what is wanted now.

Each job is told as soon as it is there, so that nothing is lost when a later one fails. Exit codes: 0 all submitted,
1 not all (it says why, and what to do), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serai.cli.registry_reader import Reader
from serai.cli.site_flag import add_site_flag, asked_site
from serai.cli.site_registry import look
from serai.contracts.session_record import GPUS_MAX
from serai.launcher.jobs import JobId, JobName, Jobs, Refused, Unknown
from serai.launcher.maintenance import fitted
from serai.launcher.site import Exclude, JobPlan, RuntimeKind, Site
from serai.launcher.site_file import written_duration_s
from serai.launcher.slurm_commands import SlurmCommands
from serai.launcher.templates import script
from serai.runtime.fields import BadInput
from serai.runtime.quarantine_list import Quarantine, quarantined
from serai.runtime.settings import refuse
from serai.runtime.slurm_time import duration_text
from serai.runtime.telemetry import set_up_logs

DONE, NOT_ALL = 0, 1
COUNT_MAX, CHAIN_MAX = 64, 64
HANDOVER_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_site_flag(parser)
    parser.add_argument("--model", required=True, help="a model of the site file, or any name with a command")
    parser.add_argument("--profile", help="the model of the site file, when clients ask for it by another name")
    wanted = parser.add_argument_group("what is wanted (each counts more than the site file)")
    wanted.add_argument("--gpus", type=int, help="GPUs, over all nodes")
    wanted.add_argument("--gpu", help="kind of GPU, by its name in the site file")
    wanted.add_argument("--nodes", type=int, help="nodes of each job (default: as many as the GPUs need)")
    wanted.add_argument("--engines", type=int, help="engines of each job, side by side on shares of its GPUs")
    wanted.add_argument("--cpus", type=int, help="CPUs of each node")
    wanted.add_argument("--memory", help="memory of each node, as sbatch takes it: 64G")
    wanted.add_argument("--time", help="time limit, as sbatch takes it: 90 (minutes), 8:00:00, 1-12")
    wanted.add_argument("--time-min", help="Slurm may shorten the job to this when it starts earlier then")
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        wanted.add_argument(f"--{name}", help="as sbatch takes it")
    wanted.add_argument("--runtime", help="how the engine is run, by its name in the site file")
    wanted.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of sbatch, as in --sbatch=--exclusive; may be repeated",
    )
    several = parser.add_argument_group("several jobs")
    several.add_argument("--count", type=int, default=1, help="so many jobs at a time (default: 1)")
    several.add_argument("--array", action="store_true", help="the --count as one array of Slurm")
    several.add_argument(
        "--chain",
        type=int,
        default=1,
        help="so many one after the other, all submitted now: each starts --handover before the time of the one before "
        "it is up, or when that has ended (default: 1)",
    )
    several.add_argument(
        "--handover",
        default="",
        metavar="TIME",
        help="how long both of a pair may run (default: 30 minutes, at most half of --time)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script of the first job, and submit nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…", help="the engine's command")


def run(arguments: argparse.Namespace) -> int:
    site = asked_site(arguments)
    try:
        order = _order(site, arguments)
    except BadInput as error:
        refuse(str(error))
    set_up_logs("tools", "error")
    if arguments.dry_run:
        return asyncio.run(_show(site, order))
    return asyncio.run(_submit(site, order))


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for."""

    plan: JobPlan
    count: int
    chain: int
    array: bool
    handover_s: float

    def time_s(self, copy: int, link: int) -> float:
        """The time limit of a job. First jobs of later copies are shorter, so that not all end, and not all successors
        load, in the same minute."""
        early = self.plan.time_s / 2 * copy / self.count if self.chain > 1 and link == 0 else 0.0
        return max(60.0, self.plan.time_s - early)


def _order(site: Site, arguments: argparse.Namespace) -> Order:
    """Raises BadInput."""
    names = ("gpus", "gpu", "nodes", "cpus", "memory", "partition", "account", "qos", "constraint", "reservation")
    asked: dict[str, Any] = {
        name: value for name in (*names, "runtime") if (value := getattr(arguments, name)) not in (None, "")
    }
    for flag, value, most in (("--gpus", arguments.gpus, 4096), ("--nodes", arguments.nodes, 1024)):
        if value is not None and not 0 <= value <= most:
            raise BadInput(flag, f"is {value}", f"write 0 to {most}")
    for flag, value, most in (("--count", arguments.count, COUNT_MAX), ("--chain", arguments.chain, CHAIN_MAX)):
        if not 1 <= value <= most:
            raise BadInput(flag, f"is {value}", f"write 1 to {most}")
    if arguments.time:
        asked["time_s"] = written_duration_s("--time", arguments.time)
    if arguments.time_min:
        asked["time_least_s"] = written_duration_s("--time-min", arguments.time_min)
    command = [word for index, word in enumerate(arguments.command) if index or word != "--"]
    if command:
        asked["engine"] = tuple(command)
    if arguments.profile:
        asked["model"] = arguments.model
    if arguments.engines is not None:
        asked["environment"] = {"SERAI_ENGINES": str(arguments.engines)}
    for name, value in asked.items():
        if isinstance(value, str) and not value.isprintable():
            raise BadInput(f"--{name}", f"is {value!r}", "write one line")
    plan = site.job(arguments.profile or arguments.model, sbatch=tuple(arguments.sbatch), **asked)
    if arguments.engines is not None:
        _check_engines(plan, arguments.engines)
    if arguments.array and arguments.chain > 1:
        raise BadInput("--array", "cannot be had with --chain", "leave one of them out")
    handover_s = written_duration_s("--handover", arguments.handover) if arguments.handover else HANDOVER_S
    if arguments.handover and handover_s >= plan.time_s:
        raise BadInput("--handover", f"{arguments.handover} is not below --time", "give less")
    return Order(plan, arguments.count, arguments.chain, arguments.array, min(handover_s, plan.time_s / 2))


def _check_engines(plan: JobPlan, engines: int) -> None:
    """Raises BadInput."""
    gpus = plan.profile.gpus or 0
    if engines < 1 or engines > GPUS_MAX:
        raise BadInput("--engines", f"is {engines}", f"write 1 to {GPUS_MAX}")
    if engines == 1:
        return
    if plan.nodes > 1:
        raise BadInput("--engines", f"cannot be had on {plan.nodes} nodes", "leave it out, and give --count N")
    if plan.runtime.kind is RuntimeKind.PYXIS:
        why = "cannot be had with a runtime of kind `pyxis`, whose srun shows each engine all GPUs of the job"
        raise BadInput("--engines", why, "take apptainer or enroot")
    if gpus % engines:
        raise BadInput(
            "--engines", f"{engines} cannot share {gpus} GPUs evenly", f"give --gpus {engines} or a multiple"
        )


async def _fit(site: Site, order: Order, slurm: SlurmCommands) -> Order:
    """With a time limit that ends before the next maintenance."""
    fit = await fitted(
        slurm,
        lambda time_s: script(site, replace(order.plan, time_s=time_s)),
        order.plan.time_s,
        time.time(),
        order.plan.profile.time_least_s,
    )
    if fit.note:
        _say(fit.note)
    plan = replace(order.plan, time_s=fit.time_s)
    return replace(order, plan=plan, handover_s=min(order.handover_s, fit.time_s / 2))


async def _without_bad_nodes(site: Site, slurm: SlurmCommands) -> Site:
    """With the hosts that the registry has in quarantine among those to stay away from."""
    now_s = time.time()

    async def see(reader: Reader) -> list[Quarantine]:
        return quarantined(reader.copy.replica.records(), site.name, now_s)

    found = await look(site, see)
    if isinstance(found, Unknown):
        if site.nats.tools_nkey_file:
            _say(f"nodes in quarantine are not known ({found.reason})")
        return site
    nodes = await slurm.nodes() if found else frozenset[str]()
    bad = [Exclude(node=one.node, reason=one.reason, until_s=one.until_s) for one in found]
    known = [one for one in bad if not isinstance(nodes, Unknown) and one.node in nodes]
    return replace(site, exclude=(*site.exclude, *known))


async def _show(site: Site, order: Order) -> int:
    slurm = SlurmCommands(site.commands)
    site = await _without_bad_nodes(site, slurm)
    order = await _fit(site, order, slurm)
    print(_script(site, order, _name(order), 0, 0), end="")
    return DONE


def _script(site: Site, order: Order, name: JobName, copy: int, link: int) -> str:
    excluded = site.excluded(time.time())
    plan = replace(order.plan, time_s=order.time_s(copy, link))
    return script(site, plan, name=str(name), excluded=excluded, array=order.count if order.array else 0)


def _name(order: Order) -> JobName:
    return JobName.for_model(order.plan.model, secrets.token_hex(4))


async def _submit(site: Site, order: Order) -> int:
    slurm = SlurmCommands(site.commands)
    site = await _without_bad_nodes(site, slurm)
    order = await _fit(site, order, slurm)
    if site.output and not site.commands.prefix:
        _make_folder(site.output)
    for one in site.excluded(time.time()):
        _say(f"without node {one.node}: {one.reason}")
    copies = 1 if order.array else order.count
    wanted, done = copies * order.chain, 0
    for copy in range(copies):
        before: JobId | None = None
        for link in range(order.chain):
            name = _name(order)
            options = [] if before is None else [_after(before, order.time_s(copy, link - 1) - order.handover_s)]
            answer = await slurm.submit(_script(site, order, name, copy, link), options)
            if isinstance(answer, Unknown):
                answer = await _look_for(slurm, name, answer)
            if not isinstance(answer, JobId):
                _explain(answer, done, wanted)
                return NOT_ALL
            before, done = answer, done + 1
            follows = f", {options[0]}" if options else ""
            limit = duration_text(order.time_s(copy, link))
            # At once: what is printed is what is known when the next one fails.
            print(f"{answer}  {name}  --time={limit}{follows}", flush=True)
    _say(f"{done} submitted; look with: serai jobs")
    return DONE


def _after(before: JobId, delay_s: float) -> str:
    """Some time after the start of the one before, or when it has ended, however it did."""
    return f"--dependency=after:{before.job}+{max(1, int(delay_s // 60))}?afterany:{before.job}"


async def _look_for(slurm: SlurmCommands, name: JobName, answer: Unknown) -> JobId | Unknown:
    """A submission that was not answered may have been done: the job has a name that no other has."""
    jobs = await slurm.jobs()
    if isinstance(jobs, Jobs) and (found := jobs.named(name)):
        return found.id
    return answer


def _explain(answer: Refused | Unknown, done: int, wanted: int) -> None:
    if isinstance(answer, Unknown):
        _say(f"Slurm did not say whether it took the job: {answer.reason}")
        _say("it may have: look with `serai jobs` before you submit again")
    else:
        _say(f"Slurm refused the job: {answer.text}")
        _say(f"what to do: {answer.remedy}")
    if wanted > 1:
        _say(f"{done} of {wanted} submitted; those above are there, nothing was taken back")


def _make_folder(output: str) -> None:
    """Slurm makes no folders, and a job whose output cannot be written fails without a word."""
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"output {shlex.quote(output)} of the site file cannot be made: {error.strerror}")


def _say(text: str) -> None:
    sys.stderr.write(f"serai submit: {text}\n")
