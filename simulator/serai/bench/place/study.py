"""Static and dynamic placement on one trace and one fleet: what both come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serai.bench.place.policies import SLO_TTFT_S, Dynamic, Static, options_of
from serai.bench.place.replay import Course, replay
from serai.bench.place.traces import RateTrace
from serai.placer.fleet import Fleet, Node
from serai.placer.picture import PlanRules

NODE_GPUS = 4
STATIC_SHARES = (None, 0.9, 0.97, 0.99)
"""Rates that a static placement is made for: the mean of the day before, or what these shares of its minutes stay
within."""
RULES = PlanRules(cold_after_s=7200.0, moves_per_hour=120)
"""For many models: two moves a minute at most. Engines of silent models stay for two hours unless others need room."""


@dataclass(frozen=True)
class Compared:
    """Static placements and the dynamic one."""

    static: Course
    """The best on the replayed trace."""
    static_share: float | None
    usual: Course
    """The one that was best on the day before."""
    dynamic: Course


def fleet_of(gpus: dict[str, int], share: float = 1.0) -> Fleet:
    """Nodes of four, by kind; `share` of each."""
    return Fleet(
        [
            Node(f"{kind}-{place}", kind, NODE_GPUS)
            for kind, count in gpus.items()
            for place in range(round(count * share / NODE_GPUS))
        ]
    )


@dataclass(frozen=True)
class _Tried:
    """A static placement on the day before, from which it was made, and on the trace."""

    share: float | None
    static: Static
    before: Course
    course: Course


def _statics(
    before: RateTrace, trace: RateTrace, fleet: Fleet, solve_s: float, tell: Callable[[str], None]
) -> list[_Tried]:
    """What the day before would suggest."""
    options = options_of(trace, fleet)
    found: list[_Tried] = []
    for share in STATIC_SHARES:
        static = Static(before, fleet, options, share, solve_s)
        then, course = (replay(one, fleet, static, SLO_TTFT_S) for one in (before, trace))
        told = "its mean" if share is None else f"p{share * 100:g} of its minutes"
        tell(f"static for {told} of the day before: {course.attainment:.4f}, then {then.attainment:.4f}")
        found.append(_Tried(share, static, then, course))
    return found


def dynamic(trace: RateTrace, fleet: Fleet, start: Static, solve_s: float, rules: PlanRules = RULES) -> Course:
    """The placer on `trace`, from where `start` stays."""
    options = options_of(trace, fleet)
    return replay(trace, fleet, Dynamic(trace, fleet, options, start.begin(), rules, solve_s), SLO_TTFT_S)


def compare(
    before: RateTrace,
    trace: RateTrace,
    fleet: Fleet,
    solve_s: float,
    tell: Callable[[str], None],
    rules: PlanRules = RULES,
) -> Compared:
    """Both on the whole fleet. Choosing the static placement by what came is in its favour; dynamic starts there."""
    tried = _statics(before, trace, fleet, solve_s, tell)
    best = max(tried, key=lambda one: one.course.attainment)
    usual = max(tried, key=lambda one: one.before.attainment)
    moved = dynamic(trace, fleet, best.static, solve_s, rules)
    tell(
        f"dynamic: {moved.attainment:.4f}, {moved.moves_per_hour:.0f} moves an hour (at most "
        f"{max(moved.moves_by_hour)}), {moved.cold_starts} cold starts"
    )
    return Compared(best.course, best.share, usual.course, moved)


def row(name: str, course: Course) -> list[str]:
    """A line of a table."""
    return [
        name,
        f"{course.attainment:.4f}",
        f"{course.model_attainment:.4f}",
        f"{course.gpu_hours:.0f}",
        f"{course.moves_per_hour:.1f}",
        str(max(course.moves_by_hour)),
        str(course.cold_starts),
    ]


HEAD = ["placement", "attainment", "mean of models", "GPU-hours", "moves/h", "most in an hour", "cold starts"]


def raw(courses: Sequence[tuple[str, Course]]) -> list[dict[str, Any]]:
    """As JSON."""
    return [{"placement": name, **asdict(course)} for name, course in courses]
