"""The parent of an ingress's worker processes (`serai ingress --workers N`).

It owns the listening sockets, a set for each worker, and so the connections that the kernel has taken and none of them:
they outlive a worker that ends and are served by the next one of its slot. It imports nothing but the standard library;
`serai.ingress.__main__` has checked the settings before it hands over to this. What to do is decided in `supervision`.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from serai.ingress.listening import CannotListen, listen
from serai.ingress.supervision import Kill, Retire, Start, Supervision, Terminate

PLACE = "SERAI_INGRESS_PLACE"
"""Environment variable by which a worker knows that it is one: `Place` as JSON."""
READY, ALIVE = b"r", b"a"
_PR_SET_PDEATHSIG = 1  # As `runtime.parent_death` has it, with which structlog would come.
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parent needs to know."""

    workers: int
    host: str
    port: int
    metrics_host: str
    metrics_port: int
    stop_s: float
    log_json: bool
    command: Sequence[str]
    """How a worker is started."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker has from its parent. Numbers are file descriptors."""

    slot: int
    worker: int
    listeners: Sequence[int]
    metrics_listeners: Sequence[int]
    control: int
    """A stream socket: the worker writes `READY` when it is, and from then on `ALIVE` now and then; its end means that
    it should retire."""
    folder: str
    """Private to the workers of this parent."""
    parent: int


def hand_over(plan: Plan) -> NoReturn:
    """Makes this process the parent: same process id, less memory. Never returns."""
    os.execv(sys.executable, [sys.executable, "-m", "serai.ingress.workers", json.dumps(asdict(plan))])


def place_of(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands among workers; None when it has no parent of this kind."""
    text = environment.get(PLACE)
    return Place(**json.loads(text)) if text else None


class _Child:
    """One worker's process and our end of its control socket."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.process = process
        self.control = control


class Parent:
    """Obeys `Supervision`."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self._plan = plan
        self._folder = folder
        self._supervision = Supervision(plan.workers, plan.stop_s)
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._sets = listen(plan.host, plan.port, plan.workers, flag="--port")
        # One set for all: whoever is scraped answers for all.
        where = (plan.metrics_host, plan.metrics_port)
        self._metrics = listen(*where, 1, flag="--metrics-port")[0] if plan.metrics_port else []
        self._is_listening = True

    def run(self) -> int:
        """Until all workers have ended; the exit code."""
        supervision = self._supervision
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)  # Its number comes through the socket.
        self._selector.register(wake, selectors.EVENT_READ)
        while True:
            self._reap()
            while effects := supervision.due(time.monotonic()):
                for effect in effects:
                    self._obey(effect)
            self._tell()
            if supervision.is_over:
                return supervision.exit_code
            self._wait(wake)

    def _wait(self, wake: socket.socket) -> None:
        for key, _ in self._selector.select(self._supervision.next_s(time.monotonic())):
            if key.fileobj is not wake:
                self._hear(key.data)
                continue
            for number in wake.recv(4096):
                if number == signal.SIGHUP:
                    self._say("info", "replacing all workers, one after the other")
                    self._supervision.replace_all()
                elif number != signal.SIGCHLD:
                    self._supervision.stop(time.monotonic())

    def _hear(self, worker: int) -> None:
        child = self._children[worker]
        if said := child.control.recv(64):
            self._supervision.alive(worker, time.monotonic())
            if READY in said:
                self._supervision.ready(worker)
        else:  # Its process ends; that is seen elsewhere.
            self._selector.unregister(child.control)
            child.control.close()

    def _reap(self) -> None:
        for worker, child in list(self._children.items()):
            code = child.process.poll()
            if code is not None:
                del self._children[worker]
                self._let_go(child)
                self._supervision.ended(worker, 128 - code if code < 0 else code, time.monotonic())

    def _obey(self, effect: Start | Retire | Terminate | Kill) -> None:
        match effect:
            case Start():
                self._start(effect)
            case Retire():
                self._let_go(self._children[effect.worker])
            case Terminate():
                self._close_listeners()  # The workers' own go on until they have drained.
                self._children[effect.worker].process.send_signal(signal.SIGTERM)
            case Kill():
                self._say("warning", f"worker {effect.worker} {effect.why} and is killed")
                self._children[effect.worker].process.kill()

    def _start(self, start: Start) -> None:
        try:
            self._start_process(start)
        except (OSError, subprocess.SubprocessError) as error:
            # No memory for it now, perhaps: the others serve, and it is tried again.
            self._say("warning", f"worker {start.worker} cannot be started ({error})")
            self._supervision.ended(start.worker, os.EX_OSERR, time.monotonic())

    def _start_process(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        listeners = [one.fileno() for one in self._sets[start.slot]]
        metrics = [one.fileno() for one in self._metrics]
        place = Place(start.slot, start.worker, listeners, metrics, theirs.fileno(), self._folder, os.getpid())
        try:
            process = subprocess.Popen(
                self._plan.command,
                env=os.environ | {PLACE: json.dumps(asdict(place))},
                pass_fds=[*listeners, *metrics, theirs.fileno()],
                preexec_fn=_in_child,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._children[start.worker] = _Child(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, start.worker)

    def _let_go(self, child: _Child) -> None:
        if child.control.fileno() >= 0:
            self._selector.unregister(child.control)
            child.control.close()

    def _close_listeners(self) -> None:
        if self._is_listening:
            self._is_listening = False
            for one in [*self._metrics, *[one for group in self._sets for one in group]]:
                one.close()

    def _tell(self) -> None:
        for notice in self._supervision.notices:
            self._say("warning", notice)
        self._supervision.notices.clear()

    def _say(self, level: str, text: str) -> None:
        """A line in the log, like those of the workers."""
        if self._plan.log_json:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps({"event": f"workers: {text}", "level": level, "service": "ingress", "timestamp": stamp})
        else:
            text = f"serai ingress: {text}"
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _in_child() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It is for the parent; a terminal sends it to all.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    """The parent, whose plan is the only argument."""
    plan = Plan(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="serai-ingress-") as folder:
        try:
            parent = Parent(plan, folder)
        except CannotListen as error:
            sys.stderr.write(f"serai ingress: {error}\n")
            return 2
        return parent.run()


if __name__ == "__main__":
    raise SystemExit(main())
