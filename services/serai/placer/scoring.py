"""What a placement is worth, in the levels' own units, and what it leaves missing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from serai.placer.options import Option
from serai.placer.placement import Level, Missing, Objective, Placed
from serai.placer.problem import Problem


def served_shares(problem: Problem, placed: Sequence[Placed]) -> dict[str, float]:
    """Per model the share of its planned demand that is served, at most 1; 1 where nothing is wanted."""
    served: Counter[str] = Counter()
    for instance in placed:
        served[instance.option.model] += instance.option.requests_s  # type: ignore[assignment]
    return {
        demand.model: min(1.0, served[demand.model] / demand.planned_requests_s) if demand.planned_requests_s else 1.0
        for demand in problem.demands
    }


def greedy_levels(
    problem: Problem, placed: Sequence[Placed], counts: Sequence[int], objective: Objective
) -> list[Level]:
    """The levels' values for a placement that nobody proved anything about; bounds are what nothing can exceed."""
    shares = served_shares(problem, placed)
    wanted = [d for d in problem.demands if d.planned_requests_s > 0]
    reachable = {cell.model for cell in problem.cells}
    reachable |= {number for number, share in enumerate(problem.pinned_share) if share > 0}
    worst = min(
        (shares[d.model] for number, d in enumerate(problem.demands) if d in wanted and number in reachable),
        default=1.0,
    )
    total = sum(d.priority * d.planned_requests_s * shares[d.model] for d in wanted)
    demanded = sum(d.priority * d.planned_requests_s for d in wanted)
    found = [Level("worst share", worst, 1.0, worst >= 1.0, 0.0)]
    if objective == "max-min":
        found.append(Level("total", total, demanded, total >= demanded, 0.0))
        found.append(Level("cost", cost(problem, counts), 0.0, False, 0.0))
    return found


def cost(problem: Problem, counts: Sequence[int]) -> float:
    """Priced GPU-hours of running over the horizon, starting and stopping."""
    total = 0.0
    for cell, count in zip(problem.cells, counts, strict=True):
        kept = min(count, cell.running)
        total += count * cell.run_price + (count - kept) * cell.start_price + (cell.running - kept) * cell.stop_price
    return total


def missing(
    problem: Problem, placed: Sequence[Placed], options: Sequence[Option], domains: dict[str, str]
) -> tuple[Missing, ...]:
    """What models lack, with the reason, largest lack first."""
    shares = served_shares(problem, placed)
    offered = {option.model for option in options}
    possible = {problem.demands[cell.model].model for cell in problem.cells}
    found: list[Missing] = []
    for demand in problem.demands:
        lacking = demand.planned_requests_s * (1 - shares[demand.model])
        at = {domains[name] for p in placed if p.option.model == demand.model for name, _ in p.nodes}
        if lacking > 1e-9 * max(1.0, demand.planned_requests_s):
            why = _why(problem, demand.model, offered, possible)
            found.append(Missing(demand.model, "option" if demand.model not in possible else "capacity", lacking, why))
        if len(at) < demand.min_replicas:
            why = f"stands in {len(at)} failure domains of {demand.min_replicas} wanted"
            found.append(Missing(demand.model, "replicas", demand.min_replicas - len(at), why))
    return tuple(sorted(found, key=lambda m: (m.what, -m.amount, m.model)))


def _why(problem: Problem, model: str, offered: set[str], possible: set[str]) -> str:
    if model not in offered:
        return "no way to run it on these GPUs within its targets"
    demand = next(demand for demand in problem.demands if demand.model == model)
    if model not in possible:
        if demand.providers_allowed:
            return f"no node of its providers ({', '.join(demand.providers_allowed)}) can hold it long enough"
        return "no node can hold it before its allocation ends"
    if demand.project in problem.quotas:
        return f"all GPUs it may use are in use, or the quota of project `{demand.project}` is"
    if demand.max_replicas is not None:
        return f"all GPUs it may use are in use, or it has its {demand.max_replicas} replicas"
    return "all GPUs it may use are in use"
