"""What `serai profile` does around the cost model: cleaning rules, splits, placement, passes, and a running engine."""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from serai.bench.profile import engine, fit, folds, placement_test, serving_logs, show, silicon, validate
from serai.bench.profile.engine_fit import fit_engine
from serai.bench.profile.engine_measuring import (
    DecodeSample,
    EngineMeasurer,
    EngineSamples,
    EngineUnusable,
    MeasuringPlan,
    PromptSample,
    first_model,
)
from serai.bench.profile.kernel_tables import Times, pass_s
from serai.bench.profile.served_fit import fit_served, predicted_tpot_ms
from serai.bench.profile.serving_logs import LoggedRequest, segments
from serai.performance.hardware import GPUS
from serai.performance.latency_profile import LatencyProfile, Overheads, decode_profile, profile_for
from serai.performance.roofline import RooflineModel
from serai.performance.serving import Load
from serai.performance.shipped_models import shipped_card

# The served rows

COLUMNS = (
    "id",
    *("backend", "backend_version", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "batch_size"),
    *("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
ROW: dict[str, Any] = {
    "id": "qwen3_32b_h100_sxm_vllm_agg_1024x512_c16_tp2_epnone_1",
    "backend": "vllm",
    "backend_version": "0.12.0",
    "model_path": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "mode": "agg",
    "isl": 1024,
    "osl": 512,
    "gemm_quant_mode": "",
    "batch_size": 16.0,
    "tp_size": 2.0,
    "pp_size": 1.0,
    "attention_dp_size": "",
    "moe_tp_size": 1.0,
    "moe_ep_size": 1.0,
    "silicon_ttft_ms": 200.0,
    "silicon_tpot_ms": 18.0,
}


def served(tmp_path: Path, *rows: dict[str, Any]) -> silicon.ServedRows:
    path = tmp_path / silicon.PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        writer.writeheader()
        writer.writerows(ROW | row for row in rows)
    return silicon.load_served_rows(tmp_path)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"silicon_ttft_ms": 5001.0}, "queued"),
        ({"model_path": "zhipuai/GLM-5"}, "sparse attention"),
        ({"tp_size": 16.0}, "one host"),
        ({"attention_dp_size": 2.0}, "one host"),
        ({"model_path": "openai/gpt-oss-120b", "moe_tp_size": 1.0}, "one host"),
        ({"id": "gpt_oss_120b_c16_tp2_ep2_927", "tp_size": 4.0}, "disagree on TP"),
        ({"batch_size": 100_000.0}, "KV cache"),
        ({"silicon_ttft_ms": 1.0, "silicon_tpot_ms": 1.0}, "faster than 85% of every peak"),
    ],
)
def test_unusable_rows_are_dropped_and_counted(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    found = served(tmp_path, row)
    assert not found.rows
    assert [count for reason, count in found.dropped.items() if why in reason] == [1]


def test_usable_rows_stand_repeats_join_and_conflicts_fall(tmp_path: Path) -> None:
    found = served(
        tmp_path,
        {},
        {"silicon_tpot_ms": 20.0},
        {"silicon_tpot_ms": 40.0},
        {"silicon_tpot_ms": 20.0},
        {"mode": "disagg"},
        {"system": "b200_sxm"},
        {"osl": 256, "silicon_tpot_ms": 33.0},
        {"osl": 256, "silicon_tpot_ms": 33.0, "tp_size": 4.0, "id": "same_c16_tp4_epnone_1"},
    )
    (row,) = found.rows
    assert row.tpot_ms == 20.0
    assert row.load == Load(16, 1024, 512)
    assert found.dropped["a duplicate"] == 1
    assert found.dropped["the same measurement under two labels"] == 2


def test_a_number_that_is_none_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"silicon_sample\.csv:2: .*long"):
        served(tmp_path, {"isl": "long"})


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "0", "soon", ""])
def test_a_time_that_is_none_names_file_line_and_field(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match=r"^silicon_sample\.csv:3: field `silicon_tpot_ms` is '.*above 0$"):
        served(tmp_path, {}, {"silicon_tpot_ms": value})


