"""Pictures are drawn and are the same bytes for the same numbers; tables say what outcomes say."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serai.simulator.fairness import by_prompt
from serai.simulator.goodput import CurvePoint, judged
from serai.simulator.outcomes import NS, LatencyDefinition, Outcome, Outcomes, SloTarget
from serai.simulator.queues import waiting
from serai.simulator.reports import pictures
from serai.simulator.reports.drawing import ExtraMissing, written
from serai.simulator.reports.tables import (
    curves_object,
    scan_object,
    write_curves_csv,
    write_json,
    write_outcomes_csv,
    write_outcomes_json,
)
from serai.simulator.summary import summary, ttfts_s

STRICT, INDUSTRY = LatencyDefinition.STRICT, LatencyDefinition.INDUSTRY
SLO = SloTarget(5.0, 0.1)
OUTCOMES = Outcomes(
    [
        Outcome(0, 100, 11, 0, NS, NS, 2 * NS, client="ann", itl_max_ns=5),
        Outcome(NS, 3000, 11, 1, 7 * NS, 8 * NS, 9 * NS, preemptions=1),
        Outcome(2 * NS, 100, 11, refused=True),
    ]
)
CURVE = (CurvePoint(10.0, (1.0, 0.98)), CurvePoint(20.0, (0.5, 0.3)))
CURVES = [pictures.PolicyCurve("ours", STRICT, CURVE), pictures.PolicyCurve("ours", INDUSTRY, CURVE)]
INTERVALS = {"0": [(0, NS, "prefill"), (NS, 3 * NS, "decode")], "1": [(2 * NS, 4 * NS, "mixed")]}

PICTURES: dict[str, Callable[[Path], None]] = {
    "attainment": lambda stem: pictures.attainment_by_rate(stem, CURVES),
    "phases": lambda stem: pictures.phase_timeline(stem, INTERVALS, 0.5, 3.5),
    "ttft": lambda stem: pictures.latency_cdf(stem, {"ours": ttfts_s(OUTCOMES, STRICT)}, 5.0),
    "fairness": lambda stem: pictures.fairness_by_bucket(
        stem, {"ours": by_prompt(OUTCOMES, SLO, STRICT)}, what="prompt (tokens)"
    ),
    "queue": lambda stem: pictures.queue_over_time(stem, {"ours": waiting(OUTCOMES)}),
}
LABELS = {
    "attainment": ["request rate (requests/s)", "ours, strict", "ours, industry", "99%"],
    "phases": ["time (s)", "instance", "prefill", "decode", "mixed", "idle"],
    "ttft": ["TTFT (s)", "ours", "target: 5 s"],
    "fairness": ["prompt (tokens); requests below", "2048–8191", "ours (Jain 0.500)"],
    "queue": ["time (s)", "requests waiting", "ours"],
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_written_twice_with_its_labels_and_units(name: str, tmp_path: Path) -> None:
    stem = tmp_path / "made" / f"{name}-1.5"
    PICTURES[name](stem)
    assert written(stem, "png").read_bytes().startswith(b"\x89PNG")
    text = written(stem, "svg").read_text()
    assert [label for label in LABELS[name] if label not in text] == []


def test_the_same_numbers_are_the_same_bytes(tmp_path: Path) -> None:
    for stem in ("one", "two"):
        PICTURES["phases"](tmp_path / stem)
    for ending in ("png", "svg"):
        assert written(tmp_path / "one", ending).read_bytes() == written(tmp_path / "two", ending).read_bytes()


def test_empty_and_endless_data_are_drawn_too(tmp_path: Path) -> None:
    pictures.latency_cdf(tmp_path / "cdf", {"none answered": [math.inf, math.inf]}, 0.1, quantity="TPOT")
    pictures.fairness_by_bucket(tmp_path / "fair", {"ours": by_prompt([], SLO, STRICT)}, what="prompt (tokens)")
    assert "TPOT (ms)" in written(tmp_path / "cdf", "svg").read_text()


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ExtraMissing, match=r"^pictures need matplotlib: run `pip install 'serai\[simulator\]'`$"):
        PICTURES["queue"](tmp_path / "queue")


def test_a_cdf_ends_at_the_share_that_was_answered() -> None:
    values, shares = pictures._cdf([1.0, math.inf, 2.0, math.inf])
    assert (values, shares) == ([1.0, 2.0], [0.25, 0.5])
    many = [float(value) for value in range(1, 50_001)]
    values, shares = pictures._cdf(many)
    assert len(values) <= 1001
    assert (values[-1], shares[-1]) == (50_000.0, 1.0)


def test_outcomes_as_csv_and_json_say_the_same(tmp_path: Path) -> None:
    write_outcomes_csv(tmp_path / "o.csv", OUTCOMES)
    write_outcomes_json(tmp_path / "o.json", OUTCOMES)
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    columns = json.loads((tmp_path / "o.json").read_text())
    assert [row["first_token_ns"] for row in rows] == [str(NS), str(7 * NS), ""]
    assert columns["first_token_ns"] == [NS, 7 * NS, None]
    assert [row["refused"] for row in rows] == ["0", "0", "1"]
    assert columns["client"] == ["ann", "", ""]
    assert set(rows[0]) == set(columns)


def test_curves_and_scans_are_told_with_their_seeds(tmp_path: Path) -> None:
    write_curves_csv(tmp_path / "c.csv", CURVES)
    assert (tmp_path / "c.csv").read_text().splitlines()[:3] == [
        "policy,definition,rate_per_s,attainment,spread,seeds",
        "ours,strict,10,0.990000,0.014142,2",
        "ours,strict,20,0.400000,0.141421,2",
    ]
    assert curves_object(CURVES)[1]["points"][0] == {"rate_per_s": 10.0, "attainment": 0.99, "by_seed": [1.0, 0.98]}
    found = scan_object(judged(CURVE, 0.99))
    assert (found["highest_held_per_s"], found["lowest_failing_per_s"]) == (10, 20)
    assert found["highest_held_by_seed"] == [10, None]


def test_json_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    write_json(tmp_path / "s.json", summary(OUTCOMES, SLO))
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["energy_j_per_token"] is None
    assert found["strict"]["ttft"]["max_s"] is None
    assert found["requests"] == 3
