"""`serai bench admission`: what it costs to ask a macro-scheduler where a request is to go.

Three parts. One decision of the group alone, with 11 instances of 256 requests each. A live macro-scheduler between a
real nats-server and an ingress's own client, asked as fast as it answers. And what a whole request pays for it: two
Serais side by side, one under `least-loaded`, one under `macro-scheduled`, before engines that answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from serai.bench.fleet_stand import FleetStand, fleet_stand
from serai.bench.load import LoadTask
from serai.bench.percentiles import median_of, percentile
from serai.bench.processes import BenchFailed, cpu_s
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH, Stand, Target, chat_body, stand
from serai.bench.stand_in_instances import KV_TOKENS, StandInInstance, easy_report, live
from serai.bench.targets import end_on_sigterm
from serai.contracts.admission import AdmissionAnswer, AdmissionAsk, Decision, InstanceState
from serai.ingress.macro_scheduled import AdmissionClient, Ask
from serai.macro_scheduler.group import (
    Answer,
    Asked,
    Group,
    GroupSettings,
    Joined,
    Own,
    Owned,
    Reported,
    Take,
    TookOver,
)
from serai.macro_scheduler.instance_view import StepPredictor
from serai.runtime.nats_bus import NatsAddress, NatsBus

INSTANCES, REQUESTS_EACH = 11, 256
POLICIES = ("serai", "paper", "author_code")
_DECISIONS, _DECISIONS_QUICK = 20_000, 4_000
_ASKERS = 64
_LIVE_S, _LIVE_QUICK_S = 10.0, 4.0
_RATES = (0, 16, 64)
"""Requests a second; 0: one connection that asks again at once, so that no process falls asleep between two."""
_ROUND_S, _ROUND_QUICK_S = 10.0, 4.0
_ROUNDS, _ROUNDS_QUICK = 5, 2
_READY_S = 15.0


@dataclass(slots=True)
class Live:
    """What the live macro-scheduler gave."""

    answered_s: float = 0.0
    """Answers a second under full load."""
    admitted_s: float = 0.0
    ask_ms: list[float] = field(default_factory=list)
    """Round trips, one ask at a time."""
    others: int = 0
    """Asks of the full load that were not admitted."""
    admitted: int = 0
    """In the full load."""
    scheduler_cpu_s: float = 0.0
    """What the macro-scheduler took for them: on a busy machine, the truer measure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench admission`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument(
        "--part", choices=("decision", "live", "request"), action="append", help="only this part; may be given again"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    end_on_sigterm()
    quick, parts = arguments.quick, arguments.part or ("decision", "live", "request")
    figures: dict[str, float] = {}
    raw: dict[str, object] = {}
    try:
        if "decision" in parts:
            figures |= _decision_figures(_DECISIONS_QUICK if quick else _DECISIONS)
        if "live" in parts:
            measured = _measure_live(_LIVE_QUICK_S if quick else _LIVE_S)
            figures |= _live_figures(measured)
            raw["ask_ms"] = [round(one, 4) for one in measured.ask_ms]
        if "request" in parts:
            samples = _measure_requests(_ROUNDS_QUICK if quick else _ROUNDS, _ROUND_QUICK_S if quick else _ROUND_S)
            figures |= _request_figures(samples)
            raw["requests"] = samples
    except BenchFailed as failure:
        say(f"serai bench admission: {failure}")
        return 1
    config = {"quick": quick, "instances": INSTANCES, "requests_each": REQUESTS_EACH, "askers": _ASKERS}
    hand_out(Report("bench admission", config, figures, _table(figures), [], raw), arguments)
    return 0


def _table(figures: dict[str, float]) -> list[list[str]]:
    return [["figure", "value"], *[[name, f"{value:.4g}"] for name, value in figures.items()]]


# -- one decision ------------------------------------------------------------------------------------------------------


def full_group(policy: str) -> tuple[Group, list[str]]:
    """A group whose instances all have `REQUESTS_EACH` requests, and their sessions."""
    group = Group(GroupSettings(policy=policy))
    predict = StepPredictor(lambda tokens: 0.0005 + 1e-7 * tokens, lambda sequences, context: 0.02)
    sessions = [f"s{number}" for number in range(INSTANCES)]
    for session in sessions:
        for own in group.handle(Joined(session, KV_TOKENS, predict), 0.0):
            if isinstance(own, Own):
                _take(group, session, own.owner)
    return group, sessions


def _take(group: Group, session: str, owner: str) -> None:
    for effect in group.handle(Owned(session, 1 << 20, owner), 0.0):
        if isinstance(effect, Take):
            report = easy_report(session, 1 << 20, 0, 1, REQUESTS_EACH)
            group.handle(TookOver(InstanceState(report, [], True)), 0.0)


def decision_s(policy: str, count: int) -> list[float]:
    """What each of so many decisions took. Reports come between them, at the rate at which they would."""
    group, sessions = full_group(policy)
    applied = dict.fromkeys(sessions, 0)
    took_s: list[float] = []
    for number in range(count):
        now_s = 1.0 + number / 5000
        if number % 15 == 0:  # 11 instances, each every 30 ms, while 5,000 asks come in a second.
            session = sessions[number // 15 % INSTANCES]
            report = easy_report(session, 1 << 20, applied[session], number + 2, REQUESTS_EACH)
            group.handle(Reported(report), now_s)
        ask = AdmissionAsk(f"r{number}", 300, 200, project=f"p{number % 7}")
        began_s = time.perf_counter()
        effects = group.handle(Asked(ask, "inbox"), now_s)
        took_s.append(time.perf_counter() - began_s)
        for effect in effects:
            if isinstance(effect, Answer) and effect.answer.lease is not None:
                applied[effect.answer.session] = effect.answer.lease.sequence
    return took_s


def _decision_figures(count: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    gc.collect()
    gc.freeze()  # As a service does when it starts: what is loaded is not looked through again and again.
    for policy in POLICIES:
        took_s = decision_s(policy, count)
        name = "" if policy == "serai" else f"_{policy}"
        figures[f"decision_us_p50{name}"] = percentile(took_s, 0.5) * 1e6
        figures[f"decision_us_p99{name}"] = percentile(took_s, 0.99) * 1e6
        say(f"{policy}: a decision takes {figures[f'decision_us_p50{name}']:.1f} µs")
    return figures


# -- a live process ----------------------------------------------------------------------------------------------------


def _measure_live(duration_s: float) -> Live:
    with fleet_stand() as up:
        scheduler = up.start_service("macro-scheduler", "macro.ready")
        found: Live = uvloop.run(_ask_for(up, duration_s, scheduler.pid))
        return found


async def _ask_for(up: FleetStand, duration_s: float, scheduler: int) -> Live:
    agents = await NatsBus.connect(NatsAddress(up.nats_url), "agent")
    ingress = await NatsBus.connect(NatsAddress(up.nats_url), "ingress")
    instances = [StandInInstance(agents, "m", number, REQUESTS_EACH) for number in range(INSTANCES)]
    by_session = {one.session: one for one in instances}
    for one in instances:
        await one.start()
    client = AdmissionClient(ingress, 1.0)
    await client.start()
    await agents.barrier()
    await ingress.barrier()
    living = asyncio.create_task(live(instances))
    numbers = iter(range(1 << 60))

    async def ask() -> bool:
        answer = await client.ask(Ask("m", AdmissionAsk(f"r{next(numbers)}", 300, 200), time.monotonic() + 30))
        if isinstance(answer, AdmissionAnswer) and answer.lease is not None:
            by_session[answer.session].applies(answer.lease)
            return answer.decision is Decision.ADMIT
        await asyncio.sleep(0.01)
        return False

    try:
        await _until_ready(ask)
        found = Live()
        for _ in range(300):
            began_s = time.perf_counter()
            await ask()
            found.ask_ms.append((time.perf_counter() - began_s) * 1000)
            await asyncio.sleep(0.005)
        used_s = cpu_s([scheduler])
        await _load(ask, duration_s, found)
        found.scheduler_cpu_s = cpu_s([scheduler]) - used_s
        return found
    finally:
        living.cancel()
        await agents.aclose()
        await ingress.aclose()


async def _until_ready(ask: Callable[[], Awaitable[bool]]) -> None:
    give_up_at_s = time.monotonic() + _READY_S
    while not await ask():
        if time.monotonic() > give_up_at_s:
            raise BenchFailed(f"the macro-scheduler admits nothing within {_READY_S:g} s")


async def _load(ask: Callable[[], Awaitable[bool]], duration_s: float, found: Live) -> None:
    """So many asks are out all the time."""
    counts = {True: 0, False: 0}
    end_s = time.perf_counter() + duration_s

    async def asking() -> None:
        while time.perf_counter() < end_s:
            counts[await ask()] += 1

    began_s = time.perf_counter()
    await asyncio.gather(*[asking() for _ in range(_ASKERS)])
    took_s = time.perf_counter() - began_s
    found.admitted_s = counts[True] / took_s
    found.answered_s = sum(counts.values()) / took_s
    found.others = counts[False]
    found.admitted = counts[True]
    say(f"live: {found.admitted_s:.0f} admissions a second")


def _live_figures(found: Live) -> dict[str, float]:
    return {
        "admissions_per_s": found.admitted_s,
        "answers_per_s": found.answered_s,
        "not_admitted": float(found.others),
        "admissions_per_cpu_s": found.admitted / found.scheduler_cpu_s if found.scheduler_cpu_s else 0.0,
        "ask_p50_ms": percentile(found.ask_ms, 0.5),
        "ask_p99_ms": percentile(found.ask_ms, 0.99),
    }


# -- a whole request ---------------------------------------------------------------------------------------------------


def _measure_requests(rounds: int, duration_s: float) -> list[dict[str, object]]:
    """Both Serais at each rate, one after the other, round by round."""
    samples: list[dict[str, object]] = []
    with stand([]) as up:
        targets = [
            up.start_serai("least-loaded", flags=("--policy", "least-loaded")),
            up.start_serai("macro-scheduled", flags=("--policy", "macro-scheduled")),
        ]
        _wait_until_led(up, targets[1])
        for number in range(rounds):
            for rate in _RATES:
                for target in targets if number % 2 == 0 else targets[::-1]:
                    p50_ms = _p50_ms(up, target, rate, duration_s, number)
                    samples.append({"target": target.name, "rate": rate, "round": number, "p50_ms": p50_ms})
                    say(f"round {number + 1}/{rounds}  {target.name:16} {rate:3} rps  p50 {p50_ms:.3f} ms")
    return samples


def _wait_until_led(up: Stand, target: Target) -> None:
    log = up.work / f"{target.name}-state" / "logs" / "macro-scheduler.log"
    give_up_at_s = time.monotonic() + _READY_S
    while '"macro.leads"' not in log.read_text():
        if time.monotonic() > give_up_at_s:
            raise BenchFailed(f"no macro-scheduler leads within {_READY_S:g} s; see {log}")
        time.sleep(0.1)


def _p50_ms(up: Stand, target: Target, rate: float, duration_s: float, seed: int) -> float:
    task = LoadTask(
        port=target.port,
        path=CHAT_PATH,
        body=chat_body(tokens=1),
        headers=dict(target.headers),
        connections=8 if rate else 1,
        rate=rate,
        duration_s=duration_s,
        seed=seed,
    )
    outcome = up.measure(target, task)
    if outcome.errors:
        raise BenchFailed(f"{target.name}: {outcome.errors}")
    return percentile(outcome.latencies_ms, 0.5)


def _request_figures(samples: Sequence[dict[str, object]]) -> dict[str, float]:
    found = {(one["target"], one["rate"], one["round"]): float(str(one["p50_ms"])) for one in samples}
    figures: dict[str, float] = {}
    for rate in _RATES:
        added = [
            found["macro-scheduled", rate, number] - p50_ms
            for (target, of_rate, number), p50_ms in found.items()
            if target == "least-loaded" and of_rate == rate
        ]
        figures[f"added_p50_ms_{rate}rps" if rate else "added_p50_ms_c1"] = median_of(added)
    figures["added_p50_ms"] = max(figures.values())
    return figures
