"""The processes of this host, as /proc shows them: which belong to an engine, what they read, which are left over.

An engine's processes carry a mark in their environment, which children inherit, whatever they do with sessions and
process groups. It names the agent, so that engines of agents that are gone can be told from those of agents that live.
Programs that write a title over their arguments wipe their environment too: vLLM's engine cores and workers do, which
are the ones that hold the GPUs. They have the mark of the process that leads their session.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serai.worker_agent.engine.start_watch import Signs

MARK = "SERAI_ENGINE_OF"
_ROOT = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told from another that got its number later."""

    pid: int
    started: int
    """Clock ticks since the host booted."""

    @property
    def alive(self) -> bool:
        return identity_of(self.pid) == self


def identity_of(pid: int) -> ProcessIdentity | None:
    """None when there is no such process; one that has ended and is not yet waited for counts as gone."""
    try:
        fields = (_ROOT / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else ProcessIdentity(pid, int(fields[19]))


def new_mark(run: str) -> str:
    """`HOST:NAMESPACE:PID:START:RUN`: this agent, and a run of an engine of its. Process numbers mean something in one
    namespace of one boot of one host only."""
    own = identity_of(os.getpid())
    return f"{_here()}:{own.pid}:{own.started}:{run}" if own is not None else ""


def marked(mark: str) -> list[ProcessIdentity]:
    """Those of our user that carry exactly this mark."""
    return [identity for identity, theirs in _marks() if theirs == mark] if mark else []


def left_over() -> list[ProcessIdentity]:
    """Engines of our user whose agent, of this same host and namespace, is gone."""
    here = f"{_here()}:"
    found = []
    for identity, mark in _marks():
        agent = mark.removeprefix(here).split(":")[:2] if mark.startswith(here) else []
        if len(agent) == 2 and all(number.isdigit() for number in agent):
            pid, started = agent
            if not ProcessIdentity(int(pid), int(started)).alive:
                found.append(identity)
    return found


def sibling_pids() -> set[int]:
    """Processes of all engines of Serai's that we may look at, whosever agent lives."""
    return {identity.pid for identity, _ in _marks()}


def signs_of(processes: list[ProcessIdentity]) -> Signs:
    """Sums over what these have read, written and hold. Those that have just ended count as nothing."""
    read = written = resident = 0
    for process in processes:
        io = _numbers(_ROOT / str(process.pid) / "io")
        status = _numbers(_ROOT / str(process.pid) / "status")
        # `rchar` misses what is mapped, `read_bytes` what comes from memory and from some network file systems.
        read += max(io.get("rchar", 0), io.get("read_bytes", 0))
        written += max(io.get("write_bytes", 0), 0)
        resident += (status.get("RssAnon", 0) + status.get("RssFile", 0)) * 1024
    return Signs(read, written, resident)


def socket_inodes(pid: int) -> set[int] | None:
    """Of the sockets that a process holds; None when we may not look."""
    folder = _ROOT / str(pid) / "fd"
    found = set()
    try:
        for entry in os.scandir(folder):
            try:
                target = os.readlink(entry.path)
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        return None
    return found


def pids() -> list[int]:
    """Of all processes that we see."""
    return [int(name) for name in os.listdir(_ROOT) if name.isdigit()]


# -- inside --------------------------------------------------------------------------------------------------------


def _marks() -> Iterator[tuple[ProcessIdentity, str]]:
    by_session: dict[int, str] = {}
    unmarked: list[tuple[int, int]] = []
    for pid in pids():
        mark = _mark_of(pid)
        if mark is None:
            continue
        if not mark:
            unmarked.append((pid, _session_of(pid)))
            continue
        if _session_of(pid) == pid:
            by_session[pid] = mark
        if (identity := identity_of(pid)) is not None:
            yield identity, mark
    for pid, session in unmarked:
        if session in by_session and (identity := identity_of(pid)) is not None:
            yield identity, by_session[session]


def _mark_of(pid: int) -> str | None:
    """Empty when it has none; None when it is not our user's, or ourselves."""
    folder = _ROOT / str(pid)
    try:
        if pid == os.getpid() or folder.stat().st_uid != os.getuid():
            return None
        environment = (folder / "environ").read_bytes()
    except OSError:
        return None
    wanted = f"{MARK}=".encode()
    found = next((entry for entry in environment.split(b"\0") if entry.startswith(wanted)), b"")
    return found[len(wanted) :].decode(errors="replace")


def _session_of(pid: int) -> int:
    """0 when it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _here() -> str:
    try:
        boot = (_ROOT / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat(_ROOT / "self/ns/pid").st_ino
    except OSError:
        return "?"
    return f"{boot}:{namespace}"


def _numbers(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found
