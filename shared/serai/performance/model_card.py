"""Model cards: the dimensions that decide cost, read from any Hugging Face `config.json`.

Dense, grouped-query, latent (MLA) and mixture-of-experts decoders are understood. Architectures whose cost the model
does not describe (linear attention, state-space layers, sparse attention) are refused by name instead of guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat, weight_bytes


class BadModelConfig(ValueError):
    """A `config.json` that cannot become a card; one line that names the file and the field."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Multi-head, grouped-query or multi-query attention."""

    heads: int
    kv_heads: int
    head_dim: int

    def projection_parameters(self, hidden: int) -> int:
        """Weights of the q, k, v and output projections of one layer."""
        return hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 §2.1): keys and values are kept as one latent vector a token."""

    heads: int
    query_rank: int
    """Rank of the query compression; 0 = queries are projected directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def projection_parameters(self, hidden: int) -> int:
        """Weights of all projections of one layer."""
        return self.replicated_parameters(hidden) + self.sharded_parameters(hidden)

    def replicated_parameters(self, hidden: int) -> int:
        """Weights of the down-projections, which every tensor-parallel rank holds whole."""
        return hidden * (self.query_rank + self.kv_rank + self.rope_dim)

    def sharded_parameters(self, hidden: int) -> int:
        """Weights of the per-head projections, split over tensor-parallel ranks."""
        query_in = self.query_rank or hidden
        per_head = query_in * (self.nope_dim + self.rope_dim) + self.kv_rank * (self.nope_dim + self.value_dim)
        return self.heads * (per_head + self.value_dim * hidden)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed feed-forward layers."""

    count: int
    active: int
    """Experts a token is sent to."""
    intermediate: int
    shared_intermediate: int
    """Width of the shared experts, which every token passes; 0 = none."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Dimensions of one decoder-only model."""

    name: str
    source: str
    """The file or place the card was read from; errors name it."""
    hidden: int
    layers: int
    attention: GroupedAttention | LatentAttention
    intermediate: int
    """Width of the dense feed-forward layers."""
    gated: bool
    """Whether the feed-forward has a gate (SwiGLU: three matrices) or not (two)."""
    vocabulary: int
    tied_embeddings: bool
    context_tokens_max: int
    dense_layers: int
    experts: Experts | None = None
    window: int = 0
    """Tokens a sliding-window layer looks back; 0 = none."""
    window_layers: int = 0
    quantisation: Quantisation = Quantisation()
    """As the checkpoint is stored."""

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.layers - self.window_layers

    def dense_parameters(self, intermediate: int) -> int:
        """Weights of one feed-forward layer of the given width."""
        return (3 if self.gated else 2) * self.hidden * intermediate

    def parameters(self) -> int:
        """All weights: projections, feed-forward layers, experts, embedding and output head."""
        return int(sum(self.parameters_by_part().values()))

    def parameters_by_part(self) -> dict[str, int]:
        """Weights by part: `attention`, `dense` (with shared experts), `experts`, `router`, `embedding`, `head`."""
        shared = experts = router = 0
        if self.experts is not None:
            shared = self.moe_layers * self.dense_parameters(self.experts.shared_intermediate)
            experts = self.moe_layers * self.experts.count * self.dense_parameters(self.experts.intermediate)
            router = self.moe_layers * self.hidden * self.experts.count
        return {
            "attention": self.layers * self.attention.projection_parameters(self.hidden),
            "dense": self.dense_layers * self.dense_parameters(self.intermediate) + shared,
            "experts": experts,
            "router": router,
            "embedding": self.vocabulary * self.hidden,
            "head": 0 if self.tied_embeddings else self.vocabulary * self.hidden,
        }

    def weight_bytes(self, quantisation: Quantisation | None = None) -> float:
        """Bytes of all weights in the given formats (default: as stored)."""
        formats = quantisation or self.quantisation
        parts = self.parameters_by_part()
        quantised = (
            weight_bytes(parts["attention"], formats.attention)
            + weight_bytes(parts["dense"], formats.dense)
            + weight_bytes(parts["experts"], formats.experts)
        )
        return quantised + 2 * (parts["router"] + parts["embedding"] + parts["head"])


