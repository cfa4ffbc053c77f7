"""A large placement problem: 142 models, six kinds of GPU, 5,000 GPUs in nodes of four and eight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from serai.performance.model_card import ModelCard
from serai.performance.shipped_models import shipped_card
from serai.placer.demand import LengthSpread, ModelDemand
from serai.placer.fleet import Fleet, Node

KINDS = {
    "a100-sxm-80": 0.30,
    "h100-sxm-80": 0.25,
    "gh200-96": 0.20,
    "h200-sxm-141": 0.10,
    "l40s": 0.10,
    "b200": 0.05,
}
"""Shares of all GPUs."""
CARDS = (
    *("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-7B-Instruct"),
    *("Qwen/Qwen3-1.7B", "meta-llama/Llama-2-13b-hf", "codellama/CodeLlama-34b-hf", "Qwen/Qwen3-32B"),
    *("meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen3-30B-A3B"),
    *("mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B-FP8"),
)
BURST_MAX = 80.0
BURSTING = 0.15
"""Share of the models that are at their peak now."""


@dataclass(frozen=True)
class Case:
    """What the placer is asked."""

    fleet: Fleet
    demands: tuple[ModelDemand, ...]
    cards: dict[str, ModelCard]


def scale_case(seed: int, *, models: int, gpus: int, requests_s: float, kinds: int = 6) -> Case:
    """Zipf-distributed means that add up to `requests_s`; some models burst, at most to 80 times their mean."""
    random = Random(f"{seed}/scale")
    names = [f"model-{number:03d}" for number in range(models)]
    cards = {name: shipped_card(random.choice(CARDS)) for name in names}
    weights = [1 / (rank + 1) for rank in range(models)]
    demands = []
    for rank, name in enumerate(names):
        mean = requests_s * weights[rank] / sum(weights)
        peak = min(BURST_MAX, math.exp(random.uniform(math.log(1.5), math.log(BURST_MAX))))
        now = mean * (peak if random.random() < BURSTING else 1.0)
        prompt, output = random.choice([300, 700, 1200, 2500]), random.choice([60, 120, 300, 500])
        demands.append(
            ModelDemand(
                name,
                now,
                LengthSpread.about(prompt),
                LengthSpread.about(output),
                requests_s_high=now * 1.3,
                burstiness_cv=min(4.0, math.sqrt(peak)),
                slo_ttft_s=5.0,
                slo_tpot_s=0.1,
                min_replicas=2 if rank < 20 else 1,
            )
        )
    return Case(Fleet(_nodes(gpus, kinds)), tuple(demands), cards)


def _nodes(gpus: int, kinds: int) -> list[Node]:
    shares = dict(list(KINDS.items())[:kinds])
    nodes = []
    for kind, share in shares.items():
        left, place = round(gpus * share / sum(shares.values()) / 4) * 4, 0
        while left > 0:
            size = 4 if kind == "gh200-96" or place % 3 == 0 else min(8, left)
            nodes.append(
                Node(
                    f"{kind}-{place}",
                    kind,
                    size,
                    provider=f"provider-{place % 3}",
                    failure_domain=f"{kind}-{place % 8}",
                )
            )
            left, place = left - size, place + 1
    return nodes
