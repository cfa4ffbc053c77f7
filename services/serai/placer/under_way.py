"""The plan that is being carried out: what may be told now, what has failed, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from serai.contracts.placement import ActionKind, KeptPlan, PlanState, RunState
from serai.placer import metrics
from serai.placer.carrying_out import CarryingOut, Failure, Floor
from serai.placer.deciding import Decision
from serai.placer.leading import Memory
from serai.placer.picture import failed_key
from serai.placer.placement_file import PlacementFile
from serai.placer.pools import PoolView
from serai.placer.sessions_seen import seen_now
from serai.placer.settings import PlacerSettings
from serai.placer.told import Told
from serai.runtime.registry_replica import RegistryReplica

log = structlog.get_logger()


class UnderWay:
    """Of one placer. `news` is called when a plan should be made at once."""

    def __init__(
        self, settings: PlacerSettings, memory: Memory, told: Told, replica: RegistryReplica, news: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._told = told
        self._replica = replica
        self._news = news
        self._carrying: CarryingOut | None = None

    @property
    def busy(self) -> bool:
        """Whether there is one."""
        return self._carrying is not None

    def drop(self) -> None:
        """It is gone on with no more; what has been told stands."""
        self._carrying = None

    def begin(self, plan: KeptPlan, decision: Decision) -> None:
        """From now on."""
        floors = {}
        for model, facts in decision.facts.items():
            demand = facts.demand
            gets = any(one.assignment.model == model and one.kind is not ActionKind.STOP for one in plan.actions)
            floors[model] = Floor(demand.min_replicas, gets and demand.planned_requests_s > 0)
        self._memory.begins(plan.actions, time.monotonic())
        for model in decision.plan.let_go:
            self._memory.warm[model] = sorted({one.pool for one in plan.actions if one.assignment.model == model})
        for one in plan.actions:
            if one.kind is not ActionKind.KEEP:
                metrics.MOVES.of(str(one.kind)).add()
        self._carrying = CarryingOut(plan.actions, floors, start_timeout_s=self._settings.start_timeout_s)

    def go_on(self, file: PlacementFile, views: Sequence[PoolView], now: float) -> None:
        """What can be told now is wanted from now on."""
        carrying, plan = self._carrying, self._memory.plan
        if carrying is None or plan is None:
            return
        step = carrying.look(seen_now(self._replica, views, self._told, file.models, now), now)
        for pool, run in step.told.items():
            self._told.want(pool, run, step.stops)
        if step.moves:
            self._memory.moved(step.moves, now)
        done = carrying.done
        actions = [replace(one, done=one.done or one.assignment.id in done) for one in plan.actions]
        self._memory.plan = plan = replace(plan, actions=actions)
        if carrying.over:
            self._finish(carrying, plan, now)

    def _finish(self, carrying: CarryingOut, plan: KeptPlan, now: float) -> None:
        for id, why in carrying.skipped.items():
            log.warning("placer.step_skipped", id=id, why=why)
        for failure in carrying.failed.values():
            if failed_key(failure.model, failure.pool) not in self._memory.failed_for_s(now):
                self._note_failure(failure, now)
        fate = PlanState.REPLACED if carrying.failed or carrying.skipped else PlanState.DONE
        metrics.PLANS.of(str(fate)).add()
        log.info("placer.plan_over", generation=plan.generation, done=len(carrying.done), failed=len(carrying.failed))
        self._memory.plan = replace(plan, state=fate)
        self._carrying = None
        self._news()

    def note_runs(self, views: Sequence[PoolView], now: float) -> None:
        """Engines that have failed are not wanted any more; those that serve are known to work."""
        for view in views:
            wanted = dict(self._told.run_of(view.name))
            failed = []
            for run in view.report.runs:
                id, model = run.assignment.id, run.assignment.model
                if run.state is RunState.SERVING:
                    self._memory.worked(failed_key(model, view.name))
                elif run.state is RunState.FAILED and id in wanted:
                    failed.append(id)
                    self._note_failure(Failure(model, view.name, run.problem), now)
            if failed:
                left = [one for id, one in wanted.items() if id not in failed]
                self._told.want(view.name, left, dict.fromkeys(failed, "its engine has failed"))

    def _note_failure(self, failure: Failure, now: float) -> None:
        waits_s = self._memory.failed(failed_key(failure.model, failure.pool), self._settings.failed_wait_s, now)
        metrics.FAILURES.of(failure.model).add()
        log.error("placer.engine_failed", model=failure.model, pool=failure.pool, why=failure.why, waits_s=waits_s)
        self._news()
