"""Static and dynamic placement for the replay: the same solver; dynamic with forecasts and the placer's own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from serai.bench.place.replay import Engine, Start, Stop
from serai.bench.place.traces import RateTrace
from serai.contracts.placement import ActionKind, Assignment, RunState
from serai.performance.shipped_models import shipped_card
from serai.placer.demand import ModelDemand
from serai.placer.fleet import Fleet
from serai.placer.forecast import Forecaster
from serai.placer.leading import Memory
from serai.placer.options import Option, make_options
from serai.placer.picture import Instance, ModelFacts, Picture, PlanRules, PoolFacts
from serai.placer.placement import Placement, Rules, Running, SolveLimits
from serai.placer.plan import Plan, make_plan
from serai.placer.solve import solve

SLO_TTFT_S = 5.0
SLO_TPOT_S = 0.1
CV = 1.5
"""Burstiness within a minute that capacities are told for."""
LEAD_S = 120.0
SPAN_S = 300.0


def demand_of(
    trace: RateTrace, place: int, requests_s: float, high: float | None = None, least: int = 0
) -> ModelDemand:
    """A model of the trace at a rate."""
    model = trace.models[place]
    return ModelDemand(
        model.name,
        requests_s,
        model.prompt,
        model.output,
        requests_s_high=high,
        burstiness_cv=CV,
        slo_ttft_s=SLO_TTFT_S,
        slo_tpot_s=SLO_TPOT_S,
        min_replicas=least,
    )


def options_of(trace: RateTrace, fleet: Fleet) -> tuple[Option, ...]:
    """Every way to run every model of the trace within the targets, on one node each."""
    cards = {model.name: shipped_card(model.card) for model in trace.models}
    demands = [demand_of(trace, place, 1.0) for place in range(len(trace.models))]
    return tuple(option for option in make_options(demands, fleet, cards=cards).feasible if option.nodes == 1)


@dataclass
class Static:
    """One placement for the whole trace, made from an earlier one: each model's rate that `share` of its minutes stay
    within (None: its mean)."""

    trace: RateTrace
    fleet: Fleet
    options: Sequence[Option]
    share: float | None
    solve_s: float
    every_s: float = 1e12

    def begin(self) -> Sequence[Start]:
        """The placement."""
        demands = [demand_of(self.trace, place, self._rate(place)) for place in range(len(self.trace.models))]
        placement = solve(self.fleet, demands, self.options, limits=SolveLimits(self.solve_s))
        return [Start(placed.option, placed.nodes[0][0]) for placed in placement.placed]

    def _rate(self, place: int) -> float:
        if self.share is None:
            return self.trace.mean_s(place)
        return max(self.trace.quantile_s(place, self.share), self.trace.mean_s(place))

    def decide(self, now_s: float, seen: Mapping[str, int], engines: Sequence[Engine]) -> Sequence[Start | Stop]:
        """Nothing, ever."""
        return ()


@dataclass
class Dynamic:
    """The placer as it runs: forecasts from what was seen, the solver from what runs, and the rules of `plan.py` for
    what is worth moving. It begins where a static placement stays, and knows nothing of what comes."""

    trace: RateTrace
    fleet: Fleet
    options: Sequence[Option]
    start: Sequence[Start]
    rules: PlanRules
    solve_s: float = 0.0
    every_s: float = 60.0
    forecaster: Forecaster = field(default_factory=Forecaster)
    generation: int = 0
    memory: Memory = field(default_factory=Memory)
    warm: dict[str, list[str]] = field(default_factory=dict)
    held: int = 0

    def begin(self) -> Sequence[Start]:
        """Where the best static placement begins."""
        return self.start

    def decide(self, now_s: float, seen: Mapping[str, int], engines: Sequence[Engine]) -> Sequence[Start | Stop]:
        """One round of the placer."""
        self.generation += 1
        for name, count in seen.items():
            self.forecaster.observe(name, now_s, count, self.every_s)
        facts = self._facts(now_s)
        demands = [fact.demand for fact in facts]
        running = [Running(e.id, e.option, ((e.node, e.option.gpus),), since_s=now_s - e.started_s) for e in engines]
        limits = SolveLimits(self.solve_s)
        binding = Rules(worst_share_slack=self.rules.fairness.slack(self.options))
        placement = solve(self.fleet, demands, self.options, running, binding, limits)
        if placement.missing:
            # Not everything that may come can be had: first what is expected.
            facts = [replace(f, demand=replace(f.demand, requests_s_high=None)) for f in facts]
            expected = [fact.demand for fact in facts]
            placement = solve(self.fleet, expected, self.options, running, binding, limits)
        return self._worth(now_s, placement, facts, engines)

    def _facts(self, now_s: float) -> list[ModelFacts]:
        prewarm = self.forecaster.prewarm(now_s, LEAD_S, SPAN_S)
        facts = []
        for place, model in enumerate(self.trace.models):
            ahead = self.forecaster.ahead(model.name, now_s, LEAD_S, SPAN_S)
            least = 1 if model.name in prewarm else 0
            wanted = ahead.unused_s < self.rules.horizon_s
            demand = demand_of(self.trace, place, ahead.requests_s, ahead.high, least)
            if not wanted:
                demand = replace(demand, requests_s=0.0, requests_s_high=0.0)
            facts.append(ModelFacts(demand, unused_s=ahead.unused_s, prewarm=model.name in prewarm))
        return facts

    def _worth(
        self, now_s: float, placement: Placement, facts: Sequence[ModelFacts], engines: Sequence[Engine]
    ) -> list[Start | Stop]:
        """What the plan rules let through."""
        instances = [_instance(engine, now_s) for engine in engines]
        pools = [PoolFacts(n.name, n.gpu, n.gpus, n.provider, frozenset({"vllm"})) for n in self.fleet.nodes]
        memory = self.memory
        picture = Picture(
            pools,
            instances,
            facts,
            moves_last_hour=memory.moves_last_hour(now_s),
            warm=self.warm,
            turns=memory.turns(now_s),
        )
        plan = make_plan(picture, placement, self.rules, self.generation, limited=True)
        self.held += len(plan.held)
        memory.begins(plan.actions, now_s)
        found = self._begun(plan, now_s, engines)
        memory.moved(len(found), now_s)
        return found

    def _begun(self, plan: Plan, now_s: float, engines: Sequence[Engine]) -> list[Start | Stop]:
        """What can be done of it now. The rest waits for engines that load, and is in the next plan again, as a placer
        plans anew while a plan is under way."""
        by_shape = {_shape(option): option for option in self.options}
        serving = {engine.id for engine in engines if engine.ready_s <= now_s}
        room = {node.name: node.gpus for node in self.fleet.nodes}
        for engine in engines:
            room[engine.node] -= engine.option.gpus
        found: list[Start | Stop] = []
        freed: set[str] = set()
        for action in plan.changes:
            if action.kind is ActionKind.STOP and serving.issuperset(action.after):
                self.warm.setdefault(action.assignment.model, []).append(action.pool)
                found.append(Stop(action.assignment.id))
                room[action.pool] += action.assignment.gpus
                freed.add(action.pool)
        for action in plan.changes:
            if action.kind is ActionKind.START and action.assignment.gpus <= room[action.pool]:
                room[action.pool] -= action.assignment.gpus
                option = by_shape[_assigned_shape(action.assignment, self.fleet.by_name[action.pool].gpu)]
                found.append(Start(option, action.pool, waits=action.pool in freed))
        return found


def _instance(engine: Engine, now_s: float) -> Instance:
    option = engine.option
    assignment = Assignment(
        engine.id,
        option.model,
        "vllm",
        option.gpus,
        option.tensor,
        option.pipeline,
        option.data,
        option.quantisation,
    )
    state = RunState.SERVING if engine.ready_s <= now_s else RunState.STARTING
    return Instance(engine.id, option, engine.node, assignment, state, engine.id, now_s - engine.started_s)


def _shape(option: Option) -> tuple[object, ...]:
    return (option.model, option.gpu, option.tensor, option.pipeline, option.data, option.quantisation)


def _assigned_shape(assignment: Assignment, gpu: str) -> tuple[object, ...]:
    a = assignment
    return (a.model, gpu, a.tensor, a.pipeline, a.data, a.quantization)
