"""Macro-scheduled systems by name.

| name | scheduler | engine |
|---|---|---|
| `padg-paper` | EcoServe's Algorithm 1 as written | prompts first, as in its paper (vLLM 0.7) |
| `padg-author-code` | as its authors released it | the same |
| `serai` | ours | phase-gated: windows, mixed steps, decoding |
"""

from __future__ import annotations

from serai.macro_scheduler.group import GroupSettings
from serai.performance.latency_model import LatencyModel
from serai.simulator.fast.dispatch import Dispatch
from serai.simulator.fast.macro_scheduled import MacroScheduled, MacroSettings, ReportPath
from serai.simulator.fast.presets import EnginePreset, Overheads, System, engine_preset, instance_spec
from serai.simulator.outcomes import SloTarget

MACRO_SYSTEMS: dict[str, str] = {"padg-paper": "paper", "padg-author-code": "author_code", "serai": "serai"}
"""Policy of each system."""


def macro_system(
    name: str,
    model: LatencyModel,
    instances: int,
    slo: SloTarget,
    *,
    engine: EnginePreset | None = None,
    overheads: Overheads | None = None,
    path: ReportPath | None = None,
    attainment: float = 0.99,
    scan: str = "",
    interval_share: float | None = None,
    hold_output: bool = False,
    kv_tokens: int | None = None,
    gpus: int = 1,
) -> System:
    """`instances` equal engines under the macro-scheduler `name`, for requests with target `slo`.

    `scan="random"` and `interval_share` (windows of that share of the TTFT target) are the paper's ablations;
    `hold_output` belongs to `padg-author-code`. Raises KeyError for an unknown name, ValueError for settings that
    cannot be."""
    spec = instance_spec(engine or engine_preset("padg"), model, overheads or Overheads(), kv_tokens, gpus)
    group = GroupSettings(
        policy=MACRO_SYSTEMS[name],
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        attainment=attainment,
        beat_s=1e9,
        lease_s=10.0,
        pending_max=100_000,
        scan=scan,
        interval_share=interval_share,
    )
    settings = MacroSettings(group, path or ReportPath(), hold_output)
    specs = [spec] * instances

    def dispatch() -> Dispatch:
        return MacroScheduled(specs, settings)

    return System(name, specs, dispatch)
