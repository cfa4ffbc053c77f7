"""The parts of `serai place bench` and `simulate`: fluid queues, traces, the replay's own check, files of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from serai.bench.place.fluid import QUEUE_SHARE, FluidQueue
from serai.bench.place.opentela_case import Pool, demands, measured_options, score
from serai.bench.place.replay import Engine, OverCommitted, Start, Stop, replay
from serai.bench.place.simulate import read_trace
from serai.bench.place.study import compare, fleet_of
from serai.bench.place.traces import RateTrace, TracedModel, published_marginals
from serai.placer.demand import LengthSpread
from serai.placer.fleet import Fleet, Node
from serai.placer.options import Option
from serai.runtime.fields import BadInput

ABOUT = LengthSpread.about(100)
SMALL = TracedModel("m", "meta-llama/Llama-3.1-8B", ABOUT, ABOUT)


def test_a_queue_within_its_capacity_serves_everybody() -> None:
    queue = FluidQueue(5.0)
    for _ in range(60):
        queue.step(600, 10.0, 60)
    assert queue.met == pytest.approx(queue.arrived)


def test_in_overload_the_share_that_is_served_is_in_time_and_the_rest_is_turned_away() -> None:
    queue = FluidQueue(5.0)
    for _ in range(60):
        queue.step(1200, 10.0, 60)
    assert queue.met == pytest.approx(36_000)
    assert queue.waiting == pytest.approx(QUEUE_SHARE * 50)
    assert queue.met + queue.waiting + queue.turned_away == pytest.approx(queue.arrived)


def test_one_step_is_as_exact_as_many_while_the_capacity_stays() -> None:
    one, many = FluidQueue(5.0), FluidQueue(5.0)
    for arriving in (1200.0, 300.0, 900.0, 0.0):
        one.step(arriving, 10.0, 60)
        for _ in range(12):
            many.step(arriving / 12, 10.0, 5)
    assert one.met == pytest.approx(many.met)


def test_the_synthetic_trace_has_the_published_marginals() -> None:
    trace = published_marginals(1, hours=24, mean_s=150)
    peaks = sorted((trace.peak_over_mean(place, 1) for place in range(142)), reverse=True)
    assert len(trace.models) == 142
    assert 50 <= peaks[0] <= 110
    assert peaks[14] >= 13
    busiest = sorted((trace.mean_s(place) for place in range(142)), reverse=True)
    assert busiest[0] / busiest[9] == pytest.approx(10, rel=0.15)
    assert published_marginals(1, hours=1).counts == published_marginals(1, hours=1).counts


class _Greedy:
    """A policy that gives a node away twice."""

    every_s = 60.0

    def begin(self) -> Sequence[Start]:
        return [Start(Option("m", "a100-sxm-80", 1, 1.0), "n")] * 2

    def decide(self, now_s: float, seen: Mapping[str, int], engines: Sequence[Engine]) -> Sequence[Start | Stop]:
        return ()


class _Takes(_Greedy):
    """After five minutes another model gets the only GPU."""

    def begin(self) -> Sequence[Start]:
        return [Start(Option(SMALL.name, "a100-sxm-80", 1, 1.0), "n")]

    def decide(self, now_s: float, seen: Mapping[str, int], engines: Sequence[Engine]) -> Sequence[Start | Stop]:
        if now_s != 300.0:
            return ()
        return [Stop(engines[0].id), Start(Option("other", "a100-sxm-80", 1, 1.0), "n", waits=True)]


def test_the_replay_refuses_a_policy_that_gives_gpus_away_twice() -> None:
    trace = RateTrace("t", (SMALL,), ((1, 1),))
    with pytest.raises(OverCommitted, match="node n runs engines of 2 GPUs"):
        replay(trace, Fleet([Node("n", "a100", 1)]), _Greedy(), 5.0)


def test_when_demand_changes_sides_the_dynamic_placement_follows() -> None:
    models = (SMALL, TracedModel("other", SMALL.card, ABOUT, ABOUT))
    quiet, busy = [60] * 60, [18_000] * 60
    before = RateTrace("t", models, (tuple(busy + busy), tuple(quiet + quiet)))
    trace = RateTrace("t", models, (tuple(busy + quiet), tuple(quiet + busy)))
    fleet = fleet_of({"a100-sxm-80": 8})
    compared = compare(before, trace, fleet, 0.0, lambda _: None)
    stays, moves = compared.static, compared.dynamic
    assert compared.usual.attainment <= stays.attainment
    assert moves.attainment > stays.attainment + 0.1
    assert moves.gpu_hours <= fleet.gpus * 2
    assert 0 < max(moves.moves_by_hour) <= 120


def test_shares_that_do_not_fit_speeds_are_paid_for() -> None:
    options = {(o.model, o.gpu): o for o in measured_options()}
    rates = {d.model: options[d.model, "gh200-96"].requests_s for d in demands()}
    fair = {d.model: [Pool(options[d.model, "gh200-96"], 4, rates[d.model], 1.0)] for d in demands()}
    split = {m: [Pool(p[0].option, 3, p[0].rate, 0.5), Pool(p[0].option, 1, p[0].rate, 0.5)] for m, p in fair.items()}
    assert score(split).total_rps == pytest.approx(score(fair).total_rps / 2)


def test_files_of_traces_are_read_and_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    head = "minute,model,requests,card\n"
    file.write_text(head + "0,a,5,meta-llama/Llama-3.1-8B\n2,a,7,meta-llama/Llama-3.1-8B\n")
    assert read_trace(file, ABOUT, ABOUT).counts == ((5, 0, 7),)
    file.write_text(head + "0,a,many,meta-llama/Llama-3.1-8B\n")
    with pytest.raises(BadInput, match="line 2, field `requests`"):
        read_trace(file, ABOUT, ABOUT)
    file.write_text(head + "0,a,5,meta-llama/Llama-9\n")
    with pytest.raises(BadInput, match="field `card`"):
        read_trace(file, ABOUT, ABOUT)
    file.write_text("minute,model\n")
    with pytest.raises(BadInput, match="lacks card, requests"):
        read_trace(file, ABOUT, ABOUT)


def test_gpus_that_change_hands_are_counted_once() -> None:
    trace = RateTrace("t", (SMALL, TracedModel("other", SMALL.card, ABOUT, ABOUT)), ((60,) * 10, (60,) * 10))
    fleet = Fleet([Node("n", "a100", 1)])
    course = replay(trace, fleet, _Takes(), 5.0)
    assert (course.starts, course.stops) == (1, 1)
    assert course.gpu_hours == pytest.approx(10 / 60)
