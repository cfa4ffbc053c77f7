"""What a site has, and the job that comes of a model profile and what was asked for beside it. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from serai.runtime.fields import BadInput


class RuntimeKind(StrEnum):
    """How the engine's command is found on a node."""

    PLAIN = "plain"
    """As it is."""
    VENV = "venv"
    MODULES = "modules"
    APPTAINER = "apptainer"
    ENROOT = "enroot"
    PYXIS = "pyxis"
    """Slurm's plugin for enroot: `srun --container-image`."""
    PODMAN = "podman"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One way to run engines at the site."""

    kind: RuntimeKind = RuntimeKind.PLAIN
    path: str = ""
    """Of a virtual environment."""
    image: str = ""
    """Of a container: a file or a name."""
    command: str = ""
    """The program, when it is not called as its kind: `singularity`, `podman-hpc`."""
    options: tuple[str, ...] = ()
    """More words for it."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees, as `/models` or `/from:/to`."""
    modules: tuple[str, ...] = ()
    """Loaded first, whatever the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """A kind of GPU as Slurm knows it here."""

    gres: str = "gpu"
    """`gpu:h100`; the number is put behind it."""
    constraint: str = ""
    per_node: int = 0
    """0 = not told: jobs of several nodes have to say how many."""
    partition: str = ""
    """Where such nodes are, unless something else says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A queue of the site."""

    time_max_s: float | None = None
    preemptible: bool = False
    grace_s: float = 30.0
    """Between Slurm's SIGTERM and the kill, when a job is preempted (`GraceTime`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is wanted for a model. What is empty is left to Slurm."""

    engine: tuple[str, ...] = ()
    """The engine's command, without `--host` and `--port`; `pool` and flags of a pool agent, where the placer says what
    runs."""
    model: str = ""
    """The name clients ask for; default: the profile's own."""
    engine_kind: str = ""
    gpus: int | None = None
    """In all, over all nodes."""
    gpu: str = ""
    nodes: int = 0
    """0 = as many as the GPUs need."""
    time_s: float | None = None
    time_least_s: float | None = None
    """Slurm may shorten the job to this if it starts earlier then."""
    cpus: int | None = None
    """A node."""
    memory: str = ""
    """A node, as sbatch takes it: `64G`."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    runtime: str = ""
    requeue: bool | None = None
    drain_s: float | None = None
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, each with its value: `--exclusive`, `--mail-type=FAIL`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For engine and agent; each setting of `serai agent` has a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A model that the launcher keeps served: how many, and what to expect until it has been seen."""

    profile: str
    """Of `models`."""
    count: int = 1
    time_s: float | None = None
    """Of each job; None = the profile's."""
    queue_wait_s: float = 600.0
    load_s: float = 300.0
    load_s_max: float | None = None
    """A job without a session for so long is given up."""
    idle_s: float | None = None
    """Let go when no request has come for so long; None = never."""
    leaves_s: float | None = None
    """So long before the end of its job a session takes no more requests; None = the drain's time and `STOP_S`."""
    scale_to: int = 0
    """The placer may ask for so many at most, in place of `count`; 0 = for none but `count`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclude:
    """A node that jobs stay away from."""

    node: str
    reason: str
    until_s: float | None = None
    """Seconds since 1970; None = until it is taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nats:
    """How agents, and the tools, reach NATS."""

    url: str
    nkey_file: str = ""
    creds_file: str = ""
    ca_file: str = ""
    tools_nkey_file: str = ""
    tools_url: str = ""
    """As the login node sees NATS, when that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """How Slurm's commands are run."""

    prefix: tuple[str, ...] = ()
    """Words before each command: `ssh -o BatchMode=yes login1` where Slurm is not on this machine."""
    cluster: str = ""
    """For `--clusters`, where the commands talk to several; empty = the one they talk to by themselves."""
    timeout_s: float = 30.0
    query_every_s: float = 30.0
    """The queue is asked at most so often, by whomever; sites ask for no less than this."""
    failures_max: int = 3
    """So many failures on end, and nothing is asked for `pause_s`, then twice as long, up to `pause_max_s`."""
    pause_s: float = 60.0
    pause_max_s: float = 600.0


