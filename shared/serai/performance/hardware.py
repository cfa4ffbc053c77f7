"""Catalogue of GPUs and links, each number with its source. Peaks are dense (no structured sparsity).

Peaks are what the vendor prints; what an engine reaches of them is the business of `latency_profile.py`. Memory is
what the driver reports to a process, not the marketing figure, since KV capacity is decided by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

MIB = 1024**2
GIB = 1024**3


class UnknownHardware(ValueError):
    """A GPU or link that is not in the catalogue; the text names it and the nearest entries."""


class ComputeFormat(StrEnum):
    """Number format of the multiplications, which decides the peak."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between GPUs or hosts. `bandwidth_bytes_s` is per GPU (or host) and one direction."""

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as software sees it. A peak of 0 means the format has no native multiplication."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_s: float
    bf16_flops_s: float
    fp8_flops_s: float
    int8_flops_s: float
    fp4_flops_s: float
    link: str
    """Between GPUs of one host: a name in LINKS."""
    host_link: str
    power_w: float
    idle_power_w: float
    source: str
    family: str
    """GPUs of one family share efficiency factors where a member has not been measured."""

    def peak_flops_s(self, wanted: ComputeFormat) -> tuple[ComputeFormat, float]:
        """The format that is really computed in, and its dense peak in FLOP/s.

        A GPU without the wanted format unpacks weights to BF16 first (weight-only quantisation), so BF16 it is; FP4
        falls to FP8 where that is native.
        """
        peaks = {
            ComputeFormat.BF16: self.bf16_flops_s,
            ComputeFormat.FP8: self.fp8_flops_s,
            ComputeFormat.INT8: self.int8_flops_s,
            ComputeFormat.FP4: self.fp4_flops_s,
        }
        if peaks[wanted] > 0:
            return wanted, peaks[wanted]
        return ComputeFormat.BF16, self.bf16_flops_s


_NVLINK = "vendor datasheet of the GPU: total both directions, halved"
_PCIE = "PCI-SIG raw rate x16 one direction after encoding"
_NETWORK = "line rate; latency as measured by common RDMA or TCP tests"

NO_LINK_COST = Link("ideal", 1e18, 0.0, "moves any message in no time: the textbook roofline, which leaves it out")

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink3", 300e9, 2.5e-6, _NVLINK),
        Link("nvlink3-a800", 200e9, 2.5e-6, _NVLINK),
        Link("nvlink4", 450e9, 2.0e-6, _NVLINK),
        Link("nvlink4-bridge", 300e9, 2.0e-6, _NVLINK),
        Link("nvlink5", 900e9, 2.0e-6, _NVLINK),
        Link("infinity-fabric3", 448e9, 2.5e-6, "AMD MI300X datasheet: 7 links × 128 GB/s both directions, halved"),
        Link("pcie3", 15.75e9, 5e-6, _PCIE),
        Link("pcie4", 31.5e9, 5e-6, _PCIE),
        Link("pcie5", 63.0e9, 5e-6, _PCIE),
        Link("ethernet-10g", 1.25e9, 30e-6, _NETWORK),
        Link("ethernet-25g", 3.125e9, 20e-6, _NETWORK),
        Link("ethernet-100g", 12.5e9, 10e-6, _NETWORK),
        Link("ethernet-400g", 50e9, 5e-6, _NETWORK),
        Link("infiniband-400g", 50e9, 3e-6, _NETWORK),
        Link("memory", 100e9, 1e-6, "between sockets of one host, order of magnitude"),
    )
}

_A100 = "NVIDIA A100 datasheet (2021)"
_A800 = "NVIDIA A800 datasheet (2022): A100 with NVLink cut to 400 GB/s"
_H100 = "NVIDIA H100 datasheet (2023), halved where it prints sparsity"
_H100_NVL = "NVIDIA H100 NVL product brief (2024), halved where it prints sparsity"
_H200 = "NVIDIA H200 datasheet (2024), halved where it prints sparsity"
_GH200 = "NVIDIA GH200 datasheet (2023, 2024), halved where it prints sparsity; power of the GPU's share"
_AMPERE = "NVIDIA Ampere GA102 white paper (2021), FP16 with FP32 accumulation"
_ADA = "NVIDIA Ada white paper (2023), FP16 with FP32 accumulation"
_L20 = "NVIDIA L20 product brief (2023)"
_L40S = "NVIDIA L40S datasheet (2023), halved where it prints sparsity"
_RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet (2025), halved from sparsity"
_BLACKWELL = "NVIDIA Blackwell architecture brief (2024), halved where it prints sparsity"
_MI300X = "AMD Instinct MI300X datasheet (2023)"
_XEON = "Intel Xeon 8480+: 56 cores × 2 GHz AMX, 8 × DDR5-4800"
_DESKTOP = "8 cores × 3 GHz AVX2 in FP32, 2 × DDR4-3200"

