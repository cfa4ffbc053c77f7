"""Which worker processes an ingress should have: who is started, started again, replaced, ended, and when to give up.

Events come in by `ready`, `alive`, `ended`, `stop` and `replace_all`; `due` then looks at the whole state and says what
is to be done. No clock is read here: `now` is the monotonic time in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 3.0
"""Short: meanwhile new connections of its slot wait."""
STEADY_AFTER_S = 10.0
"""A worker that ran for so long is started again at once when it dies, and so is one that died for the first time."""
START_S = 60.0
"""How long a worker may take until it is ready."""
ALIVE_EVERY_S = 5.0
"""So often a worker says that its event loop turns, and so often at least it is looked whether it does."""
SILENT_S = 30.0
"""A worker that has said nothing for so long hangs: the kernel goes on giving it connections that nobody answers."""
FAILED_STARTS_MAX = 3
"""So many in a row, of one place, while no worker serves: there is nothing left to wait for."""
SECOND_STOP_AFTER_S = 1.0
"""A wish to stop that comes sooner after the first is taken for the same one."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start worker `worker` at the listening sockets of `slot`."""

    slot: int
    worker: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Its successor serves: no new connections, finish what runs, end."""

    worker: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """The whole ingress stops: SIGTERM."""

    worker: int


@dataclass(frozen=True, slots=True)
class Kill:
    """It had its time: SIGKILL."""

    worker: int
    why: str = "did not obey in time"


Effect = Start | Retire | Terminate | Kill


@dataclass(slots=True)
class _Worker:
    slot: int
    started_s: float
    is_ready: bool = False
    told_s: float | None = None
    """When it was told to end."""
    is_killed: bool = False
    heard_s: float | None = None
    """When it last said that it is alive; None: it has said nothing of that kind yet."""


@dataclass(slots=True)
class _Slot:
    start_at_s: float = 0.0
    failures: int = 0
    """Deaths in a row, none of which came after a steady time."""


@dataclass(slots=True)
class Supervision:
    """`slots` places, each with one worker, or two while one replaces the other."""

    slots: int
    stop_s: float
    """How long a worker may take to end when it is told to."""
    exit_code: int = 0
    """Of the whole ingress."""
    notices: list[str] = field(default_factory=list)
    """What people should know, to be taken out by the caller."""
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _last: int = 0
    _was_up: bool = False
    """All were ready at one time: from then on a death is not a failed start of the ingress."""
    _replacing: list[int] = field(default_factory=list)
    """Slots whose worker is to be replaced, in turn."""
    _replaced_upto: int = 0
    """Workers with greater numbers were started after the wish to replace all."""
    _looked_s: float = -math.inf
    _stopping_since_s: float | None = None
    _is_forced: bool = False

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.slots)]

    # -- events --------------------------------------------------------------------------------------------------

    def ready(self, worker: int) -> None:
        """It takes connections."""
        if worker in self._workers:
            self._workers[worker].is_ready = True
        if not self._was_up and sum(one.is_ready for one in self._workers.values()) == self.slots:
            self._was_up = True

    def alive(self, worker: int, now: float) -> None:
        """Its event loop turns."""
        if worker in self._workers:
            self._workers[worker].heard_s = now

    def ended(self, worker: int, code: int, now: float) -> None:
        """Its process is gone. `code` as the shell has it: 128 + signal for one that was killed."""
        gone = self._workers.pop(worker)
        if gone.told_s is not None or self._stopping_since_s is not None:
            return
        if worker > self._replaced_upto and self._replacing and not gone.is_ready:
            self._replacing.clear()
            self.notices.append(f"a new worker did not come up (exit code {code}); the present ones stay")
            return
        slot = self._slots[gone.slot]
        is_steady = gone.is_ready and now - gone.started_s >= STEADY_AFTER_S
        slot.failures = 1 if is_steady else slot.failures + 1
        pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (slot.failures - 2)) if slot.failures > 1 else 0.0
        slot.start_at_s = now + pause_s
        serving = any(one.is_ready for one in self._workers.values())
        if not gone.is_ready and (not self._was_up or (not serving and slot.failures >= FAILED_STARTS_MAX)):
            self.notices.append(f"worker {worker} ended with exit code {code} at its start; giving up")
            self.exit_code = code or 1
            self._stopping_since_s = now
            return
        again = f"in {pause_s:g} s" if pause_s else "now"
        self.notices.append(f"worker {worker} ended with exit code {code}; another is started {again}")

    def stop(self, now: float) -> None:
        """End all; asked for once more, at once."""
        if self._stopping_since_s is None:
            self._stopping_since_s = now
        elif now - self._stopping_since_s > SECOND_STOP_AFTER_S:
            self._is_forced = True

    def replace_all(self) -> None:
        """Replace one after the other, each by one that is ready before it goes."""
        self._replacing = list(range(self.slots))
        self._replaced_upto = self._last

    # -- what to do ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Nothing runs and nothing is to be started."""
        return self._stopping_since_s is not None and not self._workers

    def due(self, now: float) -> list[Effect]:
        """What is to be done now; it is taken as done."""
        self._forgive(now)
        effects: list[Effect] = [*self._overdue(now)]
        if self._stopping_since_s is not None:
            for number, one in self._workers.items():
                if one.told_s is None:
                    one.told_s = now
                    effects.append(Terminate(number))
            return effects
        effects.extend(self._start(number, now) for number in self._missing(now))
        return effects + self._replacement(now)

    def next_s(self, now: float) -> float | None:
        """In how many seconds to look again though nothing has happened; None: not at all."""
        times = [slot.start_at_s for slot in self._slots if slot.start_at_s > now]
        for one in self._workers.values():
            if one.told_s is not None:
                times.append(one.told_s + self.stop_s)
            elif not one.is_ready:
                times.append(one.started_s + START_S)
            elif one.heard_s is not None:
                times.append(now + ALIVE_EVERY_S)
        return max(0.0, min(times) - now) if times else None

    def _forgive(self, now: float) -> None:
        """Who has not looked for long, because it was stopped itself perhaps, knows of nobody how long they have been
        silent."""
        if now - self._looked_s > 2 * ALIVE_EVERY_S:
            for one in self._workers.values():
                one.heard_s = None if one.heard_s is None else now
        self._looked_s = now

    def _overdue(self, now: float) -> Iterator[Kill]:
        for number, one in self._workers.items():
            is_late = now - one.told_s > self.stop_s if one.told_s is not None else False
            is_stuck = not one.is_ready and now - one.started_s > START_S
            is_silent = one.heard_s is not None and one.told_s is None and now - one.heard_s > SILENT_S
            if (is_late or is_stuck or is_silent or self._is_forced) and not one.is_killed:
                one.is_killed = True
                yield Kill(number, f"has hung for {SILENT_S:g} s") if is_silent else Kill(number)

    def _missing(self, now: float) -> Sequence[int]:
        """Slots that need a worker. The first worker starts alone: what is wrong with all is said once."""
        missing = [number for number in range(self.slots) if not self._staying(number)]
        is_first = not self._was_up and not any(one.is_ready for one in self._workers.values())
        if is_first:
            missing = missing[:1] if not self._workers else []
        return [number for number in missing if now >= self._slots[number].start_at_s]

    def _replacement(self, now: float) -> list[Effect]:
        if not self._replacing:
            return []
        slot = self._replacing[0]
        staying = self._staying(slot)
        fresh = [number for number in staying if number > self._replaced_upto]
        if not fresh:
            # One that is not there yet, or not ready, is waited for.
            return [self._start(slot, now)] if any(self._workers[number].is_ready for number in staying) else []
        if not self._workers[fresh[-1]].is_ready:
            return []
        self._replacing.pop(0)
        effects: list[Effect] = []
        for number in staying:
            if number != fresh[-1]:
                self._workers[number].told_s = now
                effects.append(Retire(number))
        return effects + self._replacement(now)

    def _staying(self, slot: int) -> list[int]:
        return [number for number, one in self._workers.items() if one.slot == slot and one.told_s is None]

    def _start(self, slot: int, now: float) -> Start:
        self._last += 1
        self._workers[self._last] = _Worker(slot, now)
        return Start(slot, self._last)
