"""Settings of the placer."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import file_fault, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerSettings(ConnectionSettings):
    placement_file: Path = setting(
        MISSING, "the placement file: models, what is asked of them, rules; read again on change"
    )
    plan_every_s: float = setting(30.0, "time between plans when nothing has changed, in seconds")
    solve_s: float = setting(10.0, "how long the solver may look for a better placement, in seconds; 0: the greedy way")
    demand_every_s: float = setting(10.0, "time between questions to the ledger, in seconds")
    settle_s: float = setting(5.0, "after its start, or a lost connection, it only listens for so long, in seconds")
    start_timeout_s: float = setting(3600.0, "an engine that does not serve after so long has failed, in seconds")
    failed_wait_s: float = setting(
        120.0, "where an engine of a model failed, the next is tried after so long, in seconds; doubled each time"
    )
    lease_s: float = setting(30.0, "another placer takes over when this one has been silent for so long, in seconds")
    kubectl: str = setting("kubectl", "command that scales workloads of Kubernetes")

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        if fault := file_fault(self.placement_file):
            raise ValueError(f"--placement-file: {fault}")
        if self.lease_s < 3:
            raise ValueError(f"--lease-s {self.lease_s:g}: must be at least 3")
        positive = {
            "--plan-every-s": self.plan_every_s,
            "--demand-every-s": self.demand_every_s,
            "--start-timeout-s": self.start_timeout_s,
            "--failed-wait-s": self.failed_wait_s,
        }
        for flag, value in positive.items():
            if value <= 0:
                raise ValueError(f"{flag} {value:g}: must be above 0")
        if not 0 <= self.solve_s <= 3600:
            raise ValueError(f"--solve-s {self.solve_s:g}: must be between 0 and 3600")
        if self.settle_s < 0:
            raise ValueError(f"--settle-s {self.settle_s:g}: must not be negative")
