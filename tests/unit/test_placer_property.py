"""Random placement problems: whatever is asked for, nothing is given away twice and what is missing is said.

`SERAI_PLACER_EXAMPLES=1000` makes the run as long as it was for docs/benchmarks.md.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, assume, given, settings

from serai.placer.placement import BadRules, SolveLimits
from serai.placer.solve import solve
from serai.placer.verify import violations
from unit.placer_cases import Case
from unit.placer_cases import cases as random_cases

EXAMPLES = int(os.environ.get("SERAI_PLACER_EXAMPLES", "40"))


def _solved(case: Case, time_s: float, objective: str = "max-min"):  # type: ignore[no-untyped-def]
    limits = SolveLimits(time_s, workers=1)
    return solve(case.fleet, case.demands, case.options, case.running, case.rules, limits, objective)  # type: ignore[arg-type]


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(random_cases())
def test_no_placement_ever_gives_away_what_is_not_there(case: Case) -> None:
    try:
        greedy = _solved(case, 0.0)
    except BadRules:
        assume(False)
    solved, by_latency = _solved(case, 2.0), _solved(case, 2.0, "latency")
    for placement in (greedy, solved, by_latency):
        assert violations(case.fleet, case.demands, placement, case.running, case.rules) == []
    values = {level.name: level.value for level in solved.levels}
    before = {level.name: level.value for level in greedy.levels}
    short = sum(m.amount for m in greedy.missing if m.what == "replicas")
    if "worst share" in values and values.get("replicas", 0) == short:
        assert values["worst share"] >= before["worst share"] - 1e-4