# fmt: off
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # name, memory, bandwidth, bf16, fp8, int8, fp4, between GPUs, to host, power, idle power, source, family
        Gpu("a100-pcie-40", 40960 * MIB, 1555e9, 312e12, 0, 624e12, 0, "pcie4", "pcie4", 250, 45, _A100, "ampere-hbm"),
        Gpu("a100-pcie-80", 81920 * MIB, 1935e9, 312e12, 0, 624e12, 0, "pcie4", "pcie4", 300, 50, _A100, "ampere-hbm"),
        Gpu("a100-sxm-40", 40960 * MIB, 1555e9, 312e12, 0, 624e12, 0, "nvlink3", "pcie4", 400, 55, _A100, "ampere-hbm"),
        Gpu("a100-sxm-80", 81920 * MIB, 2039e9, 312e12, 0, 624e12, 0, "nvlink3", "pcie4", 400, 60, _A100, "ampere-hbm"),
        Gpu("a800-pcie-80", 81920 * MIB, 1935e9, 312e12, 0, 624e12, 0, "pcie4", "pcie4", 300, 50, _A800, "ampere-hbm"),
        Gpu("a800-sxm-80", 81920 * MIB, 2039e9, 312e12, 0, 624e12, 0, "nvlink3-a800", "pcie4", 400, 60, _A800,
            "ampere-hbm"),
        Gpu("h100-pcie-80", 81559 * MIB, 2000e9, 756e12, 1513e12, 1513e12, 0, "pcie5", "pcie5", 350, 55, _H100,
            "hopper"),
        Gpu("h100-sxm-80", 81559 * MIB, 3350e9, 989e12, 1979e12, 1979e12, 0, "nvlink4", "pcie5", 700, 75, _H100,
            "hopper"),
        Gpu("h100-nvl-94", 95830 * MIB, 3938e9, 835e12, 1671e12, 1671e12, 0, "nvlink4-bridge", "pcie5", 400, 65,
            _H100_NVL, "hopper"),
        Gpu("h200-sxm-141", 143771 * MIB, 4800e9, 989e12, 1979e12, 1979e12, 0, "nvlink4", "pcie5", 700, 78, _H200,
            "hopper"),
        Gpu("gh200-96", 97871 * MIB, 4000e9, 989e12, 1979e12, 1979e12, 0, "nvlink4", "pcie5", 700, 90, _GH200,
            "hopper"),
        Gpu("gh200-144", 146831 * MIB, 4900e9, 989e12, 1979e12, 1979e12, 0, "nvlink4", "pcie5", 700, 90, _GH200,
            "hopper"),
        Gpu("l20", 46068 * MIB, 864e9, 119.5e12, 239e12, 239e12, 0, "pcie4", "pcie4", 275, 35, _L20, "gddr"),
        Gpu("l40s", 46068 * MIB, 864e9, 362.05e12, 733e12, 733e12, 0, "pcie4", "pcie4", 350, 35, _L40S, "gddr"),
        Gpu("rtx-3090", 24576 * MIB, 936e9, 71e12, 0, 284e12, 0, "pcie4", "pcie4", 350, 25, _AMPERE, "ampere-gddr"),
        Gpu("rtx-4090", 24564 * MIB, 1008e9, 165.2e12, 330.3e12, 660.6e12, 0, "pcie4", "pcie4", 450, 22, _ADA,
            "gddr"),
        Gpu("a40", 46068 * MIB, 696e9, 149.7e12, 0, 299.3e12, 0, "pcie4", "pcie4", 300, 30, _AMPERE, "ampere-gddr"),
        Gpu("rtx-a6000", 49140 * MIB, 768e9, 154.8e12, 0, 309.7e12, 0, "pcie4", "pcie4", 300, 25, _AMPERE,
            "ampere-gddr"),
        Gpu("rtx-pro-6000", 97887 * MIB, 1597e9, 503.8e12, 1007.6e12, 1007.6e12, 2015e12, "pcie5", "pcie5", 600, 35,
            _RTX_PRO, "gddr"),
        Gpu("b200", 183359 * MIB, 7700e9, 2250e12, 4500e12, 4500e12, 9000e12, "nvlink5", "pcie5", 1000, 140, _BLACKWELL,
            "blackwell"),
        Gpu("gb200", 189471 * MIB, 8000e9, 2500e12, 5000e12, 5000e12, 10000e12, "nvlink5", "pcie5", 1200, 150,
            _BLACKWELL, "blackwell"),
        Gpu("mi300x", 196592 * MIB, 5300e9, 1307.4e12, 2614.9e12, 2614.9e12, 0, "infinity-fabric3", "pcie5", 750, 140,
            _MI300X, "cdna3"),
        Gpu("cpu-server", 512 * GIB, 307e9, 114e12, 0, 229e12, 0, "memory", "memory", 350, 110, _XEON, "cpu"),
        Gpu("cpu-desktop", 16 * GIB, 50e9, 0.77e12, 0, 1.5e12, 0, "memory", "memory", 65, 15, _DESKTOP, "cpu"),
    )
}
# fmt: on

