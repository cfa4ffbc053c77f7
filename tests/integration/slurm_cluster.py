"""A real Slurm, private to a test run: munged, slurmctld and a few emulated nodes (`slurmd -N`) on this machine.

Its nodes have GPUs of two kinds (device files without a device), and it has two partitions: jobs in `normal` push jobs
in `scavenger` out, who are warned, have a grace time, and are requeued. Its state, key and sockets lie in one folder
and its ports are free ones, so it neither needs nor disturbs a Slurm that the machine has already. Nothing of it is
left when it stops.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from serai.worker_agent.engine.process import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
START_TIMEOUT_S = 20.0
STATE_SAVED_S = 12.0
"""A save of jobs may wait for so long."""
COMMAND_TIMEOUT_S = 15.0
KILL_WAIT_S = 10
GRACE_S = 30
"""Between the warning of a job that is pushed out and its end. By default Slurm gives the warning to steps only."""
NODE_SILENCE_S = 10
"""A node that is silent for longer is down, and its jobs are requeued."""
GPU_KINDS = ("a100", "h100")
GPUS_OF_A_NODE = 2

SLURM_CONF = """\
ClusterName=serai-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout={node_silence_s}
KillWait={kill_wait_s}
MailProg=/bin/true
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=scavenger Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 "
    "Gres=gpu:{kind}:{gpus} Feature={kind}"
)
GPUS = "NodeName={name} Name=gpu Type={kind} File={folder}/gpus-{name}/nvidia[0-{last}]"


