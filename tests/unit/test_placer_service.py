"""The placer's shell against pools that the test plays: who acts, what is told, what is refused, what is left alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.placement import (
    ASSIGNMENT_LABEL,
    ActionKind,
    ApplyRequest,
    Assignment,
    Assignments,
    PlacementRequest,
    PlacementWord,
    PlanRecord,
    PlanState,
    PoolReport,
    PoolRun,
    RunState,
)
from serai.contracts.session_record import GpuDevice, Lifecycle
from serai.contracts.subjects import ASSIGN, PLACEMENT_APPLY, PLACEMENT_EXPLAIN, POOL
from serai.placer.leftovers import ENDED_KEPT_S, UNKNOWN_KEPT_S
from serai.placer.placement_file import PlacementFile, read_placement
from serai.placer.service import Placer
from serai.placer.settings import PlacerSettings
from serai.runtime.bus import BusError, Message
from serai.worker_agent.pool_book import Over, PoolBook, Serves, Told
from unit.fakes import FakeBus, record_of

TEXT = """
models:
  a: {engine: emulated, min_replicas: 1, instances: [{gpu: h100, requests_s: 2, load_s: 1}]}
  b: {engine: emulated, demand: {requests_s: 2}, instances: [{gpu: h100, requests_s: 2, load_s: 1}]}
rules: {mode: MODE, cool_down_s: 0, drain_s: 5, gpu_share_per_change: 1}
"""


class Keys:
    """A bucket: compare-and-set by revision."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.away = False

    async def get(self, key: str) -> tuple[bytes, int] | None:
        if self.away:
            raise BusError("no answer in 5 s")
        return self.values.get(key)

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        if self.away:
            raise BusError("no answer in 5 s")
        if revision != self.values.get(key, (b"", 0))[1]:
            return False
        self.values[key] = (value, revision + 1)
        return True

    async def entries(self) -> dict[str, bytes]:
        return {key: value for key, (value, _) in self.values.items()}

    async def delete(self, key: str) -> None:
        del self.values[key]


@dataclass
class PlayedPool:
    """A pool agent as far as messages go; its engines start and drain at once."""

    bus: FakeBus
    name: str
    book: PoolBook
    instance: str = "i1"
    sequence: int = 0
    told: list[Assignments] = field(default_factory=list)

    def answer(self, data: bytes) -> bytes:
        told = decode(Assignments, data)
        self.told.append(told)
        effects = self.book.handle(Told(told), 0.0)
        refused = next((str(effect.why) for effect in effects if type(effect).__name__ == "Refused"), "")
        return encode(replace(self.report(), refused=refused))

    def go_on(self) -> None:
        """What starts serves, what drains has gone."""
        for run in self.book.runs(0.0):
            if run.state is RunState.STARTING:
                self.book.handle(Serves(run.assignment.id), 0.0)
            elif run.state is RunState.DRAINING:
                self.book.handle(Over(run.assignment.id), 0.0)

    def report(self) -> PoolReport:
        self.sequence += 1
        gpus = [GpuDevice("u", "H100")]
        runs = [replace(run, session=f"s-{run.assignment.id}", age_s=100.0) for run in self.book.runs(0.0)]
        return PoolReport(
            self.name, self.instance, self.sequence, gpu="H100", gpus=gpus, engines=["emulated"],
            generation=self.book.generation, runs=runs, host=self.name,
        )  # fmt: skip

    @property
    def models(self) -> list[str]:
        return [run.assignment.model for run in self.book.runs(0.0) if run.state is not RunState.FAILED]


class Site:
    """One placer, or several, and pools that are played."""

    def __init__(self, folder: Path, mode: str, pools: int = 2) -> None:
        self.bus = FakeBus()
        self.placement, self.pool_keys = Keys(), Keys()
        (folder / "placement.yaml").write_text(TEXT.replace("MODE", mode))
        self.file: PlacementFile = read_placement(TEXT.replace("MODE", mode), "placement.yaml")
        self.settings = PlacerSettings(
            placement_file=folder / "placement.yaml", solve_s=0.0, settle_s=0.0, plan_every_s=0.05, lease_s=3.0
        )
        self.pools = [self.add(f"p{number}") for number in range(pools)]
        self.placer = self.make()

    def add(self, name: str) -> PlayedPool:
        pool = PlayedPool(self.bus, name, PoolBook(name, 1, {"emulated": 1}.keys()))
        self.bus.answers[ASSIGN.of(name)] = pool.answer
        return pool

    def make(self) -> Placer:
        made = Placer(self.settings, lambda: self.file, self.bus, self.placement, self.pool_keys)  # type: ignore[arg-type]
        made.copy.synced = True
        return made

    async def look(self, placer: Placer | None = None, times: int = 1) -> None:
        """Pools speak, the placer looks."""
        placer = placer or self.placer
        placer._news |= placer._files.again()
        for _ in range(times):
            for pool in self.pools:
                report = pool.report()
                placer.on_pool(Message(POOL.of(pool.name), encode(report)))
                for run in report.runs:
                    self.says(placer, run)
            await placer.lease.beat()
            if not placer._blind():
                placer._planned_at_s = -1e9
                await placer._look()
            for pool in self.pools:
                pool.go_on()

    @staticmethod
    def says(placer: Placer, run: PoolRun) -> None:
        """Its session's own word."""
        serving = run.state is RunState.SERVING
        lifecycle = Lifecycle.SERVING if serving else Lifecycle.LEFT
        if serving or run.state is RunState.FAILED:
            record = record_of(run.session, lifecycle, model=run.assignment.model)
            placer.copy.replica.merge(record, time.monotonic(), heard=True)

    def ask(self, handler: Callable[[Message], None], subject: str, question: object) -> PlacementWord:
        self.bus.published.clear()
        handler(Message(subject, encode(question), "reply"))
        return decode(PlacementWord, self.bus.published[-1].payload)

    def explain(self, model: str = "", placer: Placer | None = None) -> PlacementWord:
        placer = placer or self.placer
        return self.ask(placer.answers.on_explain, PLACEMENT_EXPLAIN.of_site("local"), PlacementRequest(model))

    def apply(self, generation: int) -> PlacementWord:
        return self.ask(self.placer.answers.on_apply, PLACEMENT_APPLY.of_site("local"), ApplyRequest(generation))


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, "automatic")


