"""`serai bench overhead`: the latency that Serai, and each peer, adds to the engine's own, at fixed request rates.

Requests arrive at random (Poisson) whatever is still unanswered, for answers of one token, which the engine gives at
once. Rounds go through all targets one after the other. Added p50: median over rounds of the difference within a
round. Added p99: difference of the percentiles of all rounds together, since a round has too few requests for one.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serai.bench.load import LoadOutcome, LoadTask
from serai.bench.percentiles import median_of, percentile
from serai.bench.processes import BenchFailed
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH, ENGINE_FLAGS, Stand, Target, chat_body, stand
from serai.bench.targets import add_target_arguments, check_target_arguments, chosen_targets, end_on_sigterm
from serai.bench.trace_file import hops, read_spans

# Requests a second, and for how many seconds of a round: the slow ones need time to have samples at all.
_FULL_S = {1: 20.0, 4: 10.0, 16: 15.0, 64: 5.0}
_QUICK_S = {1: 7.0, 4: 4.0, 16: 4.0, 64: 2.0}
_FULL_ROUNDS = 4
_P99_RATE = 16
_WARMUP_S = 0.5
_CONNECTIONS = 8
_TRACED_RATE = 16
_TRACED_S, _TRACED_QUICK_S = 10.0, 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One rate at one target in one round."""

    target: str
    round: int
    rate: int
    outcome: LoadOutcome

    @property
    def p50_ms(self) -> float:
        """Median latency."""
        return percentile(self.outcome.latencies_ms, 0.5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench overhead`."""
    parser.description = __doc__
    add_report_arguments(parser)
    add_target_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    check_target_arguments(arguments)
    end_on_sigterm()
    quick = arguments.quick
    rounds = arguments.rounds or (1 if quick else _FULL_ROUNDS)
    durations_s = {rate: s * arguments.stretch for rate, s in (_QUICK_S if quick else _FULL_S).items()}
    cores = len(os.sched_getaffinity(0)) if arguments.keep_awake else 0
    # A minute has no room for the peers; asked for by name they are measured all the same.
    names = chosen_targets(arguments, peers=not quick)
    try:
        with stand(names, keep_awake_cores=cores) as up:
            samples = _measure_all(up, rounds, durations_s)
            memory_mb = {f"{target.name}_rss_mb": target.rss_mb for target in up.targets}
            hop_figures = _trace(up, _TRACED_QUICK_S if quick else _TRACED_S) if "serai" in names else {}
            names = [target.name for target in up.targets]
            notes = [*up.notes, *_notes(samples)]
    except BenchFailed as failure:
        say(f"serai bench overhead: {failure}")
        return 1
    figures = {**figures_of(samples), **hop_figures, **memory_mb}
    config = {
        "rounds": rounds,
        "quick": quick,
        "targets": names,
        "engine": " ".join(ENGINE_FLAGS),
        "cpus_kept_awake": arguments.keep_awake,
        "seconds_by_rate": {str(rate): seconds for rate, seconds in durations_s.items()},
    }
    raw = [_raw(sample) for sample in samples]
    hand_out(Report("bench overhead", config, figures, _table(names, figures), notes, raw), arguments)
    return 0


def figures_of(samples: Sequence[Sample]) -> dict[str, float]:
    """What each target adds to direct, by rate; Serai's figures without its name, as everything here is about it."""
    figures: dict[str, float] = {}
    direct = {(sample.round, sample.rate): sample for sample in samples if sample.target == "direct"}
    pooled: dict[tuple[str, int], list[float]] = defaultdict(list)
    added: dict[tuple[str, int], list[float]] = defaultdict(list)
    for sample in samples:
        key = (sample.target, sample.rate)
        pooled[key].extend(sample.outcome.latencies_ms)
        if sample.target != "direct":
            added[key].append(sample.p50_ms - direct[sample.round, sample.rate].p50_ms)
    for (target, rate), differences in added.items():
        figures[f"{_prefix(target)}added_p50_ms_{rate}rps"] = median_of(differences)
    for (target, rate), latencies in pooled.items():
        figures[f"{target}_p50_ms_{rate}rps"] = percentile(latencies, 0.5)
        if rate == _P99_RATE:
            figures[f"{target}_p99_ms_{rate}rps"] = percentile(latencies, 0.99)
            if target != "direct":
                difference = percentile(latencies, 0.99) - percentile(pooled["direct", rate], 0.99)
                figures[f"{_prefix(target)}added_p99_ms_{rate}rps"] = difference
    return {**figures, **_errors(samples)}


def _prefix(target: str) -> str:
    return "" if target == "serai" else f"{target}_"


def _errors(samples: Sequence[Sample]) -> dict[str, float]:
    errors: dict[str, float] = defaultdict(float)
    for sample in samples:
        errors[f"{sample.target}_errors"] += sum(sample.outcome.errors.values())
    return errors


def _measure_all(up: Stand, rounds: int, durations_s: Mapping[int, float]) -> list[Sample]:
    samples = []
    for number in range(rounds):
        for rate, duration_s in durations_s.items():
            for target in up.targets:
                # The same arrivals for all targets of a round: what differs is what is between client and engine.
                outcome = up.measure(target, _task(target, rate, duration_s, seed=number))
                sample = Sample(target.name, number, rate, outcome)
                say(f"round {number + 1}/{rounds}  {target.name:12} {rate:3} rps  p50 {sample.p50_ms:8.3f} ms")
                samples.append(sample)
    return samples


def _task(target: Target, rate: float, duration_s: float, seed: int) -> LoadTask:
    return LoadTask(
        port=target.port,
        path=CHAT_PATH,
        body=chat_body(tokens=1),
        headers=dict(target.headers),
        connections=_CONNECTIONS,
        rate=rate,
        warmup_s=_WARMUP_S,
        duration_s=duration_s,
        seed=seed,
    )


def _trace(up: Stand, duration_s: float) -> dict[str, float]:
    """Where the time goes, from a second Serai that writes traces: the one that is measured does not pay for them."""
    file = up.work / "trace.jsonl"
    target = up.start_serai("serai-traced", {"SERAI_TRACE_FILE": str(file), "SERAI_TRACE_RATIO": "1"})
    outcome = up.measure(target, _task(target, _TRACED_RATE, duration_s, seed=0))
    up.stop("serai-traced")  # what is still kept is written at the end
    figures = hops(read_spans(file).values()) if file.exists() else {}
    if not figures:
        up.notes.append("no breakdown by hop: Serai's trace file holds no whole trace")
        return {}
    client_ms = percentile(outcome.latencies_ms, 0.5) - figures["hop_ingress_whole_p50_ms"]
    return {**figures, "hop_client_http_p50_ms": client_ms}


def _notes(samples: Sequence[Sample]) -> list[str]:
    return [
        f"{sample.target} at {sample.rate} rps, round {sample.round + 1}: errors: {count} × {reason}"
        for sample in samples
        for reason, count in sorted(sample.outcome.errors.items())
    ]


def _raw(sample: Sample) -> dict[str, Any]:
    outcome = sample.outcome
    return {
        "target": sample.target,
        "round": sample.round,
        "rate": sample.rate,
        "latencies_ms": [round(latency, 3) for latency in outcome.latencies_ms],
        "late_sends_ms_max": round(outcome.late_sends_ms_max, 3),
        "errors": outcome.errors,
    }


def _table(names: Sequence[str], figures: Mapping[str, float]) -> list[list[str]]:
    head = ["milliseconds", *names, *[f"added by {name}" for name in names if name != "direct"]]
    shown = [(f"p50 at {rate} rps", f"p50_ms_{rate}rps") for rate in _FULL_S]
    shown.append((f"p99 at {_P99_RATE} rps", f"p99_ms_{_P99_RATE}rps"))
    rows = [
        [
            title,
            *[_cell(figures, f"{name}_{figure}") for name in names],
            *[_cell(figures, f"{_prefix(name)}added_{figure}") for name in names if name != "direct"],
        ]
        for title, figure in shown
    ]
    hop_rows = [
        [name.removesuffix("_p50_ms").replace("_", " "), f"{value:.3f}", *[""] * (len(head) - 2)]
        for name, value in figures.items()
        if name.startswith("hop_")
    ]
    return [head, *rows, *hop_rows]


def _cell(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.3f}" if name in figures else "–"
