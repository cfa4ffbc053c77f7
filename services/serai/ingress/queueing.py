"""The queue of one model, in front of its policy: who goes next, and who is told at once that it will not be served.

Pure: events and `now` in, effects out. The rule in plain words:

* While there is room, a request goes at once. Room is `capacity` less what has gone and not ended.
* Who waits stands in a class of priority (0 first). Within a class projects take turns by what they have used:
  the one that has been served the fewest tokens, by its weight, is next (virtual token counters, VTC: Sheng et al.,
  "Fairness in Serving Large Language Models", OSDI 2024). A project that comes back after a pause gets no credit for
  it. Within a project, who must begin earliest is next (EDF).
* Nothing starves: who has waited for `ageing_s` moves up a class, and a deadline counts as no later than
  `patience_s` after arrival, so that newcomers cannot go before an old request for ever.
* A request that cannot begin in time, by how long requests have taken here, is refused on arrival, and told when it
  would have been served. One whose time passes while it waits is refused then.
* The queue is bounded, in requests and in bytes. When it is full, a newcomer takes the place of the last one in the
  lowest class below its own, or of a project in its class that holds more than its project would; else it is refused.

Every request that arrives is dispatched or refused, once, unless it is cancelled before.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

import msgspec

CLASSES = ("interactive", "normal", "batch")
"""Names of the classes of priority, the first goes first."""
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""What a token counts in the fairness between projects, as in the VTC paper: saying one costs more than reading one."""
DURATION_SAMPLE = 0.1
"""Weight of one more request in the observed duration."""
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 600.0


@dataclass(frozen=True, slots=True)
class QueueSettings:
    entries_max: int = 1024
    bytes_max: int = 256 * 1024 * 1024
    """Of bodies that wait; they are held in memory."""
    ageing_s: float = 15.0
    patience_s: float = 60.0
    wait_max_s: float = 60.0
    """A request that names no time of its own waits no longer for its turn: a client that would wait for minutes, and
    perhaps not be served then, does better to hear it."""
    gap_max_s: float = 10.0
    """While no session serves the model, a request waits no longer for one. Long enough for a session that has just
    been lost to be found again, or for the next allocation to take over; not for an engine to load its model."""
    classes: int = len(CLASSES)


# -- events ------------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True, gc=False):  # Made for each request: a fifth of a frozen dataclass's cost.
    """A request that wants to be dispatched."""

    request: str
    project: str = ""
    priority: int = 1
    body_bytes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Expected; settled with `Ended`."""
    begin_by_s: float = math.inf
    """The latest time, on the clock of `now`, at which it is still worth dispatching: what its TTFT target, or its
    timeout, leaves beside the prefill."""
    weight: float = 1.0
    """Of its project: with 2 it is due twice as much as others."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client has left. Nothing comes back; a dispatched request has still to be `Ended`."""

    request: str


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A dispatched request is over, however it ended."""

    request: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """As used; None = not known, and then the estimate stands."""
    served: bool = True
    """False: it failed or was cancelled, so its duration says nothing of how fast requests are served."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests of this model may be out at once from now on; None = as many as come."""

    requests: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. To be sent at `next_wake_s`."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Nobody will serve this model in time; all that wait, and have come before a certain time, are refused with
    `retry_after_s`."""

    retry_after_s: float = 5.0
    arrived_before_s: float = math.inf


Event = Arrived | Cancelled | Ended | Capacity | Tick | Closed

# -- effects -----------------------------------------------------------------------------------------------------------


class Refusal(StrEnum):
    """Why a request is not served; the `code` of its error."""

    QUEUE_FULL = "queue_full"
    DISPLACED = "queue_displaced"
    TOO_LATE = "deadline_unreachable"
    DEADLINE_PASSED = "queue_timeout"
    CLOSED = "no_session"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """It may go to the policy now."""

    request: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """It is answered with 503, or 429 for `own_share`, and `Retry-After: retry_after_s`, which is whole seconds."""

    request: str
    why: Refusal
    retry_after_s: float
    waited_s: float
    waiting: int
    """How many waited then, for the message."""
    own_share: bool = False
    """The queue is full, and its project has more of it than others: it is its own doing."""


Effect = Dispatch | Refuse


class QueueMisuse(ValueError):
    """The shell told of something that cannot be: a fault of ours, never of a client."""


# -- state -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    asked: Arrived
    number: int
    arrived_s: float
    due_s: float
    """Its deadline, bounded by patience: what EDF sorts by."""
    level: int
    """Its class now; it moves up with age."""

    @property
    def key(self) -> tuple[float, int]:
        return (self.due_s, self.number)


class _Running(msgspec.Struct, frozen=True, gc=False):
    asked: Arrived
    dispatched_s: float
    charged: float


class _Level:
    """One class: its projects' requests, each in the order of their deadlines."""

    __slots__ = ("ages", "projects")

    def __init__(self) -> None:
        self.projects: dict[str, list[tuple[float, int, _Waiting]]] = {}
        self.ages: deque[tuple[float, _Waiting]] = deque()
        """When each came into this class. Those that went on are skipped when their turn comes."""

    def add(self, waiting: _Waiting) -> None:
        insort(self.projects.setdefault(waiting.asked.project, []), (*waiting.key, waiting))

    def remove(self, waiting: _Waiting) -> None:
        project = waiting.asked.project
        queue = self.projects[project]
        del queue[bisect_left(queue, waiting.key, key=lambda item: item[:2])]
        if not queue:
            del self.projects[project]


