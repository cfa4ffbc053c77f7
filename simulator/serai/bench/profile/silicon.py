"""Served measurements of H100 and H200: `profiles/aic/silicon_sample.csv`, cleaned and split.

The cleaning rules look at labels and at physics, never at a prediction of the fitted model, and are the same for
fitted and held-out rows; the split is by model and by configuration and was fixed before the first fit.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median

from serai.performance.hardware import NO_LINK_COST, find_gpu
from serai.performance.latency_profile import Efficiency, LatencyProfile
from serai.performance.memory import Parallelism
from serai.performance.model_card import ModelCard
from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat
from serai.performance.roofline import RooflineModel
from serai.performance.serving import Load, least_loop_s
from serai.performance.shipped_models import shipped_card

PATH = "profiles/aic/silicon_sample.csv"
SYSTEMS = {"h100_sxm": "h100-sxm-80", "h200_sxm": "h200-sxm-141"}
STACKS = ("vllm", "trtllm", "trtllm-1.0", "sglang", "sglang-0.5.1")
"""What profiles are fitted for. TensorRT-LLM's release candidate of 1.0, with half of all rows, is kept apart from the
later builds: it spends half as much again between kernels. SGLang 0.5.1 is kept apart because it was measured
otherwise: its fitted rows wait half of all prompts for their first token, so all requests arrived in one wave."""
_STACKS = {("trtllm", "1.0.0rc3"): "trtllm-1.0", ("sglang", "0.5.1.post1"): "sglang-0.5.1"}
_NAMED_TENSOR = re.compile(r"_tp(\d+)_")
"""TP in a row's name. Columns multiplied it by the expert parallelism in some rows: `tp2_ep2` became TP 4."""
QUEUED_TTFT_MS = 5000.0
"""Beyond this a request waited in a queue or was preempted: a matter for the simulator."""

NEAR_PEAK = 0.85
"""No kernel of a GEMM, in any independent table of these GPUs, passes 0.81 of the peak; a whole engine cannot pass
0.85. Rows that would need to were answered from a prompt cache, or held fewer requests than their label says."""
_NEAR_PEAK = LatencyProfile(
    "any",
    "ideal",
    Efficiency(
        linear_compute=NEAR_PEAK,
        linear_memory=NEAR_PEAK,
        experts_compute=NEAR_PEAK,
        experts_memory=NEAR_PEAK,
        attention_compute=NEAR_PEAK,
        attention_memory=NEAR_PEAK,
        elementwise_memory=NEAR_PEAK,
    ),
)

HELD_OUT_MODELS = ("meta-llama/Llama-3.1-70B", "MiniMaxAI/MiniMax-M2.5")
"""Never fitted, on any GPU or engine: one dense model and one with experts."""
HELD_OUT_SHARE = 3
"""One in so many of the other configurations (model, GPU, engine, TP) is held out, by a hash of its name."""

_SAME_MODEL = {
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B-Instruct",
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-R1",
}
_UNDESCRIBED = {"zhipuai/GLM-5": "sparse attention", "Qwen/Qwen3.5-397B-A17B": "linear attention"}


@dataclass(frozen=True, slots=True)
class ServedRow:
    """One closed-loop measurement of one engine instance."""

    model: str
    system: str
    engine: str
    version: str
    precision: str
    tensor: int
    expert: bool
    load: Load
    ttft_ms: float
    tpot_ms: float
    held_out: bool
    instance: RooflineModel
    """The instance without overheads; `with_profile` gives it other factors."""

    @property
    def stack(self) -> str:
        """The engine stack whose profile predicts this row: one of STACKS."""
        return _STACKS.get((self.engine, self.version), self.engine)

    @property
    def textbook(self) -> RooflineModel:
        """The pure roofline of the row, without communication."""
        known = self.instance
        return RooflineModel(
            known.card, known.gpu, known.parallelism, quantisation=known.quantisation, link=NO_LINK_COST
        )

    @property
    def configuration(self) -> str:
        """What the split goes by."""
        return f"{self.model}|{self.system}|{self.engine}|tp{self.tensor}"


@dataclass(frozen=True, slots=True)
class ServedRows:
    """The rows that stand, and how many fell to which rule."""

    rows: list[ServedRow]
    dropped: dict[str, int]


def is_held_out(model: str, system: str, engine: str, tensor: int) -> bool:
    """Whether the fit must not see this configuration. Depends on names only."""
    if model in HELD_OUT_MODELS:
        return True
    digest = sha256(f"{model}|{system}|{engine}|tp{tensor}".encode()).hexdigest()
    return int(digest, 16) % HELD_OUT_SHARE == 0


def load_served_rows(data: Path) -> ServedRows:
    """The cleaned rows. Raises OSError when the file is absent and ValueError, naming file and line, when a number in
    it is not one."""
    path = data / PATH
    with path.open(newline="") as lines:
        raw = [
            (f"{path.name}:{number}", row)
            for number, row in enumerate(csv.DictReader(lines), start=2)
            if row["mode"] == "agg" and row["system"] in SYSTEMS
        ]
    for place, row in raw:
        _check_times(place, row)
    labels = _labels(row for _, row in raw)
    dropped: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    rows: list[ServedRow] = []
    for place, row in raw:
        reason = _unusable(row, labels, seen)
        found = None if reason else _row(place, row)
        reason = reason or (_impossible(found) if found else "")
        if reason or found is None:
            dropped[reason] += 1
            continue
        rows.append(found)
    merged = _merged(rows)
    dropped["a repeat, joined by its median"] = len(rows) - len(merged)
    return ServedRows(merged, dict(sorted(dropped.items())))