def model_card(config: Mapping[str, Any], source: str, name: str = "") -> ModelCard:
    """The card of a Hugging Face `config.json`, already parsed. `source` names the file in errors.

    A multimodal wrapper is followed to its `text_config`. Raises BadModelConfig naming the file and the field.
    """
    return _Reader(config, source).card(name)


_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_active": ("num_experts_per_tok", "top_k_experts", "experts_per_token", "moe_top_k"),
    "experts_width": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
}
_UNGATED = {"opt", "bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "falcon", "phi", "mpt", "starcoder2", "gpt_bigcode"}
_UNDESCRIBED_FIELDS = {
    "index_topk": "sparse attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
}
_LARGEST = 10**9


class _Reader:
    """Reads one config; every complaint names the file and the field."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.source = source
        if not isinstance(config, Mapping):
            raise BadModelConfig(f"{source}: not a JSON object")
        inner = config.get("text_config") or config.get("llm_config") or config.get("language_config")
        if inner is not None and not isinstance(inner, Mapping):
            raise self.bad("text_config", "is not an object")
        self.config: Mapping[str, Any] = {**config, **inner} if inner else config

    def bad(self, field: str, what: str) -> BadModelConfig:
        return BadModelConfig(f"{self.source}: field `{field}` {what}")

    def integer(self, field: str, default: int | None = None, least: int = 1) -> int:
        """The whole number under any of the field's names; `default` when absent, BadModelConfig without one."""
        for name in _NAMES.get(field, (field,)):
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
                raise self.bad(name, f"is {value!r}, not a whole number")
            if not least <= value <= _LARGEST or value != int(value):
                raise self.bad(name, f"is {value!r}, not a whole number from {least} to {_LARGEST}")
            return int(value)
        if default is None:
            raise self.bad(_NAMES.get(field, (field,))[0], "is missing")
        return default

    def card(self, name: str) -> ModelCard:
        self.refuse_undescribed()
        hidden, layers = self.integer("hidden_size"), self.integer("num_hidden_layers")
        experts, dense_layers = self.experts(layers)
        model_type = str(self.config.get("model_type", ""))
        default_width = 4 * hidden if model_type in _UNGATED else None
        width = self.integer("intermediate_size", 0 if experts and not dense_layers else default_width, least=0)
        window, window_layers = self.windows(layers)
        return ModelCard(
            name=name or str(self.config.get("_name_or_path") or model_type or self.source),
            source=self.source,
            hidden=hidden,
            layers=layers,
            attention=self.attention(hidden),
            intermediate=width,
            gated=model_type not in _UNGATED,
            vocabulary=self.integer("vocab_size"),
            tied_embeddings=bool(self.config.get("tie_word_embeddings", model_type in _UNGATED)),
            context_tokens_max=self.integer("max_position_embeddings", 2048),
            dense_layers=dense_layers,
            experts=experts,
            window=window,
            window_layers=window_layers,
            quantisation=self.quantisation(),
        )

    def refuse_undescribed(self) -> None:
        for field, what in _UNDESCRIBED_FIELDS.items():
            if self.config.get(field):
                raise self.bad(field, f"means {what}, which the cost model does not describe")
        types = self.config.get("layer_types")
        unknown = set(types if isinstance(types, Sequence) else ()) - {"full_attention", "sliding_attention"}
        if unknown:
            raise self.bad("layer_types", f"has {min(map(str, unknown))!r}, which the cost model does not describe")

    def attention(self, hidden: int) -> GroupedAttention | LatentAttention:
        heads = self.integer("num_attention_heads")
        if self.config.get("kv_lora_rank") is not None:
            return LatentAttention(
                heads=heads,
                query_rank=self.integer("q_lora_rank", 0, least=0),
                kv_rank=self.integer("kv_lora_rank"),
                nope_dim=self.integer("qk_nope_head_dim"),
                rope_dim=self.integer("qk_rope_head_dim"),
                value_dim=self.integer("v_head_dim"),
            )
        multi_query = bool(self.config.get("multi_query")) and not self.config.get("new_decoder_architecture")
        kv_heads = self.integer("num_key_value_heads", 1 if multi_query else heads)
        if heads % kv_heads:
            raise self.bad("num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads {heads}")
        if self.config.get("head_dim") is None and hidden % heads:
            raise self.bad("num_attention_heads", f"is {heads}, which does not divide hidden_size {hidden}")
        return GroupedAttention(heads, kv_heads, self.integer("head_dim", hidden // heads))

    def experts(self, layers: int) -> tuple[Experts | None, int]:
        """The routed experts, if any, and how many layers are dense."""
        count = self.integer("experts", 0, least=0)
        if count <= 1:
            return None, layers
        active = self.integer("experts_active")
        if active > count:
            raise self.bad("num_experts_per_tok", f"is {active}, more than the {count} experts")
        width = self.integer("experts_width")
        shared = self.integer("shared_expert_intermediate_size", 0, least=0)
        shared = shared or self.integer("shared_intermediate_size", 0, least=0)
        shared = shared or self.integer("n_shared_experts", 0, least=0) * width
        return Experts(count, active, width, shared), self.dense_layers(layers)

    def dense_layers(self, layers: int) -> int:
        first = self.integer("first_k_dense_replace", 0, least=0)
        step = self.integer("decoder_sparse_step", 1)
        listed = self.config.get("mlp_only_layers") or []
        dense = sum(1 for i in range(layers) if i < first or i in listed or (i + 1) % step)
        if dense >= layers:
            raise self.bad("first_k_dense_replace", f"leaves none of the {layers} layers to the experts")
        return dense

    def windows(self, layers: int) -> tuple[int, int]:
        """Width of the sliding window and how many layers have one."""
        if self.config.get("use_sliding_window") is False:
            return 0, 0
        window = self.integer("sliding_window", 0, least=0)
        if not window:
            return 0, 0
        types = self.config.get("layer_types")
        if isinstance(types, Sequence):
            return window, min(layers, sum(1 for kind in types if kind == "sliding_attention"))
        return window, layers

    def quantisation(self) -> Quantisation:
        """As the checkpoint's `quantization_config` says; BF16 without one."""
        config = self.config.get("quantization_config")
        if not config:
            dtype = str(self.config.get("torch_dtype") or self.config.get("dtype") or "bfloat16")
            return Quantisation.uniform(WeightFormat.FP32 if dtype == "float32" else WeightFormat.BF16)
        if not isinstance(config, Mapping):
            raise self.bad("quantization_config", "is not an object")
        weights = self.weight_format(config)
        skipped = config.get("modules_to_not_convert") or config.get("ignore") or []
        text = " ".join(map(str, skipped)) if isinstance(skipped, Sequence) else ""
        attention = WeightFormat.BF16 if "self_attn" in text and "layernorm" not in text else weights
        dense = WeightFormat.BF16 if "shared_experts" in text or "mlp\\.(" in text else weights
        kv = KvFormat.FP8 if str(config.get("kv_cache_quant_algo") or "").upper() == "FP8" else KvFormat.BF16
        return Quantisation(attention, dense, weights, kv)

    def weight_format(self, config: Mapping[str, Any]) -> WeightFormat:
        method = " ".join(str(config.get(key) or "") for key in ("quant_method", "quant_algo", "format")).lower()
        for word, found in (("mxfp4", WeightFormat.MXFP4), ("nvfp4", WeightFormat.NVFP4), ("fp8", WeightFormat.FP8)):
            if word in method:
                return found
        bits, floating = self.quantised_bits(config), "float" in str(config.get("config_groups", "")).lower()
        if bits == 4:
            return WeightFormat.NVFP4 if floating else WeightFormat.INT4
        if bits == 8:
            return WeightFormat.FP8 if floating else WeightFormat.INT8
        name = method.strip() or "none"
        raise self.bad("quantization_config", f"has a method the cost model does not know: {name!r}")

    def quantised_bits(self, config: Mapping[str, Any]) -> int:
        bits = config.get("bits") or config.get("w_bit")
        if not bits and config.get("load_in_4bit"):
            bits = 4
        if not bits and config.get("load_in_8bit"):
            bits = 8
        groups = config.get("config_groups")
        if not bits and isinstance(groups, Mapping):
            for group in groups.values():
                weights = group.get("weights") if isinstance(group, Mapping) else None
                if isinstance(weights, Mapping) and weights.get("num_bits"):
                    bits = weights["num_bits"]
        return bits if isinstance(bits, int) else 0
