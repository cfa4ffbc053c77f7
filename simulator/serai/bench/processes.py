"""Child processes of a benchmark: started with a log each, counted in memory, and gone at the end, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from serai.runtime.parent_death import die_with_parent

_LAST_LOG_BYTES = 2000


class BenchFailed(Exception):
    """The benchmark cannot go on; the text says why and shows the end of the log that tells more."""


class Processes:
    """All children of one benchmark run. Leaving the context ends them and theirs."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._children: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._others: set[int] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stop_s: float = 3.0,
        pipes: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start `command`, its output in a log named after `name`. It has `stop_s` to obey SIGTERM at the end.

        With `pipes`, standard input and output are pipes to the caller. Raises BenchFailed when it cannot be started.
        """
        with self.log_of(name).open("wb") as log:
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else log,
                    stderr=log,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise BenchFailed(f"cannot start {name}: {error}") from error
        self._children[name] = (child, stop_s)
        return child

    def also_end(self, pids: Iterable[int]) -> None:
        """Processes that a child started for itself and that must not outlive it."""
        self._others.update(pids)

    def log_of(self, name: str) -> Path:
        """Where the output of `name` goes."""
        return self._log_folder / f"{name}.log"

    def wait_until(
        self, name: str, child: subprocess.Popen[bytes], is_ready: Callable[[], bool], timeout_s: float
    ) -> None:
        """Wait until `is_ready`. Raises BenchFailed when the child ends before, or is not ready in `timeout_s`."""
        give_up_at_s = time.monotonic() + timeout_s
        while not is_ready():
            if child.poll() is not None:
                raise BenchFailed(
                    f"{name} ended with status {child.returncode} at its start\n{last_lines([self.log_of(name)])}"
                )
            if time.monotonic() > give_up_at_s:
                raise BenchFailed(f"{name} was not ready within {timeout_s:g} s\n{last_lines([self.log_of(name)])}")
            time.sleep(0.05)

    def end(self, name: str) -> None:
        """End one child now: SIGTERM, then SIGKILL to its whole group. Does nothing when there is none."""
        if name not in self._children:
            return
        child, stop_s = self._children.pop(name)
        if child.poll() is None:
            child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(stop_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def stop(self) -> None:
        """End all children. All are told first, so that they stop side by side."""
        for child, _ in self._children.values():
            if child.poll() is None:
                child.terminate()
        for name in list(self._children):
            self.end(name)
        for pid in self._others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._others.clear()


def last_lines(logs: Iterable[Path]) -> str:
    """The end of each log, under its name; logs that are not there or empty are left out."""
    parts = []
    for log in logs:
        with contextlib.suppress(OSError):
            end = log.read_bytes()[-_LAST_LOG_BYTES:].decode("utf-8", "replace").strip()
            if end:
                parts.append(f"--- the end of {log.name}:\n{end}")
    return "\n".join(parts)


def rss_mb(pids: Iterable[int], without: Collection[int] = ()) -> float:
    """Resident memory of processes and all their descendants, in MB (10⁶ bytes), but not of `without` and theirs. Those
    that are gone count nothing."""
    total_kb = 0
    for pid in _with_descendants(pids, without):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total_kb += int(line.split()[1])
    return total_kb * 1024 / 1e6


def cpu_s(pids: Iterable[int], without: Collection[int] = ()) -> float:
    """Processor time that processes and all their descendants have taken so far, in seconds, but not `without` and
    theirs."""
    ticks = 0
    for pid in _with_descendants(pids, without):
        fields = _stat_fields(pid)
        if fields:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _with_descendants(pids: Iterable[int], without: Collection[int]) -> set[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields:
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in found and pid not in without:
            found.add(pid)
            todo.extend(parents.get(pid, ()))
    return found


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: state, parent, …; empty when the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
