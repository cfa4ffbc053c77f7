"""What GPUs and engines reach of their peaks: efficiency factors, fixed overheads, and where they were fitted.

A profile belongs to a GPU and an engine stack. It is a small JSON file with its provenance inside; the shipped ones
lie beside this module in `profiles/`, and `serai profile fit` or `serai profile engine` write new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from math import log

import msgspec

from serai.performance.hardware import GPUS, Gpu, find_gpu


class BadProfile(ValueError):
    """A profile file that is not one; the text names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Reached share of the GPU's (or link's) peak, per operator class; 1 is the pure roofline."""

    linear_compute: float = 1.0
    """Projections and dense feed-forward layers, where multiplication limits."""
    linear_memory: float = 1.0
    """The same, where reading weights limits."""
    narrow_compute: float = 1.0
    """Further factor on multiplication in FP8, INT8 or FP4: scales, and activations quantised on the way."""
    experts_compute: float = 1.0
    """Grouped products of routed experts, where multiplication limits."""
    experts_narrow_compute: float = 1.0
    """Their further factor in narrow formats."""
    experts_memory: float = 1.0
    attention_compute: float = 1.0
    """Prompt attention."""
    attention_memory: float = 1.0
    """Reading keys and values."""
    elementwise_memory: float = 1.0
    """Norms, rotations, activations, additions."""
    link_bandwidth: float = 1.0
    """All-reduce; above 1 where switches add up on the way (NVLink SHARP)."""
    link_bandwidth_large: float = 1.0
    """Further factor for messages of `communication.LARGE_MESSAGE_BYTES` and more."""
    ridge_sharpness: float = 100.0
    """How sharply a matrix product turns from memory-bound to multiplication-bound: exponent n in
    (multiply^n + read^n)^(1/n). 100 is the corner of the pure roofline; kernels reach 2 to 6. Not a share."""
    routing_evenness: float = 100.0
    """How evenly tokens spread over experts: shape of the Gamma law of their popularity. 100 is even; 1 to 3 is what
    trained routers do. Not a share, but fitted with the others."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time that no peak explains, in seconds."""

    step_s: float = 0.0
    """Per engine step: scheduling, input preparation, sampling, launch. About 15 to 40 ms in vLLM before 0.6, 1 to
    5 ms since."""
    sequence_s: float = 0.0
    """Per sequence in the step."""
    kernel_s: float = 0.0
    """Per kernel: launch, and the gap before the next (`roofline.kernels` counts them)."""
    launch_s: float = 0.0
    """Per kernel, on the host, at the same time as the GPU works: a step is never shorter than all its launches.
    About 60 µs where Python launches each kernel, nothing where graphs are replayed."""
    experts_layer_s: float = 0.0
    """Per layer with routed experts: router, sorting, gathering, and products too small to fill the GPU. 30 to 50 µs
    in kernel tables, for a single token."""
    expert_s: float = 0.0
    """Per expert that a GPU touches in a layer: a tile too small to fill the GPU. Slicing every expert over ranks
    pays it on each rank; whole experts on each rank (expert parallelism) pay it once."""
    all_reduce_s: float = 0.0
    """Per all-reduce over two GPUs, however small."""


@dataclass(frozen=True, slots=True)
class ServingHabits:
    """How an engine mixes prompts into running batches, for the closed-loop estimate in `serving.py`."""

    prompts_together: float = 1.0
    """Prompts that share a step and so do not delay each other's decoding."""
    delay_share: float = 1.0
    """Share of the other prompts' processing that falls between a request's own tokens: 1 when prompts arrive
    evenly over time, 0.5 when all wait and are processed before any decodes (prefill first, arriving together)."""
    mixed_steps: bool = True
    """Whether prompt chunks run in the same step as decoding (chunked prefill) or in steps of their own."""
    chunk_tokens: int = 8192
    """Token budget of a mixed step."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a profile's numbers come from."""

    sources: list[str] = field(default_factory=list)
    rows_fitted: int = 0
    fit_error: float = 0.0
    """Mean absolute relative error over the fitted rows."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Everything the roofline needs to know about one GPU under one engine stack beside the catalogue's peaks."""

    gpu: str
    engine: str
    efficiency: Efficiency = Efficiency()
    overheads: Overheads = Overheads()
    serving: ServingHabits = ServingHabits()
    provenance: Provenance = Provenance()


