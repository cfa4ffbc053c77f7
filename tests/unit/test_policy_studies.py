"""Policy studies: scans of rates, averages of ratios, samples of cells, and results kept between runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.bench.simulate import never_worse
from serai.bench.simulate.ablation import relative_figures, variants
from serai.bench.simulate.goodput import lost_share, paper_table, ratio_figures, slice_rows
from serai.bench.simulate.never_worse import gap_of, sample
from serai.bench.simulate.scaling import grown
from serai.bench.simulate.staleness import loss_figures
from serai.bench.simulate.study import runs as study_runs
from serai.bench.simulate.study.cells import (
    TARGETS,
    Candidate,
    Cell,
    Load,
    decode_share,
    long_enough,
    paper_slice,
    reference_rate_per_s,
)
from serai.bench.simulate.study.code_digest import UNRELATED, code_digest, covered
from serai.bench.simulate.study.comparison import (
    Goodput,
    average_ratio,
    candidates_for,
    ratio,
    ratio_range,
    told,
)
from serai.bench.simulate.study.runs import CellFailed, FixedCells, Runs
from serai.bench.simulate.study.scans import QUICK, ScanJob, best_of
from serai.bench.simulate.study.systems import Result
from serai.bench.simulate.traces import InstanceScan, common_count
from serai.simulator.goodput import LEVELS, GoodputScan
from serai.simulator.rising_scan import RisingScan, ScanPlan, rising_rates

RATES = tuple(float(rate) for rate in range(10, 110, 10))
A800 = paper_slice("a800", "codellama-34b", "sharegpt")
L20 = paper_slice("l20", "codellama-34b", "longbench")


def scanned(
    curve: Callable[[float], float], plan: ScanPlan
) -> tuple[dict[float, GoodputScan], list[tuple[float, int]]]:
    scan, asked = RisingScan(plan), []
    while asks := scan.wanted():
        for rate, seed in asks:
            asked.append((rate, seed))
            scan.learn(rate, seed, curve(rate))
    return scan.results(), asked


def falling(at: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= at else 0.2


def test_a_scan_rises_until_it_has_failed_for_good_and_is_finer_where_it_turns() -> None:
    found, asked = scanned(falling(47), ScanPlan(RATES, (1,)))
    assert [rate for rate, _ in asked[:6]] == [10, 20, 30, 40, 50, 60]
    assert max(rate for rate, _ in asked) == 60
    assert found[0.9].highest_held_per_s == 45
    assert found[0.9].lowest_failing_per_s == 47.5


def test_every_seed_is_asked_where_a_level_turns_and_only_there() -> None:
    _, asked = scanned(falling(47), ScanPlan(RATES, (1, 2, 3)))
    seeds = Counter(rate for rate, _ in asked)
    assert {rate for rate, count in seeds.items() if count == 3} == {45, 47.5}


def test_a_turn_that_other_seeds_move_is_looked_for_again() -> None:
    scan = RisingScan(ScanPlan(RATES, (1, 2, 3)))
    while asks := scan.wanted():
        for rate, seed in asks:
            scan.learn(rate, seed, 1.0 if rate <= (57 if seed == 1 else 43) else 0.2)
    found = scan.results()[0.9]
    assert (found.highest_held_per_s, found.lowest_failing_per_s) == (42.5, 45)


def test_a_rate_that_fails_below_one_that_holds_is_told() -> None:
    def dented(rate: float) -> float:
        return 0.85 if rate in (20, 30) else falling(55)(rate)

    found, _ = scanned(dented, ScanPlan(RATES, (1,), rounds=0))
    assert found[0.9].highest_held_per_s == 50
    assert found[0.9].lowest_failing_per_s == 20
    assert not found[0.9].monotone


def test_nothing_is_wanted_while_answers_are_awaited() -> None:
    scan = RisingScan(ScanPlan(RATES, (1,)))
    assert scan.wanted() == [(10, 1)]
    assert scan.wanted() == []
    with pytest.raises(ValueError, match="nobody asked"):
        scan.learn(20, 1, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=10, max_size=10), st.integers(1, 3), st.integers(0, 3))
def test_any_curve_ends_with_all_seeds_at_the_rates_that_decide(values: list[float], seeds: int, rounds: int) -> None:
    def curve(rate: float) -> float:
        return values[min(9, int(rate / 10.0001))]

    found, asked = scanned(curve, ScanPlan(RATES, tuple(range(seeds)), rounds=rounds))
    assert len(asked) == len(set(asked)) <= 10 * 9 * seeds
    for scan in found.values():
        points = {point.rate_per_s: point for point in scan.curve}
        lower = scan.highest_held_per_s
        higher = min((rate for rate in points if lower is not None and rate > lower), default=None)
        if lower is not None and higher is not None:
            assert len(points[lower].by_seed) == len(points[higher].by_seed) == seeds


def test_a_plan_needs_rising_rates() -> None:
    for rates in ((), (2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="rising rates"):
            ScanPlan(rates, (1,))
    assert rising_rates(57.63, (0.5, 1.0)) == (28.82, 57.63)


# Ratios


def goodput(*by_seed: float | None, failing: float | None = None) -> Goodput:
    held = by_seed[0]
    return Goodput(held, failing, True, by_seed, False)


TABLE = {
    (where, system): {level: goodput(*held) for level in LEVELS}
    for where, systems in {
        A800: {"vllm": (40.0, 38.0), "sarathi": (50.0, 50.0), "padg-paper": (60.0, 57.0), "serai": (66.0, 66.0)},
        L20: {"vllm": (4.0, 4.0), "sarathi": (None, None), "padg-paper": (8.0, 8.0), "serai": (8.0, 8.0)},
    }.items()
    for system, held in systems.items()
}


def test_ratios_average_as_the_paper_does_and_leave_failing_cases_out() -> None:
    assert ratio(TABLE, A800, "padg-paper", "vllm", 0.9) == 1.5
    assert math.isnan(ratio(TABLE, L20, "padg-paper", "sarathi", 0.9))
    assert average_ratio(TABLE, [A800, L20], "padg-paper", ["vllm", "sarathi"], 0.9) == (pytest.approx(4.7 / 3), 3)
    assert ratio_range(TABLE, [A800], "padg-paper", "sarathi", 0.9) == (1.14, 1.2)
    figures = ratio_figures(TABLE, [A800, L20])
    assert figures["a800_paper_over_vllm_p90"] == 1.5
    assert figures["l20_serai_over_vllm_p99"] == 2.0
    assert "l20_paper_over_sarathi_p90" not in figures
    assert figures["serai_over_paper_p90_worst"] == 1.0


def test_the_papers_table_has_a_row_where_we_have_a_figure() -> None:
    head, *rows = paper_table(TABLE, [A800, L20])
    assert head[1:3] == ("paper", "Algorithm 1 here")
    by_name = {row[0]: row for row in rows}
    assert by_name["T1: l20, a800, over vllm"][1:4] == ("2.01", "1.75", "-13%")
    assert by_name["T3: l20, over vllm"][2] == "2.00"
    assert not any("h100" in name for name in by_name)
    assert slice_rows(TABLE)[0][0] == "a800 codellama-34b sharegpt: vllm"


def test_a_share_is_lost_of_what_was_there() -> None:
    assert lost_share(40, 30) == 0.25
    assert lost_share(40, None) == 1
    assert math.isnan(lost_share(None, 3))


def test_disaggregated_systems_get_the_ratios_nearest_to_balance() -> None:
    assert candidates_for("serai", A800, 3) == [Candidate("serai")]
    prefills = [one.prefill for one in candidates_for("mooncake", A800, 3)]
    assert len(prefills) == 3
    assert 0 < decode_share(L20) < decode_share(A800) < 1
    assert prefills[0] <= (1 - decode_share(A800)) * 8 <= prefills[-1]


def test_a_variant_is_told_beside_its_whole_policy() -> None:
    table = {
        (A800, name): {level: goodput(rate) for level in LEVELS}
        for name, rate in (("paper", 50.0), ("paper_random_next", 40.0), ("serai", 60.0), ("serai_median_slack", None))
    }
    figures = relative_figures(table, [A800], [name for _, name in table])
    assert figures["paper_random_next_over_paper_p90"] == 0.8
    assert figures["serai_median_slack_over_serai_p99"] == 0
    assert "serai" in variants(quick=True)
    assert "serai" not in variants(quick=True, policy="paper")
    assert "paper" not in variants(quick=True, policy="serai")
    assert {"paper_interval_25", "paper_interval_100"} <= set(variants(quick=False)) - set(variants(quick=True))


def test_growth_is_goodput_over_that_of_few_instances() -> None:
    table = {("m", "serai", count): {0.9: goodput(rate)} for count, rate in ((1, 5.0), (2, None), (4, 27.0))}
    assert grown(table, "m", "serai", 1, 4, 0.9) == 5.4
    assert grown(table, "m", "serai", 1, 2, 0.9) == 0
    assert math.isnan(grown(table, "m", "serai", 2, 4, 0.9))


# Cells


def test_a_cell_is_named_by_all_that_it_depends_on() -> None:
    cell = Cell(A800, Candidate("vllm"), Load(40.0, 1))
    others = [
        replace(cell, where=L20),
        replace(cell, candidate=Candidate("vllm", (("without", "x"),))),
        replace(cell, load=Load(40.0, 2)),
        replace(cell, delay_s=0.1),
        replace(cell, loss=0.1),
    ]
    assert len({other.text() for other in [cell, *others]}) == 1 + len(others) == 1 + len(fields(cell))
    assert json.loads(cell.text())["where"]["model"] == "codellama-34b"


def test_a_load_is_as_long_as_its_requests_need() -> None:
    assert long_enough(Load(100.0, 1, counted_s=45), 500).counted_s == 45
    assert long_enough(Load(2.0, 1, counted_s=45), 500).counted_s == 250
    assert long_enough(Load(0.1, 1, counted_s=45), 500).counted_s == 600


def test_the_reference_rate_grows_with_instances_and_falls_with_the_target() -> None:
    rate = reference_rate_per_s(A800)
    assert reference_rate_per_s(replace(A800, instances=16)) == pytest.approx(2 * rate, rel=0.01)
    assert reference_rate_per_s(replace(A800, slo=replace(TARGETS["sharegpt"], tpot_s=0.06))) < rate


# never-worse


def test_the_sample_is_even_on_every_axis_and_its_beginning_is_a_sample() -> None:
    places = sample(630)
    assert places[:24] == sample(24)
    for value, count in Counter(place.where.instances for place in places).items():
        assert count == 126, value
    assert set(Counter(place.where.cluster for place in places).values()) == {210}
    assert set(Counter(place.cv for place in places).values()) == {210}
    assert len({(place.where, place.rate_per_s, place.cv) for place in places}) > 600


def test_a_gap_is_ours_less_the_better_ordinary_one() -> None:
    place = sample(1)[0]
    attained = {(0, "vllm", 1): 0.9, (0, "vllm", 2): 0.9, (0, "sarathi", 1): 0.94, (0, "sarathi", 2): 0.96}
    gap = gap_of(place, attained | {(0, "serai", 1): 0.93, (0, "serai", 2): 0.95}, (1, 2), "serai")
    assert gap.points == pytest.approx(-1)
    assert gap.error_points == pytest.approx(0)
    assert gap.attainment["sarathi"] == pytest.approx(0.95)
    assert math.prod(never_worse.AXES.values()) > 10_000


def test_stale_losses_are_told_at_the_worst_rate() -> None:
    attained = {("serai", 10.0, 0.0): 0.99, ("serai", 10.0, 1.0): 0.98, ("serai", 20.0, 0.0): 0.97}
    figures = loss_figures(attained | {("serai", 20.0, 1.0): 0.93}, ["serai"], [10.0, 20.0], [0.0, 1.0])
    assert figures == {"serai_loss_points_1000ms": pytest.approx(4)}


# Jobs


def result(attainment: float, requests: int = 100) -> Result:
    values = dict.fromkeys(Result.__slots__, 0.0) | {"attainment": attainment, "requests": requests}
    return Result(**values)  # type: ignore[arg-type]


def answered(job: ScanJob | InstanceScan, of: Callable[[Cell], Result]) -> None:
    while cells := job.wanted():
        for cell in cells:
            job.learn(cell, of(cell))


def test_the_best_ratio_of_a_disaggregated_system_counts() -> None:
    jobs = [ScanJob(A800, Candidate("mooncake", prefill=prefill), QUICK) for prefill in (2, 3)]
    for job, most in zip(jobs, (30, 45), strict=True):
        answered(job, lambda cell, most=most: result(1.0 if cell.load.rate_per_s < most else 0.1))
    assert best_of(jobs, 0.9).candidate.prefill == 3
    found = told(jobs[1].scans()[0.9])
    (held,) = rising_rates(reference_rate_per_s(A800), [0.7])
    assert found.held_per_s == found.by_seed[0] == held


def test_a_trace_gets_more_instances_until_enough_is_attained() -> None:
    jobs = {
        ("azure-code", system): InstanceScan("azure-code", system, (1, 2, 4, 8), (1, 2), 60.0)
        for system in ("vllm", "serai")
    }
    for (_, system), job in jobs.items():
        need = 4 if system == "vllm" else 2
        answered(job, lambda cell, need=need: result(min(1.0, 0.95 * cell.where.instances / need)))
    serai = jobs["azure-code", "serai"]
    assert (serai.fewest(0.9), serai.fewest(0.99)) == (2, 4)
    assert serai.attainment(8) == 1.0
    assert serai.gpu_s_per_1k(0.9) == pytest.approx(2 * 2 * 60 / 100 * 1000)
    assert common_count(jobs, "azure-code") == 4


# Runs


CELLS = [Cell(A800, Candidate("vllm"), Load(40.0, seed)) for seed in (1, 2)]


def test_results_are_kept_and_used_again_while_the_code_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Cell] = []

    def run(cell: Cell) -> Result:
        ran.append(cell)
        return replace(result(0.5), tpot_p99_s=math.inf)

    monkeypatch.setattr(study_runs, "measured", run)
    for _ in range(2):
        job, runs = FixedCells(CELLS), Runs(1, tmp_path)
        runs.complete([job, FixedCells(CELLS[:1])])
        assert {found.attainment for found in job.results.values()} == {0.5}
        assert job.results[CELLS[0]].tpot_p99_s == math.inf
    assert ran == CELLS
    assert runs.from_cache == 2

    monkeypatch.setattr(study_runs, "code_digest", lambda macro: "other code")
    Runs(1, tmp_path).complete([FixedCells(CELLS)])
    assert ran == [*CELLS, *CELLS]


def test_a_file_that_is_broken_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_runs, "measured", lambda cell: result(0.5))
    Runs(1, tmp_path).complete([FixedCells(CELLS[:1])])
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text('{"cell": ')
    job = FixedCells(CELLS[:1])
    Runs(1, tmp_path).complete([job])
    assert job.results[CELLS[0]] == result(0.5)


def test_a_run_that_breaks_says_which_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cell: Cell) -> Result:
        raise ZeroDivisionError

    monkeypatch.setattr(study_runs, "measured", run)
    with pytest.raises(CellFailed, match=r"vllm failed: ZeroDivisionError\(\).*rate_per_s.: 40"):
        Runs(1).complete([FixedCells(CELLS)])


def test_code_of_the_macro_scheduler_matters_only_where_it_takes_part() -> None:
    assert code_digest(True) != code_digest(False)
    assert len(code_digest(False)) == 64


def test_kept_results_are_named_by_all_the_code_that_a_run_imports() -> None:
    listing = "import sys, serai.bench.simulate.study.systems; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout
    modules = {name for name in imported.split() if name.startswith("serai.")}
    named = (*covered(), *UNRELATED)
    left = {one for one in modules if not any(one == name or one.startswith(f"{name}.") for name in named)}
    # Packages that contain them have no code of their own.
    assert {one for one in left if not any(other.startswith(f"{one}.") for other in modules)} == set()
