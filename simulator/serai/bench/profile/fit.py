"""`serai profile fit`: efficiency factors and overheads from measurements, as small files with their provenance.

Uses the fitted part of every measurement set and leaves the held-out part untouched; `serai profile validate` judges
the result. Deterministic: the same data gives the same files on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from serai.bench.profile import kernel_tables, serving_logs, static_prefill
from serai.bench.profile.data_folder import DataMissing, add_data_argument, checked_data
from serai.bench.profile.served_fit import fit_served
from serai.bench.profile.silicon import load_served_rows
from serai.bench.report import folder, say
from serai.performance.fitting import FitFailed
from serai.performance.hardware import GPUS
from serai.performance.latency_profile import LatencyProfile, encode_profile, on_gpu

Profiles = dict[tuple[str, str], LatencyProfile]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai profile fit`."""
    parser.description = __doc__
    add_data_argument(parser)
    parser.add_argument("--out", type=folder, default=Path("profiles"), metavar="DIR", help="where the files go")


def run(arguments: argparse.Namespace) -> int:
    """Fit and write. Exit status 2 when the measurements are missing or cannot be fitted."""
    try:
        found = fit_all(checked_data(arguments.data))
    except (DataMissing, FitFailed, OSError, ValueError) as error:
        print(f"serai profile fit: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for (gpu, engine), profile in sorted(found.items()):
        path = arguments.out / f"{gpu}.{engine}.json"
        path.write_bytes(encode_profile(profile))
        print(f"{path}  {profile.provenance.rows_fitted} rows, error {profile.provenance.fit_error:.1%}")
    return 0


def fit_all(data: Path) -> Profiles:
    """Every profile the measurements give, by GPU and engine. Raises OSError when a file is absent."""
    found: Profiles = {}
    for profile in _fitted(data):
        found[profile.gpu, profile.engine] = profile
    found.update(_engines_on_kernels(found))
    nearest = found[serving_logs.FITTED_GPU, serving_logs.ENGINE]
    put_together = (_l20(nearest), _rtx_4090(nearest, found["rtx-3090", kernel_tables.ENGINE]))
    return found | {(profile.gpu, profile.engine): profile for profile in put_together}


def _fitted(data: Path) -> Iterator[LatencyProfile]:
    say("served rows of H100 and H200")
    served = [row for row in load_served_rows(data).rows if not row.held_out]
    yield from (profile for profile in fit_served(served).values() if profile.provenance.rows_fitted)
    say("static prompts of A100 and H100")
    prompts = [row for row in static_prefill.load_prompt_rows(data)[0] if not row.held_out]
    for gpu in static_prefill.SYSTEMS.values():
        yield static_prefill.fit_prompts(prompts, gpu)
    say("kernel times")
    passes = [row for row in kernel_tables.load_passes(data) if not row.held_out]
    for gpu in sorted({row.gpu for row in passes}):
        yield kernel_tables.fit_passes(passes, gpu)
    say("request logs of RTX PRO 6000")
    yield serving_logs.fit_logs([log for log in serving_logs.load_logs(data) if not log.held_out])


def _l20(nearest: LatencyProfile) -> LatencyProfile:
    """L20 under vLLM: the nearest measured GPU's factors, but another all-reduce. Four RTX PRO 6000 exchange slowly;
    EcoServe's L20 nodes reach 3.3 thousand prompt tokens a second at TP 4, which that would not allow."""
    efficiency = replace(nearest.efficiency, link_bandwidth=0.6)
    note = f"factors of {nearest.gpu}; all-reduce at 0.6 of PCIe, set by EcoServe's prompt rate: not measured"
    return replace(nearest, gpu="l20", efficiency=efficiency, provenance=replace(nearest.provenance, note=note))


def _rtx_4090(nearest: LatencyProfile, geforce: LatencyProfile) -> LatencyProfile:
    """RTX 4090 under vLLM: the nearest measured GPU's factors, but the RTX 3090's share of the multiplication peak.

    GeForce cards add BF16 products up in FP32 at half the rate of the professional boards with the same cores, and the
    catalogue holds that halved peak. Cores that are held back so do not wait for operands or power: single large
    products on the RTX 3090 reach 0.82 to 1.06 of its halved peak, while the RTX PRO 6000, with no such brake, reaches
    0.68 of its whole one."""
    efficiency = replace(nearest.efficiency, linear_compute=geforce.efficiency.linear_compute)
    note = f"factors of {nearest.gpu}; matrix products as on {geforce.gpu}, whose peak is halved too: not measured"
    sources = nearest.provenance.sources + geforce.provenance.sources
    provenance = replace(nearest.provenance, sources=sources, note=note)
    return on_gpu(replace(nearest, efficiency=efficiency, provenance=provenance), GPUS["rtx-4090"])


def _engines_on_kernels(found: Profiles) -> Profiles:
    """vLLM on GPUs of which only kernels were measured: the GPU's own factors for matrix products and elementwise
    kernels, everything else as vLLM has it on the H100."""
    vllm = found["h100-sxm-80", "vllm"]
    derived: Profiles = {}
    for (gpu, engine), kernels in found.items():
        if engine != kernel_tables.ENGINE or (gpu, "vllm") in found:
            continue
        own = kernels.efficiency
        efficiency = replace(
            vllm.efficiency,
            linear_compute=own.linear_compute,
            linear_memory=own.linear_memory,
            elementwise_memory=own.elementwise_memory,
            ridge_sharpness=own.ridge_sharpness,
        )
        note = f"matrix products and elementwise kernels measured on {gpu}; the rest is vLLM's on h100-sxm-80"
        sources = kernels.provenance.sources + vllm.provenance.sources
        provenance = replace(kernels.provenance, sources=sources, note=note)
        here = on_gpu(replace(vllm, efficiency=efficiency), GPUS[gpu])
        derived[gpu, "vllm"] = replace(here, provenance=provenance)
    return derived