_ALIASES = {
    "a100": "a100-sxm-80",
    "a100-40": "a100-sxm-40",
    "a100-80": "a100-sxm-80",
    "a100-sxm": "a100-sxm-80",
    "a100-sxm4-40": "a100-sxm-40",
    "a100-sxm4-80": "a100-sxm-80",
    "a100-pcie": "a100-pcie-80",
    "a800": "a800-sxm-80",
    "a800-pcie": "a800-pcie-80",
    "a800-sxm": "a800-sxm-80",
    "h100": "h100-sxm-80",
    "h100-80": "h100-sxm-80",
    "h100-80-hbm3": "h100-sxm-80",
    "h100-sxm": "h100-sxm-80",
    "h100-pcie": "h100-pcie-80",
    "h100-nvl": "h100-nvl-94",
    "h200": "h200-sxm-141",
    "h200-sxm": "h200-sxm-141",
    "gh200": "gh200-96",
    "gh200-120": "gh200-96",
    "gh200-480": "gh200-96",
    "gh200-144-hbm3e": "gh200-144",
    "rtx3090": "rtx-3090",
    "geforce-rtx-3090": "rtx-3090",
    "rtx4090": "rtx-4090",
    "geforce-rtx-4090": "rtx-4090",
    "a6000": "rtx-a6000",
    "rtxpro6000": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000",
    "b200-sxm": "b200",
    "cpu": "cpu-server",
}
"""Short names, and what `nvidia-smi` prints once lowered and hyphenated. GH200 '120GB' and '480GB' name the CPU's
memory; the GPU has 96 GB."""


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, by catalogue name, common short name, or what the driver prints.

    Raises UnknownHardware, in one line that names the nearest entries.
    """
    key = _normalised(name)
    found = GPUS.get(_ALIASES.get(key, key))
    if found is None:
        raise UnknownHardware(_unknown("GPU", name, key, [*GPUS, *_ALIASES], GPUS))
    return found


def find_link(name: str) -> Link:
    """The link called `name`. Raises UnknownHardware, in one line that names the nearest entries."""
    key = name.strip().lower().replace("_", "-")
    found = LINKS.get(key)
    if found is None:
        raise UnknownHardware(_unknown("link", name, key, list(LINKS), LINKS))
    return found


def _normalised(name: str) -> str:
    key = re.sub(r"[\s_:/]+", "-", name.strip().lower())
    key = re.sub(r"^(nvidia|nvda|amd)-", "", key)
    key = re.sub(r"^instinct-", "", key)
    return re.sub(r"(\d)gb?(?=-|$)", r"\1", key)


def _unknown(kind: str, name: str, key: str, candidates: list[str], entries: dict[str, Gpu] | dict[str, Link]) -> str:
    near = sorted({_ALIASES.get(match, match) for match in get_close_matches(key, candidates, n=3, cutoff=0.5)})
    known = ", ".join(near or sorted(entries))
    return f"unknown {kind} {name!r}: {'nearest are' if near else 'known are'} {known}"
