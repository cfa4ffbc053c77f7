"""A real Slurm, private to a test run: munged, slurmctld and a few emulated nodes (`slurmd -N`) on this machine.

Its state, key and sockets lie in one folder and its ports are free ones, so it neither needs nor disturbs a Slurm that
the machine has already. Nothing of it is left when it stops.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.worker_agent.engine.process import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
START_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 15.0
KILL_WAIT_S = 10

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
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=30
KillWait={kill_wait_s}
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN"


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
    """A running cluster. `with SlurmCluster(folder) as cluster`."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self._folder = folder
        self._nodes = [f"node{number}" for number in range(nodes)]
        self._daemons: list[subprocess.Popen[bytes]] = []
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

    @property
    def _output_folder(self) -> Path:
        return self._folder / "jobs"

    # -- its life ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        controller_port, *node_ports = _free_ports(1 + len(self._nodes))
        nodes = "\n".join(
            NODE.format(name=name, host=host, port=port) for name, port in zip(self._nodes, node_ports, strict=True)
        )
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=host, controller_port=controller_port, folder=self._folder, nodes=nodes, kill_wait_s=KILL_WAIT_S
            )
        )
        self._start_munge()
        (self._folder / "controller").mkdir()
        self._daemon("slurmctld", "-D", "-i")
        for name in self._nodes:
            (self._folder / f"node-{name}").mkdir()
            self._daemon("slurmd", "-D", "-N", name, name=f"slurmd-{name}")
        self._wait(lambda: self._idle_nodes() == len(self._nodes), "all nodes are idle")

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
        with (self._folder / f"{name or words[0]}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _idle_nodes(self) -> int:
        try:
            return self.command("scontrol", "--oneliner", "show", "node").count("State=IDLE ")
        except subprocess.CalledProcessError:
            return 0  # The controller does not answer yet.

    def _wait(self, there: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        give_up_at_s = time.monotonic() + timeout_s
        while not there():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > give_up_at_s:
                logs = "\n".join(f"{path.name}:\n{_end_of(path)}" for path in sorted(self._folder.glob("*.log")))
                raise RuntimeError(f"not within {timeout_s:g} s: {what}; ended: {ended}\n{logs}")
            time.sleep(0.05)

    def _stop(self) -> None:
        """Nodes and controller first: without them nothing starts or requeues a job. Then whatever jobs left."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # Jobs run under daemons of their own (slurmstepd), in sessions of their own; the environment tells ours.
        give_up_at_s = time.monotonic() + 5
        while (pids := self._job_processes()) and time.monotonic() < give_up_at_s:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)

    def _job_processes(self) -> list[int]:
        wanted = f"SLURM_CONF={self._folder / 'slurm.conf'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue  # It has just ended, or is the kernel's.
        return found


def _free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


def _end_of(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])
