"""Settings of the worker-agent."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass

from serai.contracts.session_record import GPUS_MAX, LABELS_MAX, TEXT_CHARACTERS_MAX
from serai.runtime.connection_settings import ConnectionSettings, host_name
from serai.runtime.http1 import Origin
from serai.runtime.settings import setting
from serai.worker_agent.engine.kinds import ENGINES
from serai.worker_agent.engine.ports import PORTS_VARIABLE, port_range


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(ConnectionSettings):
    model: str = setting(MISSING, "name clients ask for")
    engine: str = setting("auto", f"engine kind: auto, {', '.join(ENGINES)}")
    engine_url: str = setting("", "attach to an engine that runs already, e.g. http://127.0.0.1:8000")
    engine_model: str = setting("", "name the engine answers to, when it is not --model")
    engine_api_key: str = setting(
        "", "key the engine asks for; give it by the variable, since command lines can be read by everyone"
    )
    engines: int = setting(1, "how many engines to start from the one command, each with its share of the GPUs")
    provider: str = setting("local", "institution that owns the hardware")
    allocation: str = setting(
        "", "name of the allocation, when it is not to be that of the Slurm or PBS job, the pod or the process"
    )
    concurrency_max: int = setting(1024, "requests taken at once; more are refused as busy")
    body_bytes_max: int = setting(32 * 1024 * 1024, "largest request body, in bytes")
    start_timeout_s: float = setting(
        1800.0, "how long the engine may take to serve, in seconds; one that still loads its model is given longer"
    )
    engine_restarts: int = setting(5, "how often an hour an engine that ended by accident is started again")
    engine_hung_s: float = setting(
        180.0,
        "an engine without any progress for so long, in seconds, and without a canary's token, starts anew; 0 = never",
    )
    engine_silence_s: float = setting(
        600.0, "a request from whose engine nothing came for so long is ended, in seconds"
    )
    drain_s: float = setting(
        60.0, "how long running requests may take to finish once told to end, in seconds, when nobody kills us sooner"
    )
    grace_s: float = setting(
        0.0,
        "time between SIGTERM and SIGKILL, in seconds, e.g. a pod's terminationGracePeriodSeconds; 0 = as usual there",
    )
    allocation_s: float = setting(
        0.0, "time limit of the allocation from now on, in seconds, where no batch system tells it; 0 = none"
    )
    engine_stop_s: float = setting(10.0, "how long the engine may take to end before it is killed, in seconds")
    status_interval_s: float = setting(1.0, "time between signs of life, in seconds")
    rejoin_after_s: float = setting(
        3600.0,
        "an agent that was without NATS for longer, in seconds, ends, and has to be started again as a new session; "
        "less than the time after which registries close silent sessions",
    )
    prefill_s_per_token: float = setting(
        0.0, "what a prompt token may take at worst, in seconds, until the engine has shown it; 0 = by kind of engine"
    )
    open_gate: str = setting(
        "mixed",
        "what an engine that can be told its phase does while the phase gate holds nothing back: mixed (prompts beside "
        "decodes), or prefill (prompts first, as the macro-scheduler's policies paper and author_code want it)",
    )
    scratch: str = setting("", "folder on the node's own disk for what engines compile and cache; weights stay")
    interface: str = setting("", "network interface by which engines of several nodes reach each other, e.g. ib0")
    nodes: str = setting("", "auto = one engine over all nodes of the Slurm or PBS job, with an agent on each of them")
    nodes_address: str = setting(
        "", "where the other nodes reach the first, when its name in the job does not lead there"
    )
    nodes_port: int = setting(0, "port on which the first node waits for the others; 0 = by the job's id")
    engine_proxies: bool = setting(False, "leave the engine its proxies, e.g. to download; loopback is always spared")
    gpu_wait_s: float = setting(120.0, "how long to wait for GPUs whose memory others hold, in seconds")
    gpu_others_gib: float = setting(2.0, "memory of a GPU that others may hold without being in the way, in GiB")
    worker_group: str = setting("", "name of the group of agents that were launched together")
    labels: tuple[str, ...] = setting((), "KEY=VALUE, a label of the session; may be repeated", flag="--label")

    def __post_init__(self) -> None:
        # Not super(): dataclasses with slots are made twice, and super() would look at the first.
        ConnectionSettings.__post_init__(self)
        if self.engine not in ("auto", *ENGINES):
            raise ValueError(f"--engine {self.engine!r}: must be auto or one of {', '.join(ENGINES)}")
        self.check_model()
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
            "--rejoin-after-s": self.rejoin_after_s,
        }
        for flag, value in positive.items():
            if value <= 0:
                raise ValueError(f"{flag} {value:g}: must be above 0")
        not_negative = {
            "--drain-s": self.drain_s,
            "--engine-stop-s": self.engine_stop_s,
            "--grace-s": self.grace_s,
            "--allocation-s": self.allocation_s,
        }
        for flag, value in not_negative.items():
            if value < 0:
                raise ValueError(f"{flag} {value:g}: must not be negative")
        if min(self.engine_restarts, self.engine_hung_s, self.gpu_wait_s, self.gpu_others_gib) < 0:
            raise ValueError("--engine-restarts, --engine-hung-s, --gpu-wait-s, --gpu-others-gib must not be negative")
        if self.open_gate not in ("mixed", "prefill"):
            raise ValueError(f"--open-gate {self.open_gate!r}: must be mixed or prefill")
        if self.nodes not in ("", "auto"):
            raise ValueError(f"--nodes {self.nodes!r}: must be auto, or not given")
        if self.nodes and self.engine_url:
            raise ValueError("--nodes and --engine-url exclude each other: an engine that runs has its nodes already")
        if not 1 <= self.engines <= GPUS_MAX:
            raise ValueError(f"--engines {self.engines}: must be 1 to {GPUS_MAX}")
        if self.engines > 1 and (self.nodes or self.engine_url):
            raise ValueError(f"--engines {self.engines}: excludes --nodes and --engine-url, which are of one engine")
        if not 0 <= self.nodes_port < 65_536:
            raise ValueError(f"--nodes-port {self.nodes_port}: must be a TCP port, or 0")
        if self.prefill_s_per_token < 0:
            raise ValueError("--prefill-s-per-token must not be negative; 0 = by kind of engine")
        port_range(os.environ.get(PORTS_VARIABLE))
        _check_labels(self.labels)

    def check_model(self) -> None:
        """Raises ValueError when there is none."""
        if not self.model:
            raise ValueError("--model must not be empty")

    @property
    def label_values(self) -> dict[str, str]:
        """Labels by their keys; the last of several with one key counts."""
        return dict(label.split("=", 1) for label in self.labels)

    @property
    def gpu_borne_bytes(self) -> int:
        """What others may hold of a GPU."""
        return round(self.gpu_others_gib * 2**30)

    @property
    def allocation_name(self) -> str:
        """Slurm's or PBS' job, Kubernetes' pod, or this process on this host. Retries go to another allocation, so the
        name differs between hosts."""
        return (
            self.allocation
            or (f"slurm-{os.environ['SLURM_JOB_ID']}" if os.environ.get("SLURM_JOB_ID") else "")
            or (f"pbs-{os.environ['PBS_JOBID']}" if os.environ.get("PBS_JOBID") else "")
            or os.environ.get("POD_NAME", "")
            or f"host-{host_name()}-{os.getpid()}"
        )

    @property
    def restart_count(self) -> int:
        """How often the batch system has requeued this allocation."""
        text = os.environ.get("SLURM_RESTART_COUNT", "0")
        return int(text) if text.isdigit() else 0


def _check_labels(labels: tuple[str, ...]) -> None:
    if len(labels) > LABELS_MAX:
        raise ValueError(f"--label: {len(labels)} labels; at most {LABELS_MAX}")
    for label in labels:
        key, equals, value = label.partition("=")
        if not key or not equals:
            raise ValueError(f"--label {label!r}: must look like KEY=VALUE")
        if max(len(key), len(value)) > TEXT_CHARACTERS_MAX:
            raise ValueError(f"--label {key[:40]!r}: keys and values have at most {TEXT_CHARACTERS_MAX} characters")