@pytest.fixture
def by_hand(tmp_path: Path) -> Site:
    return Site(tmp_path, "by-hand")


def test_engines_are_told_and_kept_first(site: Site) -> None:
    async def work() -> None:
        await site.look(times=3)
        assert sorted(site.pools[0].models + site.pools[1].models) == ["a", "b"]
        for pool in site.pools:
            kept = decode(Assignments, site.pool_keys.values[pool.name][0])
            assert kept == pool.told[-1]
        generations = [told.generation for pool in site.pools for told in pool.told]
        assert len(set(generations)) == len(generations)
        record = decode(PlanRecord, site.placement.values["local"][0])
        assert record.generation >= max(generations)
        assert site.explain().plan.state is PlanState.DONE  # type: ignore[union-attr]

    run(work)


def test_nothing_is_told_without_a_yes(by_hand: Site) -> None:
    async def work() -> None:
        await by_hand.look(times=3)
        word = by_hand.explain()
        assert word.plan is not None
        assert word.plan.state is PlanState.PROPOSED
        assert [action.kind for action in word.plan.actions] == [ActionKind.START] * 2
        generation = word.plan.generation
        assert [pool.told for pool in by_hand.pools] == [[], []]
        assert by_hand.apply(generation + 1).problem.startswith(f"plan {generation + 1} is stale")
        assert by_hand.apply(generation).problem == ""
        await by_hand.look(times=3)
        assert sorted(by_hand.pools[0].models + by_hand.pools[1].models) == ["a", "b"]
        assert "no plan waits for a yes" in by_hand.apply(generation).problem

    run(work)


def test_a_plan_for_sessions_that_are_gone_is_refused(by_hand: Site) -> None:
    async def work() -> None:
        await by_hand.look()
        by_hand.apply(by_hand.explain().plan.generation)  # type: ignore[union-attr]
        await by_hand.look(times=3)
        by_hand.file = read_placement(
            TEXT.replace("MODE", "by-hand")
            .replace("min_replicas: 1, ", "")
            .replace("requests_s: 2}, i", "requests_s: 4}, i"),
            "placement.yaml",
        )
        await by_hand.look()
        plan = by_hand.explain().plan
        assert plan is not None
        stops = [action for action in plan.actions if action.kind is ActionKind.STOP]
        assert [action.assignment.model for action in stops] == ["a"]
        (pool,) = [pool for pool in by_hand.pools if pool.name == stops[0].pool]
        pool.book.handle(Over(stops[0].assignment.id, "it was told to end"), 0.0)
        by_hand.placer.on_pool(Message(POOL.of(pool.name), encode(pool.report())))
        told = len(pool.told)
        problem = by_hand.apply(plan.generation).problem
        assert f"plan {plan.generation} is stale: a on {pool.name} has gone (session s-" in problem
        assert len(pool.told) == told, "nothing was done"

    run(work)


def test_one_acts_and_the_other_takes_over_without_touching_what_runs(site: Site) -> None:
    async def work() -> None:
        await site.look(times=3)
        told = [len(pool.told) for pool in site.pools]
        second = site.make()
        await site.look(second, times=3)
        assert second.lease.why_not.startswith("another placer acts for the site")
        assert [len(pool.told) for pool in site.pools] == told
        await site.placer.lease.give_back(site.placer.memory.kept("", 99, 0.0))
        await site.look(second, times=3)
        assert second.lease.held
        assert [len(pool.told) for pool in site.pools] == told, "things are as they should be"
        assert second.memory.generation >= max(one.generation for pool in site.pools for one in pool.told)

    run(work)


