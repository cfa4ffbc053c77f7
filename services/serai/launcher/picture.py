"""What a launcher's plan is made from, and what it may say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serai.contracts.launcher import SlotWord
from serai.launcher.job_book import BRAKE_FROM_JOBS
from serai.launcher.jobs import JobId
from serai.launcher.runs import Run
from serai.launcher.slots import Slot
from serai.launcher.trouble import Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Times in seconds."""

    lead_factor: float = 1.25
    """Successors are submitted earlier than the wait and the load that are expected, by this factor …"""
    lead_margin_s: float = 120.0
    """… and by so much: for the batch system's own rhythm, and for ours."""
    birth_spacing_s: float = 60.0
    """Successors of one deployment are submitted at least so far apart; they would load from the same disk."""
    stop_margin_s: float = 20.0
    """What an engine and its job need to end: drains are over by then."""
    drain_s_max: float = 3600.0
    """How long a session without an end of its own may take to drain."""
    linger_s: float = 300.0
    """A job whose sessions have left, or hold nothing and drain, ends by itself within this, or is cancelled."""
    left_s: float = 60.0
    """A job whose sessions have left without a drain is not waited for any longer: its engine may start again."""
    silent_s_max: float = 600.0
    """A running job whose sessions have been silent for longer is given a successor."""
    slot_jobs_max: int = 2
    steady_s: float = 2.0
    """A successor has served for so long before the old one drains."""
    short_life_s: float = 300.0
    """A job that leaves sooner after its first token, and without a drain, may have failed: its end is awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One deployment."""

    deployment: str
    model: str
    count: int
    time_limit_s: float
    """Of its jobs."""
    wait_s: float
    """Expected in the queue, learned."""
    load_s: float
    """Expected from the start of a job to the first token, learned."""
    leaves_s: float = 0.0
    """So long before the end of its job a session takes no more requests, by itself."""
    load_s_max: float
    """A job that runs for longer without a session is given up."""
    idle_s: float | None = None
    """Let go when no request has come for so long; None = never."""
    idle_for_s: float | None = None
    """Since the last request; None = not known."""
    asleep: bool = False
    """Let go."""

    def lead_s(self, rules: Rules) -> float:
        """How long before the end of a job its successor is submitted."""
        return rules.lead_factor * (self.wait_s + self.load_s) + rules.lead_margin_s + self.leaves_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that is known now."""

    now: float
    blind: str = ""
    """Why the picture is not whole; empty = it is."""
    wanted: Sequence[Wanted]
    runs: Sequence[Run]
    """Older generations of a slot first; those that are over are not among them."""
    troubles: Mapping[Slot, Trouble] = field(default_factory=dict)
    succeeded_at_s: Mapping[str, float] = field(default_factory=dict)
    """Per deployment: when a successor was last submitted."""

    @property
    def many_silent(self) -> bool:
        """Sessions of more than half of three or more running jobs are silent: that is not theirs, but ours."""
        started = [run for run in self.runs if run.started]
        silent = [run for run in started if run.silent_since_s is not None]
        return len(started) >= BRAKE_FROM_JOBS and 2 * len(silent) > len(started)


@dataclass(frozen=True, slots=True)
class Submit:
    slot: Slot
    time_limit_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask a session to end; what it has may run on for `within_s`."""

    session: str
    slot: Slot
    run: str
    within_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Cancel:
    job: JobId
    slot: Slot
    run: str
    why: str
    dismissed: bool = True
    """False: it has failed."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let a deployment go until it is woken."""

    deployment: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order, and what is thought of each slot."""

    drain: tuple[Drain, ...] = ()
    cancel: tuple[Cancel, ...] = ()
    submit: tuple[Submit, ...] = ()
    sleep: tuple[Sleep, ...] = ()
    says: tuple[SlotWord, ...] = ()
    blind: str = ""

    @property
    def idle(self) -> bool:
        return not (self.drain or self.cancel or self.submit or self.sleep)
