"""`serai place bench opentela`: the published placement experiment, by our placer, its own search, and its baseline.

Which placement each way finds for 24 A100 and 32 GH200 and three models, what it serves by formula with the measured
times, and what it serves when the 300 s are replayed in the fast simulator. The table tells apart what comes from
placement and what from the router's weights.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from serai.bench.place.opentela_case import (
    PARAMETERS,
    SHORT,
    WINDOW_S,
    Pools,
    Score,
    at_measured_parallelism,
    demands,
    fleet,
    measured_options,
    pools_of,
    pools_of_placed,
    predicted_options,
    score,
    table,
    weighted,
)
from serai.bench.place.opentela_replay import Replayed, replay
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.placer.baselines import (
    allocations,
    equal_share,
    exhaustive,
    maximize_replicas,
    mem_p,
    workload_balanced,
)
from serai.placer.options import Option, OptionSettings
from serai.placer.picture import Fairness
from serai.placer.placement import Placement, Rules, SolveLimits
from serai.placer.solve import solve

SOLVE_S = 10.0
A100, GH200 = "a100-sxm-80", "gh200-96"
PUBLISHED_MEMP = {"70B": {A100: 0.11, GH200: 0.89}}
"""`straw_1.yaml`: a ninth of the traffic to one of nine instances, which has a twentieth of the speed."""
QUICK_SHARE = 0.1
QUICK_ROWS = (
    "ours, measured times",
    "memP, fair weights",
    "memP, as published",
    "ours, cost model, free parallelism",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    pools: Pools
    score: Score
    replayed: Replayed | None = None
    uncalibrated: Replayed | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai place bench opentela`."""
    add_report_arguments(parser)
    parser.add_argument("--no-replay", action="store_true", help="formulas only")


def run(arguments: argparse.Namespace) -> int:
    """Solve, score, replay, hand out."""
    began_s = time.perf_counter()
    import ortools.sat.python.cp_model  # noqa: F401 - its second of loading is told apart from solving

    import_s = time.perf_counter() - began_s
    measured = measured_options()
    ours = _solved(measured)
    say(f"measured times: {ours.status} in {ours.solve_s:.3f} s (OR-tools loaded in {import_s:.1f} s)")
    free_options = predicted_options(OptionSettings())
    free = _solved(free_options)
    say(f"cost model only, free parallelism: {free.status} in {free.solve_s:.3f} s")
    rows = _rows(measured, ours, free)
    if not arguments.no_replay:
        rows = _all_replayed(rows, arguments.quick)
    hand_out(_report(rows, ours, free, import_s, arguments), arguments)
    return 0


def _solved(options: Sequence[Option]) -> Placement:
    rules = Rules(worst_share_slack=Fairness.STRICT.slack(options))
    return solve(fleet(), demands(), options, rules=rules, limits=SolveLimits(SOLVE_S), clock=time.perf_counter)


def _rows(measured: Sequence[Option], ours: Placement, free: Placement) -> list[Row]:
    given = table(measured)
    mem = pools_of(mem_p(given, {d.model: PARAMETERS[SHORT[d.model]] for d in demands()}), given)
    every = predicted_options(OptionSettings(prune=False))
    predicted = {option.key: option.requests_s for option in every}
    at_measured = {option.key: option.requests_s for option in at_measured_parallelism(every)}
    fixed = _solved(at_measured_parallelism(every))
    textbook = _solved(at_measured_parallelism(predicted_options(OptionSettings(prune=False), textbook=True)))
    own = pools_of_placed(ours.placed)
    found = [
        ("ours, measured times", own),
        ("OpenTela's search", pools_of(exhaustive(given), given)),
        ("ours, even weights", _even(own)),
        ("memP, fair weights", mem),
        ("memP, as published", weighted(mem, PUBLISHED_MEMP)),
        ("ours, cost model, free parallelism", pools_of_placed(free.placed, predicted)),
        ("ours, cost model, fixed parallelism", pools_of_placed(fixed.placed, at_measured)),
        ("ours, textbook roofline, fixed", pools_of_placed(textbook.placed, at_measured)),
        ("equal share", pools_of(equal_share(given), given)),
        ("maximize_replicas", pools_of(maximize_replicas(given), given)),
        ("workload_balanced", pools_of(workload_balanced(given), given)),
    ]
    return [Row(name, pools, score(pools)) for name, pools in found]


def _even(pools: Pools) -> Pools:
    """Every instance the same share, whatever its GPU."""
    counts = {model: sum(pool.instances for pool in own) for model, own in pools.items()}
    shares = {
        SHORT[model]: {pool.option.gpu: pool.instances / counts[model] for pool in own} for model, own in pools.items()
    }
    return weighted(pools, shares)


def _all_replayed(rows: Sequence[Row], quick: bool) -> list[Row]:
    """Two ways that come to the same placement are replayed once."""
    done: dict[str, Row] = {}
    for row in rows:
        if repr(row.pools) not in done:
            done[repr(row.pools)] = _replayed(row, quick)
    return [replace(done[repr(row.pools)], name=row.name) for row in rows]


def _replayed(row: Row, quick: bool) -> Row:
    if quick and row.name not in QUICK_ROWS:
        return row
    say(f"replay: {row.name}")
    if quick:
        return replace(row, replayed=replay(row.pools, share=QUICK_SHARE, calibrated=True, tell=say))
    calibrated = replay(row.pools, share=1.0, calibrated=True, tell=say)
    return replace(
        row, replayed=calibrated, uncalibrated=replay(row.pools, share=1.0, calibrated=False, tell=lambda _: None)
    )


