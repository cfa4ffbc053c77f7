"""`serai profile show`: what the cost model says of one instance, or which profiles there are.

Without a model, lists the shipped profiles with their provenance. With one, prints memory, prompt times, decode steps
with their parts, and energy, for a GPU, a split and an engine.
"""

from __future__ import annotations

import argparse
import sys

from serai.bench.profile.engine import read_card
from serai.bench.report import Report, add_report_arguments, hand_out
from serai.performance.hardware import UnknownHardware, find_gpu, find_link
from serai.performance.latency_model import BadStep, Step
from serai.performance.latency_profile import profile_for, shipped_profiles
from serai.performance.memory import BadParallelism, MemoryBudget, Parallelism
from serai.performance.model_card import BadModelConfig
from serai.performance.quantisation import KvFormat, Quantisation, WeightFormat
from serai.performance.roofline import RooflineModel

PROMPTS = (128, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8, 32, 64, 128, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai profile show`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("model", nargs="?", default="", metavar="NAME|FILE", help="shipped model or a config.json")
    parser.add_argument("--gpu", default="h100", help="GPU of the catalogue (default: h100)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallelism")
    parser.add_argument("--ep", action="store_true", help="whole experts on each rank")
    parser.add_argument("--engine", default="vllm", help="engine stack of the profile")
    parser.add_argument("--weights", choices=[f.value for f in WeightFormat], help="format (default: as stored)")
    parser.add_argument("--kv", choices=[f.value for f in KvFormat], help="format of keys and values")
    parser.add_argument("--context", type=int, default=1024, help="mean context of decoding sequences, in tokens")
    parser.add_argument("--link", default="infiniband-400g", help="link to another instance, for KV transfer")
    parser.add_argument("--utilisation", type=float, default=0.9, help="share of GPU memory the engine may use")


def run(arguments: argparse.Namespace) -> int:
    """Print. Exit status 2 for what the model or catalogue does not know."""
    try:
        hand_out(_instance(arguments) if arguments.model else _profiles(), arguments)
    except (BadModelConfig, BadParallelism, BadStep, UnknownHardware) as error:
        print(f"serai profile show: {error}", file=sys.stderr)
        return 2
    return 0


def _profiles() -> Report:
    table = [("profile", "rows", "fit error")]
    notes = []
    for (gpu, engine), profile in shipped_profiles().items():
        known = profile.provenance
        table.append((f"{gpu} {engine}", str(known.rows_fitted), f"{known.fit_error:.1%}"))
        notes.append(f"{gpu} {engine}: {'; '.join(known.sources)}. {known.note}")
    return Report("profile show", {}, {"profiles": len(table) - 1}, table, notes, None)


def _instance(arguments: argparse.Namespace) -> Report:
    gpu = find_gpu(arguments.gpu)
    card = read_card(arguments.model)
    profile = profile_for(gpu.name, arguments.engine)
    instance = RooflineModel(
        card,
        gpu,
        Parallelism(arguments.tp, arguments.pp, arguments.ep),
        profile=profile,
        quantisation=_formats(card.quantisation, arguments.weights, arguments.kv),
        budget=MemoryBudget(utilisation=arguments.utilisation),
    )
    capacity = instance.kv_capacity_tokens()
    transfer = instance.kv_transfer_s(1024, find_link(arguments.link))
    figures: dict[str, float] = {
        "parameters_billion": card.parameters() / 1e9,
        "weights_gb": card.weight_bytes(instance.quantisation) / 1e9,
        "kv_bytes_per_token": instance.kv_bytes_per_token(),
        "kv_capacity_tokens": capacity,
        "kv_transfer_ms_1024": transfer * 1e3,
    }
    table = [("", "ms", "parts, energy")]
    for tokens in PROMPTS:
        seconds = instance.prefill_s(tokens)
        figures[f"prefill_ms_{tokens}"] = seconds * 1e3
        table.append((f"prompt of {tokens} tokens", f"{seconds * 1e3:.1f}", f"{tokens / seconds:,.0f} tok/s"))
    fitting = [batch for batch in BATCHES if batch * arguments.context <= capacity]
    table += [_decode_row(instance, batch, arguments.context, figures) for batch in fitting]
    known = profile.provenance
    notes = [f"profile: {profile.gpu} {profile.engine}, {known.rows_fitted} rows. {known.note}"]
    notes.append(f"weights {figures['weights_gb']:.1f} GB, cache for {capacity:,} tokens")
    if not capacity:
        notes.append("the weights do not fit: decode steps are left out")
    config = {"model": card.name, "gpu": gpu.name, "tp": arguments.tp, "pp": arguments.pp, "engine": arguments.engine}
    return Report("profile show", config, figures, table, notes, None)


def _formats(stored: Quantisation, weights: str | None, kv: str | None) -> Quantisation:
    cache = KvFormat(kv) if kv else stored.kv
    if weights:
        return Quantisation.uniform(WeightFormat(weights), cache)
    return Quantisation(stored.attention, stored.dense, stored.experts, cache)


def _decode_row(instance: RooflineModel, batch: int, context: int, figures: dict[str, float]) -> tuple[str, str, str]:
    step = Step(decode_sequences=batch, decode_context_tokens=batch * context)
    parts = instance.breakdown(step)
    energy = instance.energy_j(step) / batch
    figures[f"decode_ms_{batch}"] = parts.total_s * 1e3
    figures[f"decode_j_per_token_{batch}"] = energy
    named = {
        "linear": parts.linear_s,
        "experts": parts.experts_s,
        "attention": parts.attention_s,
        "elementwise": parts.elementwise_s,
        "links": parts.communication_s,
        "overhead": parts.overhead_s,
    }
    shares = ", ".join(f"{name} {value / parts.total_s:.0%}" for name, value in named.items() if value)
    return f"decode step, batch {batch}", f"{parts.total_s * 1e3:.2f}", f"{shares}; {energy:.2f} J a token"
