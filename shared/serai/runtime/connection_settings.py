"""Settings every service has: where NATS is, how to log, where metrics are served."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from serai.runtime.nats_bus import NatsAddress
from serai.runtime.settings import file_fault, setting
from serai.runtime.telemetry import LOG_LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """Where NATS is, who we are to it, and whose registry is asked."""

    nats_url: str = setting("nats://127.0.0.1:4222", "address of the NATS server")
    nats_nkey_file: Path | None = setting(None, "file with this service's NATS nkey seed, the key of its role")
    nats_creds_file: Path | None = setting(None, "file with this service's NATS credentials (JWT and seed)")
    site: str = setting("local", "name of this site, one administrative domain")

    def __post_init__(self) -> None:
        parts = urlsplit(self.nats_url)
        try:
            there = bool(parts.hostname) and parts.port != 0
        except ValueError:  # The port is not a number.
            there = False
        if parts.scheme not in ("nats", "tls", "ws", "wss") or not there:
            raise ValueError(f"--nats-url {self.nats_url!r}: must look like nats://host:4222 or tls://host:443")
        if self.nats_nkey_file and self.nats_creds_file:
            raise ValueError("--nats-nkey-file and --nats-creds-file: give one of them, not both")
        for flag, path in (("--nats-nkey-file", self.nats_nkey_file), ("--nats-creds-file", self.nats_creds_file)):
            if path is not None and (fault := file_fault(path)):
                raise ValueError(f"{flag}: {fault}")

    @property
    def nats(self) -> NatsAddress:
        return NatsAddress(self.nats_url, self.nats_nkey_file, self.nats_creds_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings(NatsSettings):
    """What every service has beside that: how to log, where metrics are served."""

    log_level: str = setting("info", "debug, info, warning or error")
    log_json: bool | None = setting(
        None, "JSON log lines, or text; when not given, text on a terminal and JSON elsewhere", flag="--log-json"
    )
    metrics_port: int = setting(0, "port for Prometheus metrics; 0 = none")
    metrics_host: str = setting("127.0.0.1", "address for Prometheus metrics; 0.0.0.0 for all")

    def __post_init__(self) -> None:
        NatsSettings.__post_init__(self)
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"--log-level {self.log_level!r}: must be one of {', '.join(LOG_LEVELS)}")
        if not 0 <= self.metrics_port < 65536:
            raise ValueError(f"--metrics-port {self.metrics_port}: must be between 0 and 65535")


def host_name() -> str:
    """This machine's name, for people; never an address."""
    return socket.gethostname()
