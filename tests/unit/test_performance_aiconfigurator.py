"""The second cost model: the same questions put to measured kernel tables, here stand-ins for the optional package."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serai.performance import aiconfigurator_model
from serai.performance.aiconfigurator_model import AiconfiguratorModel, AiconfiguratorUnavailable, compile_tables
from serai.performance.hardware import GPUS
from serai.performance.latency_model import BadStep, LatencyModel, PrefillChunk, Step
from serai.performance.memory import BadParallelism, Parallelism
from serai.performance.quantisation import Quantisation, WeightFormat
from serai.performance.shipped_models import shipped_card

CARD, H100 = shipped_card("meta-llama/Llama-3.1-8B"), GPUS["h100-sxm-80"]


class Tables:
    """Kernel tables with round numbers: 10 ms and 0.01 ms a token; attention by its lengths."""

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        assert isl > prefix, "the package refuses a prompt that is all prefix"
        shared = 10 + 0.01 * (ctx_tokens + gen_tokens)
        prompt = 1e-6 * ctx_tokens * isl
        decode = 1e-4 * gen_tokens * isl
        return shared + prompt + decode, shared, prompt, decode


MODEL = AiconfiguratorModel(Tables(), CARD, H100, step_overhead_s=0.002)


def test_steps_are_put_together_from_the_tables() -> None:
    assert isinstance(MODEL, LatencyModel)
    step = Step([PrefillChunk(500, 100), PrefillChunk(200)], 8, 8 * 1000)
    expected = 10 + 0.01 * 708 + 1e-6 * (500 * 600 + 200 * 200) + 1e-4 * 8 * 1000
    assert MODEL.step_s(step) == pytest.approx(expected / 1e3 + 0.002)
    assert MODEL.decode_step_s(8, 1000) == pytest.approx((10.08 + 0.8) / 1e3 + 0.002)
    assert MODEL.prefill_s(600, cached_tokens=100, batch=2) == pytest.approx((20 + 0.6) / 1e3 + 0.002)
    assert MODEL.step_s(Step()) == 0


def test_memory_is_the_same_as_the_rooflines_and_nonsense_is_refused() -> None:
    assert MODEL.kv_bytes_per_token() == 131_072
    assert MODEL.kv_capacity_tokens() > 300_000
    for step in (Step((), -1, 0), Step([PrefillChunk(-1)])):
        with pytest.raises(BadStep):
            MODEL.step_s(step)
    with pytest.raises(BadStep):
        MODEL.prefill_s(10, cached_tokens=10)
    with pytest.raises(BadParallelism):
        AiconfiguratorModel(Tables(), CARD, H100, Parallelism(3))


def fake_package(monkeypatch: pytest.MonkeyPatch, compile_: Any) -> None:
    package = SimpleNamespace(EngineHandle=SimpleNamespace(compile=compile_))
    monkeypatch.setattr(aiconfigurator_model, "import_module", lambda name: package)


def test_the_package_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def compile_(path: str, system: str, engine: str, **options: Any) -> Tables:
        asked.update(options, path=path, system=system, engine=engine)
        return Tables()

    fake_package(monkeypatch, compile_)
    card = shipped_card("Qwen/Qwen3-235B-A22B-FP8")
    compile_tables(Path("m"), card, GPUS["h200-sxm-141"], Parallelism(8, expert=True), engine="sglang")
    assert (asked["path"], asked["system"], asked["engine"]) == ("m", "h200_sxm", "sglang")
    assert (asked["tp_size"], asked["moe_tp_size"], asked["moe_ep_size"]) == (8, 1, 8)
    assert (asked["gemm_quant_mode"], asked["moe_quant_mode"]) == ("fp8", "fp8")
    assert asked["kvcache_quant_mode"] == "bfloat16"


def test_what_the_package_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AiconfiguratorUnavailable, match="l20"):
        compile_tables(Path("m"), CARD, GPUS["l20"])

    def refuse(*_: Any, **__: Any) -> Tables:
        raise ValueError("no tables\nfor this")

    fake_package(monkeypatch, refuse)
    with pytest.raises(AiconfiguratorUnavailable, match=r"no tables$"):
        compile_tables(Path("m"), CARD, H100)
    with pytest.raises(AiconfiguratorUnavailable, match="mxfp4"):
        compile_tables(Path("m"), CARD, H100, quantisation=Quantisation.uniform(WeightFormat.MXFP4))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(aiconfigurator_model, "import_module", missing)
    with pytest.raises(AiconfiguratorUnavailable, match=r"serai\[aiconfigurator\]"):
        compile_tables(Path("m"), CARD, H100)
