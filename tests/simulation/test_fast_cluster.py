"""The fast simulator: what must hold in any run, and what theory says of the simple ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import mean

import pytest

from serai.engine_emulator.batching.settings import BatchMode, BatchSettings
from serai.ingress.routing import LeastLoaded, RoundRobin
from serai.performance.latency_model import Step
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.dispatch import (
    Arrived,
    BadDispatch,
    Effect,
    Event,
    Gate,
    Refuse,
    Send,
    SetTimer,
    StepEnded,
    TimerFired,
)
from serai.simulator.fast.instance import Instance, InstanceSpec, Phases, TokenGaps
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import (
    DISAGGREGATED,
    SYSTEMS,
    Overheads,
    System,
    disaggregated_system,
    ratios,
    whole_system,
)
from serai.simulator.fast.routed import Routed
from serai.simulator.fast.run import NS, Run
from serai.simulator.outcomes import LatencyDefinition, SloTarget, attainment
from serai.simulator.workloads.workload import Arrival


class Stub:
    """A latency model in round numbers: so much a step, so much a prompt token, so much a decoding sequence."""

    def __init__(self, step_s: float = 0.010, token_s: float = 0.0001, sequence_s: float = 0.0) -> None:
        self._step_s, self._token_s, self._sequence_s = step_s, token_s, sequence_s

    def step_s(self, step: Step) -> float:
        tokens = sum(chunk.new_tokens for chunk in step.chunks)
        return self._step_s + tokens * self._token_s + step.decode_sequences * self._sequence_s

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        return self._step_s + batch * (prompt_tokens - cached_tokens) * self._token_s

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        return self._step_s + sequences * self._sequence_s

    def kv_capacity_tokens(self) -> int:
        return 4096

    def kv_bytes_per_token(self) -> float:
        return 100_000.0


def arrivals(rate: float, count: int, seed: int = 1, prompt: int = 400, output: int = 40) -> list[Arrival]:
    random, at_s, found = Random(seed), 0.0, []
    for _ in range(count):
        at_s += random.expovariate(rate)
        found.append(Arrival(round(at_s * NS), random.randint(1, prompt), random.randint(1, output)))
    return found


def network() -> ClusterSettings:
    return ClusterSettings(network=CLUSTERS["a800"].network)


def system(name: str, instances: int = 4, model: Stub | None = None) -> System:
    model = model or Stub()
    if name in DISAGGREGATED:
        return disaggregated_system(name, model, 2, 2, 2)
    return whole_system(name, model, instances)


def spec(settings: BatchSettings, model: Stub | None = None) -> InstanceSpec:
    return InstanceSpec(model or Stub(), settings)


def run(name: str, work: Sequence[Arrival], **of_system: object) -> Run:
    chosen = system(name, **of_system)  # type: ignore[arg-type]
    return simulate(chosen.instances, work, chosen.dispatch(), network())


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_arrival_has_one_outcome_and_all_memory_comes_back(name: str) -> None:
    work = arrivals(rate=60, count=600)
    chosen = system(name)
    most: dict[int, int] = {}

    def watch(instance: Instance, now_ns: int) -> None:
        engine = instance.engine
        most[instance.number] = max(most.get(instance.number, 0), engine.kv_tokens_used)
        assert engine.kv_tokens_used <= engine.kv_tokens_total
        assert instance.reserved_tokens >= 0

    result = simulate(chosen.instances, work, chosen.dispatch(), network(), watch=watch)

    assert [o.arrival_ns for o in result.outcomes] == [a.at_ns for a in work]
    assert result.unfinished == 0
    for outcome, arrival in zip(result.outcomes, work, strict=True):
        assert not outcome.refused
        assert outcome.first_token_ns is not None
        assert outcome.finished_ns is not None
        assert arrival.at_ns < outcome.first_token_ns <= outcome.finished_ns
        assert (outcome.decode_began_ns is None) == (arrival.output_tokens == 1)
        if outcome.decode_began_ns is not None:
            assert outcome.first_token_ns <= outcome.decode_began_ns < outcome.finished_ns
            assert outcome.itl_max_ns is not None
            assert outcome.itl_max_ns * (arrival.output_tokens - 1) >= outcome.finished_ns - outcome.first_token_ns
    assert all(figures.kv_tokens_held == 0 for figures in result.instances)
    assert max(most.values()) > 0


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_work_has_the_same_hash(name: str) -> None:
    work = arrivals(rate=40, count=200)
    assert run(name, work).sha256 == run(name, work).sha256
    assert run(name, work).sha256 != run(name, arrivals(rate=40, count=200, seed=2)).sha256


def test_a_run_is_the_same_in_another_process_with_another_hash_seed() -> None:
    script = (
        "from serai.simulator.fast.presets import *\n"
        "from serai.simulator.fast.cluster import *\n"
        "from serai.simulator.fast.paper_clusters import CLUSTERS\n"
        "from serai.simulator.workloads.workload import Arrival\n"
        "work = [Arrival(n * 40_000_000, 100 + 37 * n % 500, 1 + 13 * n % 90) for n in range(150)]\n"
        "cluster = CLUSTERS['a800']\n"
        "system = disaggregated_system('mooncake', cluster.latency_model('codellama-34b'), 2, 2, 4)\n"
        "print(simulate(system.instances, work, system.dispatch(), ClusterSettings(cluster.network)).sha256)\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_littles_law_on_a_stable_run() -> None:
    work = arrivals(rate=30, count=3000)
    result = run("vllm-v1", work)
    in_system = [(o.arrival_ns, 1) for o in result.outcomes] + [(o.finished_ns or 0, -1) for o in result.outcomes]
    area, count, last_ns = 0.0, 0, 0
    for at_ns, change in sorted(in_system):
        area += count * (at_ns - last_ns)
        count, last_ns = count + change, at_ns
    mean_count = area / result.duration_ns
    mean_stay_ns = mean((o.finished_ns or 0) - o.arrival_ns for o in result.outcomes)
    assert count == 0
    assert mean_count == pytest.approx(len(work) / result.duration_ns * mean_stay_ns, rel=1e-9)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_wait_of_one_at_a_time_is_that_of_m_d_1(load: float) -> None:
    """Prompts of one length, one a batch, one token out: an M/D/1 queue, W = ρ·s / (2·(1 − ρ))."""
    service_s = 0.010 + 100 * 0.0001
    random, at_s, work = Random(7), 0.0, []
    for _ in range(20_000):
        at_s += random.expovariate(load / service_s)
        work.append(Arrival(round(at_s * NS), 100, 1))
    settings = BatchSettings(kv_tokens=4096, mode=BatchMode.PREFILL_FIRST, step_tokens_max=100, prefix_cache=False)
    result = simulate([spec(settings)], work, Routed(RoundRobin, [0]))
    waits = [((o.first_token_ns or 0) - o.arrival_ns) / NS - service_s for o in result.outcomes]
    assert mean(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)
    assert result.instances[0].busy_share == pytest.approx(load, rel=0.02)


def test_prefill_first_starves_decoding_and_mixed_steps_do_not() -> None:
    """A stream of prompts that fills an engine: whole prompts go before decoding, chunks leave it room."""
    work = [Arrival(n * 30_000_000, 240, 30) for n in range(60)]
    systems = [whole_system(name, Stub(), 1, kv_tokens=65536) for name in ("vllm", "sarathi")]
    first, mixed = (simulate(one.instances, work, one.dispatch()) for one in systems)
    longest = [max(o.itl_max_ns or 0 for o in r.outcomes) for r in (first, mixed)]
    assert longest[0] > 5 * longest[1]
    assert max((o.first_token_ns or 0) - o.arrival_ns for o in first.outcomes) < 0.4 * NS


def test_token_gaps_are_those_a_plain_count_finds() -> None:
    random, gaps, ends = Random(3), TokenGaps(), [0]
    for _ in range(300):
        ends.append(ends[-1] + random.randint(1, 1000))
        gaps.decoded(ends[-1])
        made = len(ends) - 1
        joined = random.randrange(made)
        since = ends[joined]
        plain = max(later - earlier for earlier, later in zip(ends[joined:], ends[joined + 1 :], strict=False))
        assert gaps.longest(since, joined) == (plain, ends[-1])
    assert gaps.longest(5, 300) == (0, 5)


def test_preempted_requests_end_and_their_gap_shows() -> None:
    settings = BatchSettings(kv_tokens=640, prefix_cache=False)
    work = [Arrival(n * 1_000_000, 100, 200) for n in range(6)]
    result = simulate([spec(settings)], work, Routed(RoundRobin, [0]))
    assert result.figures()["preemptions"] > 0
    assert result.unfinished == 0
    hit = [o for o in result.outcomes if o.preemptions]
    assert hit
    assert max(o.itl_max_ns or 0 for o in hit) > 0.3 * NS
    assert min(o.itl_max_ns or 0 for o in result.outcomes if not o.preemptions) < 0.1 * NS


def test_a_decode_instance_copies_or_computes() -> None:
    # Two requests: the second one's KV comes while the first one decodes, 100 kB a token over 32 GB/s at 0.6.
    work = [Arrival(0, 2000, 50), Arrival(1, 2000, 50)]
    chosen = disaggregated_system("distserve-ideal", Stub(), 1, 1, 2)
    ends = []
    for settings in (network(), replace(network(), copies_between_steps=True)):
        result = simulate(chosen.instances, work, chosen.dispatch(), settings)
        assert result.unfinished == 0
        ends.append(result.outcomes.columns["finished_ns"][0])
    copied_ns = 2000 * 100_000 / (32e9 * 0.6) * NS
    assert ends[1] - ends[0] == pytest.approx(copied_ns, rel=0.05)


def test_whoever_never_decoded_can_still_be_judged() -> None:
    # Preempted after its first token, a request of two tokens says the second by computing its prompt again.
    settings = BatchSettings(kv_tokens=112, mode=BatchMode.PREFILL_FIRST, prefix_cache=False, decode_reserve=0.0)
    work = [Arrival(n, 48, 2) for n in range(8)]
    result = simulate([spec(settings)], work, Routed(RoundRobin, [0]))
    assert result.figures()["preemptions"] > 0
    assert result.unfinished == 0
    assert 0 <= attainment(result.outcomes, SloTarget(5.0, 0.1), LatencyDefinition.STRICT) <= 1


def test_what_can_never_fit_is_refused_and_counted() -> None:
    work = [Arrival(0, 100, 10), Arrival(1, 5000, 10), Arrival(2, 100, 10)]
    for name in SYSTEMS:
        result = run(name, work)
        assert [o.refused for o in result.outcomes] == [False, True, False], name
        assert result.figures()["refused"] == 1


def test_a_queue_limit_keeps_requests_at_the_router() -> None:
    work = [Arrival(0, 50, 20) for _ in range(40)]
    chosen = whole_system("vllm-v1", Stub(), 2, queue_limit=4, policy="least-loaded")
    most = 0

    def watch(instance: Instance, now_ns: int) -> None:
        nonlocal most
        most = max(most, instance.engine.running + instance.engine.waiting)

    result = simulate(chosen.instances, work, chosen.dispatch(), watch=watch)
    assert result.unfinished == 0
    assert most == 4


def test_round_robin_and_least_loaded_are_the_ingress_own() -> None:
    work = [Arrival(n * 50_000_000, 100, 400 if n % 2 else 5) for n in range(60)]
    turn = simulate([spec(BatchSettings(4096))] * 2, work, Routed(RoundRobin, [0, 1]))
    assert [o.instance for o in turn.outcomes] == [n % 2 for n in range(60)]
    least = simulate([spec(BatchSettings(4096))] * 2, work, Routed(LeastLoaded, [0, 1]))
    long_ones = [o.instance for o in least.outcomes if o.output_tokens == 400]
    assert 0.3 < mean(long_ones) < 0.7


def test_several_routers_see_each_others_load_late() -> None:
    """Four routers that each know only their own requests spread them worse than one, and better with reports."""
    work = arrivals(rate=150, count=2500, prompt=300, output=100)

    def spread(routers: int, delay_s: float) -> float:
        chosen = whole_system("vllm-v1", Stub(sequence_s=0.002), 8, policy="least-loaded", routers=routers)
        result = simulate(chosen.instances, work, chosen.dispatch(), ClusterSettings(status_delay_s=delay_s))
        return mean((o.finished_ns or 0) - o.arrival_ns for o in result.outcomes)

    assert spread(1, 0.0) < spread(4, 0.0) * 1.02
    assert spread(4, 0.0) < spread(4, 5.0)


def test_a_prefix_in_the_cache_is_found() -> None:
    keys = tuple(range(1, 21))
    work = [Arrival(n * 200_000_000, 330, 5, block_keys=keys) for n in range(10)]
    result = run("vllm-v1", work, instances=1)
    assert [o.cached_tokens for o in result.outcomes] == [0] + [320] * 9
    assert result.figures()["prefix_hit_share"] == pytest.approx(0.9 * 320 / 330)


def test_phases_join_steps_without_gaps() -> None:
    phases = Phases()
    phases.add("prefill", 0, 5)
    phases.add("decode", 5, 9)
    phases.add("decode", 9, 12)
    phases.add("decode", 20, 22)
    assert phases.intervals() == [(0, 5, "prefill"), (5, 12, "decode"), (20, 22, "decode")]


def test_phases_of_a_run_are_its_busy_time() -> None:
    result = run("vllm", arrivals(rate=20, count=200))
    for phases, figures in zip(result.phases, result.instances, strict=True):
        intervals = phases.intervals()
        assert all(one[1] <= later[0] for one, later in pairwise(intervals))
        busy_ns = sum(ended - began for began, ended, _ in intervals)
        assert busy_ns / result.duration_ns == pytest.approx(figures.busy_share, rel=1e-6)


def test_a_drain_cuts_a_run_that_would_go_on() -> None:
    work = arrivals(rate=1000, count=2000)
    chosen = system("vllm", 1)
    result = simulate(chosen.instances, work, chosen.dispatch(), ClusterSettings(drain_s=1.0))
    assert result.unfinished > 100
    assert result.duration_ns <= work[-1].at_ns + NS
    assert len(result.outcomes) == 2000
    slo = SloTarget(1.0, 0.1)
    assert attainment(result.outcomes, slo, LatencyDefinition.STRICT) < 0.5


def test_arrivals_out_of_order_are_an_error() -> None:
    with pytest.raises(ValueError, match="not in order"):
        run("vllm", [Arrival(5, 1, 1), Arrival(4, 1, 1)])


class Scripted:
    """A policy for tests: gates, timers, refusals, statuses, as told."""

    watches_steps = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, Event]] = []

    def handle(self, event: Event, now_ns: int) -> Iterator[Effect]:
        self.seen.append((now_ns, event))
        match event:
            case Arrived(request) if request.client == "unwanted":
                yield Refuse(request.number)
            case Arrived(request):
                yield Gate(0, False)
                yield Send(request.number, 0)
                if request.number == 1:
                    yield SetTimer(now_ns + 500_000_000, 9)
            case TimerFired():
                yield Gate(0, True)


GATED = BatchSettings(4096, BatchMode.PHASE_GATED)


def test_gates_timers_and_refusals_of_a_policy() -> None:
    policy = Scripted()
    work = [Arrival(0, 100, 30), Arrival(10_000_000, 100, 5), Arrival(20_000_000, 100, 5, client="unwanted")]
    work_open = simulate([spec(GATED)], work[:1], Scripted())
    assert work_open.unfinished == 1, "the gate was never opened"

    result = simulate([spec(GATED)], work, policy)
    first, second, unwanted = result.outcomes
    assert unwanted.refused
    assert unwanted.instance == -1
    assert first.first_token_ns is not None
    assert second.first_token_ns is not None
    assert first.first_token_ns >= 510_000_000
    assert [event.key for _, event in policy.seen if isinstance(event, TimerFired)] == [9]


def test_status_tells_every_token_and_comes_as_late_as_it_should() -> None:
    policy = Scripted()
    work = [Arrival(0, 100, 30), Arrival(1, 50, 7)]
    result = simulate([spec(GATED)], work, policy, ClusterSettings(status_delay_s=0.25))
    statuses = [(now_ns, event) for now_ns, event in policy.seen if isinstance(event, StepEnded)]
    assert statuses
    assert all(now_ns == event.ended_ns + 250_000_000 for now_ns, event in statuses)
    said: dict[int, int] = {}
    running: set[int] = set()
    for _, status in statuses:
        if status.decoded:
            for number in running:
                said[number] += 1
        for number in status.first:
            said[number] = 1
            running.add(number)
        running -= set(status.ended)
    assert said == {0: 30, 1: 7}
    assert result.unfinished == 0


def test_a_policy_that_sends_twice_is_told() -> None:
    class Twice(Scripted):
        def handle(self, event: Event, now_ns: int) -> Iterator[Effect]:
            if isinstance(event, Arrived):
                yield Send(event.request.number, 0)
                yield Send(event.request.number, 0)

    with pytest.raises(BadDispatch, match="before"):
        simulate([spec(GATED)], [Arrival(0, 1, 1)], Twice())


def test_a_slower_engine_is_slower_by_what_was_asked() -> None:
    model = CLUSTERS["a800"].latency_model("codellama-34b")
    work = [Arrival(0, 100, 11)]
    plain = whole_system("vllm", model, 1, overheads=Overheads(step_s=0.0))
    slow = whole_system("vllm", model, 1, overheads=Overheads(step_s=0.018))
    ends = [simulate(s.instances, work, s.dispatch()).outcomes[0].finished_ns or 0 for s in (plain, slow)]
    assert ends[1] - ends[0] == pytest.approx(11 * 0.018 * NS, rel=1e-4)


def test_ratios_of_disaggregation() -> None:
    assert ratios(8, 4, "mooncake") == ratios(8, 4, "mooncake-ideal") == [(n, 8 - n) for n in range(1, 8)]
    assert ratios(8, 4, "distserve-ideal") == [(2, 6), (4, 4), (6, 2)]
    assert ratios(8, 4, "distserve") == [(4, 4)]
    assert ratios(8, 1, "distserve") == ratios(8, 1, "distserve-ideal") == ratios(9, 3, "distserve") == []
    with pytest.raises(ValueError, match="cannot be spread evenly"):
        disaggregated_system("distserve-ideal", Stub(), 1, 7, 4)
    for prefill, decode, per_node in ((1, 7, 4), (3, 3, 3)):
        with pytest.raises(ValueError, match="pairs of one prefill and one decode instance on a node"):
            disaggregated_system("distserve", Stub(), prefill, decode, per_node)
