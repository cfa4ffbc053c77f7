"""The clusters and models of the PaDG paper (EcoServe, OSDI '26, §4.1), for comparisons under its conditions.

Its A800 nodes connect GPUs over PCIe, yet its prompt speeds are those of the SXM model within 5 % (A100 kernel tables);
so compute is `a800-sxm-80` and only KV transfer uses PCIe. No nominal rate of a link is reached: see `Network.share`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serai.performance.hardware import GPUS, LINKS, Link
from serai.performance.latency_profile import profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.simulator.fast.links import Network


@dataclass(frozen=True, slots=True)
class PaperCluster:
    """One cluster: its GPUs, their links, and how each model is split."""

    name: str
    gpu: str
    nodes: int
    gpus_used: int
    """In the main runs."""
    inside: Link
    between: Link
    tensor: dict[str, int]
    one_a_node: tuple[str, ...] = ()
    """Systems that had each instance on a node of its own, as far as nodes go."""

    def instances(self, model: str) -> int:
        """How many instances of `model` the main runs had."""
        return self.gpus_used // self.tensor[model]

    def instances_per_node(self, model: str, system: str = "") -> int:
        """How many instances of `system` share a node's links."""
        if system in self.one_a_node and self.instances(model) <= self.nodes:
            return 1
        return 8 // self.tensor[model]

    @property
    def network(self) -> Network:
        """Its links, for KV."""
        return Network(self.inside, self.between)

    def latency_model(self, model: str) -> RooflineModel:
        """One instance of `model`, under vLLM's profile for its GPU."""
        profile = profile_for(self.gpu, "vllm")
        return RooflineModel(
            shipped_card(MODELS[model]), GPUS[self.gpu], Parallelism(self.tensor[model]), profile=profile
        )


MODELS = {
    "llama-30b": "huggyllama/llama-30b",
    "codellama-34b": "codellama/CodeLlama-34b-hf",
    "qwen2-72b": "Qwen/Qwen2-72B",
}
PROMPT_TOKENS_MAX = {"llama-30b": 2048}
"""Contexts that the paper cut prompts to."""

_EIGHT_PORTS = replace(LINKS["infiniband-400g"], name="infiniband-8x400g", bandwidth_bytes_s=8 * 50e9)

CLUSTERS: dict[str, PaperCluster] = {
    cluster.name: cluster
    for cluster in (
        PaperCluster(
            "l20",
            "l20",
            nodes=8,
            gpus_used=32,
            inside=LINKS["pcie4"],
            between=LINKS["ethernet-10g"],
            tensor={"llama-30b": 4, "codellama-34b": 4, "qwen2-72b": 8},
            one_a_node=("mooncake", "mooncake-direct"),
        ),
        PaperCluster(
            "a800",
            "a800-sxm-80",
            nodes=2,
            gpus_used=16,
            inside=LINKS["pcie4"],
            between=LINKS["ethernet-25g"],
            tensor={"llama-30b": 2, "codellama-34b": 2, "qwen2-72b": 4},
        ),
        PaperCluster(
            "h100",
            "h100-sxm-80",
            nodes=2,
            gpus_used=16,
            inside=LINKS["nvlink4"],
            between=_EIGHT_PORTS,
            tensor={"llama-30b": 2, "codellama-34b": 2, "qwen2-72b": 4},
        ),
    )
}
