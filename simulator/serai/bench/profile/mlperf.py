"""GPU-to-GPU ratios of MLPerf Inference v4.1 (Offline, closed division): `profiles/mlperf/mlperf_v4.1_llm_summary.csv`.

Llama-2-70B on OpenOrca, and Mixtral-8x7B. Throughput per GPU is predicted as the best over tensor parallelism and
batch size that fits, with TensorRT-LLM's profile on every NVIDIA GPU, and only ratios to the H100 are judged: the
submissions' absolute numbers depend on months of tuning per model.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from serai.performance.hardware import GPUS
from serai.performance.latency_profile import LatencyProfile, on_gpu
from serai.performance.memory import BadParallelism, MemoryBudget, Parallelism
from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat
from serai.performance.roofline import RooflineModel
from serai.performance.serving import Load, closed_loop
from serai.performance.shipped_models import shipped_card

PATH = "profiles/mlperf/mlperf_v4.1_llm_summary.csv"
MODELS = {
    # benchmark: model, mean tokens in and out of its data set
    "llama2-70b-99": ("meta-llama/Llama-2-70b-hf", 294, 294),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", 300, 170),
}
REFERENCE = "h100-sxm-80"
_GPU_NAMES = (
    # pattern in the system's name, GPU
    (r"GH200-144GB", "gh200-144"),
    (r"H100[-_]SXM|H100x8_TRT|4XH100", "h100-sxm-80"),
    (r"H100[-_]NVL", "h100-nvl-94"),
    (r"H200[-_]SXM.*_TRT$|8xH200|H200_SXM_141GBx8_TRT", "h200-sxm-141"),
    (r"L40S", "l40s"),
    (r"MI300X", "mi300x"),
    (r"B200-SXM", "b200"),
)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Measured and predicted tokens per second and GPU."""

    benchmark: str
    gpu: str
    systems: int
    measured: float
    predicted: float


def load_throughputs(data: Path, profile: LatencyProfile) -> list[Throughput]:
    """The median over submissions per GPU, with the prediction. Raises OSError when the file is absent."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (data / PATH).open(newline="") as lines:
        for row in csv.DictReader(lines):
            per_gpu = _per_gpu(row)
            if per_gpu is not None:
                groups[row["benchmark"], per_gpu[0]].append(per_gpu[1])
    return [
        Throughput(benchmark, gpu, len(values), median(values), predicted_throughput(benchmark, gpu, profile))
        for (benchmark, gpu), values in sorted(groups.items())
    ]


def _per_gpu(row: dict[str, str]) -> tuple[str, float] | None:
    known = row["benchmark"] in MODELS and row["scenario"] == "Offline" and row["division"] == "closed"
    if not known or not row["tokens_per_s_offline"] or "MaxQ" in row["system"]:
        return None
    gpu = next((name for pattern, name in _GPU_NAMES if re.search(pattern, row["system"])), None)
    count = re.search(r"x(\d+)(?:_|$)|^(\d+)x|_(\d)XH100|(\d)xH\d00", row["system"])
    if gpu is None or count is None:
        return None
    gpus = int(next(group for group in count.groups() if group))
    return (gpu, float(row["tokens_per_s_offline"]) / gpus) if gpus <= 8 else None


def predicted_throughput(benchmark: str, gpu: str, profile: LatencyProfile) -> float:
    """Best predicted output tokens per second and GPU, over TP 1 to 8 and batches that fit."""
    model, prompt, output = MODELS[benchmark]
    best = 0.0
    for tensor in (1, 2, 4, 8):
        formats = Quantisation.uniform(WeightFormat.NVFP4 if GPUS[gpu].fp4_flops_s else WeightFormat.FP8, KvFormat.FP8)
        try:
            instance = RooflineModel(
                shipped_card(model),
                GPUS[gpu],
                Parallelism(tensor),
                profile=on_gpu(profile, GPUS[gpu]),
                quantisation=formats,
                budget=MemoryBudget(utilisation=0.95),
            )
        except BadParallelism:
            continue
        most = min(2048, instance.kv_capacity_tokens() // (prompt + output))
        for batch in {most, most // 2, most // 4} - {0}:
            loop = closed_loop(instance, profile.serving, Load(batch, prompt, output))
            best = max(best, batch / loop.tpot_s / tensor)
    return best
