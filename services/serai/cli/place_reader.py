"""What the `serai place …` tools share: one question, one answer, and how a plan is shown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar

from serai.cli.asking import TIMEOUT_S, ask
from serai.contracts.placement import ActionKind, KeptPlan, ModelWord, PlacementWord, PlanAction
from serai.contracts.subjects import Subject

Question = TypeVar("Question")

ANEW_TIMEOUT_S = 90.0
"""A plan may take the solver a while."""


def ask_placer(
    tool: str, arguments: argparse.Namespace, subject: Subject[Question], question: Question, *, slow: bool = False
) -> tuple[PlacementWord | None, int]:
    """The answer, when there is one, and the tool's exit code."""
    timeout_s = ANEW_TIMEOUT_S if slow else TIMEOUT_S
    return ask(tool, "placer", arguments, subject, question, PlacementWord, timeout_s)


def header(word: PlacementWord) -> str:
    """Who acts, and how."""
    if word.blind:
        return f"site {word.site}: the placer does nothing now: {word.blind}"
    mode = "does what it plans by itself" if word.mode == "automatic" else "waits for `serai place apply`"
    pools, gpus = len(word.pools), sum(pool.gpus for pool in word.pools)
    return f"site {word.site}: {pools} pools with {gpus} GPUs; the placer {mode}"


def plan_text(word: PlacementWord) -> str:
    """The whole plan, its models first."""
    lines = [header(word), "", *table(word.models)]
    if word.plan is not None:
        lines += ["", *diff_lines(word.plan)]
    bad = [f"  {pool.pool}: {pool.problem}" for pool in word.pools if pool.problem]
    return "\n".join([*lines, *(["", "Pools on which nothing new is placed:", *bad] if bad else [])])


def table(models: Sequence[ModelWord]) -> list[str]:
    """A line for each model."""
    width = max([len(word.model) for word in models] + [5])
    lines = [f"{'model':{width}}  serve  planned  asked/s  served/s  served by the plan"]
    lines += [
        f"{one.model:{width}}  {one.instances:5}  {one.wanted:7}  {one.demand_requests_s:7.2f}  "
        f"{one.capacity_requests_s:8.2f}  {one.served_share:.0%}"
        for one in models
    ]
    return lines


def diff_lines(plan: KeptPlan) -> list[str]:
    """What changes, and what is not done though it would be better."""
    changes = [action for action in plan.actions if action.kind is not ActionKind.KEEP]
    lines = [f"plan {plan.generation}, {plan.state}" + (f" ({plan.note})" if plan.note else "")]
    lines += [_change_line(action) for action in changes] or ["  nothing changes"]
    return lines + [f"  not now: {held}" for held in plan.held]


def _change_line(action: PlanAction) -> str:
    one = action.assignment
    sign = "+" if action.kind is ActionKind.START else "-"
    gpus = f"{one.gpus} GPU" + ("" if one.gpus == 1 else "s")
    done = "  (done)" if action.done else ""
    return f"  {sign} {one.model} on {action.pool}, {gpus}: {action.why}{done}"
