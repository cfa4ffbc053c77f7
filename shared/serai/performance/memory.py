"""How much of a GPU's memory the weights take, and how many tokens of keys and values fit beside them."""

from __future__ import annotations

from dataclasses import dataclass

from serai.performance.hardware import GIB, Gpu
from serai.performance.model_card import GroupedAttention, ModelCard
from serai.performance.quantisation import KV_BYTES, Quantisation, weight_bytes

KV_BLOCK_TOKENS = 16
"""Paged engines hand out KV memory in blocks of this many tokens."""


class BadParallelism(ValueError):
    """A split of a model over GPUs that no engine could load; one line that names field, file and numbers."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one instance is split. `tensor × pipeline` GPUs hold one copy of the model."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    """Whole experts on each tensor-parallel rank instead of a slice of every expert."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What an engine leaves to keys and values."""

    utilisation: float = 0.9
    """Share of the GPU's memory the engine may use (vLLM `--gpu-memory-utilization`)."""
    reserve_bytes: float = 2.5 * GIB
    """Per GPU: context, graphs, communication buffers and the largest step's activations."""


def checked_parallelism(card: ModelCard, parallelism: Parallelism) -> Parallelism:
    """`parallelism` itself, or BadParallelism when it does not divide the model. Names the card's file and field."""
    tensor, heads = parallelism.tensor, card.attention.heads
    if tensor < 1 or parallelism.pipeline < 1:
        raise BadParallelism(f"{card.source}: tensor and pipeline parallelism must be at least 1")
    if heads % tensor:
        raise BadParallelism(f"{card.source}: field `num_attention_heads` is {heads}, not divisible by TP {tensor}")
    if isinstance(card.attention, GroupedAttention) and max(card.attention.kv_heads, tensor) % min(
        card.attention.kv_heads, tensor
    ):
        kv_heads = card.attention.kv_heads
        raise BadParallelism(
            f"{card.source}: field `num_key_value_heads` is {kv_heads}, not shared evenly by TP {tensor}"
        )
    if card.dense_layers and card.intermediate % tensor:
        width = card.intermediate
        raise BadParallelism(f"{card.source}: field `intermediate_size` is {width}, not divisible by TP {tensor}")
    if parallelism.pipeline > card.layers:
        raise BadParallelism(f"{card.source}: field `num_hidden_layers` is {card.layers}, fewer than PP stages")
    if parallelism.expert and card.experts is not None and card.experts.count % tensor:
        count = card.experts.count
        raise BadParallelism(f"{card.source}: field `num_experts` is {count}, not divisible by EP {tensor}")
    return parallelism


def kv_bytes_per_token_per_gpu(card: ModelCard, parallelism: Parallelism, quantisation: Quantisation) -> float:
    """Bytes one token's keys and values take on one GPU of the instance.

    Grouped-query heads are split over tensor-parallel ranks and repeated when there are fewer heads than ranks;
    latent vectors (MLA) are repeated on every rank. Sliding-window layers are counted as full ones, which is what
    an engine without a hybrid cache allocates.
    """
    attention = card.attention
    if isinstance(attention, GroupedAttention):
        values = 2 * max(1.0, attention.kv_heads / parallelism.tensor) * attention.head_dim
    else:
        values = attention.kv_rank + attention.rope_dim
    return card.layers / parallelism.pipeline * values * KV_BYTES[quantisation.kv]


def kv_bytes_per_token(card: ModelCard, quantisation: Quantisation | None = None) -> float:
    """Bytes one token's keys and values take, held once: what a transfer to another instance must carry."""
    return kv_bytes_per_token_per_gpu(card, Parallelism(), quantisation or card.quantisation)


def weight_bytes_per_gpu(card: ModelCard, parallelism: Parallelism, quantisation: Quantisation) -> float:
    """Bytes of weights on one GPU (the fullest stage of a pipeline).

    Projections, feed-forward layers, experts, embedding and head are split over tensor-parallel ranks; routers and
    the down-projections of latent attention are repeated.
    """
    parts = card.parameters_by_part()
    replicated = 0
    if not isinstance(card.attention, GroupedAttention):
        replicated = card.layers * card.attention.replicated_parameters(card.hidden)
    layers = (
        weight_bytes((parts["attention"] - replicated) / parallelism.tensor + replicated, quantisation.attention)
        + weight_bytes(parts["dense"] / parallelism.tensor, quantisation.dense)
        + weight_bytes(parts["experts"] / parallelism.tensor, quantisation.experts)
        + 2.0 * parts["router"]
    )
    ends = 2.0 * (parts["embedding"] + parts["head"]) / parallelism.tensor
    largest_stage = -(-card.layers // parallelism.pipeline) / card.layers
    return layers * largest_stage + (ends if parallelism.pipeline == 1 else ends / 2)


def kv_capacity_tokens(
    card: ModelCard,
    gpu: Gpu,
    parallelism: Parallelism,
    quantisation: Quantisation,
    budget: MemoryBudget | None = None,
) -> int:
    """Tokens of keys and values that fit beside the weights, in whole blocks; 0 when the weights do not fit."""
    budget = budget or MemoryBudget()
    free = gpu.memory_bytes * budget.utilisation - budget.reserve_bytes
    free -= weight_bytes_per_gpu(card, parallelism, quantisation)
    block = KV_BLOCK_TOKENS * kv_bytes_per_token_per_gpu(card, parallelism, quantisation)
    return max(0, int(free // block)) * KV_BLOCK_TOKENS