DEFAULT_TIME_S = 8 * 3600.0
DEFAULT_DRAIN_S = 120.0
STOP_S = 60.0
"""Beyond the drain: to stop the engine, and for what Slurm's clock is coarse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """All that a batch script says. Made by `Site.job`."""

    profile: Profile
    """With the site's usual values and what was asked for."""
    runtime: Runtime
    model: str
    time_s: float
    drain_s: float
    nodes: int
    gres: str
    """With its number a node; empty = no GPUs."""
    constraint: str
    partition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A site file's content."""

    name: str
    nats: Nats
    provider: str = "local"
    executable: str = "serai"
    scratch: str = ""
    output: str = ""
    """Folder of the jobs' output; empty = where they are submitted."""
    commands: CommandSettings = field(default_factory=CommandSettings)
    usual: Profile = field(default_factory=Profile)
    """What profiles leave out."""
    gpus: Mapping[str, GpuKind] = field(default_factory=dict)
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    runtimes: Mapping[str, Runtime] = field(default_factory=dict)
    models: Mapping[str, Profile] = field(default_factory=dict)
    exclude: tuple[Exclude, ...] = ()
    deployments: Mapping[str, Kept] = field(default_factory=dict)
    """What `serai launcher` keeps served."""

    def job(self, name: str, **asked: Any) -> JobPlan:
        """The job of the model profile `name`; `asked` are fields of `Profile`, and count most. A name that is no
        profile needs an engine. Raises BadInput, whose place is a flag or a field of the site file."""
        if name not in self.models and not asked.get("engine"):
            known = ", ".join(self.models) or "none"
            raise BadInput(
                f"--model {name}",
                f"the site file has no such model (it has {known}){_near(name, self.models)}",
                "add it below `models`, or give the engine's command after `--`",
            )
        profile = _over(_over(self.usual, self.models.get(name, Profile())), Profile(**asked))
        if not profile.engine:
            raise BadInput(f"models.{name}.engine", "is missing", "write the engine's command, as a list of words")
        kind = self._known(self.gpus, "gpu", profile.gpu, GpuKind())
        partition = profile.partition or kind.partition
        queue = self.partitions.get(partition, Partition())
        if self.partitions and partition and partition not in self.partitions:
            self._known(self.partitions, "partition", partition, queue)
        nodes, gres = _gpus(profile, kind)
        runtime = self._known(self.runtimes, "runtime", profile.runtime, Runtime())
        if nodes > 1 and runtime.kind is RuntimeKind.PYXIS:
            raise BadInput("--runtime", "of kind `pyxis` runs an engine on one node only", "take apptainer or enroot")
        time_s = DEFAULT_TIME_S if profile.time_s is None else profile.time_s
        if queue.time_max_s is not None and time_s > queue.time_max_s:
            raise BadInput(
                "--time",
                f"{time_s / 3600:g} h is above what partition `{partition}` allows ({queue.time_max_s / 3600:g} h)",
                "give a shorter one, and --chain N for more of them, one after the other",
            )
        drain_s = DEFAULT_DRAIN_S if profile.drain_s is None else profile.drain_s
        if queue.preemptible:
            drain_s = min(drain_s, max(5.0, queue.grace_s - 10.0))
        constraints = [one for one in (kind.constraint, profile.constraint) if one]
        return JobPlan(
            profile=profile,
            runtime=runtime,
            model=profile.model or name,
            time_s=time_s,
            drain_s=drain_s,
            nodes=nodes,
            gres=gres,
            constraint="&".join(constraints),
            partition=partition,
        )

    def excluded(self, now_s: float) -> list[Exclude]:
        """Those that hold at `now_s` seconds since 1970."""
        return [one for one in self.exclude if one.until_s is None or now_s < one.until_s]

    def _known(self, section: Mapping[str, Any], what: str, name: str, default: Any) -> Any:
        if not name:
            return default
        if name not in section:
            known = ", ".join(section) or "none"
            raise BadInput(
                f"--{what} {name}",
                f"the site file has no such {what} (it has {known}){_near(name, section)}",
                f"choose one, or add it below `{what}s`",
            )
        return section[name]


def _gpus(profile: Profile, kind: GpuKind) -> tuple[int, str]:
    """Nodes, and the GRES of each."""
    count = 0 if profile.gpus is None else profile.gpus
    nodes = profile.nodes
    if not nodes:
        nodes = -(-count // kind.per_node) if kind.per_node else 1
    nodes = max(1, nodes)
    if count % nodes:
        raise BadInput("--gpus", f"{count} cannot be shared out evenly to {nodes} nodes", f"give a multiple of {nodes}")
    if kind.per_node and count // nodes > kind.per_node:
        raise BadInput(
            "--gpus",
            f"{count} on {nodes} node(s) is more than the {kind.per_node} that a node has",
            "give more --nodes, or leave --nodes out",
        )
    return nodes, f"{kind.gres}:{count // nodes}" if count else ""


def _over(below: Profile, above: Profile) -> Profile:
    """`above`, filled up from `below`. Environments are joined."""
    empty = Profile()
    given = {name: getattr(above, name) for name in Profile.__slots__ if getattr(above, name) != getattr(empty, name)}
    given["environment"] = {**below.environment, **above.environment}
    given["sbatch"] = (*below.sbatch, *above.sbatch)
    return replace(below, **given)


def _near(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean `{near[0]}`?" if near else ""
