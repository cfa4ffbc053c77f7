"""Number formats of weights and of the KV cache: how many bits each takes, and what it is multiplied in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from serai.performance.hardware import ComputeFormat


class WeightFormat(StrEnum):
    """How weights lie in memory. `weight_bytes` counts their scales."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


class KvFormat(StrEnum):
    """How keys and values lie in memory."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


WEIGHT_BITS: dict[WeightFormat, float] = {
    WeightFormat.FP32: 32,
    WeightFormat.BF16: 16,
    WeightFormat.FP8: 8,
    WeightFormat.INT8: 8,
    WeightFormat.INT4: 4.25,
    WeightFormat.MXFP4: 4.25,
    WeightFormat.NVFP4: 4.5,
}
"""Bits a weight takes, block scales included: INT4 in groups of 128 with scale and zero point (or 64 with a scale),
MXFP4 with one 8-bit scale per 32, NVFP4 with one FP8 scale per 16."""

COMPUTE: dict[WeightFormat, ComputeFormat] = {
    WeightFormat.FP32: ComputeFormat.BF16,
    WeightFormat.BF16: ComputeFormat.BF16,
    WeightFormat.FP8: ComputeFormat.FP8,
    WeightFormat.INT8: ComputeFormat.INT8,
    WeightFormat.INT4: ComputeFormat.BF16,
    WeightFormat.MXFP4: ComputeFormat.FP4,
    WeightFormat.NVFP4: ComputeFormat.FP4,
}
"""What the weights are multiplied in where the GPU can; INT4 is weight-only in every common engine."""

KV_BYTES: dict[KvFormat, float] = {KvFormat.FP32: 4, KvFormat.BF16: 2, KvFormat.FP8: 1}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What the parts of a model are stored in. Embedding, output head, norms and routers stay in BF16."""

    attention: WeightFormat = WeightFormat.BF16
    """Projections around attention."""
    dense: WeightFormat = WeightFormat.BF16
    """Feed-forward layers without routing, and shared experts."""
    experts: WeightFormat = WeightFormat.BF16
    """Routed experts."""
    kv: KvFormat = KvFormat.BF16

    @classmethod
    def uniform(cls, weights: WeightFormat, kv: KvFormat = KvFormat.BF16) -> Quantisation:
        """The same format for all quantised parts."""
        return cls(weights, weights, weights, kv)


def weight_bytes(parameters: float, weights: WeightFormat) -> float:
    """Bytes that `parameters` weights take, scales included."""
    return parameters * WEIGHT_BITS[weights] / 8
