"""The roofline cost model: per operator the larger of multiplication and memory time, plus what rooflines leave out.

Follows LLM-Viewer (arXiv 2402.16363) and OpenTela's simulator, with what the latter lacks: attention divided by
tensor parallelism, the cost of all-reduce, routing of experts, efficiency factors fitted to measured engines, and
overhead per step, sequence and layer as explicit parameters. `docs/cost-model.md` explains it in two pages.

For an operator with F FLOPs and B bytes on a GPU with peaks P and W and fitted shares e_c and e_m:

    time = max(F / (e_c · P), B / (e_m · W))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serai.performance import memory
from serai.performance.communication import LARGE_MESSAGE_BYTES, all_reduce_s, transfer_s
from serai.performance.energy import Activity, energy_j
from serai.performance.hardware import ComputeFormat, Gpu, Link, find_link
from serai.performance.latency_model import BadStep, PrefillChunk, Step, StepTime
from serai.performance.latency_profile import PURE_ROOFLINE, LatencyProfile
from serai.performance.memory import MemoryBudget, Parallelism, checked_parallelism
from serai.performance.model_card import Experts, GroupedAttention, LatentAttention, ModelCard
from serai.performance.quantisation import COMPUTE, KV_BYTES, Quantisation, WeightFormat, weight_bytes

_ACTIVATION_BYTES = 2.0
"""Activations travel in BF16 whatever the weights are in."""


def experts_touched(experts: Experts, tokens: float, evenness: float = 100.0) -> float:
    """Expected number of experts that at least one of `tokens` tokens is sent to.

    Each expert's popularity is Gamma-distributed with mean k/E and shape `evenness`, so it is missed by all tokens
    with probability (1 + k·tokens/(E·evenness))^−evenness; evenness → ∞ is even routing, E·(1 − exp(−k·tokens/E)).
    """
    missed = (1.0 + experts.active * tokens / (experts.count * evenness)) ** -evenness
    return float(max(experts.active, experts.count * (1.0 - missed)))


def either(multiply_s: float, read_s: float, sharpness: float) -> float:
    """Time of an operator that needs `multiply_s` of multiplication and `read_s` of memory: the larger, rounded off
    at the ridge, where both are near each other, by the exponent `sharpness`."""
    larger, smaller = (multiply_s, read_s) if multiply_s > read_s else (read_s, multiply_s)
    if sharpness >= 50 or smaller < 0.1 * larger:
        return larger
    return float(larger * (1.0 + (smaller / larger) ** sharpness) ** (1.0 / sharpness))


def kernels(card: ModelCard) -> int:
    """Kernels one step launches, about, without those of routed experts: two norms, two projections, rotation,
    attention and cache write a layer; three more for a dense feed-forward or shared experts; six more for the extra
    projections and norms of latent attention."""
    per_layer = 7 + (6 if isinstance(card.attention, LatentAttention) else 0)
    shared = card.experts is not None and card.experts.shared_intermediate > 0
    return card.layers * per_layer + 3 * (card.dense_layers + (card.moe_layers if shared else 0))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A group of equal matrix products: seconds per token to multiply, seconds to read the weights, seconds per
    token to read and write activations. All layers together, on one GPU."""

    multiply_s: float
    weights_s: float
    activations_s: float


