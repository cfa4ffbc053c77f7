"""One way to run a model, with what it needs and gives; and one that is none, with the reason. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run one model on GPUs of one kind. `tensor` GPUs lie on one node; `pipeline` stages may lie on
    several."""

    model: str
    gpu: str
    tensor: int
    requests_s: float
    """What one instance serves within the model's targets, steadily; 0: nothing."""
    pipeline: int = 1
    data: int = 1
    """Copies of the weights behind one session."""
    expert: bool = False
    """Whole experts on each rank instead of slices of all."""
    quantisation: str = "bf16"
    nodes: int = 1
    """Nodes it spans: 1, or as many as pipeline stages."""
    latency_s: float = 0.0
    """Mean from arrival to the last token, at `requests_s`."""
    load_s: float = 0.0
    """From the decision until it serves: the engine's start and reading the weights."""
    kv_tokens: int = 0
    memory_bytes_per_gpu: float = 0.0
    """Weights, keys and values, and what the engine needs beside them."""
    concurrency: int = 0
    """Requests in flight at `requests_s`."""
    measured: bool = False
    """Whether `requests_s` was measured or comes from the cost model."""
    why: str = ""
    """What limits `requests_s`."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tensor * self.pipeline * self.data

    @property
    def gpus_per_node(self) -> int:
        """GPUs it takes on each node it spans."""
        return self.gpus // self.nodes

    @property
    def key(self) -> str:
        """Names it in plans and explanations: `model gpu tp2 pp1 fp8`."""
        parts = [self.model, self.gpu, f"tp{self.tensor}"]
        parts += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"dp{self.data}"] if self.data > 1 else []
        parts += ["ep"] if self.expert else []
        parts += [f"over {self.nodes} nodes"] if self.nodes > 1 else []
        return " ".join([*parts, self.quantisation])


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A way that is none, and why."""

    model: str
    gpu: str
    tensor: int
    pipeline: int
    data: int
    quantisation: str
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What one instance was measured to serve; takes the place of the cost model's word."""

    model: str
    gpu: str
    tensor: int
    requests_s: float
    pipeline: int = 1
    latency_s: float = math.nan
    """NaN: not measured; the cost model's stands."""
