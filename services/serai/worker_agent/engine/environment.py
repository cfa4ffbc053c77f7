"""The environment of an engine: the agent's own, without what would harm it and without Serai's own secrets. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from serai.worker_agent.engine.process_table import MARK

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "HF_MODULES_CACHE": "hf_modules",
}
"""What engines compile and write in small files: slow on parallel file systems, and broken by two jobs that write the
same. Weights (HF_HOME, HF_HUB_CACHE) stay where they are."""

_INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_ADDRESS = ("VLLM_HOST_IP", "SGLANG_HOST_IP", "HOST_IP")


def engine_environment(
    ours: Mapping[str, str],
    by_kind: Mapping[str, str],
    *,
    mark: str,
    scratch: str = "",
    interface: str = "",
    address: str = "",
    keep_proxies: bool = False,
) -> dict[str, str]:
    """`by_kind`: what engines of its kind get; `scratch`: a folder on this node for caches, empty = where they are;
    `interface` and its `address`: how engines on several nodes reach each other. What somebody has set stays."""
    kept = {name: value for name, value in ours.items() if not name.startswith("SERAI_")}
    if not keep_proxies:
        kept = {name: value for name, value in kept.items() if name.lower() not in _PROXIES}
    kept |= {name: _without_proxy(ours) for name in ("no_proxy", "NO_PROXY")}
    wanted = {"PYTHONUNBUFFERED": "1"} | dict(by_kind)
    if scratch:
        wanted |= {name: f"{caches_in(scratch)}/{folder}" for name, folder in _CACHES.items()}
    if interface:
        wanted |= dict.fromkeys(_INTERFACE, interface)
    if address:
        wanted |= dict.fromkeys(_ADDRESS, address)
    return wanted | kept | {MARK: mark}


def caches_in(scratch: str) -> str:
    """The folder of engines' caches in `scratch`."""
    return f"{scratch.rstrip('/')}/serai-engine-caches"


def _without_proxy(ours: Mapping[str, str]) -> str:
    """What was spared the proxies already, and loopback."""
    given = ours.get("no_proxy") or ours.get("NO_PROXY") or ""
    entries = [entry for entry in (word.strip() for word in given.split(",")) if entry]
    return ",".join([*entries, *[entry for entry in _LOOPBACK if entry not in entries]])