class RequestQueue:
    """The queue of one model. `now` is monotonic, in seconds."""

    def __init__(self, settings: QueueSettings | None = None, capacity: int | None = None) -> None:
        self._settings = settings or QueueSettings()
        self._capacity = capacity
        self._levels = [_Level() for _ in range(self._settings.classes)]
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, _Running] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._waiting_bytes = 0
        self._arrivals = 0
        self._used: dict[str, float] = {}
        """The virtual token counter of each project; of those that are idle, only while it is above the least."""
        self._active: dict[str, int] = {}
        """How many requests of each project wait or run."""
        self._duration_s: float | None = None
        self._now_s = 0.0

    # -- views ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def duration_s(self) -> float | None:
        """How long requests take here, from dispatch to end; None = none has ended yet."""
        return self._duration_s

    @property
    def capacity(self) -> int | None:
        return self._capacity

    def apply(self, settings: QueueSettings) -> None:
        """Other settings from now on; the number of classes stays. Who waits is not put off by them."""
        self._settings = replace(settings, classes=self._settings.classes)

    def runs(self, request: str) -> bool:
        """Whether it has been dispatched and not ended."""
        return request in self._running

    @property
    def next_wake_s(self) -> float | None:
        """When the next `Tick` is due; None = not before another event."""
        return self._deadlines[0][0] if self._deadlines else None

    def wait_s(self, asked: Arrived, now: float) -> float | None:
        """How long a request that arrives now would wait; None = not known yet. Before it go all of higher classes,
        those of its own project that must begin earlier, and of each other project in its class as many as it takes
        to have used as much; as if all requests of a project cost the same."""
        if self._room > 0 and not self._waiting:
            return 0.0
        self._now_s = now
        level, due_s = self._level_of(asked), self._due_s(asked, now)
        projects = self._levels[level].projects
        before = bisect_right(projects.get(asked.project, ()), due_s, key=lambda item: item[0])
        use_then = self._start(asked.project) + before * _cost(asked)
        for project, queue in projects.items():
            if project != asked.project and self._used[project] <= use_then:
                before += min(len(queue), int((use_then - self._used[project]) / _cost(queue[0][2].asked)) + 1)
        for higher in self._levels[:level]:
            before += sum([len(queue) for queue in higher.projects.values()])
        return self._time_for(before + 1)

    def _time_for(self, turns: int) -> float | None:
        """Until so many have been dispatched: each that runs now ends when it has taken the usual time, and the next
        one in its place takes that time again."""
        turns -= max(0, self._room)
        if turns <= 0:
            return 0.0
        if self._duration_s is None or not self._capacity or not self._running:
            return None
        too_many = max(0, -self._room)  # The capacity has shrunk: so many end without making a place.
        rounds, place = divmod(turns - 1, len(self._running) - too_many)
        # In the order in which they were dispatched, so in the order in which they should end.
        next_to_end = next(islice(self._running.values(), too_many + place, None))
        return max(0.0, next_to_end.dispatched_s + self._duration_s - self._now_s) + rounds * self._duration_s

    @property
    def _room(self) -> int:
        return 1 << 30 if self._capacity is None else self._capacity - len(self._running)

    # -- events --------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done now, in this order. Raises QueueMisuse."""
        effects: list[Effect] = []
        self._now_s = now
        if not self._waiting and isinstance(event, Ended):
            self._end(event, now)
            return effects
        self._expire(now, effects)
        match event:
            case Arrived():
                self._arrive(event, now, effects)
            case Cancelled(request):
                if waiting := self._waiting.get(request):
                    self._take_out(waiting)
                    self._part(waiting.asked.project)
            case Ended():
                self._end(event, now)
            case Capacity(requests):
                self._capacity = None if requests is None else max(0, requests)
            case Closed(retry_after_s, arrived_before_s):
                for waiting in [one for one in self._waiting.values() if one.arrived_s < arrived_before_s]:
                    self._refuse(waiting, Refusal.CLOSED, retry_after_s, now, effects)
            case Tick():
                pass
        self._age(now)
        self._dispatch(now, effects)
        return effects

    def go(self, asked: Arrived, now: float) -> bool:
        """Takes a request for which there is room and before which nobody waits, as `handle` would dispatch it;
        False: it has to be handled. The path of nearly all requests, at a fifth of the cost."""
        if self._waiting or asked.begin_by_s < now or self._room <= 0 or asked.request in self._running:
            return False
        self._join(asked.project)
        self._run(asked, now)
        return True

    def _run(self, asked: Arrived, now: float) -> None:
        charged = _cost(asked)
        self._used[asked.project] += charged
        self._running[asked.request] = _Running(asked, now, charged)

    def _arrive(self, asked: Arrived, now: float, effects: list[Effect]) -> None:
        if asked.request in self._waiting or asked.request in self._running:
            raise QueueMisuse(f"request {asked.request!r} has arrived already")
        self._arrivals += 1
        waiting = _Waiting(asked, self._arrivals, now, self._due_s(asked, now), self._level_of(asked))
        self._join(asked.project)
        wait_s = self.wait_s(asked, now)
        now_or_never = asked.begin_by_s <= now
        if (now_or_never and wait_s != 0.0) or now + (wait_s or 0.0) > asked.begin_by_s:
            # When what stands before it now is gone but for as much as its deadline leaves time for.
            too_long_s = max(0.0, (wait_s or 0.0) - max(0.0, asked.begin_by_s - now))
            self._put_off(waiting, Refusal.TOO_LATE, too_long_s, now, effects)
        elif wait_s == 0.0 or self._make_place(waiting, now, effects):
            self._put_in(waiting, now)
        else:
            own_share = self._holds_most(asked.project)
            self._put_off(waiting, Refusal.QUEUE_FULL, self._time_for(1), now, effects, own_share)

    def _make_place(self, newcomer: _Waiting, now: float, effects: list[Effect]) -> bool:
        """Whether there is a place for `newcomer`; others are only put off when that makes one."""
        victims = self._victims(newcomer)
        if victims is None:
            return False
        for victim in victims:
            own_share = victim.level == newcomer.level
            self._refuse(victim, Refusal.DISPLACED, self._time_for(self.waiting), now, effects, own_share)
        return True

    def _victims(self, newcomer: _Waiting) -> list[_Waiting] | None:
        """Who has to go: the last ones of the lowest class, of the project that holds most there; None = it is not to
        be."""
        entries = self.waiting + 1 - self._settings.entries_max
        size = self._waiting_bytes + newcomer.asked.body_bytes - self._settings.bytes_max
        victims: list[_Waiting] = []
        for number in range(len(self._levels) - 1, newcomer.level - 1, -1):
            queues = self._levels[number].projects
            held = {project: len(queue) for project, queue in queues.items()}
            while entries > 0 or size > 0:
                most = max(held, key=lambda project: (held[project], project), default="")
                least = held.get(newcomer.asked.project, 0) + 1 if number == newcomer.level else 0
                if not held or held[most] <= least:
                    break
                held[most] -= 1
                victims.append(queues[most][held[most]][2])
                entries -= 1
                size -= victims[-1].asked.body_bytes
        return None if entries > 0 or size > 0 else victims

    def _end(self, ended: Ended, now: float) -> None:
        running = self._running.pop(ended.request, None)
        if running is None:
            raise QueueMisuse(f"request {ended.request!r} ends and was not dispatched")
        asked = running.asked
        prompt = asked.prompt_tokens if ended.prompt_tokens is None else ended.prompt_tokens
        output = asked.output_tokens if ended.output_tokens is None else ended.output_tokens
        self._used[asked.project] += _tokens_cost(prompt, output, asked.weight) - running.charged
        self._part(asked.project)
        if ended.served:
            took_s = now - running.dispatched_s
            before_s = took_s if self._duration_s is None else self._duration_s
            self._duration_s = before_s + DURATION_SAMPLE * (took_s - before_s)

    def _expire(self, now: float, effects: list[Effect]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            waiting = self._waiting[self._deadlines[0][2]]
            self._refuse(waiting, Refusal.DEADLINE_PASSED, self._time_for(self.waiting), now, effects)

    def _age(self, now: float) -> None:
        for number in range(1, len(self._levels)):
            ages = self._levels[number].ages
            while ages and (self._is_gone(ages[0][1], number) or now - ages[0][0] >= self._settings.ageing_s):
                _, waiting = ages.popleft()
                if not self._is_gone(waiting, number):
                    self._levels[number].remove(waiting)
                    waiting.level = number - 1
                    self._add(waiting, now)

    def _add(self, waiting: _Waiting, now: float) -> None:
        level = self._levels[waiting.level]
        level.add(waiting)
        if waiting.level > 0:
            level.ages.append((now, waiting))

    def _is_gone(self, waiting: _Waiting, level: int) -> bool:
        return waiting.level != level or self._waiting.get(waiting.asked.request) is not waiting

    def _dispatch(self, now: float, effects: list[Effect]) -> None:
        while self._waiting and self._room > 0:
            level = next(level for level in self._levels if level.projects)
            project = min(level.projects, key=lambda name: (self._used[name], level.projects[name][0][1]))
            waiting = level.projects[project][0][2]
            self._take_out(waiting)
            self._run(waiting.asked, now)
            effects.append(Dispatch(waiting.asked.request, now - waiting.arrived_s))

    # -- in and out ----------------------------------------------------------------------------------------------

    def _put_in(self, waiting: _Waiting, now: float) -> None:
        asked = waiting.asked
        self._waiting[asked.request] = waiting
        self._waiting_bytes += asked.body_bytes
        self._add(waiting, now)
        if asked.begin_by_s < math.inf:
            insort(self._deadlines, (asked.begin_by_s, waiting.number, asked.request))

    def _take_out(self, waiting: _Waiting) -> None:
        asked = waiting.asked
        del self._waiting[asked.request]
        self._waiting_bytes -= asked.body_bytes
        self._levels[waiting.level].remove(waiting)
        if asked.begin_by_s < math.inf:
            del self._deadlines[bisect_left(self._deadlines, (asked.begin_by_s, waiting.number, asked.request))]

    def _refuse(
        self,
        waiting: _Waiting,
        why: Refusal,
        retry_after_s: float | None,
        now: float,
        effects: list[Effect],
        own_share: bool = False,
    ) -> None:
        self._take_out(waiting)
        self._put_off(waiting, why, retry_after_s, now, effects, own_share)

    def _put_off(
        self,
        waiting: _Waiting,
        why: Refusal,
        retry_after_s: float | None,
        now: float,
        effects: list[Effect],
        own_share: bool = False,
    ) -> None:
        self._part(waiting.asked.project)
        after_s = RETRY_AFTER_MIN_S if retry_after_s is None else retry_after_s
        bounded_s = min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, float(math.ceil(after_s))))
        effects.append(Refuse(waiting.asked.request, why, bounded_s, now - waiting.arrived_s, self.waiting, own_share))

    def _holds_most(self, project: str) -> bool:
        """Others wait, too, and none has more places."""
        held: dict[str, int] = {}
        for level in self._levels:
            for name, queue in level.projects.items():
                held[name] = held.get(name, 0) + len(queue)
        return len(held) > 1 and held.get(project, 0) == max(held.values())

    def _join(self, project: str) -> None:
        """One more of `project`. When it had none, it starts where the least used of the others is: what it did not
        use, it does not save up."""
        self._used[project] = self._start(project)
        self._active[project] = self._active.get(project, 0) + 1

    def _start(self, project: str) -> float:
        """What `project` counts as having used, should one more request of it come now."""
        used = self._used.get(project, 0.0)
        if project in self._active:
            return used
        return max(used, min((self._used[name] for name in self._active), default=0.0))

    def _part(self, project: str) -> None:
        self._active[project] -= 1
        if self._active[project]:
            return
        del self._active[project]
        if not self._active:
            self._used.clear()  # Nobody is there who would be owed anything.
            return
        least = min(self._used[name] for name in self._active)
        for name in [name for name, used in self._used.items() if used <= least and name not in self._active]:
            del self._used[name]

    def _due_s(self, asked: Arrived, now: float) -> float:
        return min(asked.begin_by_s, now + self._settings.patience_s)

    def _level_of(self, asked: Arrived) -> int:
        return min(max(0, asked.priority), len(self._levels) - 1)


def _cost(asked: Arrived) -> float:
    return _tokens_cost(asked.prompt_tokens, asked.output_tokens, asked.weight)


def _tokens_cost(prompt_tokens: int, output_tokens: int, weight: float) -> float:
    """At least one token, so that requests whose size nobody knows take turns, too."""
    return max(1.0, INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens) / max(1e-6, weight)


def dispatched(effects: Iterable[Effect]) -> list[str]:
    """The requests that may go, in their order."""
    return [effect.request for effect in effects if isinstance(effect, Dispatch)]