class RooflineModel:
    """A model on GPUs under an engine, as a LatencyModel.

    `link` overrides the catalogue's connection between the instance's GPUs (for example L20 over PCIe, or an
    instance that spans hosts). Raises BadParallelism when the split does not divide the model.
    """

    def __init__(
        self,
        card: ModelCard,
        gpu: Gpu,
        parallelism: Parallelism | None = None,
        *,
        profile: LatencyProfile = PURE_ROOFLINE,
        quantisation: Quantisation | None = None,
        link: Link | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.card = card
        self.gpu = gpu
        self.parallelism = checked_parallelism(card, parallelism or Parallelism())
        self.profile = profile
        self.quantisation = quantisation or card.quantisation
        self.link = link or find_link(gpu.link)
        self.budget = budget or MemoryBudget()
        self._memory_rate = gpu.memory_bandwidth_bytes_s
        self._prepare()

    def _prepare(self) -> None:
        """Turns dimensions and factors into the seconds-per-token coefficients that `step_s` adds up."""
        card, tensor, efficiency = self.card, self.parallelism.tensor, self.profile.efficiency
        self._matrices = self._linear_matrices()
        self._head = self._matrix(card.vocabulary * card.hidden / tensor, WeightFormat.BF16, card.hidden, 1)
        self._attention = self._attention_rates()
        self._elementwise_s = self._elementwise_bytes_per_token() / (self._memory_rate * efficiency.elementwise_memory)
        self._reduces = 2 * card.layers + 1 if tensor > 1 else 0
        self._reduce_fixed_s = self._reduces * all_reduce_s(
            0, tensor, self.link, efficiency.link_bandwidth, self.profile.overheads.all_reduce_s
        )
        self._reduce_token_s = self._reduces * all_reduce_s(
            card.hidden * _ACTIVATION_BYTES, tensor, self.link, efficiency.link_bandwidth
        )
        self._large_tokens = LARGE_MESSAGE_BYTES / (card.hidden * _ACTIVATION_BYTES)
        self._stages_token_s = (self.parallelism.pipeline - 1) * card.hidden * _ACTIVATION_BYTES
        self._stages_token_s /= self.link.bandwidth_bytes_s * efficiency.link_bandwidth
        self._stages_fixed_s = (self.parallelism.pipeline - 1) * self.link.latency_s
        overheads = self.profile.overheads
        self._kernels_s = kernels(card) * overheads.kernel_s + card.moe_layers * overheads.experts_layer_s
        self._launch_s = kernels(card) * self.profile.overheads.launch_s
        if card.experts is not None:
            self._prepare_experts(card.experts)

    def _matrix(self, parameters: float, weights: WeightFormat, width: float, count: int) -> _Matrix:
        """`count` products with `parameters` weights each on this GPU; `width` values in and out per token."""
        efficiency = self.profile.efficiency
        peak = self._peak(weights, efficiency.narrow_compute)
        memory_rate = self._memory_rate * efficiency.linear_memory
        return _Matrix(
            multiply_s=count * 2 * parameters / (peak * efficiency.linear_compute),
            weights_s=count * weight_bytes(parameters, weights) / memory_rate,
            activations_s=count * width * _ACTIVATION_BYTES / memory_rate,
        )

    def _peak(self, weights: WeightFormat, narrow: float) -> float:
        """FLOP/s of the format that `weights` are multiplied in on this GPU; `narrow` is the factor of narrow ones."""
        computed, peak = self.gpu.peak_flops_s(COMPUTE[weights])
        return peak if computed is ComputeFormat.BF16 else peak * narrow

    def _linear_matrices(self) -> list[_Matrix]:
        card, tensor, formats = self.card, self.parallelism.tensor, self.quantisation
        found = list(self._attention_matrices())
        gate = 2 if card.gated else 1
        if card.dense_layers:
            found += self._feed_forward(card.intermediate / tensor, gate, formats.dense, card.dense_layers)
        if card.experts is not None:
            router = card.hidden * card.experts.count
            found.append(self._matrix(router, WeightFormat.BF16, card.hidden, card.moe_layers))
            if card.experts.shared_intermediate:
                shared = card.experts.shared_intermediate / tensor
                found += self._feed_forward(shared, gate, formats.dense, card.moe_layers)
        return found

    def _feed_forward(self, width: float, gate: int, weights: WeightFormat, count: int) -> list[_Matrix]:
        hidden = self.card.hidden
        up = self._matrix(gate * hidden * width, weights, hidden + gate * width, count)
        return [up, self._matrix(width * hidden, weights, width + hidden, count)]

    def _attention_matrices(self) -> list[_Matrix]:
        card, tensor, weights = self.card, self.parallelism.tensor, self.quantisation.attention
        attention, hidden = card.attention, card.hidden
        if isinstance(attention, GroupedAttention):
            query = attention.heads / tensor * attention.head_dim
            both = 2 * max(1.0, attention.kv_heads / tensor) * attention.head_dim
            into = self._matrix(hidden * (query + both), weights, hidden + query + both, card.layers)
            return [into, self._matrix(query * hidden, weights, query + hidden, card.layers)]
        down, heads = attention.replicated_parameters(hidden), attention.heads / tensor
        query_in = attention.query_rank or hidden
        query = heads * (attention.nope_dim + attention.rope_dim)
        lift = heads * attention.kv_rank * (attention.nope_dim + attention.value_dim)
        out = heads * attention.value_dim
        return [
            self._matrix(down, weights, hidden + down / hidden, card.layers),
            self._matrix(query_in * query, weights, query_in + query, card.layers),
            self._matrix(lift, weights, 2 * heads * attention.kv_rank + query + out, card.layers),
            self._matrix(out * hidden, weights, out + hidden, card.layers),
        ]

    def _attention_rates(self) -> tuple[float, float, float]:
        """Seconds per query-key pair in prompts, per query-key pair in decoding, and per KV byte-token read; per
        layer."""
        efficiency, tensor, attention = self.profile.efficiency, self.parallelism.tensor, self.card.attention
        rate = self.gpu.bf16_flops_s * efficiency.attention_compute
        heads = attention.heads / tensor
        kv_bytes = KV_BYTES[self.quantisation.kv]
        if isinstance(attention, GroupedAttention):
            prompt = decode = 4.0 * heads * attention.head_dim
            values = 2 * max(1.0, attention.kv_heads / tensor) * attention.head_dim
        else:
            prompt, decode = _latent_flops(attention, heads)
            values = attention.kv_rank + attention.rope_dim
        read = values * kv_bytes / (self._memory_rate * efficiency.attention_memory)
        return prompt / rate, decode / rate, read

    def _elementwise_bytes_per_token(self) -> float:
        """Bytes per token read and written by norms, residual additions, rotations and activations, on one GPU.

        Two norms with their residual addition read two vectors and write two each; rotation reads and writes q and
        k; the gated activation reads two and writes one.
        """
        card, tensor = self.card, self.parallelism.tensor
        attention = card.attention
        if isinstance(attention, GroupedAttention):
            rotated = (attention.heads + attention.kv_heads) * attention.head_dim / tensor
        else:
            rotated = attention.heads * attention.rope_dim / tensor + attention.rope_dim
        active = 0.0
        if card.experts is not None:
            active = card.experts.active * (card.experts.intermediate / tensor + 2 * card.hidden / 3)
            active += card.experts.shared_intermediate / tensor
        widths = card.dense_layers * card.intermediate / tensor + card.moe_layers * active
        return _ACTIVATION_BYTES * (card.layers * (8 * card.hidden + 2 * rotated) + 3 * widths)

    def _prepare_experts(self, experts: Experts) -> None:
        card, efficiency, weights = self.card, self.profile.efficiency, self.quantisation.experts
        peak = self._peak(weights, efficiency.experts_narrow_compute)
        parameters = card.dense_parameters(experts.intermediate) / self.parallelism.tensor
        count = card.moe_layers
        self._evenness = efficiency.routing_evenness
        self._expert_multiply_s = count * 2 * parameters * experts.active / (peak * efficiency.experts_compute)
        rate = self._memory_rate * efficiency.experts_memory
        self._expert_read_s = count * weight_bytes(parameters, weights) / rate
        ranks = self.parallelism.tensor if self.parallelism.expert else 1
        self._expert_fixed_s = count * self.profile.overheads.expert_s / ranks
        self._expert_token_s = count * experts.active * 2 * card.hidden * _ACTIVATION_BYTES / rate

    # The answers

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds. Raises BadStep for negative counts."""
        return sum(self._parts(step))

    def breakdown(self, step: Step) -> StepTime:
        """Where the time of `step` goes."""
        return StepTime(*self._parts(step))

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts in one step. `cached_tokens` of each are in the cache already."""
        new = prompt_tokens - cached_tokens
        if new < 1 or cached_tokens < 0 or batch < 1:
            raise BadStep(f"cannot prefill {batch} × {prompt_tokens} tokens of which {cached_tokens} are cached")
        return self.step_s(Step(chunks=[PrefillChunk(new, cached_tokens)] * batch))

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a step that adds one token to each of `sequences`, whose mean context is `context_tokens`."""
        return self.step_s(Step(decode_sequences=sequences, decode_context_tokens=round(sequences * context_tokens)))

    def kv_capacity_tokens(self) -> int:
        """Tokens of keys and values that fit beside the weights; 0 when the weights alone do not fit."""
        return memory.kv_capacity_tokens(self.card, self.gpu, self.parallelism, self.quantisation, self.budget)

    def kv_bytes_per_token(self) -> float:
        """Bytes one token's keys and values take, held once."""
        return memory.kv_bytes_per_token(self.card, self.quantisation)

    def kv_transfer_s(self, tokens: int, link: Link, bandwidth_share: float = 0.8) -> float:
        """Time to send the keys and values of `tokens` tokens to another instance over `link`, in seconds."""
        return transfer_s(tokens * self.kv_bytes_per_token(), link, bandwidth_share)

    def head_s(self, sequences: int) -> float:
        """Time of the output head for `sequences` sequences, in seconds; part of every step."""
        return max(sequences * self._head.multiply_s, self._head.weights_s + sequences * self._head.activations_s)

    def activity(self, step: Step) -> Activity:
        """How the step's time is spent: multiplying, moving memory, or waiting (communication, launches, host)."""
        parts = self._parts(step)
        tokens = step.decode_sequences + sum(chunk.new_tokens for chunk in step.chunks)
        multiplying = sum(
            tokens * m.multiply_s
            for m in self._matrices
            if tokens * m.multiply_s > m.weights_s + tokens * m.activations_s
        )
        if step.chunks:
            multiplying += parts[2]
        if self.card.experts is not None and tokens * self._expert_multiply_s >= 0.9 * parts[1]:
            multiplying += parts[1]
        device = sum(parts[:4])
        return Activity(min(multiplying, device), max(0.0, device - multiplying), parts[4] + parts[5])

    def energy_j(self, step: Step) -> float:
        """Energy the instance's GPUs use in one step, in joules."""
        return energy_j(self.gpu, self.parallelism.gpus, self.activity(step))

    def with_profile(self, profile: LatencyProfile) -> RooflineModel:
        """The same instance with other factors."""
        return RooflineModel(
            self.card,
            self.gpu,
            self.parallelism,
            profile=profile,
            quantisation=self.quantisation,
            link=self.link,
            budget=self.budget,
        )

    def with_overheads(self, *, step_s: float) -> RooflineModel:
        """The same instance with another overhead per step, in seconds (older engines: 0.015 to 0.04)."""
        return self.with_profile(replace(self.profile, overheads=replace(self.profile.overheads, step_s=step_s)))

    def _parts(self, step: Step) -> tuple[float, float, float, float, float, float]:
        """Seconds per operator class, in StepTime's order."""
        decodes, context = step.decode_sequences, step.decode_context_tokens
        if decodes < 0 or context < 0:
            raise BadStep(f"negative count in {step}")
        tokens = decodes
        for chunk in step.chunks:
            if chunk.new_tokens < 0 or chunk.cached_tokens < 0:
                raise BadStep(f"negative count in {chunk}")
            tokens += chunk.new_tokens
        if not tokens:
            return 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        sequences = decodes + len(step.chunks)
        linear = self.head_s(sequences)
        sharpness = self.profile.efficiency.ridge_sharpness
        for matrix in self._matrices:
            linear += either(tokens * matrix.multiply_s, matrix.weights_s + tokens * matrix.activations_s, sharpness)
        experts = self._experts_s(tokens)
        attention = self._attention_s(step.chunks, decodes, context)
        elementwise = tokens * self._elementwise_s
        communication = self._communication_s(tokens)
        waiting = max(0.0, self._launch_s - linear - experts - attention - elementwise - communication)
        overheads = self.profile.overheads
        overhead = overheads.step_s + sequences * overheads.sequence_s + self._kernels_s + waiting
        return linear, experts, attention, elementwise, communication, overhead

    def _communication_s(self, tokens: int) -> float:
        reduce_s = tokens * self._reduce_token_s
        if tokens >= self._large_tokens:
            reduce_s /= self.profile.efficiency.link_bandwidth_large
        return self._reduce_fixed_s + self._stages_fixed_s + reduce_s + tokens * self._stages_token_s

    def _experts_s(self, tokens: int) -> float:
        experts = self.card.experts
        if experts is None:
            return 0.0
        touched = experts_touched(experts, tokens, self._evenness)
        read = touched * (self._expert_read_s + self._expert_fixed_s) + tokens * self._expert_token_s
        multiply = tokens * self._expert_multiply_s
        return either(multiply, read, self.profile.efficiency.ridge_sharpness)

    def _attention_s(self, chunks: Sequence[PrefillChunk], decodes: int, context: float) -> float:
        pair_s, decode_pair_s, read_s = self._attention
        full, windowed, window = self.card.full_layers, self.card.window_layers, self.card.window
        total = 0.0
        for chunk in chunks:
            new, end = chunk.new_tokens, chunk.cached_tokens + chunk.new_tokens
            pairs = new * (chunk.cached_tokens + (new + 1) / 2)
            total += full * max(pairs * pair_s, end * read_s)
            if windowed:
                total += windowed * max(min(pairs, new * window) * pair_s, min(end, new + window) * read_s)
        if decodes:
            total += full * max(context * decode_pair_s, context * read_s)
            if windowed:
                near = min(context, decodes * window)
                total += windowed * max(near * decode_pair_s, near * read_s)
        return total


def _latent_flops(attention: LatentAttention, heads: float) -> tuple[float, float]:
    """FLOPs per query-key pair of latent attention: in prompts on lifted keys and values, in decoding on the latent
    vectors themselves (weight absorption)."""
    prompt = 2.0 * heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
    decode = 2.0 * heads * (2 * attention.kv_rank + attention.rope_dim)
    return prompt, decode
