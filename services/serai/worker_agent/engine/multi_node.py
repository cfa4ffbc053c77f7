"""One engine over several nodes of an allocation: who takes part, and what each node runs. Pure.

Rank 0 is the node whose agent is the session; the others only run their part of the engine. vLLM has a mode of its own
for this (`--nnodes`); with `--distributed-executor-backend ray` in its command, Ray carries it instead. SGLang has its
own mode only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from zlib import crc32

from serai.worker_agent.engine.base import EngineMisconfigured

NODES_MAX = 256
"""Of one engine. A longer list is an allocation that was meant for something else."""
_PORTS = range(20_000, 32_000)
"""Below those that the kernel hands out to clients."""
_OURS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless", "--dist-init-addr")


@dataclass(frozen=True, slots=True)
class Place:
    """This node among those of the allocation."""

    allocation: str
    hosts: tuple[str, ...]
    rank: int

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.hosts[self.rank]})"


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Part:
    """What one node runs."""

    command: Sequence[str]
    before: Sequence[str] = ()
    """A command that is started first, and ends with it."""
    waits: bool = False
    """`command` starts only when somebody listens at the meeting address."""
    environment: Mapping[str, str] = field(default_factory=dict)


# -- who takes part --------------------------------------------------------------------------------------------------


def node_list(environment: Mapping[str, str]) -> str:
    """Slurm's name for the nodes of this job step, or of the job: `gpu[01-04]`; `scontrol show hostnames` spells it
    out. Empty outside Slurm."""
    return environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")


def hosts_in(text: str) -> tuple[str, ...]:
    """One host a line, each once, in order: from `scontrol show hostnames`, or from PBS's node file, which has a line
    for each slot. Raises EngineMisconfigured."""
    hosts = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not hosts:
        raise EngineMisconfigured("--nodes auto: the allocation's list of nodes is empty")
    if len(hosts) > NODES_MAX:
        raise EngineMisconfigured(f"--nodes auto: the allocation has {len(hosts)} nodes; at most {NODES_MAX}")
    if odd := next((host for host in hosts if not host.replace("-", "").replace(".", "").isalnum()), ""):
        raise EngineMisconfigured(f"--nodes auto: {odd[:60]!r} in the allocation's list of nodes is no host's name")
    return hosts


def place_in(hosts: tuple[str, ...], environment: Mapping[str, str], host_name: str) -> Place:
    """Which of `hosts` this is: by Slurm's or PBS's number of the node, else by our own name. Raises
    EngineMisconfigured."""
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise EngineMisconfigured(
            "--nodes auto: two agents on one node; start one per node: srun --ntasks-per-node=1 …"
        )
    allocation = environment.get("SLURM_JOB_ID") or environment.get("PBS_JOBID", "")
    for name in ("SLURM_NODEID", "PBS_NODENUM"):
        number = environment.get(name, "")
        if number.isdigit() and int(number) < len(hosts):
            return Place(allocation, hosts, int(number))
    short = [host.partition(".")[0] for host in hosts]
    own = host_name.partition(".")[0]
    if short.count(own) != 1:
        raise EngineMisconfigured(f"--nodes auto: this host, {host_name!r}, is not among {', '.join(hosts)[:200]}")
    return Place(allocation, hosts, short.index(own))


def meeting_port(allocation: str) -> int:
    """Where rank 0 waits for the others: the same on all nodes without a word between them, and most likely another one
    for another job."""
    return _PORTS[crc32(allocation.encode()) % len(_PORTS)]


# -- what each runs --------------------------------------------------------------------------------------------------


def part_of(kind: str, command: Sequence[str], place: Place, master: Address) -> Part:
    """What the node at `place` runs of the engine `command` of `kind`, whose processes meet at `master`. Rank 0's
    command still lacks the address of its API. Raises EngineMisconfigured."""
    if given := next((word for word in command if word.partition("=")[0].replace("_", "-") in _OURS), ""):
        raise EngineMisconfigured(f"leave {given} out of the engine's command: with --nodes auto the agent says it")
    nodes = ["--nnodes", str(len(place.hosts)), "--node-rank", str(place.rank)]
    if kind == "sglang":
        return Part([*command, *nodes, "--dist-init-addr", str(master)])
    if kind != "vllm":
        raise EngineMisconfigured(f"--nodes auto: an engine of kind {kind} runs on one node only; vllm and sglang can")
    if uses_ray(command):
        return _ray_part(command, place, master)
    there = ["--master-addr", master.host, "--master-port", str(master.port)]
    return Part([*command, *nodes, *there, *(["--headless"] if place.rank else [])])


def uses_ray(command: Sequence[str]) -> bool:
    """Whether vLLM's command asks for Ray."""
    text = " ".join(command).replace("_", "-")
    return "--distributed-executor-backend ray" in text or "--distributed-executor-backend=ray" in text


def _ray_part(command: Sequence[str], place: Place, master: Address) -> Part:
    """Ray in the foreground (`--block`), so that it ends with us, and vLLM on rank 0 alone."""
    at = next((index for index, word in enumerate(command) if PurePath(word).name == "vllm"), None)
    if at is None:
        raise EngineMisconfigured(
            "--nodes auto with Ray: there is no word `vllm` in the command, so no place for `ray`"
        )
    # Beside vllm: in the same container, or the same folder.
    ray = [*command[:at], str(PurePath(command[at]).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    if place.rank:
        return Part([*ray, f"--address={master}"], waits=True)
    head = [*ray, "--head", f"--node-ip-address={master.host}", f"--port={master.port}", "--include-dashboard=false"]
    return Part(command, head, True, {"RAY_ADDRESS": str(master)})