def _check_times(place: str, row: Mapping[str, str]) -> None:
    """Raises ValueError, naming file, line and field, when a measured time is not one."""
    for key in ("silicon_ttft_ms", "silicon_tpot_ms"):
        try:
            known = 0 < float(row[key]) < inf
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"{place}: field `{key}` is {row[key]!r}; write a time in milliseconds above 0")


def _measurement(row: Mapping[str, str]) -> tuple[str, ...]:
    values = (f"{float(row[key]):.4g}" for key in ("silicon_ttft_ms", "silicon_tpot_ms"))
    return (row["system"], row["isl"], row["osl"], *values)


def _labels(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, ...], set[tuple[str, str]]]:
    labels: dict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
    for row in rows:
        labels[_measurement(row)].add((row["tp_size"], row["batch_size"]))
    return labels


def _whole(row: Mapping[str, str], key: str) -> int:
    return int(float(row[key])) if row[key] else 1


def _unusable(
    row: Mapping[str, str], labels: Mapping[tuple[str, ...], set[tuple[str, str]]], seen: set[tuple[str, ...]]
) -> str:
    """The rule a row falls to by its labels alone, or nothing."""
    model = row["model_path"]
    if model in _UNDESCRIBED:
        return f"architecture not described ({_UNDESCRIBED[model]})"
    tensor = _whole(row, "tp_size")
    experts = max(1, _whole(row, "moe_tp_size")) * max(1, _whole(row, "moe_ep_size"))
    spread = tensor > 8 or _whole(row, "pp_size") > 1 or _whole(row, "attention_dp_size") > 1
    if spread or (experts != tensor and _card(model).experts is not None):
        return "not one tensor-parallel instance on one host"
    named = _NAMED_TENSOR.search(row["id"])
    if named and int(named[1]) != tensor:
        return "its name and its columns disagree on TP"
    measurement = _measurement(row)
    if len(labels[measurement]) > 1:
        return "the same measurement under two labels"
    if measurement in seen:
        return "a duplicate"
    seen.add(measurement)
    if float(row["silicon_ttft_ms"]) > QUEUED_TTFT_MS:
        return "TTFT above 5 s: queued"
    return ""


def _card(model: str) -> ModelCard:
    return shipped_card(_SAME_MODEL.get(model, model))


def _row(place: str, row: Mapping[str, str]) -> ServedRow:
    try:
        load = Load(int(float(row["batch_size"])), int(row["isl"]), int(row["osl"]))
        ttft, tpot = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    model = _SAME_MODEL.get(row["model_path"], row["model_path"])
    tensor, engine = _whole(row, "tp_size"), row["backend"]
    expert = _whole(row, "moe_ep_size") > 1 and tensor > 1
    card = shipped_card(model)
    instance = RooflineModel(
        card,
        find_gpu(SYSTEMS[row["system"]]),
        Parallelism(tensor, expert=expert),
        quantisation=_formats(card, row["gemm_quant_mode"], engine),
    )
    return ServedRow(
        *(model, SYSTEMS[row["system"]], engine, row["backend_version"], row["gemm_quant_mode"], tensor, expert, load),
        *(ttft, tpot, is_held_out(model, row["system"], engine, tensor), instance),
    )


def _formats(card: ModelCard, label: str, engine: str) -> Quantisation:
    """What the weights and the cache were in. Checkpoints published in four bits keep their own formats; FP8 under
    TensorRT-LLM comes with an FP8 cache, elsewhere the cache is BF16 unless asked for."""
    if card.quantisation.experts in (WeightFormat.MXFP4, WeightFormat.INT4):
        return card.quantisation
    if not label:
        return Quantisation()
    return Quantisation.uniform(WeightFormat.FP8, KvFormat.FP8 if engine == "trtllm" else KvFormat.BF16)


def _impossible(row: ServedRow) -> str:
    """The rule a row falls to by physics, or nothing."""
    load = row.load
    if load.concurrency * (load.prompt_tokens + load.output_tokens) > row.instance.kv_capacity_tokens():
        return "more tokens than the KV cache holds"
    took = (row.ttft_ms + load.output_tokens * row.tpot_ms) / 1e3
    if took < least_loop_s(row.textbook.with_profile(_NEAR_PEAK), load):
        return f"faster than {NEAR_PEAK:.0%} of every peak: not the labelled work"
    return ""


def _merged(rows: list[ServedRow]) -> list[ServedRow]:
    """Repeats of one measurement become one row with the median times."""
    groups: dict[tuple[object, ...], list[ServedRow]] = defaultdict(list)
    for row in rows:
        groups[row.configuration, row.expert, row.precision, row.version, row.load].append(row)
    return [
        replace(same[0], tpot_ms=median(r.tpot_ms for r in same), ttft_ms=median(r.ttft_ms for r in same))
        for same in groups.values()
    ]
