"""One run of a scenario: a system, a rate, a seed; and many of them in several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from serai.bench.simulate.scenario import Scenario, Variant, read_scenario
from serai.simulator.fast.cluster import simulate
from serai.simulator.fast.run import NS, Run
from serai.simulator.outcomes import LatencyDefinition, attainment
from serai.simulator.summary import Costs, Spread, Summary, summary

Key = tuple[int, float | None, int]
"""Place of the variant, rate (None: as written), seed."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one run came to. Small, so that it travels between processes."""

    variant: int
    rate: float | None
    seed: int
    attainment: Mapping[LatencyDefinition, float]
    figures: Mapping[str, float]
    sha256: str
    wall_s: float


def run_once(scenario: Scenario, variant: Variant, rate: float | None, seed: int, *, details: bool = True) -> Run:
    """The run itself. Without `details`, energy and phases are not kept, which makes it faster by a third."""
    instances, settings = variant.system.instances, scenario.cluster
    if not details:
        instances = [replace(spec, energy_j=None) for spec in instances]
        settings = replace(settings, keep_phases=False)
    return simulate(instances, scenario.workload_at(rate, seed), variant.system.dispatch(), settings)


def measured(scenario: Scenario, key: Key) -> Point:
    """One run, judged."""
    place, rate, seed = key
    began_s = time.perf_counter()
    scanning = bool(scenario.rates)
    run = run_once(scenario, scenario.variants[place], rate, seed, details=not scanning)
    found = {
        definition: attainment(run.outcomes, scenario.slo, definition, scenario.window)
        for definition in LatencyDefinition
    }
    figures = run.figures() if scanning else {**run.figures(), **latency_figures(summarised(scenario, run))}
    sha256 = "" if scanning else run.sha256
    return Point(place, rate, seed, found, figures, sha256, time.perf_counter() - began_s)


def summarised(scenario: Scenario, run: Run) -> Summary:
    """The run's figures over the requests that count. Costs are of the whole run, as is its throughput."""
    figures = run.figures()
    window = scenario.window if scenario.warm_up_s else None
    return summary(run.outcomes, scenario.slo, window=window, costs=Costs(figures["gpu_s"], figures["energy_j"]))


def latency_figures(found: Summary) -> dict[str, float]:
    """A summary, flat, with units."""
    flat: dict[str, float] = {
        "attainment_strict": found.strict.attainment,
        "attainment_industry": found.industry.attainment,
        "requests_per_s": found.requests_per_s,
        "output_tokens_per_s": found.output_tokens_per_s,
        "cached_share": found.cached_share,
        "gpu_s_per_1k_tokens": found.gpu_s_per_1k_tokens,
        "energy_j_per_token": found.energy_j_per_token,
    }
    spreads: dict[str, Spread] = {
        "ttft_strict": found.strict.ttft,
        "ttft_industry": found.industry.ttft,
        "tpot_strict": found.strict.tpot,
        "tpot_industry": found.industry.tpot,
        "whole": found.whole,
        "longest_gap": found.longest_gap,
    }
    for name, spread in spreads.items():
        flat |= {f"{name}_{part}": getattr(spread, part) for part in ("mean_s", "p50_s", "p90_s", "p99_s")}
    return flat


def simulated_s(run: Run) -> float:
    """How long the run was in virtual time."""
    return run.duration_ns / NS


class Points:
    """Runs by key, each made once, in up to `jobs` processes."""

    def __init__(self, scenario: Scenario, jobs: int, said: Callable[[Point], None]) -> None:
        self.known: dict[Key, Point] = {}
        self._scenario = scenario
        self._jobs = jobs
        self._said = said

    def make(self, keys: Sequence[Key]) -> None:
        """Run what is not known yet."""
        wanted = [key for key in keys if key not in self.known]
        for point in self._made(wanted):
            self.known[point.variant, point.rate, point.seed] = point
            self._said(point)

    def __getitem__(self, key: Key) -> Point:
        self.make([key])
        return self.known[key]

    def _made(self, keys: Sequence[Key]) -> Iterator[Point]:
        if self._jobs == 1 or len(keys) < 2:
            yield from (measured(self._scenario, key) for key in keys)
            return
        # Fresh processes: what was imported here (a progress bar's threads, say) does not go along.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self._jobs, len(keys)), mp_context=context) as pool:
            file, seeds = self._scenario.file, len(self._scenario.seeds)
            waiting = {pool.submit(_measured_in_child, file, seeds, key) for key in keys}
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)


@cache
def _scenario(file: str, seeds: int) -> Scenario:
    return read_scenario(Path(file), seeds)


def _measured_in_child(file: str, seeds: int, key: Key) -> Point:
    return measured(_scenario(file, seeds), key)
