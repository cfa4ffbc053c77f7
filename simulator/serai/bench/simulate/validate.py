"""`serai simulate validate`: judges the fast simulator, part by part.

| part  | truth                                                        | figure, goal              |
|-------|--------------------------------------------------------------|---------------------------|
| logs  | request logs of real vLLM 0.19: three models, two GPUs       | mean TTFT, E2E within 10 % |
| live  | the same requests to four emulated engines in real time      | attainment_gap_points ≤ 5 |
| hash  | every system again in processes with other hash seeds        | hash_stable 1             |
| speed | an hour of eight instances at 40 requests/s, figures and all | wall_s_per_sim_hour ≤ 60  |
| drain | OpenTela's six drain times of one instance                   | none                      |

Where a replayed log is off, it is replayed again with step times from the log itself: what is left then is scheduling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from serai.bench.live_run import LiveRun, chat_arrivals
from serai.bench.processes import BenchFailed
from serai.bench.profile.data_folder import add_data_argument
from serai.bench.report import Report, add_report_arguments, hand_out, rounded, say
from serai.bench.simulate import drain_test, live_engines, logged_runs, repeatability

LOG_GOAL = 0.10
GAP_GOAL_POINTS = 5.0
SPEED_GOAL_S = 60.0
QUICK_LIVE_S, FULL_LIVE_S = 15.0, 60.0
QUICK_SPEED_S, FULL_SPEED_S = 120.0, 3600.0
QUICK_DRAIN_SHARE = 0.02


@dataclass
class Findings:
    """What the parts add to."""

    figures: dict[str, float] = field(default_factory=dict)
    table: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai simulate validate`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_report_arguments(parser)
    add_data_argument(parser)
    parser.add_argument(
        "--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS), metavar="PART", help="which parts (all)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Judge and print. Exit status 1 when a live engine did not answer."""
    found = Findings()
    try:
        for part in arguments.parts:
            _PARTS[part](found, arguments.data, arguments.quick)
    except BenchFailed as error:
        print(f"serai simulate validate: {error}", file=sys.stderr)
        return 1
    head = ("", "simulated", "truth", "difference")
    config = {"parts": arguments.parts, "quick": arguments.quick}
    hand_out(
        Report("simulate validate", config, found.figures, [head, *found.table], found.notes, found.raw), arguments
    )
    return 0


# Logs of real engines


def _logs(found: Findings, data: Path, quick: bool) -> None:
    try:
        runs = logged_runs.load_runs(data)
    except (OSError, msgspec.MsgspecError) as error:
        found.notes.append(f"logged runs were not judged: {error}; name the folder that holds `profiles/` with --data")
        return
    for one in runs:
        say(f"replaying {one.name}")
        replay, preemptions = logged_runs.replayed(one)
        errors = logged_runs.errors(one.measured, replay)
        _log_rows(found, one.name, one.measured, replay)
        for (quantity, statistic), off in errors.items():
            suffix = "" if statistic == "mean" else f"_{statistic}"
            found.figures[f"llmservingsim_{one.name}_{quantity}{suffix}_error"] = abs(off)
        found.raw[f"log {one.name}"] = {f"{q}_{s}": rounded(off) for (q, s), off in errors.items()}
        worst = max(abs(errors[quantity, "mean"]) for quantity in ("ttft", "e2e"))
        if worst > LOG_GOAL or not quick:
            _log_cause(found, one, errors, preemptions)


def _log_rows(found: Findings, name: str, measured: logged_runs.Latency, replay: logged_runs.Latency) -> None:
    for label, known, said in (
        ("mean TTFT", measured.ttft_s, replay.ttft_s),
        ("mean E2E", measured.whole_s, replay.whole_s),
        ("mean TPOT", measured.tpot_s, replay.tpot_s),
    ):
        truth, value = fmean(known), fmean(said)
        found.table.append((f"log {name}: {label}", _time(value), _time(truth), f"{value / truth - 1:+.1%}"))