def test_the_split_goes_by_names_alone() -> None:
    for model in silicon.HELD_OUT_MODELS:
        assert silicon.is_held_out(model, "h100_sxm", "vllm", 8)
    configurations = [("m", "s", engine_, tensor) for engine_ in "abcdefghij" for tensor in range(30)]
    share = sum(silicon.is_held_out(*names) for names in configurations) / len(configurations)
    assert share == pytest.approx(1 / silicon.HELD_OUT_SHARE, abs=0.1)
    # Fixed before the first fit; a change of the rule would change these.
    assert silicon.is_held_out("Qwen/Qwen3-32B", "h100_sxm", "trtllm", 8)
    assert not silicon.is_held_out("Qwen/Qwen3-32B", "h100_sxm", "trtllm", 4)


def test_served_rows_made_by_a_profile_are_met_by_its_fit(tmp_path: Path) -> None:
    shapes = [{"isl": i, "osl": o, "batch_size": b} for i in (512, 2048) for o in (128, 1024) for b in (4, 32)]
    rows = served(tmp_path, *({**s, "silicon_tpot_ms": 30.0 + i} for i, s in enumerate(shapes))).rows
    assert len(rows) == len(shapes)
    truth = replace(profile_for("h100", "vllm"), overheads=Overheads(1e-3, 3e-5, 4e-6, all_reduce_s=5e-6))
    made = [replace(r, tpot_ms=predicted_tpot_ms(r, r.instance.with_profile(truth))) for r in rows]
    fitted = fit_served(made)["h100-sxm-80", "vllm"]
    assert fitted.provenance.rows_fitted == 8
    errors = [predicted_tpot_ms(r, r.instance.with_profile(fitted)) / r.tpot_ms - 1 for r in made]
    assert max(map(abs, errors)) < 0.03


def test_loads_in_one_wave_are_a_stack_of_their_own(tmp_path: Path) -> None:
    wave, loop = (
        {"backend": "sglang", "backend_version": v, "silicon_tpot_ms": t}
        for v, t in (("0.5.1.post1", 18.0), ("0.5.9", 19.0))
    )
    found = fit_served(served(tmp_path, wave, loop).rows)
    assert found["h100-sxm-80", "sglang-0.5.1"].serving.delay_share == 0.5
    assert found["h100-sxm-80", "sglang"].serving.delay_share == 0.9
    assert not found["h100-sxm-80", "sglang"].serving.mixed_steps


def test_folds_leave_whole_groups_out(tmp_path: Path) -> None:
    tensors = [{"tp_size": float(t), "silicon_tpot_ms": 40.0 - t, "id": f"x_tp{t}_"} for t in (1, 2, 4)]
    other = {"model_path": "openai/gpt-oss-120b", "gemm_quant_mode": "nvfp4", "silicon_tpot_ms": 9.0}
    rows = served(tmp_path, *tensors, other | {"moe_tp_size": 2.0}).rows
    left = {
        name: sorted(sorted(f"{r.model[:4]}{r.tensor}" for r in judged) for _, judged in folds.folds(rows, group))
        for name, group in folds.groups(rows).items()
    }
    assert left["largest_tp"] == [["Qwen4"]]
    assert left["model"] == left["kind"] == [["Qwen1", "Qwen2", "Qwen4"], ["open2"]]
    assert sum(map(len, left["configurations"])) == len(rows)
    for fitted, judged in folds.folds(rows, folds.groups(rows)["model"]):
        assert not {r.model for r in fitted} & {r.model for r in judged}


def test_a_row_counts_for_half_at_most_in_the_criterion() -> None:
    errors = {name: [0.1, -0.1] for name in folds.WEIGHTS}
    assert folds.criterion(errors) == pytest.approx(0.1)
    assert folds.criterion(errors | {"largest_tp": [0.1, 9.0]}) == pytest.approx(0.1 + 0.31 * 0.2)


# Placement


def test_the_best_placement_by_measured_speeds_is_the_published_one() -> None:
    best = placement_test.best_placement(placement_test.measured_seconds())
    assert best.allocation == ((6, 0), (5, 8), (2, 4))
    assert best.drain_s == pytest.approx(1238.07, abs=0.01)
    assert best.total_rps == pytest.approx(129.6, abs=0.05)


