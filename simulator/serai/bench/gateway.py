"""`serai bench gateway`: how much goes through Serai, beside the engine alone and other gateways, in one run.

Rounds go through all targets one after the other (direct, serai, peers, direct, …); a figure is the median over
rounds. Unary figures are answers of one token, which the engine gives at once; streams run at 50 tokens a second.
Beside rates stands what came of a second of processor time of the gateway's processes (the engine's and the load's are
not counted). `serai_w2` is Serai with two processes of its ingress, on the same cores.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serai.bench.load import LoadOutcome, LoadTask
from serai.bench.percentiles import median_of, percentile
from serai.bench.processes import BenchFailed
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import CHAT_PATH, ENGINE_FLAGS, Stand, Target, chat_body, stand
from serai.bench.targets import add_target_arguments, check_target_arguments, chosen_targets, end_on_sigterm

_SHORT_STREAM_TOKENS = 8
_LONG_STREAM_TOKENS = 200
_FULL_ROUNDS = 5
_QUICK_TARGETS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """How long a measure takes, in seconds. Connections start spread over `ramp_s` of the warm-up."""

    warmup_s: float
    ramp_s: float
    duration_s: float

    def stretched(self, factor: float) -> Times:
        """`factor` times as long."""
        return Times(self.warmup_s * factor, self.ramp_s * factor, self.duration_s * factor)


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of load, and the figure that comes of it."""

    figure: str
    connections: int
    tokens: int
    stream: bool
    full: Times
    quick: Times
    value: Callable[[LoadOutcome], float]
    per_cpu: str = ""
    """The figure of what came of a second of processor time, for rates."""

    def task(self, target: Target, times: Times) -> LoadTask:
        """The load on `target`."""
        return LoadTask(
            port=target.port,
            path=CHAT_PATH,
            body=chat_body(tokens=self.tokens, stream=self.stream),
            headers=dict(target.headers),
            connections=self.connections,
            warmup_s=times.warmup_s,
            ramp_s=times.ramp_s,
            duration_s=times.duration_s,
            tokens_expected=self.tokens if self.stream else 0,
        )


def _rate(outcome: LoadOutcome) -> float:
    return outcome.completed / outcome.measured_s


def _token_rate(outcome: LoadOutcome) -> float:
    return outcome.tokens / outcome.measured_s


def _p50(outcome: LoadOutcome) -> float:
    return percentile(outcome.latencies_ms, 0.5)


def _first_token_p50(outcome: LoadOutcome) -> float:
    return percentile(outcome.first_tokens_ms, 0.5)


