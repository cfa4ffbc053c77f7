"""Settings of the worker-agent."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass

from serai.runtime.connection_settings import ConnectionSettings, host_name
from serai.runtime.http1 import Origin
from serai.runtime.settings import setting
from serai.worker_agent.engine.kinds import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(ConnectionSettings):
    model: str = setting(MISSING, "name clients ask for")
    engine: str = setting("auto", f"engine kind: auto, {', '.join(ENGINES)}")
    engine_url: str = setting("", "attach to an engine that runs already, e.g. http://127.0.0.1:8000")
    engine_model: str = setting("", "name the engine answers to, when it is not --model")
    engine_api_key: str = setting("", "key the engine asks for")
    provider: str = setting("local", "institution that owns the hardware")
    allocation: str = setting("", "name of the allocation; default: Slurm job, pod or process")
    concurrency_max: int = setting(1024, "requests taken at once; more are refused as busy")
    body_bytes_max: int = setting(32 * 1024 * 1024, "largest request body, in bytes")
    start_timeout_s: float = setting(1800.0, "how long the engine may take to serve, in seconds")
    engine_silence_s: float = setting(600.0, "a request from whose engine nothing came for so long is ended")
    drain_s: float = setting(60.0, "how long running requests may take to finish after SIGTERM, in seconds")
    engine_stop_s: float = setting(10.0, "how long the engine may take to end before it is killed, in seconds")
    status_interval_s: float = setting(1.0, "time between signs of life, in seconds")

    def __post_init__(self) -> None:
        # Not super(): dataclasses with slots are made twice, and super() would look at the first.
        ConnectionSettings.__post_init__(self)
        if self.engine not in ("auto", *ENGINES):
            raise ValueError(f"--engine {self.engine!r}: must be auto or one of {', '.join(ENGINES)}")
        if not self.model:
            raise ValueError("--model must not be empty")
        if self.engine_url:
            try:
                Origin.parse(self.engine_url)
            except ValueError as error:
                raise ValueError(f"--engine-url: {error}") from error
        positive = {
            "--concurrency-max": self.concurrency_max,
            "--body-bytes-max": self.body_bytes_max,
            "--start-timeout-s": self.start_timeout_s,
            "--engine-silence-s": self.engine_silence_s,
            "--status-interval-s": self.status_interval_s,
        }
        for flag, value in positive.items():
            if value <= 0:
                raise ValueError(f"{flag} {value:g}: must be above 0")
        if self.drain_s < 0 or self.engine_stop_s < 0:
            raise ValueError("--drain-s and --engine-stop-s must not be negative")

    @property
    def allocation_name(self) -> str:
        """Slurm's job, Kubernetes' pod, or this process on this host. Retries go to another allocation, so the name
        differs between hosts."""
        return (
            self.allocation
            or (f"slurm-{os.environ['SLURM_JOB_ID']}" if os.environ.get("SLURM_JOB_ID") else "")
            or os.environ.get("POD_NAME", "")
            or f"host-{host_name()}-{os.getpid()}"
        )

    @property
    def restart_count(self) -> int:
        """How often the batch system has requeued this allocation."""
        text = os.environ.get("SLURM_RESTART_COUNT", "0")
        return int(text) if text.isdigit() else 0
