"""Settings of a pool agent (`serai agent --pool`): an agent without an engine, which is told what to run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from serai.contracts.placement import POOL_CHARACTERS_MAX
from serai.contracts.session_record import GPUS_MAX, GpuDevice
from serai.contracts.subjects import to_token
from serai.runtime.connection_settings import host_name
from serai.runtime.fields import BadInput
from serai.runtime.settings import file_fault, setting
from serai.worker_agent.pool_templates import BUILT_IN, Template, read_templates
from serai.worker_agent.settings import AgentSettings

_SAID_GPUS = re.compile(r"(?P<kind>[A-Za-z][\w .-]*):(?P<count>\d{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings(AgentSettings):
    """Those of an agent, and of a pool: sessions get the agent's, each with its own model."""

    model: str = setting("", "name clients ask for; needed unless --pool")
    pool: bool = setting(False, "offer the GPUs of this allocation to the placer, which says what runs on them")
    pool_name: str = setting("", "name of the pool, when it is not to be that of the allocation and the host")
    pool_gpus: str = setting("", "KIND:COUNT, e.g. H100:2: what to offer on a machine without GPUs")
    pool_templates: Path | None = setting(None, "file with further engines' commands (docs/operating.md)")
    pool_failure_domain: str = setting("", "what fails together with this host, e.g. its rack")
    pool_storage_mb_s: float = setting(0.0, "how fast weights are read here, in MB/s; 0 = not known")
    pool_report_s: float = setting(2.0, "time between reports to the placer, in seconds")

    def __post_init__(self) -> None:
        AgentSettings.__post_init__(self)
        pool_only = {
            "--pool-name": self.pool_name,
            "--pool-gpus": self.pool_gpus,
            "--pool-templates": self.pool_templates,
            "--pool-failure-domain": self.pool_failure_domain,
        }
        for flag, value in pool_only.items():
            if value and not self.pool:
                raise ValueError(f"{flag}: is for a pool agent; give --pool, too")
        if not self.pool:
            return
        if self.engine_url or self.nodes or self.engines > 1:
            raise ValueError("--pool: excludes --engine-url, --nodes and --engines; the placer says which engines run")
        if self.model:
            raise ValueError(f"--model {self.model!r}: a pool agent has none of its own; leave out --model or --pool")
        if self.pool_gpus and not _SAID_GPUS.fullmatch(self.pool_gpus):
            raise ValueError(f"--pool-gpus {self.pool_gpus!r}: must look like H100:2")
        if self.pool_gpus and not 0 < len(self.said_gpus) <= GPUS_MAX:
            raise ValueError(f"--pool-gpus {self.pool_gpus!r}: must be 1 to {GPUS_MAX} GPUs")
        if not 0 < self.pool_report_s <= 60:
            raise ValueError(f"--pool-report-s {self.pool_report_s:g}: must be above 0, at most 60")
        if self.pool_storage_mb_s < 0:
            raise ValueError("--pool-storage-mb-s: must not be negative")
        if self.pool_templates is not None and (fault := file_fault(self.pool_templates)):
            raise ValueError(f"--pool-templates: {fault}")

    def check_model(self) -> None:
        if not self.model and not self.pool:
            raise ValueError("--model (or SERAI_MODEL) is required: name clients ask for")

    @property
    def pool_token(self) -> str:
        """Names this agent's place, also after its own restart: not by its process."""
        lasting = self.pool_name or "-".join(filter(None, (_batch_allocation(self.allocation), host_name())))
        return to_token(lasting)[:POOL_CHARACTERS_MAX]

    @property
    def said_gpus(self) -> list[GpuDevice]:
        """By `--pool-gpus`: no devices that there are."""
        found = _SAID_GPUS.fullmatch(self.pool_gpus)
        if found is None:
            return []
        return [GpuDevice(f"said-{number}", found["kind"].strip()) for number in range(int(found["count"]))]

    def templates(self) -> dict[str, Template]:
        """Raises BadInput."""
        if self.pool_templates is None:
            return BUILT_IN
        try:
            text = self.pool_templates.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise BadInput(str(self.pool_templates), f"cannot be read: {why}", "name a text file") from error
        return read_templates(text, str(self.pool_templates))


def _batch_allocation(given: str) -> str:
    for variable, prefix in (("SLURM_JOB_ID", "slurm-"), ("PBS_JOBID", "pbs-"), ("POD_NAME", "")):
        if not given and os.environ.get(variable):
            given = prefix + os.environ[variable]
    return given
