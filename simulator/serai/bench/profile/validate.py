"""`serai profile validate`: judges the shipped profiles on measurements their fit never saw, every figure with its
count.

| figure                | truth                                                              | goal   |
|-----------------------|--------------------------------------------------------------------|--------|
| tpot_mape_held_out    | served TPOT of H100 and H200: two whole models, and a third of the | ≤ 0.10 |
|                       | other configurations                                               |        |
| prefill_mape_held_out | prompt times of A100 and H100: BLOOM-176B, Llama-2-70B at TP 4     | ≤ 0.15 |
| speedup_error         | H100 over RTX 3090 on OpenTela's three shapes                      | ≤ 0.06 |
| placement_ratio       | drain time of the roofline-only placement over the best            | ≤ 1.05 |

The full run also fits everything again and says by how much the shipped numbers differ from that, and leaves each
model out in turn. `--folds` cross-validates within the fitted rows, which is how the fit's structure is chosen.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

from serai.bench.profile import (
    folds,
    kernel_tables,
    mlperf,
    placement_test,
    serving_logs,
    silicon,
    speedup,
    static_prefill,
)
from serai.bench.profile.data_folder import DataMissing, add_data_argument, checked_data
from serai.bench.profile.fit import fit_all
from serai.bench.profile.served_fit import Predictor, predicted_tpot_ms
from serai.bench.profile.silicon import ServedRow
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.performance.hardware import GPUS
from serai.performance.latency_profile import (
    Efficiency,
    LatencyProfile,
    Overheads,
    decode_profile,
    profile_for,
    shipped_profiles,
)
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

GOALS = {
    "tpot_mape_held_out": 0.10,
    "prefill_mape_held_out": 0.15,
    "speedup_error": 0.06,
    "placement_ratio": 1.05,
}
ECOSERVE_PREFILL = (
    # GPU, TP, measured prompt tokens a second of one instance of Llama-30B (EcoServe Table 3, as recalled)
    ("a800-sxm-80", 2, 6547.0),
    ("l20", 4, 3292.0),
)

Profiles = Mapping[tuple[str, str], LatencyProfile]


@dataclass
class Findings:
    """What the parts of the validation add to: figures, lines of the table, notes, and the rows behind them."""

    figures: dict[str, float] = field(default_factory=dict)
    table: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def errors(self, name: str, label: str, errors: Sequence[float]) -> None:
        """A mean absolute relative error with its bias and count: figures `name` and `rows_` with the rest of it."""
        if not errors:
            return
        size = mean(map(abs, errors))
        self.figures[name] = size
        self.figures[f"{name}_rows"] = len(errors)
        self.table.append((label, f"{size:.1%}", f"{mean(errors):+.1%}", str(len(errors))))

    def number(self, name: str, label: str, value: float, count: int) -> None:
        """Any other figure with its count."""
        self.figures[name] = value
        self.table.append((label, f"{value:.3f}", "", str(count)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai profile validate`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_report_arguments(parser)
    add_data_argument(parser)
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="judge the profiles in DIR, not the shipped ones")
    parser.add_argument("--folds", action="store_true", help="also cross-validate within the fitted rows: minutes")


def run(arguments: argparse.Namespace) -> int:
    """Judge and print. Exit status 2 when the measurements or profiles are missing."""
    try:
        data = checked_data(arguments.data)
        profiles = _profiles(arguments.profiles)
        found = validate(data, profiles, full=not arguments.quick, within=arguments.folds)
    except (DataMissing, OSError, ValueError, KeyError) as error:
        print(f"serai profile validate: {error}", file=sys.stderr)
        return 2
    head = ("", "mean abs error", "bias", "rows")
    config = {"held_out_models": silicon.HELD_OUT_MODELS, "goals": GOALS, "quick": arguments.quick}
    hand_out(Report("profile validate", config, found.figures, [head, *found.table], found.notes, found.raw), arguments)
    return 0


def _profiles(folder: Path | None) -> Profiles:
    if folder is None:
        return shipped_profiles()
    read = (decode_profile(path.read_bytes(), str(path)) for path in sorted(folder.glob("*.json")))
    return {(profile.gpu, profile.engine): profile for profile in read}


def validate(data: Path, profiles: Profiles, *, full: bool, within: bool = False) -> Findings:
    """All parts in turn. Raises OSError when a measurement is absent."""
    found = Findings()
    for part in (_served, _prompts, _kernels, _logs, _mlperf, _placement, _anchors):
        part(data, profiles, found)
    if full:
        _refit(data, profiles, found)
        _leave_one_model_out(data, found)
    if within:
        _within_fitted(data, found)
    found.figures["rows"] = sum(v for k, v in found.figures.items() if k.endswith("_held_out_rows"))
    for name, goal in GOALS.items():
        if found.figures[name] > goal:
            found.notes.append(f"{name} {found.figures[name]:.3f} misses its goal of {goal}")
    return found


def _served(data: Path, profiles: Profiles, found: Findings) -> None:
    say("served rows of H100 and H200")
    served = silicon.load_served_rows(data)
    predict = {key: Predictor(profile) for key, profile in profiles.items()}
    errors = {id(r): predict[r.system, r.stack].tpot_ms(r) / r.tpot_ms - 1 for r in served.rows}
    held = [row for row in served.rows if row.held_out]

    def of(rows: Iterable[ServedRow]) -> list[float]:
        return [errors[id(row)] for row in rows]

    unseen = [row for row in held if row.model in silicon.HELD_OUT_MODELS]
    found.errors("tpot_mape_held_out", "TPOT, served, held out", of(held))
    found.errors("tpot_mape_unseen_models", "  of models never fitted", of(unseen))
    found.errors("tpot_mape_unseen_sizes", "  of sizes never fitted", of(r for r in held if r not in unseen))
    found.errors("tpot_mape_dense", "  dense models", of(r for r in held if r.instance.card.experts is None))
    found.errors("tpot_mape_experts", "  models with experts", of(r for r in held if r.instance.card.experts))
    for stack in silicon.STACKS:
        found.errors(f"tpot_mape_{_flat(stack)}", f"  under {stack}", of(r for r in held if r.stack == stack))
    found.figures["tpot_median_error_held_out"] = median(map(abs, of(held)))
    found.errors("tpot_mape_fitted", "TPOT, served, fitted rows", of(r for r in served.rows if not r.held_out))
    roofline = [predicted_tpot_ms(row, row.textbook) / row.tpot_ms - 1 for row in held]
    found.errors("roofline_tpot_mape", "TPOT, pure roofline, same rows", roofline)
    found.figures["roofline_tpot_bias"] = mean(roofline)
    _served_speed_up(held, predict, found)
    found.notes.append("served rows left out: " + "; ".join(f"{n} {why}" for why, n in served.dropped.items() if n))
    found.notes.append("held out: all of " + ", ".join(silicon.HELD_OUT_MODELS) + "; and by hash " + _by_hash(held))
    found.raw["served"] = [_served_raw(row, errors[id(row)]) for row in served.rows]


def _by_hash(held: Sequence[ServedRow]) -> str:
    return ", ".join(sorted({r.configuration for r in held if r.model not in silicon.HELD_OUT_MODELS}))


def _served_raw(row: ServedRow, error: float) -> dict[str, object]:
    load = row.load
    shape = f"{load.prompt_tokens}/{load.output_tokens} c{load.concurrency}"
    return {
        "configuration": row.configuration,
        "shape": shape,
        "held_out": row.held_out,
        "tpot_ms": row.tpot_ms,
        "error": round(error, 4),
    }


def _served_speed_up(held: Sequence[ServedRow], predict: Mapping[tuple[str, str], Predictor], found: Findings) -> None:
    """H200 over H100 where both served the same held-out load under the same engine."""
    sides: dict[tuple[object, ...], dict[str, ServedRow]] = defaultdict(dict)
    for row in held:
        sides[row.model, row.stack, row.tensor, row.precision, row.load][row.system] = row
    errors = []
    for pair in sides.values():
        if len(pair) == 2:
            slow, fast = pair["h100-sxm-80"], pair["h200-sxm-141"]
            measured = slow.tpot_ms / fast.tpot_ms
            predicted = predict[slow.system, slow.stack].tpot_ms(slow) / predict[fast.system, fast.stack].tpot_ms(fast)
            errors.append(predicted / measured - 1)
    found.errors("speedup_error_h200_over_h100", "speed-up H200 over H100, served, held out", errors)


def _prompts(data: Path, profiles: Profiles, found: Findings) -> None:
    say("static prompts of A100 and H100")
    rows, dropped = static_prefill.load_prompt_rows(data)
    engine = static_prefill.ENGINE
    errors = {id(r): static_prefill.predicted_prompt_ms(r, profiles[r.gpu, engine]) / r.prompt_ms - 1 for r in rows}
    held = [row for row in rows if row.held_out]
    found.errors("prefill_mape_held_out", "prompt time, held out", [errors[id(r)] for r in held])
    for gpu, name in (("a100-sxm-80", "a100"), ("h100-sxm-80", "h100")):
        found.errors(f"prefill_mape_{name}", f"  on {gpu}", [errors[id(r)] for r in held if r.gpu == gpu])
    found.errors("prefill_mape_fitted", "prompt time, fitted rows", [errors[id(r)] for r in rows if not r.held_out])
    roofline = [r.textbook.prefill_s(r.prompt_tokens, batch=r.batch) * 1e3 / r.prompt_ms - 1 for r in held]
    found.errors("roofline_prefill_mape", "prompt time, pure roofline, same rows", roofline)
    found.errors(
        "speedup_error_h100_over_a100", "speed-up H100 over A100, prompts, held out", _prompt_ratios(held, errors)
    )
    powered = [r for r in held if r.gpu == "a100-sxm-80" and r.power_share > 0.3]
    power = [static_prefill.predicted_power_share(r, profiles[r.gpu, engine]) / r.power_share - 1 for r in powered]
    found.errors("power_mape", "mean power while decoding, A100, held out", power)
    found.notes += [f"prompt rows left out: {count} {why}" for why, count in dropped.items() if count]


def _prompt_ratios(held: Sequence[static_prefill.PromptRow], errors: Mapping[int, float]) -> list[float]:
    sides: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for row in held:
        sides[row.model, row.tensor, row.batch, row.prompt_tokens][row.gpu] = 1 + errors[id(row)]
    return [pair["a100-sxm-80"] / pair["h100-sxm-80"] - 1 for pair in sides.values() if len(pair) == 2]


def _kernels(data: Path, profiles: Profiles, found: Findings) -> None:
    say("kernel times and the speed-up of the OpenTela pair")
    passes = [row for row in kernel_tables.load_passes(data) if row.held_out]
    errors = [
        kernel_tables.predicted_pass_s(row, profiles[row.gpu, kernel_tables.ENGINE]) / row.seconds - 1 for row in passes
    ]
    found.errors("kernel_mape_held_out", "passes from kernel times, held out", errors)
    shapes = speedup.speed_ups(kernel_tables.load_layer_tables(data), profiles)
    found.number("speedup_error", "speed-up H100 over RTX 3090, mean error", mean(s.error for s in shapes), len(shapes))
    found.figures["speedup_error_worst"] = max(s.error for s in shapes)
    found.figures["speedup_absolute_error"] = mean(e for s in shapes for e in (s.fast_error, s.slow_error))
    found.notes += [
        f"speed-up at {s.shape}: measured {s.measured:.2f}, predicted {s.predicted:.2f};"
        f" own errors {s.fast_error:.1%} and {s.slow_error:.1%}"
        for s in shapes
    ]


def _logs(data: Path, profiles: Profiles, found: Findings) -> None:
    say("request logs of RTX 4090 and RTX PRO 6000")
    for log in serving_logs.load_logs(data):
        profile = profiles[log.gpu, serving_logs.ENGINE]
        kind = "held out" if log.held_out else "fitted"
        name = f"log_tpot_mape_{_flat(log.gpu)}_{_flat(log.model.split('/')[-1])}"
        label = f"TPOT per request, {log.model} on {log.gpu}, {kind}"
        found.errors(name, label, serving_logs.tpot_errors(log, profile))


def _mlperf(data: Path, profiles: Profiles, found: Findings) -> None:
    say("MLPerf ratios")
    rows = mlperf.load_throughputs(data, profiles["h100-sxm-80", "trtllm"])
    reference = {row.benchmark: row for row in rows if row.gpu == mlperf.REFERENCE}
    errors = []
    for row in rows:
        base = reference[row.benchmark]
        measured, predicted = row.measured / base.measured, row.predicted / base.predicted
        found.notes.append(
            f"MLPerf {row.benchmark} {row.gpu}: {row.measured:.0f} tok/s a GPU ({row.systems} systems), predicted"
            f" {row.predicted:.0f}; ratio to H100 measured {measured:.2f}, predicted {predicted:.2f}"
        )
        if row is not base:
            errors.append(predicted / measured - 1)
    found.errors("mlperf_ratio_error", "throughput ratio to H100, MLPerf v4.1", errors)


def _placement(_: Path, profiles: Profiles, found: Findings) -> None:
    say("placement test")
    best = placement_test.best_placement(placement_test.measured_seconds())
    roofline = placement_test.best_placement(placement_test.predicted_seconds())
    fitted = {"a100-sxm-80": profiles["a100-sxm-80", "vllm"], "gh200-96": profiles["h100-sxm-80", "vllm"]}
    planned = placement_test.best_placement(placement_test.predicted_seconds(fitted))
    tried = len(placement_test.allocations())
    found.number("placement_ratio", "drain time, roofline-only plan over best", roofline.drain_s / best.drain_s, tried)
    found.number("placement_ratio_fitted", "drain time, fitted plan over best", planned.drain_s / best.drain_s, tried)
    for name, plan in (("best", best), ("roofline-only", roofline), ("fitted", planned)):
        found.notes.append(
            f"placement, {name}: instances on (A100, GH200) {plan.allocation}, drain {plan.drain_s:.0f} s,"
            f" {plan.total_rps:.1f} requests/s"
        )


def _anchors(_: Path, __: Profiles, found: Findings) -> None:
    """EcoServe's prompt speeds: GPUs without any measurement here, so their nearest profile stands in."""
    for gpu, tensor, measured in ECOSERVE_PREFILL:
        profile = profile_for(gpu, "vllm")
        instance = RooflineModel(shipped_card("huggyllama/llama-30b"), GPUS[gpu], Parallelism(tensor), profile=profile)
        predicted = 1024 / instance.prefill_s(1024)
        found.figures[f"ecoserve_prefill_error_{gpu.split('-')[0]}"] = predicted / measured - 1
        found.notes.append(
            f"EcoServe, Llama-30B on {tensor} × {gpu}: {measured:.0f} prompt tok/s measured, {predicted:.0f} predicted"
        )


