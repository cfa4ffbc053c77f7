"""Other gateways, each installed in an environment of its own by `make peers`: how each is started.

Flags keep what each does by itself, but for three things: it listens on loopback only, it notices the engine at once,
and it stops without waiting. Limits that would refuse 1,000 streams are lifted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PeerCommand:
    """How to start a peer, and what a request needs to pass it."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """A gateway found in the peers' folder. `name` is as in figures."""

    name: str
    folder: Path

    def command(
        self,
        *,
        port: int,
        metrics_port: int,
        engine_port: int,
        model: str,
        work: Path,
        more_engine_ports: Sequence[int] = (),
    ) -> PeerCommand:
        """How to start it on `port` before the engines on these ports; it may write to `work`."""
        ports = (engine_port, *more_engine_ports)
        return _COMMANDS[self.name](_Place(self.folder / "bin", port, metrics_port, ports, model, work))


def find_peers() -> list[Peer]:
    """The peers installed in `.peers/`, or in the folder that SERAI_PEERS names."""
    folder = Path(os.environ.get("SERAI_PEERS") or ".peers").absolute()
    found = [Peer(name, folder / name.replace("_", "-")) for name in _COMMANDS]
    return [peer for peer in found if (peer.folder / "bin" / peer.name.replace("_", "-")).exists()]


@dataclass(frozen=True, slots=True)
class _Place:
    bin: Path
    port: int
    metrics_port: int
    engine_ports: tuple[int, ...]
    model: str
    work: Path

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://{HOST}:{port}" for port in self.engine_ports]

    def listening(self) -> list[str]:
        return ["--host", HOST, "--port", str(self.port)]

    def rust_flags(self) -> list[str]:
        """The flags that vllm-router and SMG, both descended from SGLang's router, have in common."""
        metrics = ["--prometheus-host", HOST, "--prometheus-port", str(self.metrics_port)]
        return [
            *self.listening(), "--worker-urls", *self.engine_urls, "--policy", "round_robin", *metrics,
            "--worker-startup-check-interval", "1", "--max-concurrent-requests", "32768",
        ]  # fmt: skip


def _vllm_router(place: _Place) -> PeerCommand:
    return PeerCommand([str(place.bin / "vllm-router"), *place.rust_flags(), "--log-level", "warning"])


def _smg(place: _Place) -> PeerCommand:
    flags = [*place.rust_flags(), "--backend", "vllm", "--shutdown-grace-period-secs", "1", "--log-level", "warn"]
    return PeerCommand([str(place.bin / "smg"), "launch", *flags])


def _litellm(place: _Place) -> PeerCommand:
    config = place.work / "litellm.yaml"
    deployments = [
        f"  - model_name: {place.model}\n"
        "    litellm_params:\n"
        f"      model: openai/{place.model}\n"
        f"      api_base: {url}/v1\n"
        "      api_key: none\n"
        for url in place.engine_urls
    ]
    config.write_text("".join(["model_list:\n", *deployments]))
    key = f"sk-{secrets.token_urlsafe(24)}"
    flags = ["--config", str(config), *place.listening(), "--num_workers", "1", "--telemetry", "False"]
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key, "LITELLM_LOG": "ERROR"}
    return PeerCommand([str(place.bin / "litellm"), *flags], environment, {"Authorization": f"Bearer {key}"})


_COMMANDS: dict[str, Callable[[_Place], PeerCommand]] = {
    "vllm_router": _vllm_router,
    "smg": _smg,
    "litellm": _litellm,
}
