"""What the PaDG paper (EcoServe, OSDI '26) measured, for tables beside ours. Ratios are goodput of PaDG over a
baseline's; `vllm` and `sarathi` do not disaggregate (NoDG), `distserve` and `mooncake` do (FuDG)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NODG = ("vllm", "sarathi")
FUDG = ("distserve", "mooncake")
BASELINES = (*NODG, *FUDG)
INDEPENDENT = {name: f"{name}-independent" for name in NODG}
"""The same engines with Poisson arrivals of their own each, as from a client that picks one at random. The paper does
not say how requests came to the instances of its NoDG baselines, and vLLM 0.7 had no router. Round robin by one counter
makes arrivals at each of N instances nearly regular (Erlang-N gaps), which few systems have, and which keeps a prefill
from falling into a short answer."""


@dataclass(frozen=True, slots=True)
class PaperRatio:
    """One published ratio: an average over the slices that `clusters`, `models` and `datasets` hold (empty: all) and
    over `baselines`, at P90."""

    table: str
    ratio: float
    baselines: tuple[str, ...]
    clusters: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For a table's first column."""
        where = ", ".join([*self.clusters, *self.models, *self.datasets]) or "all"
        return f"{self.table}: {where}, over {' and '.join(self.baselines)}"


def _by(table: str, axis: str, rows: Mapping[str, tuple[float, float]]) -> list[PaperRatio]:
    return [
        PaperRatio(table, ratio, baselines, **{axis: (name,)})
        for name, ratios in rows.items()
        for baselines, ratio in zip((NODG, FUDG), ratios, strict=True)
    ]


_T1 = {"vllm": 2.01, "sarathi": 1.87, "distserve": 3.43, "mooncake": 3.41}
_T2 = {"vllm": 1.34, "sarathi": 1.25, "distserve": 1.75, "mooncake": 1.24}
_T3 = {"vllm": 1.96, "sarathi": 1.99, "distserve": 2.51, "mooncake": 2.40}

RATIOS: tuple[PaperRatio, ...] = (
    *(PaperRatio("T1", ratio, (name,), clusters=("l20", "a800")) for name, ratio in _T1.items()),
    *(PaperRatio("T2", ratio, (name,), clusters=("h100",)) for name, ratio in _T2.items()),
    *(PaperRatio("T3", ratio, (name,), clusters=("l20",)) for name, ratio in _T3.items()),
    *_by("T4", "models", {"llama-30b": (1.59, 4.82), "codellama-34b": (1.83, 2.15), "qwen2-72b": (1.76, 1.79)}),
    *_by("T5", "clusters", {"l20": (1.97, 2.45), "a800": (1.91, 4.21), "h100": (1.29, 1.50)}),
    *_by("T6", "datasets", {"alpaca": (1.19, 1.70), "sharegpt": (1.26, 4.00), "longbench": (2.72, 2.53)}),
)

TIGHTER_SLO: Mapping[str, tuple[float, float]] = {
    "padg-paper": (42, 18),
    "vllm": (16, 6.4),
    "sarathi": (28, 7.6),
}
"""T7: P99 goodput of CodeLlama-34B on A800 under ShareGPT, with 5 s and 100 ms, and with 1 s and 50 ms."""
TIGHTER_SLO_LOSS: Mapping[str, float] = {
    "padg-paper": 0.571,
    "vllm": 0.600,
    "sarathi": 0.729,
    "distserve": 0.269,
    "mooncake": 0.239,
}
BURST_LOSS: Mapping[str, float] = {
    "padg-paper": 0.173,
    "vllm": 0.195,
    "sarathi": 0.357,
    "distserve": 0.126,
    "mooncake": 0.171,
}
"""T8: share of P99 goodput lost from CV 1.2 to 2.0, same set-up."""
STATIC_SCALING: Mapping[str, float] = {"codellama-34b": 4.96, "qwen2-72b": 5.47}
"""T9: goodput P90 of 4 instances over that of 1, on L20 under ShareGPT."""