def _refit(data: Path, profiles: Profiles, found: Findings) -> None:
    """How far the judged numbers are from a fit made now: 0 when they are the fit of this data."""
    changes = [_largest_change(profiles[key], profile) for key, profile in fit_all(data).items() if key in profiles]
    found.number("refit_largest_change", "largest change of a factor on fitting again", max(changes), len(changes))


def _largest_change(old: LatencyProfile, new: LatencyProfile) -> float:
    pairs: list[tuple[float, float]] = []
    parts: tuple[tuple[Callable[[LatencyProfile], object], type[Efficiency] | type[Overheads]], ...] = (
        (lambda p: p.efficiency, Efficiency),
        (lambda p: p.overheads, Overheads),
    )
    for part, kind in parts:
        pairs += [(getattr(part(old), f.name), getattr(part(new), f.name)) for f in fields(kind)]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def _leave_one_model_out(data: Path, found: Findings) -> None:
    """Every model predicted by a fit that saw none of its rows, on any GPU or engine."""
    rows = silicon.load_served_rows(data).rows
    errors: list[float] = []
    for model in sorted({row.model for row in rows}):
        say(f"leaving out {model}")
        own = folds.left_out_errors([r for r in rows if r.model != model], [r for r in rows if r.model == model])
        short = model.split("/")[-1]
        found.errors(f"tpot_mape_without_{_flat(short)}", f"TPOT, {short}, model left out", own)
        errors += own
    found.errors("tpot_mape_leave_one_model_out", "TPOT, each model left out in turn", errors)


def _within_fitted(data: Path, found: Findings) -> None:
    """Cross-validation that never reads a held-out row."""
    rows = [row for row in silicon.load_served_rows(data).rows if not row.held_out]
    errors: dict[str, list[float]] = {}
    for name, group in folds.groups(rows).items():
        say(f"fitted rows, left out by {name}")
        errors[name] = [e for parts in folds.folds(rows, group) for e in folds.left_out_errors(*parts)]
        found.errors(
            f"tpot_mape_folds_{name}", f"TPOT, fitted rows, left out by {name.replace('_', ' ')}", errors[name]
        )
    found.number("tpot_folds_criterion", "  weighed, rows up to 50 %", folds.criterion(errors), len(rows))


def _flat(name: str) -> str:
    """A name as part of a figure's name."""
    return name.lower().replace("-", "_").replace(".", "_")