# The report


def _report(
    rows: Sequence[Row], ours: Placement, free: Placement, import_s: float, arguments: argparse.Namespace
) -> Report:
    by_name = {row.name: row for row in rows}
    best, memp = by_name["ours, measured times"], by_name["memP, fair weights"]
    published = by_name["memP, as published"]
    freed = by_name["ours, cost model, free parallelism"]
    fixed, textbook = by_name["ours, cost model, fixed parallelism"], by_name["ours, textbook roofline, fixed"]
    worst = ours.levels[0]
    figures = {
        "objective": worst.value / WINDOW_S,
        "bound": worst.bound / WINDOW_S,
        "solve_s": ours.solve_s,
        "proved": float(ours.proved),
        "optima": float(_optima()),
        "total_rps": best.score.total_rps,
        "longest_drain_s": best.score.longest_drain_s,
        "free_total_rps": freed.score.total_rps,
        "free_longest_drain_s": freed.score.longest_drain_s,
        "free_solve_s": free.solve_s,
        "free_proved": float(free.proved),
        "memp_fair_total_rps": memp.score.total_rps,
        "memp_published_total_rps": published.score.total_rps,
        "memp_longest_drain_s": memp.score.longest_drain_s,
        "fixed_total_rps": fixed.score.total_rps,
        "fixed_longest_drain_s": fixed.score.longest_drain_s,
        "textbook_total_rps": textbook.score.total_rps,
        "textbook_longest_drain_s": textbook.score.longest_drain_s,
        "gain_of_placement_rps": best.score.total_rps - memp.score.total_rps,
        "gain_of_weights_rps": memp.score.total_rps - published.score.total_rps,
        "import_s": import_s,
    }
    for name, row in (("", best), ("free_", freed), ("memp_fair_", memp), ("memp_published_", published)):
        if row.replayed is not None:
            figures[f"replay_{name}total_rps"] = row.replayed.score.total_rps
            figures[f"replay_{name}longest_drain_s"] = row.replayed.score.longest_drain_s
    return Report(
        "place bench opentela",
        {"window_s": WINDOW_S, "replay_share": QUICK_SHARE if arguments.quick else 1.0, "solve_limit_s": SOLVE_S},
        figures,
        _table(rows),
        _notes(figures),
        [_raw(row) for row in rows],
    )


def _optima() -> int:
    """How many allocations reach the best worst drain: 1 says that the optimum is the only one."""
    given = table(measured_options())
    worst = [min(given.shares(allocation)) for allocation in allocations(given)]
    return sum(1 for share in worst if share >= max(worst) * (1 - 1e-12))


def _table(rows: Sequence[Row]) -> list[list[str]]:
    head = ["placement", "13B", "34B", "70B", "rps 13B", "34B", "70B", "total", "drain s", "replay total", "drain s"]
    lines = [[*head, "uncalibrated total", "drain s"]]
    for row in rows:
        instances = {SHORT[model]: _told(row.pools, model) for model in row.pools}
        line = [row.name, *(instances[name] for name in PARAMETERS)]
        line += [f"{row.score.rps[name]:.1f}" for name in PARAMETERS]
        line += [f"{row.score.total_rps:.1f}", f"{row.score.longest_drain_s:.0f}"]
        for replayed in (row.replayed, row.uncalibrated):
            told = replayed and [f"{replayed.score.total_rps:.1f}", f"{replayed.score.longest_drain_s:.0f}"]
            line += told or ["–", "–"]
        lines.append(line)
    return lines


def _told(pools: Pools, model: str) -> str:
    """Instances as `6A 4G`, with the parallelism where it is not the measured one."""
    parts: Counter[str] = Counter()
    for pool in pools[model]:
        kind = "A" if pool.option.gpu == A100 else "G"
        pipeline = f"pp{pool.option.pipeline}" if pool.option.pipeline > 1 else ""
        parts[f"{kind}·tp{pool.option.tensor}{pipeline}"] += pool.instances
    return " ".join(f"{count}{kind}" for kind, count in sorted(parts.items())) or "none"


def _notes(figures: dict[str, float]) -> list[str]:
    weights, placement = figures["gain_of_weights_rps"], figures["gain_of_placement_rps"]
    return [
        f"of the {weights + placement:.1f} rps between ours and memP as published, {weights:.1f} come from the weight "
        f"that the router gave one slow instance and {placement:.1f} from placement; what placement brings is "
        f"balance: the longest drain falls from {figures['memp_longest_drain_s']:.0f} to "
        f"{figures['longest_drain_s']:.0f} s",
        "free parallelism chooses splits that were never measured; they are scored with the measured rate times the "
        "predicted ratio of the two splits. With the measured splits only, the cost model's plans are the two rows "
        "called fixed",
        "replay: steps slowed by one factor a model and GPU, so that one instance alone takes its measured time; "
        "uncalibrated: the cost model as it is",
    ]


def _raw(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "pools": {model: [asdict(pool) for pool in own] for model, own in row.pools.items()},
        "score": asdict(row.score),
        "replayed": None if row.replayed is None else asdict(row.replayed),
        "uncalibrated": None if row.uncalibrated is None else asdict(row.uncalibrated),
    }