PURE_ROOFLINE = LatencyProfile(gpu="any", engine="ideal")
"""All factors 1, no overhead: the textbook roofline, kept for contrast. It predicts about half of the real TPOT."""


_ALONE = ("kernels", "vllm-2023", "sglang-0.5.1")


def encode_profile(profile: LatencyProfile) -> bytes:
    """The profile as indented JSON with a newline at its end, stable for version control."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def decode_profile(data: bytes, source: str) -> LatencyProfile:
    """The profile in `data`. Raises BadProfile naming `source` and the field that is wrong."""
    try:
        profile = msgspec.json.decode(data, type=LatencyProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadProfile(f"{source}: {error}") from error
    for factor in fields(Efficiency):
        value = getattr(profile.efficiency, factor.name)
        most = 100.0 if factor.name in ("ridge_sharpness", "routing_evenness") else 2.0
        if not 0 < value <= most:
            raise BadProfile(f"{source}: field `efficiency.{factor.name}` is {value}, not in 0..{most:g}")
    for overhead in fields(Overheads):
        value = getattr(profile.overheads, overhead.name)
        if not 0 <= value <= 1:
            raise BadProfile(f"{source}: field `overheads.{overhead.name}` is {value}, not in 0..1 seconds")
    return profile


@cache
def shipped_profiles() -> dict[tuple[str, str], LatencyProfile]:
    """The profiles that come with the package, by GPU name and engine."""
    found: dict[tuple[str, str], LatencyProfile] = {}
    for entry in sorted((files(__package__) / "profiles").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            profile = decode_profile(entry.read_bytes(), entry.name)
            found[profile.gpu, profile.engine] = profile
    return found


def profile_for(gpu_name: str, engine: str = "vllm") -> LatencyProfile:
    """The shipped profile for a GPU and engine: the very pair, else the nearest that was measured.

    Nearest: the same engine on a GPU of the same family; then another engine on that family; then the same engine on
    the GPU with the nearest memory bandwidth, vLLM first. Profiles of bare kernels, of engines long gone and of loads
    that came in one wave stand in for nothing but themselves. The returned profile's provenance says
    which one stood in.
    Raises UnknownHardware when the GPU is not in the catalogue.
    """
    gpu = find_gpu(gpu_name)
    shipped = {key: p for key, p in shipped_profiles().items() if key[1] == engine or key[1] not in _ALONE}

    def distance(item: tuple[tuple[str, str], LatencyProfile]) -> tuple[bool, bool, bool, float, bool, str]:
        (name, stack), _ = item
        other = GPUS[name]
        apart = abs(log(other.memory_bandwidth_bytes_s / gpu.memory_bandwidth_bytes_s))
        return (
            other.family != gpu.family,
            stack != engine,
            name != gpu.name,
            apart,
            stack != "vllm",
            f"{name}.{stack}",
        )

    (name, stack), profile = min(shipped.items(), key=distance)
    if (name, stack) == (gpu.name, engine):
        return profile
    note = f"not measured on {gpu.name} under {engine}: factors of {name} under {stack}. {profile.provenance.note}"
    provenance = replace(profile.provenance, note=note.strip())
    return replace(on_gpu(profile, gpu), engine=engine, provenance=provenance)


PCIE_SHARE = 0.29
"""Share of PCIe that all-reduce reaches without direct links between GPUs (aiconfigurator-core 0.12 tables of vLLM
0.24 on RTX PRO 6000: 18.5 of 63 GB/s). Stacks and boards lie between 0.06 and 0.58."""


def on_gpu(profile: LatencyProfile, gpu: Gpu) -> LatencyProfile:
    """`profile` for another GPU than it was fitted on. What was fitted on NVLink does not hold on PCIe."""
    fitted = GPUS.get(profile.gpu)
    efficiency = profile.efficiency
    if gpu.link.startswith("pcie") and (fitted is None or not fitted.link.startswith("pcie")):
        efficiency = replace(efficiency, link_bandwidth=PCIE_SHARE)
    return replace(profile, gpu=gpu.name, efficiency=efficiency)