def why_not() -> str:
    """Why no Slurm can be started here, and what to do; empty when one can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} not found): {INSTALL}"
    if os.geteuid() != 0:
        return "slurmd starts jobs as their users and so needs root: run this test as root"
    return ""


@dataclass(frozen=True)
class Job:
    """What the controller says of a job."""

    state: str
    exit_code: int
    restarts: int
    node: str

    @property
    def over(self) -> bool:
        """Named by what is final: SIGNALING and the like come and go while it runs."""
        return self.state in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class SlurmCluster:
    """A running cluster. `with SlurmCluster(folder) as cluster`. Nodes are of the two kinds in turn."""

    def __init__(self, folder: Path, nodes: int = 4) -> None:
        self._folder = folder
        self.nodes = {f"node{number}": GPU_KINDS[number % len(GPU_KINDS)] for number in range(nodes)}
        """Name → kind of GPU."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        with self._stack:  # Also when a start fails half-way.
            self._stack.callback(self._stop)
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- what a user does ----------------------------------------------------------------------------------------

    def sbatch(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """Submits, and returns the job's id. Its output goes to a file of ours, see `output`."""
        self._output_folder.mkdir(exist_ok=True)
        flags = ["--parsable", "--chdir", str(self._output_folder), "--output", str(self._output_folder / "%j.out")]
        return self.command("sbatch", *flags, *words, environment=environment).strip()

    def command(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """What a Slurm command prints. Raises CalledProcessError with its complaint as a note."""
        try:
            return subprocess.run(
                words,
                env=self.environment | (environment or {}),
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=True,
            ).stdout
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def job(self, job_id: str) -> Job:
        text = self.command("scontrol", "--oneliner", "show", "job", job_id)
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        exit_code, _, _by_signal = fields["ExitCode"].partition(":")
        return Job(fields["JobState"], int(exit_code), int(fields["Restarts"]), fields.get("NodeList", ""))

    def output(self, job_id: str) -> str:
        """What the job has written so far."""
        path = self._output_folder / f"{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_again(self, job_id: str) -> None:
        """Slurm holds a requeued job back for two minutes; an operator need not wait."""
        self.command("scontrol", "update", f"jobid={job_id}", "StartTime=now")

    @property
    def _output_folder(self) -> Path:
        return self._folder / "jobs"

    # -- what befalls it -----------------------------------------------------------------------------------------

    def kill_controller(self) -> None:
        """SIGKILL: it saves nothing more. Slurm saves what it knows of jobs some seconds late; those that it had not
        saved it forgets, and ends. That is waited for, being no matter of ours."""
        started = self.command("squeue", "--noheader", "--states=running", "--format=%S").split()
        newest_s = max([datetime.fromisoformat(text).timestamp() for text in started], default=0.0)
        saved = self._folder / "controller" / "job_state"
        give_up_at_s = time.monotonic() + STATE_SAVED_S
        while saved.stat().st_mtime < newest_s + 1 and time.monotonic() < give_up_at_s:
            time.sleep(0.1)
        self._kill("slurmctld")

    def start_controller(self) -> None:
        self._daemon("slurmctld", "-D", "-i")
        self._wait(self._answers, "the controller answers")

    def lose_node(self, node: str) -> None:
        """Its slurmd is killed, and all that its jobs run there: the machine is off."""
        jobs = self.command("squeue", "--noheader", "--nodelist", node, "--format=%A").split()
        self._kill(f"slurmd-{node}")
        for job in jobs:
            self.kill_job(job)

    def find_node(self, node: str) -> None:
        """The lost one is back."""
        self._daemon("slurmd", "-D", "-N", node, name=f"slurmd-{node}")
        self._wait(lambda: "State=IDLE " in self.command("scontrol", "-o", "show", "node", node), "the node is back")

    def kill_job(self, job_id: str) -> None:
        """SIGKILL for all its processes, and for the daemon of Slurm's that watches them first."""
        _kill_all([pid for pid in _pids() if f"[{job_id}." in _words_of(pid)])
        _kill_all(self.processes_of(job_id))

    def processes_of(self, job_id: str) -> list[int]:
        return self._processes_with(f"SLURM_JOB_ID={job_id}")

    def environment_of(self, pid: int) -> dict[str, str]:
        """What a process of a job was started with; empty when it is over."""
        return dict(pair.split("=", 1) for pair in _environment_of(pid) if "=" in pair)

    # -- its life ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_configuration()
        self._start_munge()
        (self._folder / "controller").mkdir()
        self._daemon("slurmctld", "-D", "-i")
        for name in self.nodes:
            (self._folder / f"node-{name}").mkdir()
            self._daemon("slurmd", "-D", "-N", name, name=f"slurmd-{name}")
        self._wait(lambda: self._idle_nodes() == len(self.nodes), "all nodes are idle")

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        controller_port, *node_ports = _free_ports(1 + len(self.nodes))
        nodes, gpus = [], ["AutoDetect=off"]
        for (name, kind), port in zip(self.nodes.items(), node_ports, strict=True):
            self._make_gpus(name)
            nodes.append(NODE.format(name=name, host=host, port=port, kind=kind, gpus=GPUS_OF_A_NODE))
            gpus.append(GPUS.format(name=name, kind=kind, folder=self._folder, last=GPUS_OF_A_NODE - 1))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "gres.conf").write_text("\n".join(gpus) + "\n")
        (self._folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=host,
                controller_port=controller_port,
                folder=self._folder,
                nodes="\n".join(nodes),
                kill_wait_s=KILL_WAIT_S,
                grace_s=GRACE_S,
                node_silence_s=NODE_SILENCE_S,
            )
        )

    def _make_gpus(self, node: str) -> None:
        """Copies of /dev/null under other names: Slurm wants a device file, and takes its number from the name."""
        folder = self._folder / f"gpus-{node}"
        folder.mkdir()
        for number in range(GPUS_OF_A_NODE):
            os.mknod(folder / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        flags = [f"--{flag}={self._folder / file}" for flag, file in files.items()]
        # --force: it warns of a socket folder that other users cannot enter, which is what we want.
        self._daemon("munged", "--foreground", "--force", f"--log-file={self._folder}/munged-own.log", *flags)
        self._wait((self._folder / "munge.socket").exists, "munged listens")

    def _daemon(self, *words: str, name: str = "") -> None:
        name = name or words[0]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.command("scontrol", "ping"))
        except subprocess.CalledProcessError:
            return False

    def _idle_nodes(self) -> int:
        try:
            return self.command("scontrol", "--oneliner", "show", "node").count("State=IDLE ")
        except subprocess.CalledProcessError:
            return 0  # The controller does not answer yet.

    def _wait(self, there: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        give_up_at_s = time.monotonic() + timeout_s
        while not there():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > give_up_at_s:
                logs = "\n".join(f"{path.name}:\n{_end_of(path)}" for path in sorted(self._folder.glob("*.log")))
                raise RuntimeError(f"not within {timeout_s:g} s: {what}; ended: {ended}\n{logs}")
            time.sleep(0.05)

    def _stop(self) -> None:
        """Nodes and controller first: without them nothing starts or requeues a job. Then whatever jobs left."""
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # Jobs run under daemons of their own (slurmstepd), in sessions of their own; the environment tells ours.
        give_up_at_s = time.monotonic() + 5
        while (pids := self._processes_with(f"SLURM_CONF={self._folder / 'slurm.conf'}")) and (
            time.monotonic() < give_up_at_s
        ):
            _kill_all(pids)
            time.sleep(0.05)

    def _processes_with(self, *variables: str) -> list[int]:
        """Processes of this cluster that have all these in their environment, too."""
        wanted = {f"SLURM_CONF={self._folder / 'slurm.conf'}", *variables}
        return [pid for pid in _pids() if wanted <= _environment_of(pid)]


def _pids() -> list[int]:
    """All but our own."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in found if pid != os.getpid()]


def _environment_of(pid: int) -> set[str]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    except OSError:
        return set()  # It has just ended, or is the kernel's.


def _words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


def _end_of(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])