# Long streams start spread over as long as one lasts, so that their ends are spread too.
MEASURES = (
    Measure("unary_rps_c32", 32, 1, False, Times(1.0, 0.0, 4.0), Times(0.2, 0.0, 0.6), _rate, "unary_per_cpu_s_c32"),
    Measure("unary_p50_ms_c1", 1, 1, False, Times(0.5, 0.0, 3.0), Times(0.1, 0.0, 0.3), _p50),
    Measure(
        "stream_ttft_p50_ms_c32",
        32, _SHORT_STREAM_TOKENS, True, Times(1.0, 0.2, 4.0), Times(0.3, 0.2, 0.6), _first_token_p50,
    ),
    Measure(
        "stream_tok_s_c256",
        256, _LONG_STREAM_TOKENS, True, Times(5.0, 4.0, 6.0), Times(1.0, 0.8, 1.2), _token_rate,
        "stream_tok_per_cpu_s_c256",
    ),
    Measure(
        "stream_tok_s_c1000",
        1000, _LONG_STREAM_TOKENS, True, Times(5.0, 4.0, 6.0), Times(2.0, 1.6, 1.2), _token_rate,
        "stream_tok_per_cpu_s_c1000",
    ),
)  # fmt: skip
_PER_CPU = {measure.figure: measure.per_cpu for measure in MEASURES if measure.per_cpu}
_FREE_TIMEOUT_S, _FREE_TIMEOUT_QUICK_S = 10.0, 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measure of one target in one round."""

    target: str
    round: int
    figure: str
    value: float
    completed: int
    cpu_s: float
    """Processor time that the gateway's processes took in the measured time."""
    outcome: LoadOutcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench gateway`."""
    parser.description = __doc__
    add_report_arguments(parser)
    add_target_arguments(parser)
    parser.add_argument(
        "--serai-workers",
        type=_workers,
        metavar="N,…",
        help="measure Serai with so many processes of its ingress (1, and as many as there are cores; quick: 1)",
    )
    parser.add_argument(
        "--measures",
        type=_measures,
        default=MEASURES,
        metavar="NAME,…",
        help=f"only these of: {', '.join(measure.figure for measure in MEASURES)}",
    )


def _workers(text: str) -> tuple[int, ...]:
    numbers = tuple([int(word) for word in text.split(",") if word.isdigit()])
    if not numbers or len(numbers) < len(text.split(",")) or not all(1 <= number <= 64 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 to 64")
    return numbers


def _measures(text: str) -> tuple[Measure, ...]:
    known = {measure.figure: measure for measure in MEASURES}
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no measure {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple([known[name] for name in names])


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the stand does not come up."""
    check_target_arguments(arguments)
    end_on_sigterm()
    rounds = arguments.rounds or (1 if arguments.quick else _FULL_ROUNDS)
    cores = len(os.sched_getaffinity(0))
    workers = arguments.serai_workers or ((1,) if arguments.quick else tuple(sorted({1, cores})))
    free_timeout_s = _FREE_TIMEOUT_QUICK_S if arguments.quick else _FREE_TIMEOUT_S
    try:
        with stand(
            chosen_targets(arguments),
            keep_awake_cores=cores if arguments.keep_awake else 0,
            free_timeout_s=free_timeout_s,
            serai_workers=workers,
        ) as up:
            times = _times(len(up.targets), arguments)
            samples = _measure_all(up, arguments.measures, rounds, times)
            memory = {target.name: target.rss_mb for target in up.targets}
            names = [target.name for target in up.targets]
            notes = [*up.notes, *_notes(samples)]
    except BenchFailed as failure:
        say(f"serai bench gateway: {failure}")
        return 1
    config = {
        "rounds": rounds,
        "quick": arguments.quick,
        "targets": names,
        "engine": " ".join(ENGINE_FLAGS),
        "cpus_kept_awake": arguments.keep_awake,
        "measures": [_describe(measure, times[measure.figure]) for measure in arguments.measures],
    }
    figures = figures_of(samples, memory)
    raw = [{**asdict(sample), "outcome": _without_samples(sample.outcome)} for sample in samples]
    hand_out(Report("bench gateway", config, figures, _table(names, figures), notes, raw), arguments)
    return 0


def figures_of(samples: Sequence[Sample], memory_mb: Mapping[str, float]) -> dict[str, float]:
    """Medians over rounds, by target and figure; errors are sums."""
    values: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, float] = defaultdict(float)
    for sample in samples:
        values[f"{sample.target}_{sample.figure}"].append(sample.value)
        if sample.figure in _PER_CPU and sample.cpu_s:
            per_cpu_s = sample.value * sample.outcome.measured_s / sample.cpu_s
            values[f"{sample.target}_{_PER_CPU[sample.figure]}"].append(per_cpu_s)
        errors[f"{sample.target}_errors"] += sum(sample.outcome.errors.values())
    figures = {name: median_of(of_rounds) for name, of_rounds in values.items()}
    return {**figures, **{f"{name}_rss_mb": value for name, value in memory_mb.items()}, **errors}


def _times(targets: int, arguments: argparse.Namespace) -> dict[str, Times]:
    """Times by figure. Few targets leave each more of the minute that `--quick` may take."""
    if not arguments.quick:
        return {measure.figure: measure.full.stretched(arguments.stretch) for measure in MEASURES}
    factor = arguments.stretch * max(1.0, _QUICK_TARGETS / targets)
    return {measure.figure: measure.quick.stretched(factor) for measure in MEASURES}


def _measure_all(up: Stand, measures: Sequence[Measure], rounds: int, times: Mapping[str, Times]) -> list[Sample]:
    samples = []
    for number in range(rounds):
        for measure in measures:
            for target in up.targets:
                sample = _measure(up, target, measure, number, times[measure.figure])
                say(f"round {number + 1}/{rounds}  {target.name:12} {measure.figure:24} {sample.value:10.2f}")
                samples.append(sample)
    return samples


def _measure(up: Stand, target: Target, measure: Measure, number: int, times: Times) -> Sample:
    with _CpuMeter(target, times) as meter:
        outcome = up.measure(target, measure.task(target, times))
    taken_s = meter.taken_s
    return Sample(target.name, number, measure.figure, measure.value(outcome), outcome.completed, taken_s, outcome)


class _CpuMeter:
    """Reads the processor time of processes when the load's measured time begins, and when it ends."""

    def __init__(self, target: Target, times: Times) -> None:
        self._target = target
        self._times = times
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.taken_s = 0.0

    def __enter__(self) -> _CpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.join()

    def _read(self) -> None:
        time.sleep(self._times.warmup_s)
        before_s = self._target.cpu_s
        time.sleep(self._times.duration_s)
        self.taken_s = self._target.cpu_s - before_s


def _notes(samples: Sequence[Sample]) -> list[str]:
    notes = []
    for sample in samples:
        where = f"{sample.target} {sample.figure}, round {sample.round + 1}"
        if sample.outcome.errors:
            what = ", ".join(f"{count} × {reason}" for reason, count in sorted(sample.outcome.errors.items()))
            notes.append(f"{where}: errors: {what}")
        if sample.outcome.load_cpu_share > 0.9:
            share = sample.outcome.load_cpu_share
            notes.append(f"{where}: the load generator took {share:.0%} of a core and may be what was measured")
    return notes


def _describe(measure: Measure, times: Times) -> dict[str, Any]:
    return {
        "figure": measure.figure,
        "connections": measure.connections,
        "tokens": measure.tokens,
        "stream": measure.stream,
        **asdict(times),
    }


def _without_samples(outcome: LoadOutcome) -> dict[str, Any]:
    """An outcome with percentiles in place of its samples."""
    fields = asdict(outcome)
    for name in ("latencies_ms", "first_tokens_ms"):
        samples = fields.pop(name)
        fields[name] = {f"p{share}": percentile(samples, share / 100) for share in (50, 90, 99) if samples}
    return fields


def _table(names: Sequence[str], figures: Mapping[str, float]) -> list[list[str]]:
    rows = [name for measure in MEASURES for name in (measure.figure, measure.per_cpu) if name]
    rows += ["rss_mb", "errors"]
    shown = [row for row in rows if any(f"{name}_{row}" in figures for name in names)]
    cells = [[figure, *[_cell(figures, f"{name}_{figure}") for name in names]] for figure in shown]
    return [["", *names], *cells]


def _cell(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:,.2f}" if name in figures else "–"