def test_a_failed_engine_is_not_tried_there_at_once(site: Site) -> None:
    async def work() -> None:
        await site.look(times=3)
        (pool,) = [pool for pool in site.pools if pool.models == ["b"]]
        (run_now,) = pool.book.runs(0.0)
        pool.book.handle(Over(run_now.assignment.id, "exited: exit code 1"), 0.0)
        await site.look(times=3)
        assert pool.models == []
        word = site.explain("b").models[0]
        assert any(f"failed lately (b at {pool.name})" in line for line in word.text)
        other = site.add("p2")
        site.pools.append(other)
        await site.look(times=3)
        assert other.models == ["b"]

    run(work)


def test_a_bucket_that_vanished_stops_nothing_and_is_made_anew(site: Site) -> None:
    async def work() -> None:
        await site.look(times=3)
        before = [pool.models for pool in site.pools]
        site.placement.values.clear()
        site.pool_keys.values.clear()
        await site.look(times=3)
        assert [pool.models for pool in site.pools] == before
        site.placement.away = site.pool_keys.away = True
        site.placer.lease._beaten_at_s = -1e9
        await site.look(times=2)
        assert "cannot be read or written" in site.explain().blind
        assert [pool.models for pool in site.pools] == before

    run(work)


def test_what_an_engine_took_to_load_counts_for_the_next(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        await site.look()
        (pool, *_) = site.pools
        (one,) = [run.assignment for run in pool.book.runs(0.0)]
        site.placer.loads._loading.add(one.id)
        site.placer.loads._born_s[one.id] = time.monotonic() - 145.0
        await site.look(times=2)
        took_s = site.placer.loads.seen_s[one.model, "h100-sxm-80"]
        assert took_s == pytest.approx(45.0, abs=1.0), "it serves for 100 s"
        decision = site.placer._decision
        assert decision is not None
        assert {option.load_s for option in decision.options.feasible if option.model == one.model} == {took_s}

    run(work)


def test_an_agent_started_anew_without_kv_is_told_again(site: Site) -> None:
    async def work() -> None:
        await site.look(times=3)
        pool = site.pools[0]
        models = pool.models
        pool.book, pool.instance = PoolBook(pool.name, 1, {"emulated": 1}.keys()), "i2"
        site.placer.told._pools[pool.name].told_at_s = -1e9
        await site.look(times=3)
        assert pool.models == models

    run(work)


def test_another_placers_newer_word_is_respected(site: Site) -> None:
    async def work() -> None:
        await site.look()
        site.pool_keys.values["p0"] = (encode(Assignments("p0", 1_000)), 7)
        site.placer.told.want("p0", [], {})
        with pytest.raises(Exception, match="assignments of generation 1000 already"):
            await site.placer._deliver({view.name: view.report for view in site.placer.pools.views(0.0)})

    run(work)


def test_an_unknown_model_is_told_by_name(site: Site) -> None:
    async def work() -> None:
        await site.look()
        word = site.explain("nobody")
        assert word.problem == "there is no model 'nobody' in the placement file (there is a, b)"

    run(work)


def test_words_that_are_none_are_answered_and_change_nothing(site: Site) -> None:
    async def work() -> None:
        await site.look()
        for handler in (site.placer.answers.on_explain, site.placer.answers.on_apply):
            site.bus.published.clear()
            handler(Message("x", b"{", "reply"))
            assert decode(PlacementWord, site.bus.published[-1].payload).problem
        before = list(site.placer.pools)
        bad: Any = replace(site.pools[0].report(), pool="no.pool")
        site.placer.on_pool(Message("pool.x", encode(bad)))
        site.placer.on_pool(Message("pool.other", encode(site.pools[0].report())))
        assert list(site.placer.pools) == before

    run(work)


def test_keys_of_pools_that_are_no_more_are_cleared_away_and_no_others(site: Site) -> None:
    async def work() -> None:
        await site.look(times=3)
        clearing, keys = site.placer._clearing, site.pool_keys
        replica = site.placer.copy.replica
        gone = {"left": "g1-1", "there": "g2-1", "unknown": "g3-1"}
        for pool, id in gone.items():
            keys.values[pool] = (encode(Assignments(pool, 3, [Assignment(id, "a", "emulated")])), 1)
        for pool, lifecycle in (("left", Lifecycle.LEFT), ("there", Lifecycle.SERVING)):
            record = record_of(f"s-{pool}", lifecycle=lifecycle, labels={ASSIGNMENT_LABEL: gone[pool]})
            replica.merge(record, 0.0)
        now = time.monotonic()
        await clearing.look(now)
        assert set(keys.values) == {"p0", "p1", *gone}, "silence of a moment says nothing"
        await clearing.look(now + ENDED_KEPT_S + 1)
        assert set(keys.values) == {"p0", "p1", "there", "unknown"}, "its sessions have left"
        await clearing.look(now + UNKNOWN_KEPT_S + 1)
        assert set(keys.values) == {"p0", "p1", "there"}, "nobody knows of it, for a whole day"

    run(work)
