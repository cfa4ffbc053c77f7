"""Settings of the macro-scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from serai.macro_scheduler.group import GroupSettings
from serai.macro_scheduler.mitosis import Bounds
from serai.macro_scheduler.scaling import ScalingSettings, Trigger
from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import setting

POLICIES = ("serai", "paper", "author_code")
LOOKS_A_WINDOW = 6
SCALERS = ("none", "placer", "launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class MacroSchedulerSettings(ConnectionSettings):
    models: tuple[str, ...] = setting(
        ("*",),
        "pattern of the models whose instances it leads, as in llama-*; may be given again",
        env="SERAI_MACRO_MODELS",
    )
    admission: str = setting("serai", f"admission policy: {', '.join(POLICIES)}")
    slo_ttft_s: float = setting(5.0, "time to the first token of requests that name no target, in seconds")
    slo_tpot_s: float = setting(0.1, "time per output token of requests that name no target, in seconds")
    attainment: float = setting(0.99, "wanted share of requests that meet both targets")
    lease_s: float = setting(
        2.0, "another one takes over when this one has been silent for so long, in seconds", env="SERAI_MACRO_LEASE_S"
    )
    beat_s: float = setting(
        0.5, "how often instances are told whom they obey, in seconds; after two without, they admit alone"
    )
    instances_lower: int = setting(6, "N_l: a new macro-instance starts with so many instances")
    instances_upper: int = setting(11, "N_u: a macro-instance has no more; the next one splits it")
    scaling: bool = setting(False, "say when a model needs an instance more or less, and drain those it does not need")
    scaling_trigger: str = setting("serai", f"whose rule says when: {', '.join(Trigger)}")
    scaling_by: str = setting(
        "none", "who starts and ends the instances it asks for: placer, launcher; none = it only drains, and logs"
    )
    scaling_sleeps: bool = setting(
        False, "put engines that are not needed to sleep, where they can, and wake them before others are asked for"
    )
    scaling_window_s: float = setting(
        30.0, "with --scaling, how much of the past is looked at, in seconds; six times in that time"
    )
    scaling_drain_s: float = setting(
        60.0, "how long an instance that is not needed may take for the requests it has, in seconds"
    )
    instances_min: int = setting(1, "with --scaling, a model keeps so many instances")
    instances_max: int = setting(64, "with --scaling, a model is given no more instances")
    instance_start_s: float = setting(
        180.0, "how long an instance takes to start, in seconds; no other is asked for meanwhile"
    )
    pending_max: int = setting(2000, "requests of a model that wait for a place at most; more are refused")

    grants: bool = setting(
        True, "give ingresses places in advance while all is at ease: requests need not be asked for then"
    )

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)
        if self.admission not in POLICIES:
            raise ValueError(f"--admission {self.admission!r}: must be one of {', '.join(POLICIES)}")
        if not 0 < self.attainment < 1:
            raise ValueError(f"--attainment {self.attainment:g}: must be above 0 and below 1")
        if not 0.2 <= self.lease_s <= 60:
            raise ValueError(f"--lease-s {self.lease_s:g}: must be from 0.2 to 60")
        if not 0.05 <= self.beat_s <= 10:
            raise ValueError(f"--beat-s {self.beat_s:g}: must be from 0.05 to 10")
        if self.pending_max < 1:
            raise ValueError(f"--pending-max {self.pending_max}: must be at least 1")
        for flag, seconds in (("--slo-ttft-s", self.slo_ttft_s), ("--slo-tpot-s", self.slo_tpot_s)):
            if seconds <= 0:
                raise ValueError(f"{flag} {seconds:g}: must be above 0")
        try:
            Bounds(self.instances_lower, self.instances_upper)
        except ValueError as error:
            raise ValueError(f"--instances-lower, --instances-upper: {error}") from error
        if self.scaling_trigger not in list(Trigger):
            raise ValueError(f"--scaling-trigger {self.scaling_trigger!r}: must be one of {', '.join(Trigger)}")
        if self.scaling_by not in SCALERS:
            raise ValueError(f"--scaling-by {self.scaling_by!r}: must be one of {', '.join(SCALERS)}")
        if self.scaling_sleeps and (self.scaling_by != "none" or not self.scaling):
            raise ValueError("--scaling-sleeps: needs --scaling without --scaling-by: who starts engines ends them")
        if self.scaling_by != "none" and not self.scaling:
            raise ValueError(f"--scaling-by {self.scaling_by}: needs --scaling")
        try:
            self._scaling()
        except ValueError as error:
            raise ValueError(_by_flag(str(error))) from error
        if not self.models:
            raise ValueError("--models: name at least one pattern; * is all")

    def group(self, owner: str) -> GroupSettings:
        """Of one model's group; `owner` names this leader and its term."""
        return GroupSettings(
            policy=self.admission,
            slo_ttft_s=self.slo_ttft_s,
            slo_tpot_s=self.slo_tpot_s,
            attainment=self.attainment,
            beat_s=self.beat_s,
            pending_max=self.pending_max,
            owner=owner,
            bounds=Bounds(self.instances_lower, self.instances_upper),
            scaling=self._scaling() if self.scaling else None,
            drains=self.scaling_by == "none",
            grants=self.grants,
        )

    def _scaling(self) -> ScalingSettings:
        return ScalingSettings(
            Trigger(self.scaling_trigger),
            window_s=self.scaling_window_s,
            evaluate_every_s=self.scaling_window_s / LOOKS_A_WINDOW,
            instances_min=self.instances_min,
            instances_max=self.instances_max,
            start_s=self.instance_start_s,
            drain_s=self.scaling_drain_s,
            sleeps=self.scaling_sleeps,
        )


def _by_flag(text: str) -> str:
    """What is wrong with how a group scales, in the words of its flags."""
    for name, flag in (
        ("window_s", "--scaling-window-s"),
        ("start_s", "--instance-start-s"),
        ("drain_s", "--scaling-drain-s"),
    ):
        text = text.replace(name, flag)
    return text.replace("instances_min", "--instances-min").replace("instances_max", "--instances-max")
