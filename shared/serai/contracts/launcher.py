"""A site's launcher: what it keeps over its own restarts, and what it tells and is told.

State lies in one KV key, which is a lease too: written by compare-and-set by whoever acts, before it acts. No time of
any clock is in it, only durations, so a launcher on another machine can go on with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeptRun:
    """One job, from the intention to submit it until it is over."""

    name: str
    """The job's name, which is new for each submission. It says which slot, and which generation of it."""
    job: str = ""
    """Its number; empty = the batch system has not told one (yet)."""
    cluster: str = ""
    served: bool = False
    """Whether a session of it has served since it started last."""
    time_limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KeptTrouble:
    """Why nothing is submitted for a slot now."""

    slot: str
    """`DEPLOYMENT/NUMBER`."""
    kind: str
    text: str
    count: int
    """Failures in a row."""
    wait_s: float | None
    """Still to wait; None = until a person has changed something."""
    specification: str = ""
    """Digest of the deployment that failed: another one is tried at once."""


@dataclass(frozen=True, slots=True)
class LauncherState:
    """What a launcher has to know that neither the batch system nor the sessions tell."""

    holder: str = ""
    """Who acts for the site; empty = nobody, the last one has gone of its own will."""
    beat: int = 0
    """Counts writes: a holder whose beat stands still for the length of a lease has gone."""
    runs: list[KeptRun] = field(default_factory=list)
    troubles: list[KeptTrouble] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)
    """Per slot: the last generation that was submitted."""
    asleep: list[str] = field(default_factory=list)
    """Deployments that were idle and have been let go."""
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    """Per deployment: what jobs waited, last ones last."""
    loads_s: dict[str, list[float]] = field(default_factory=dict)
    """Per deployment: start of the job to the first token."""
    scaled: dict[str, int] = field(default_factory=dict)
    """Deployments whose number of slots was asked for, in place of the site file's."""


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """Asks a launcher for its last plan; empty = of all slots."""

    slot: str = ""
    """`DEPLOYMENT` or `DEPLOYMENT/NUMBER`."""


@dataclass(frozen=True, slots=True)
class SlotWord:
    """What a launcher thinks of one slot."""

    slot: str
    verdict: str
    """One word: what it does, or what it waits for."""
    text: str
    """Why, one line for people."""
    alert: bool = False
    """A person has to do something."""
    jobs: list[str] = field(default_factory=list)
    """Number and state of each of its jobs."""
    facts: dict[str, float] = field(default_factory=dict)
    """The figures behind it, in seconds."""


@dataclass(frozen=True, slots=True)
class LauncherWord:
    """A launcher's last plan, or why it has none."""

    site: str
    holder: str
    acting: bool
    """False: another one acts for the site, or it does not see enough to act (`blind`)."""
    blind: str = ""
    slots: list[SlotWord] = field(default_factory=list)
    problem: str = ""
    """Why the question could not be answered."""


@dataclass(frozen=True, slots=True)
class WakeRequest:
    """Asks a launcher to start a deployment that was let go, or one that has been stopped by a trouble, again."""

    deployment: str


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Asks a launcher for so many slots of a deployment, in place of the site file's count. What is too many is drained
    before its jobs are cancelled. Asked again with the same number it changes nothing."""

    deployment: str
    count: int
    why: str = ""