def _log_cause(
    found: Findings, one: logged_runs.LoggedRun, errors: Mapping[tuple[str, str], float], preemptions: int
) -> None:
    """Replays with step times of the log itself, and says how much of the error that takes away."""
    factors = logged_runs.step_factors(one)
    if factors is None:
        found.notes.append(f"log {one.name}: step times cannot be taken from a log that two engines share")
        return
    own, _ = logged_runs.replayed(one, logged_runs.OwnSteps(one.model, factors))
    left = logged_runs.errors(one.measured, own)
    for quantity in ("ttft", "e2e"):
        found.figures[f"llmservingsim_{one.name}_{quantity}_own_steps_error"] = abs(left[quantity, "mean"])
    found.notes.append(
        f"log {one.name}: mean TTFT {errors['ttft', 'mean']:+.1%}, E2E {errors['e2e', 'mean']:+.1%}; with step times of"
        f" the log itself (decoding {factors.decode:.2f}, prompts {factors.prompt:.2f} of what the profile says)"
        f" {left['ttft', 'mean']:+.1%}, {left['e2e', 'mean']:+.1%}; {preemptions} preemptions"
        f"{'' if one.kv_known else '; size of its KV cache not logged'}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


# Engines in real time


def _live(found: Findings, _: Path, quick: bool) -> None:
    gaps: list[float] = []
    seeds = (1,) if quick else (1, 2, 3)
    duration_s = QUICK_LIVE_S if quick else FULL_LIVE_S
    rows = []
    with TemporaryDirectory() as logs, live_engines.LiveEngines(Path(logs)) as engines:
        for seed in seeds:
            say(f"{duration_s:g} s of requests to {live_engines.ENGINES} live engines, seed {seed}")
            result = engines.run(chat_arrivals(live_engines.RATE_PER_S, duration_s, seed))
            gaps += [abs(result.gap_points(slo)) for slo in live_engines.TARGETS]
            _live_rows(found, seed, result)
            rows.append(_live_raw(seed, result))
    found.figures["attainment_gap_points"] = max(gaps)
    found.figures["attainment_gap_points_mean"] = fmean(gaps)
    found.raw["live"] = rows
    if max(gaps) > GAP_GOAL_POINTS:
        found.notes.append(f"attainment_gap_points {max(gaps):.1f} misses its goal of {GAP_GOAL_POINTS:g}")


def _live_rows(found: Findings, seed: int, result: LiveRun) -> None:
    for slo in live_engines.TARGETS:
        said, known = result.attainments(slo)
        label = f"live, seed {seed}: within {slo.ttft_s:g} s, {slo.tpot_s * 1000:g} ms"
        found.table.append((label, f"{said:.1%}", f"{known:.1%}", f"{(said - known) * 100:+.1f} pt"))
    sides = result.latencies()
    for place, quantity in enumerate(("TTFT", "TPOT")):
        for part in ("p50_s", "p90_s", "p99_s"):
            said, known = (getattr(sides[side][place], part) for side in ("simulated", "live"))
            difference = f"{(said - known) * 1000:+.2f} ms"
            found.table.append((f"live, seed {seed}: {quantity} {part[:3]}", _time(said), _time(known), difference))


def _live_raw(seed: int, result: LiveRun) -> dict[str, Any]:
    return {
        "seed": seed,
        "requests": len(result.live),
        "late_sends_ms_max": rounded(result.late_sends_s_max * 1000),
        "attainment": {
            f"{slo.ttft_s:g} s, {slo.tpot_s:g} s": dict(
                zip(("simulated", "live"), map(rounded, result.attainments(slo)), strict=True)
            )
            for slo in live_engines.TARGETS
        },
        "latency_s": {
            side: {
                f"{quantity}_{part}": rounded(getattr(spread, part))
                for quantity, spread in zip(("ttft", "tpot"), spreads, strict=True)
                for part in ("mean_s", "p50_s", "p90_s", "p99_s")
            }
            for side, spreads in result.latencies().items()
        },
    }


# Repeatability and speed


def _hash(found: Findings, _: Path, quick: bool) -> None:
    say("every system in processes with other hash seeds")
    here = repeatability.hashes()
    elsewhere = [repeatability.hashes_elsewhere(seed) for seed in ((1,) if quick else (1, 4242))]
    stable = all(there == here for there in elsewhere)
    found.figures["hash_stable"] = float(stable)
    found.table.append(
        (f"hashes of {len(here)} systems", "1 process", f"{len(elsewhere)} others", "equal" if stable else "NOT EQUAL")
    )
    found.raw["sha256"] = here


def _speed(found: Findings, _: Path, quick: bool) -> None:
    duration_s = QUICK_SPEED_S if quick else FULL_SPEED_S
    say(f"{duration_s:g} s of eight instances at 40 requests/s")
    speed = repeatability.speed(duration_s)
    found.figures["wall_s_per_sim_hour"] = speed.wall_s_per_sim_hour
    found.figures["cpu_s_per_sim_hour"] = speed.cpu_s_per_sim_hour
    found.figures["us_per_step"] = speed.run_s / speed.steps * 1e6
    found.table.append(
        ("an hour of 8 instances, 40 requests/s", f"{speed.wall_s_per_sim_hour:.1f} s", f"{SPEED_GOAL_S:g} s", "")
    )
    label = "  … in processor time"
    found.table.append((label, f"{speed.cpu_s_per_sim_hour:.1f} s", "", ""))
    found.raw["speed"] = {name: getattr(speed, name) for name in speed.__slots__}
    if speed.wall_s_per_sim_hour > SPEED_GOAL_S:
        found.notes.append(
            f"wall_s_per_sim_hour {speed.wall_s_per_sim_hour:.0f} misses its goal of {SPEED_GOAL_S:g};"
            f" the process ran for {speed.cpu_s_per_sim_hour:.0f} s of it"
        )


# OpenTela's drain test


def _drain(found: Findings, _: Path, quick: bool) -> None:
    ratios = {}
    for drain in drain_test.DRAINS:
        say(f"draining {drain.name}")
        seconds = drain_test.drained_s(drain, QUICK_DRAIN_SHARE if quick else 1.0)
        ratios[drain.name] = seconds / drain.measured_s
        found.figures[f"drain_{drain.name}_s"] = seconds
        found.figures[f"drain_{drain.name}_ratio"] = ratios[drain.name]
        label = f"OpenTela drain, {drain.workload.name} on {drain.gpu}"
        found.table.append((label, f"{seconds:,.0f} s", f"{drain.measured_s:,.0f} s", f"× {ratios[drain.name]:.2f}"))
    for name in dict.fromkeys(drain.workload.name for drain in drain_test.DRAINS):
        old, new = (drain for drain in drain_test.DRAINS if drain.workload.name == name)
        said = found.figures[f"drain_{old.name}_s"] / found.figures[f"drain_{new.name}_s"]
        known = old.measured_s / new.measured_s
        found.figures[f"drain_{name}_speedup_error"] = abs(said / known - 1)
        found.table.append(
            (f"OpenTela drain, {name}: speed-up", f"{said:.2f}", f"{known:.2f}", f"{said / known - 1:+.0%}")
        )


_PARTS: dict[str, Callable[[Findings, Path, bool], None]] = {
    "logs": _logs,
    "live": _live,
    "hash": _hash,
    "speed": _speed,
    "drain": _drain,
}