def test_a_plan_from_the_roofline_alone_drains_within_five_percent_of_the_best() -> None:
    best = placement_test.best_placement(placement_test.measured_seconds())
    planned = placement_test.best_placement(placement_test.predicted_seconds())
    assert planned.drain_s <= 1.05 * best.drain_s


def test_every_allocation_uses_every_gpu() -> None:
    for allocation in placement_test.allocations():
        for side, gpus in enumerate(placement_test.GPU_COUNTS.values()):
            used = sum(w.tensor * a[side] for w, a in zip(placement_test.WORKLOADS, allocation, strict=True))
            assert used == gpus


# Passes and logs


def test_a_pass_adds_all_layers_and_one_head() -> None:
    times: Times = {(name, 4): 1.0 for name in ("q_proj", "attn", "embedding", "final_layernorm")}
    times |= {("lm_head", 1): 10.0, ("lm_head", 4): 40.0}
    assert pass_s(times, 32, 4, attention=True) == 32 * 2 + 2 + 10
    assert pass_s(times, 32, 4, attention=False, sequences=4) == 32 + 2 + 40


def test_segments_hold_what_ran_between_starts_and_ends() -> None:
    requests = [LoggedRequest(100, 11, 0.0, 1.0, 3.0), LoggedRequest(200, 21, 1.0, 2.0, 4.0)]
    found = segments(requests)
    assert [(s.start_s, s.end_s, s.sequences) for s in found] == [(1, 2, 1), (2, 3, 2), (3, 4, 1)]
    assert found[0].prompt_tokens_per_s == pytest.approx(200)
    assert found[1].context_tokens == pytest.approx(100 + 0.75 * 11 + 200 + 0.25 * 21)


def test_a_log_made_by_a_profile_is_met_by_it() -> None:
    instance = RooflineModel(shipped_card("meta-llama/Llama-3.1-8B"), GPUS["rtx-pro-6000"])
    profile = profile_for("rtx-pro-6000")
    step = instance.with_profile(profile).decode_step_s(1, 150)
    request = LoggedRequest(100, 101, 0.0, 1.0, 1.0 + 100 * step)
    log = serving_logs.ServingLog("g", "m", 1, False, [request], segments([request]), instance)
    assert serving_logs.tpot_errors(log, profile) == pytest.approx([0], abs=0.01)


# A running engine


def test_a_fit_to_an_engine_finds_its_overhead() -> None:
    start = profile_for("h100")
    truth = replace(start, overheads=replace(start.overheads, step_s=0.012))
    instance = RooflineModel(shipped_card("meta-llama/Llama-3.1-8B"), GPUS["h100-sxm-80"])
    real = instance.with_profile(truth)
    samples = EngineSamples(
        "m",
        [PromptSample(n, real.prefill_s(n)) for n in (100, 1000, 4000)],
        [DecodeSample(b, c, real.decode_step_s(b, c)) for b in (1, 8, 64) for c in (100, 1000)],
    )
    fitted = fit_engine(instance, samples, start)
    assert fitted.error < 0.02
    assert fitted.profile.overheads.step_s == pytest.approx(0.012, rel=0.1)
    assert fitted.profile.provenance.rows_fitted == 9


class StandInEngine:
    """A loopback engine that answers at once and keeps what it was asked."""

    def __init__(self, *, refuses_extra: bool = False, usage: bool = True, status: int = 200) -> None:
        self.refuses_extra = refuses_extra
        self.usage = usage
        self.status = status
        self.bodies: list[dict[str, Any]] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses_extra and "ignore_eos" in body:
            return web.json_response({"error": "unknown field ignore_eos"}, status=400)
        if self.status != 200:
            return web.Response(status=self.status, text="out of\nmemory")
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": " a"}]}\n\n')
            await asyncio.sleep(0.001)
        if self.usage:
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stand-in"}]})


@asynccontextmanager
async def serving(stand_in: StandInEngine) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", stand_in.completions), web.get("/v1/models", stand_in.models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


