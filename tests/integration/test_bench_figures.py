"""From samples to figures: what the benchmarks compute, apart from what they measure."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from serai.bench import gateway, overhead
from serai.bench.load import LoadOutcome
from serai.bench.percentiles import median_of, percentile
from serai.bench.report import Report, hand_out, rounded
from serai.bench.trace_file import hops, read_spans


def test_percentiles() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 1.0) == 2.0
    assert math.isnan(percentile([], 0.5))
    assert median_of([float("nan"), 3.0, 1.0]) == 2.0


def test_gateway_figures_are_medians_over_rounds_and_errors_are_sums() -> None:
    samples = [
        gateway.Sample(
            "serai", number, "unary_rps_c32", value, 10, 0.5, LoadOutcome(measured_s=2.0, errors={"timeout": 2})
        )
        for number, value in enumerate([100.0, 300.0, 110.0])
    ]
    figures = gateway.figures_of(samples, {"serai": 12.5})
    assert figures == {
        "serai_unary_rps_c32": 110.0,
        "serai_unary_per_cpu_s_c32": 440.0,
        "serai_rss_mb": 12.5,
        "serai_errors": 6,
    }


def test_gateway_measures_what_is_agreed() -> None:
    assert [measure.figure for measure in gateway.MEASURES] == [
        "unary_rps_c32",
        "unary_p50_ms_c1",
        "stream_ttft_p50_ms_c32",
        "stream_tok_s_c256",
        "stream_tok_s_c1000",
    ]


def test_overhead_is_what_is_added_within_a_round() -> None:
    latencies = {
        ("direct", 0): [1.0, 1.0, 1.0],
        ("serai", 0): [1.5, 1.5, 1.5],
        # A round in which the machine was slow, for both alike.
        ("direct", 1): [9.0, 9.0, 9.0],
        ("serai", 1): [9.7, 9.7, 9.7],
        ("smg", 0): [2.0],
        ("smg", 1): [10.0],
    }
    samples = [
        overhead.Sample(target, number, 16, LoadOutcome(latencies_ms=values))
        for (target, number), values in latencies.items()
    ]
    figures = overhead.figures_of(samples)
    assert figures["added_p50_ms_16rps"] == pytest.approx(0.6)
    assert figures["smg_added_p50_ms_16rps"] == pytest.approx(1.0)
    assert figures["added_p99_ms_16rps"] == pytest.approx(0.7)
    assert figures["direct_p50_ms_16rps"] == pytest.approx(5.0)
    assert figures["serai_errors"] == 0


def test_hops_are_read_from_whole_traces_only(tmp_path: Path) -> None:
    def span(trace: str, name: str, start_ms: float, end_ms: float) -> str:
        times = {"start_ns": int(start_ms * 1e6), "end_ns": int(end_ms * 1e6)}
        return json.dumps({"trace_id": trace, "attributes": {"serai.hop": name}} | times)

    lines = [
        span("a", "engine", 3, 5),
        span("a", "inference", 2, 6),
        span("a", "ingress", 0, 10),
        span("b", "ingress", 0, 99),
        '{"name": "cut off',
        '{"name": "no times", "trace_id": "a"}',
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    assert hops(read_spans(file).values()) == {
        "hop_engine_p50_ms": 2.0,
        "hop_agent_p50_ms": 2.0,
        "hop_ingress_and_nats_p50_ms": 6.0,
        "hop_ingress_whole_p50_ms": 10.0,
    }
    assert hops([{"ingress": 1.0}]) == {}


def test_the_report_is_one_json_object_with_the_agreed_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("bench x", {"rounds": 1}, {"a_ms": 1.23456, "b_ms": float("nan")}, [["", "a"]], ["a note"], [1])
    hand_out(report, argparse.Namespace(json=True, raw=tmp_path))
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"name", "machine", "config", "figures", "raw"}
    assert printed["figures"] == {"a_ms": 1.235}
    assert printed["config"]["notes"] == ["a note"]
    kept = json.loads(Path(printed["raw"]).read_text())
    assert kept["samples"] == [1]
    assert {name: kept[name] for name in printed} == printed


def test_four_significant_digits() -> None:
    assert [rounded(value) for value in (0.0, 0.123456, 12345.6, -1.23456)] == [0.0, 0.1235, 12350.0, -1.235]
