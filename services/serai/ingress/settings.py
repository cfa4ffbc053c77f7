"""Settings of the ingress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serai.contracts.inference import WINDOW_BYTES_MAX
from serai.ingress.continuation import Continuing
from serai.ingress.cors import Cors
from serai.ingress.routing import POLICIES
from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import setting

WORKERS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings(ConnectionSettings):
    config: Path | None = setting(None, "configuration file, YAML (docs/configuration.md); read again when it changes")
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = setting(8000, "TCP port to listen on")
    keys_file: Path | None = setting(None, "file of hashed API keys (serai keys add); read again when it changes")
    anonymous: bool = setting(False, "serve without API keys")
    policy: str = setting("least-loaded", f"routing policy: {', '.join(POLICIES)}")
    continuing: str = setting(
        Continuing.GREEDY,
        f"which broken streams go on at another session: {', '.join(Continuing)}; greedy: temperature 0 only",
    )
    body_bytes_max: int = setting(32 * 1024 * 1024, "largest request body, in bytes; more is answered with 413")
    answer_bytes_max: int = setting(64 * 1024 * 1024, "largest answer that is not a stream, in bytes")
    request_timeout_s: float = setting(600.0, "longest time a request may take, in seconds")
    accept_timeout_s: float = setting(3.0, "how long a session may take to show that it has a request, in seconds")
    admission_patience_s: float = setting(
        0.005, "how long a macro-scheduler may be silent before the least loaded session is taken, in seconds"
    )
    silence_timeout_s: float = setting(5.0, "how long a session may be silent while it works, in seconds")
    client_stall_s: float = setting(60.0, "how long a client may read nothing of its answer, in seconds")
    keep_alive_s: float = setting(
        15.0,
        "after so long without a word, in seconds, a client that waits for events is told that its request lives; "
        "0 = never",
    )
    cors_origin: tuple[str, ...] = setting(
        (), "origin whose web pages may use this ingress, as in https://chat.example.org; * for all; may be given again"
    )
    window_bytes: int = setting(256 * 1024, "bytes of one answer on their way from agent to client at most")
    drain_delay_s: float = setting(
        0.0, "how long requests are still taken after SIGTERM, while load balancers notice, in seconds"
    )
    shutdown_s: float = setting(30.0, "how long running requests may take to finish after SIGTERM, in seconds")
    usage_spool: Path | None = setting(
        None, "folder on a local disk where usage records wait for NATS; without one they wait in memory"
    )
    workers: int = setting(1, "processes that serve the port together; more than one need a parent beside them")

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        if not 0 < self.port < 65536:
            raise ValueError(f"--port {self.port}: must be between 1 and 65535")
        if self.policy not in POLICIES:
            raise ValueError(f"--policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
        if self.continuing not in list(Continuing):
            raise ValueError(f"--continuing {self.continuing!r}: must be one of {', '.join(Continuing)}")
        try:
            Cors(self.cors_origin)
        except ValueError as error:
            raise ValueError(f"--cors-origin: {error}") from None
        if not 64 * 1024 <= self.window_bytes <= WINDOW_BYTES_MAX:
            raise ValueError(f"--window-bytes {self.window_bytes}: must be from 65536 to {WINDOW_BYTES_MAX}")
        for flag, seconds in (("--shutdown-s", self.shutdown_s), ("--drain-delay-s", self.drain_delay_s)):
            if seconds < 0:
                raise ValueError(f"{flag} {seconds:g}: must not be negative")
        if not 1 <= self.workers <= WORKERS_MAX:
            raise ValueError(f"--workers {self.workers}: must be between 1 and {WORKERS_MAX}")
        positive = {
            "--body-bytes-max": self.body_bytes_max,
            "--answer-bytes-max": self.answer_bytes_max,
            "--request-timeout-s": self.request_timeout_s,
            "--accept-timeout-s": self.accept_timeout_s,
            "--admission-patience-s": self.admission_patience_s,
            "--silence-timeout-s": self.silence_timeout_s,
            "--client-stall-s": self.client_stall_s,
        }
        for flag, value in positive.items():
            if value <= 0:
                raise ValueError(f"{flag} {value:g}: must be above 0")