SMALL = MeasuringPlan((20, 60), (1, 2), (20,), 4, 2, 10.0, 5.0)


def measured(stand_in: StandInEngine) -> EngineSamples:
    async def all_of_it() -> EngineSamples:
        async with serving(stand_in) as url, aiohttp.ClientSession() as session:
            return await EngineMeasurer(session, url, await first_model(session, url), SMALL).measure()

    return asyncio.run(all_of_it())


def test_an_engine_is_measured_with_prompts_no_cache_knows() -> None:
    stand_in = StandInEngine()
    samples = measured(stand_in)
    assert samples.model == "stand-in"
    assert [p.prompt_tokens for p in samples.prompts] == [22, 62]
    assert [(d.sequences, d.mean_context_tokens) for d in samples.decodes] == [(1, 24), (2, 24)]
    assert all(0.001 <= d.step_s < 0.1 for d in samples.decodes)
    beginnings = [" ".join(body["prompt"].split()[:3]) for body in stand_in.bodies]
    assert len(set(beginnings)) == len(beginnings)
    assert len(stand_in.bodies) == 1 + 2 * 2 + 1 + 2


def test_an_engine_that_refuses_extra_fields_is_asked_without() -> None:
    stand_in = StandInEngine(refuses_extra=True)
    assert len(measured(stand_in).decodes) == 2
    assert sum("ignore_eos" in body for body in stand_in.bodies) == 1


@pytest.mark.parametrize(
    ("stand_in", "said"),
    [(StandInEngine(usage=False), "usage"), (StandInEngine(status=500), "status 500: out of memory")],
)
def test_an_engine_that_cannot_be_measured_is_one_line(stand_in: StandInEngine, said: str) -> None:
    with pytest.raises(EngineUnusable, match=said) as caught:
        measured(stand_in)
    assert "\n" not in str(caught.value)


# The commands


def run(module: Any, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))


def test_show_prints_an_instance_and_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(show, "Llama-3.1-8B", "--gpu", "H100", "--json") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["parameters_billion"] == pytest.approx(8.03)
    assert 0 < figures["decode_ms_1"] < figures["decode_ms_64"] < inf
    for words in (["Llama-3.1-8B", "--gpu", "tpu"], ["no-such-model"], ["Llama-3.1-8B", "--tp", "5"]):
        assert run(show, *words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_show_reads_any_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert run(show, str(path)) == 2
    assert "config.json: not JSON" in capsys.readouterr().err


def test_without_data_the_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(validate, "--data", str(tmp_path)) == 2
    assert run(fit, "--data", str(tmp_path), "--out", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.count("--data") == 2


@pytest.mark.parametrize("words", [["ftp://x", "--gpu", "h100"], ["http://127.0.0.1:9", "--gpu", "abacus"]])
def test_engine_refuses_what_it_cannot_measure(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(engine, *words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_engine_writes_a_profile_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"

    async def against(stand_in: StandInEngine) -> int:
        async with serving(stand_in) as url:
            words = [url, "--gpu", "cpu-desktop", "--card", "Qwen/Qwen3-0.6B", "--quick", "--batch-max", "2", "--json"]
            return await asyncio.to_thread(run, engine, *words, "--out", str(out))

    assert asyncio.run(against(StandInEngine())) == 0
    profile = decode_profile(out.read_bytes(), out.name)
    assert isinstance(profile, LatencyProfile)
    assert profile.gpu == "cpu-desktop"
    assert json.loads(capsys.readouterr().out)["figures"]["samples"] >= 4


DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not (DATA / "profiles").is_dir(), reason="the measurements are not beside this checkout")
def test_the_shipped_profiles_keep_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(validate, "--quick", "--json", "--data", str(DATA)) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["tpot_mape_held_out"] <= 0.10
    assert figures["prefill_mape_held_out"] <= 0.15
    assert figures["speedup_error"] <= 0.06
    assert figures["placement_ratio"] <= 1.05
    assert figures["roofline_tpot_bias"] < -0.4
    assert figures["rows"] > 700
