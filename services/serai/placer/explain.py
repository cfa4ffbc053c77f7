"""What the placer says of each model, for people who have not read the programme. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from serai.contracts.placement import ActionKind, ModelWord, PlanAction, PoolWord
from serai.placer.deciding import Decision, Situation
from serai.placer.observed import NOTHING_SEEN
from serai.placer.picture import Instance, ModelFacts
from serai.placer.placement_file import PlacedModel
from serai.placer.pools import PoolView


def model_words(decision: Decision, situation: Situation) -> list[ModelWord]:
    """One for each model of the file, in its order."""
    return [_word(model, decision, situation) for model in situation.file.models.values()]


def _word(model: PlacedModel, decision: Decision, situation: Situation) -> ModelWord:
    facts = decision.facts[model.name]
    here = [one for one in decision.instances if one.model == model.name]
    serving = [one for one in here if one.serving]
    changes = [action for action in decision.plan.changes if action.assignment.model == model.name]
    wanted = len(here) + sum(1 if action.kind is ActionKind.START else -1 for action in changes)
    capacity = sum(one.option.requests_s for one in serving) + facts.others_requests_s
    share = decision.placement.served_share.get(model.name, 1.0)
    return ModelWord(
        model.name,
        len(serving) + situation.others.get(model.name, 0),
        wanted + situation.others.get(model.name, 0),
        round(facts.demand.planned_requests_s, 3),
        round(capacity, 3),
        round(share, 3),
        [
            *_demand_lines(facts, model, situation),
            *_capacity_lines(facts, serving, situation),
            *_loading_lines(here, serving),
            *_change_lines(changes),
            *_missing_lines(model.name, decision, situation, share),
        ],
    )


def _demand_lines(facts: ModelFacts, model: PlacedModel, situation: Situation) -> list[str]:
    demand, seen = facts.demand, situation.usage.get(model.name, NOTHING_SEEN)
    lines = []
    wished = situation.wished.get(model.name)
    if wished is not None:
        most = f"{demand.planned_requests_s:.2f} requests/s are planned for, and {demand.max_replicas} at most"
        lines.append(f"Its macro-scheduler wants {_counted(wished, 'engine')} in all: {most}.")
    elif demand.planned_requests_s <= 0:
        lines.append("Nobody asks for it now" + _since(seen.unused_s, situation) + ".")
    elif seen.requests_s > model.demand.requests_s:
        window = f"over the last {situation.file.demand_window_s:.0f} s"
        more = f"since that is an estimate, {demand.planned_requests_s:.2f} are planned for"
        if demand.planned_requests_s <= seen.requests_s:
            more = "that much is planned for, since there is no room for more"
        lines.append(f"It was asked {seen.requests_s:.2f} requests/s {window}; {more}.")
    else:
        told = f"{demand.planned_requests_s:.2f} requests/s are planned for: the placement file says so"
        lines.append(f"{told}, and usage shows no more ({seen.requests_s:.2f}/s).")
    if not situation.usage_known:
        lines.append(
            "The ledger has not answered lately, so usage may be out of date, and nothing is taken for unused."
        )
    if demand.min_replicas:
        lines.append(f"Its minimum is {_counted(demand.min_replicas, 'engine')}, whatever is asked.")
    if demand.providers_allowed:
        lines.append(f"Its requests may go to {', '.join(demand.providers_allowed)} only.")
    return lines


def _since(unused_s: float, situation: Situation) -> str:
    if not situation.usage_known:
        return ""
    if math.isinf(unused_s):
        return ", and nobody has, as far back as was looked"
    return f", for {unused_s:.0f} s"


def _capacity_lines(facts: ModelFacts, serving: Sequence[Instance], situation: Situation) -> list[str]:
    others = situation.others.get(facts.model, 0)
    if not serving and not others:
        return ["No engine of it serves now."]
    lines = []
    kinds: dict[str, list[Instance]] = {}
    for one in serving:
        kinds.setdefault(one.option.key, []).append(one)
    for instances in kinds.values():
        option, where = instances[0].option, ", ".join(sorted(one.pool for one in instances))
        each = f"{option.requests_s:.2f} requests/s each within its targets" if option.requests_s else option.why
        how = f"{_counted(option.gpus, 'GPU')} ({option.gpu})"
        lines.append(f"Serving now: {_counted(len(instances), 'engine')} of {how}, {each}, on {where}.")
    if others:
        lines.append(f"Beside the pools it has {_counted(others, 'session')}, which the placer does not touch.")
    return lines


def _loading_lines(here: Sequence[Instance], serving: Sequence[Instance]) -> list[str]:
    waiting = [one for one in here if one not in serving]
    return [f"One is {one.state} on {one.pool}, for {one.age_s:.0f} s." for one in waiting]


def _change_lines(changes: Sequence[PlanAction]) -> list[str]:
    if not changes:
        return ["Nothing changes for it."]
    what = {ActionKind.START: "start one on", ActionKind.STOP: "stop the one on", ActionKind.KEEP: "keep"}
    return [f"Next: {what[action.kind]} {action.pool}, because {action.why}." for action in changes]


def _missing_lines(model: str, decision: Decision, situation: Situation, share: float) -> list[str]:
    lines = [f"Not done: {held}." for held in decision.plan.held if held.startswith(f"{model} ")]
    lines += [
        f"Missing: {missing.amount:.2f} {_unit(missing.what)}: {missing.why}."
        for missing in decision.placement.missing
        if missing.model == model
    ]
    lines += [
        f"It failed lately ({key}), and is not tried there for {left_s:.0f} s more."
        for key, left_s in situation.failed.items()
        if key.startswith(f"{model} at ")
    ]
    if share < 1 and not lines:
        lines.append(f"The plan serves {share:.0%} of what is asked; there is no more room.")
    if why := decision.options.why_not(model) if not _has_option(model, decision) else "":
        lines.append(f"No GPU here can run it: {why}.")
    return lines


def _has_option(model: str, decision: Decision) -> bool:
    return any(option.model == model for option in decision.options.feasible)


def _unit(what: str) -> str:
    return {"capacity": "requests/s", "replicas": "engines"}.get(what, what)


def pool_words(views: Sequence[PoolView]) -> list[PoolWord]:
    """One for each pool."""
    return [_pool_word(view) for view in views]


def _pool_word(view: PoolView) -> PoolWord:
    runs = view.report.runs
    taken = sum(len(run.gpus) for run in runs)
    lines = [
        f"{run.assignment.id} {run.assignment.model} {run.state}" + (f": {run.problem}" if run.problem else "")
        for run in runs
    ]
    return PoolWord(
        view.name, view.gpu, view.gpus, max(0, view.gpus - taken), view.report.provider, lines, view.problem
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
