"""Static prompt times and decode power of A100 and H100: `profiles/splitwise/perf_model.csv`.

The stack is vLLM of 2023, launched kernel by kernel from Python: useful for prompts and for GPU-to-GPU ratios, not for
today's decode times. Fitted on Llama-2-70B at TP 2 and 8; judged on Llama-2-70B at TP 4 and on BLOOM-176B at TP 8.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

from serai.bench.profile.served_fit import profile_from
from serai.bench.report import rounded
from serai.performance.energy import power_w
from serai.performance.fitting import Block, Parameter, fit
from serai.performance.hardware import GPUS, NO_LINK_COST
from serai.performance.latency_model import Step
from serai.performance.latency_profile import PURE_ROOFLINE, LatencyProfile, Provenance
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

PATH = "profiles/splitwise/perf_model.csv"
ENGINE = "vllm-2023"
SYSTEMS = {"a100-80gb": "a100-sxm-80", "h100-80gb": "h100-sxm-80"}
"""`h100-80gb-pcap` is left out: it is the H100 with prompt times multiplied by a constant."""
MODELS = {"llama2-70b": "meta-llama/Llama-2-70b-hf", "bloom-176b": "bigscience/bloom"}
HELD_OUT_MODEL = "bigscience/bloom"
HELD_OUT_TENSOR = 4

PARAMETERS = (
    Parameter("linear_compute", 0.7, 0.6, 1.0),
    Parameter("linear_memory", 0.8, 0.4, 1.0),
    Parameter("attention_compute", 0.3, 0.8, 1.0),
    Parameter("elementwise_memory", 0.4, 0.8, 1.0),
    Parameter("link_bandwidth", 0.5, 1.0, 2.0),
    Parameter("link_bandwidth_large", 0.5, 1.0, 1.0),
    Parameter("ridge_sharpness", 3.0, 0.3),
    Parameter("launch_s", 5e-5, 1.0),
    Parameter("step_s", 2e-3, 1.0),
    Parameter("sequence_s", 1e-4, 1.0),
    Parameter("all_reduce_s", 2e-5, 0.7),
)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Median time to process a batch of equal prompts, and the mean decode step and power after it."""

    model: str
    gpu: str
    tensor: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    prompt_ms: float
    token_ms: float
    power_share: float
    """Of the GPU's limit, averaged over the whole run; 0 = not measured."""
    instance: RooflineModel

    @property
    def textbook(self) -> RooflineModel:
        """The pure roofline of the row, without communication."""
        return RooflineModel(self.instance.card, self.instance.gpu, self.instance.parallelism, link=NO_LINK_COST)

    @property
    def held_out(self) -> bool:
        """Whether the fit must not see this row."""
        return self.model == HELD_OUT_MODEL or self.tensor == HELD_OUT_TENSOR


def load_prompt_rows(data: Path) -> tuple[list[PromptRow], dict[str, int]]:
    """One row per configuration and shape (the median of its repeats), and how many shapes fell to which rule.

    Raises OSError when the file is absent.
    """
    groups: dict[tuple[str, str, int, int, int], list[dict[str, str]]] = defaultdict(list)
    with (data / PATH).open(newline="") as lines:
        for line in csv.DictReader(lines):
            if line["hardware"] in SYSTEMS:
                shape = (int(line["tensor_parallel"]), int(line["batch_size"]), int(line["prompt_size"]))
                groups[line["model"], line["hardware"], *shape].append(line)
    rows: list[PromptRow] = []
    impossible = 0
    for (model, system, tensor, batch, prompt), repeats in sorted(groups.items()):
        row = _row(MODELS[model], SYSTEMS[system], tensor, batch, prompt, repeats)
        if row.prompt_ms / 1e3 < row.textbook.prefill_s(prompt, batch=batch):
            impossible += 1
        else:
            rows.append(row)
    return rows, {"faster than the pure roofline: not the labelled work": impossible}


def _row(model: str, gpu: str, tensor: int, batch: int, prompt: int, repeats: Sequence[dict[str, str]]) -> PromptRow:
    shortest = min(int(r["token_size"]) for r in repeats)
    same = [r for r in repeats if int(r["token_size"]) == shortest]
    instance = RooflineModel(shipped_card(model), GPUS[gpu], Parallelism(tensor), profile=PURE_ROOFLINE)
    return PromptRow(
        *(model, gpu, tensor, batch, prompt, shortest),
        median(float(r["prompt_time"]) for r in repeats),
        median(float(r["token_time"]) for r in same),
        median(float(r["average_power"]) for r in same),
        instance,
    )


def fit_prompts(rows: Sequence[PromptRow], gpu: str) -> LatencyProfile:
    """The profile of one GPU under the stack of 2023, fitted to `rows` of that GPU, every one of them."""
    own = [row for row in rows if row.gpu == gpu]
    measured = [log(row.prompt_ms) for row in own]

    def profile(position: Sequence[float]) -> LatencyProfile:
        values = {p.name: rounded(p.value(x)) for p, x in zip(PARAMETERS, position, strict=True)}
        return profile_from(values, ENGINE, gpu)

    def residuals(position: Sequence[float]) -> list[float]:
        values = {p.name: p.value(x) for p, x in zip(PARAMETERS, position, strict=True)}
        current = profile_from(values, ENGINE, gpu)
        return [log(predicted_prompt_ms(row, current)) - known for row, known in zip(own, measured, strict=True)]

    start, spreads = [p.start for p in PARAMETERS], [p.spread for p in PARAMETERS]
    position = fit(start, spreads, [Block(residuals, range(len(PARAMETERS)))])
    fitted = profile(position)
    error = sum(abs(predicted_prompt_ms(r, fitted) / r.prompt_ms - 1) for r in own) / len(own)
    note = "prompts only: its decode steps are those of an engine that launches every kernel from Python"
    provenance = Provenance([f"{PATH}: {gpu}, Llama-2-70B TP 2 and 8"], len(own), rounded(error), note)
    return LatencyProfile(gpu, ENGINE, fitted.efficiency, fitted.overheads, fitted.serving, provenance)


def predicted_prompt_ms(row: PromptRow, profile: LatencyProfile) -> float:
    """Predicted time of the row's whole batch of prompts, in milliseconds."""
    return row.instance.with_profile(profile).prefill_s(row.prompt_tokens, batch=row.batch) * 1e3


def predicted_power_share(row: PromptRow, profile: LatencyProfile) -> float:
    """Predicted mean power over the row's run, as a share of the GPU's limit."""
    instance = row.instance.with_profile(profile)
    context = row.prompt_tokens + row.output_tokens / 2
    step = Step(decode_sequences=row.batch, decode_context_tokens=round(row.batch * context))
    gpu = GPUS[row.gpu]
    return power_w(gpu, instance.activity(step)) / gpu.power_w
