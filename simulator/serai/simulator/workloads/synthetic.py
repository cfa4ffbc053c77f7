"""Made-up traffic: a process of arrivals, a distribution of lengths, and who shares which prefix."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from serai.runtime.fields import BadInput
from serai.simulator.workloads.lengths import Lengths, fitted
from serai.simulator.workloads.prefixes import Clients, Popularity, Sessions, SystemPrompts, chained
from serai.simulator.workloads.processes import NS, Course, Gaps, arrival_times_ns
from serai.simulator.workloads.workload import Arrival, Workload


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that makes a synthetic workload, but for its seed. `lengths` are the user's own tokens of a turn and the
    answer's; a system prompt and a session's history come on top."""

    gaps: Gaps
    course: Course
    lengths: Lengths
    model: str = ""
    context_tokens: int | None = None
    system_prompts: SystemPrompts | None = None
    sessions: Sessions | None = None
    clients: Clients | None = None

    def __post_init__(self) -> None:
        if self.context_tokens is None:
            return
        least = 2 if self.system_prompts is None else 2 + self.system_prompts.tokens
        if self.context_tokens < least:
            raise BadInput("context_tokens", f"is {self.context_tokens}", f"give at least {least}")


def synthetic(name: str, description: str, traffic: Traffic, seed: int) -> Workload:
    """`traffic` as a workload; the same for the same seed."""
    return Workload(name, description, lambda: _Maker(traffic, seed).arrivals())


@dataclass(slots=True)
class _Talk:
    """A session while it lasts. A request without sessions is a talk of one turn that nobody shares."""

    lineage: int | None
    system: int | None
    client: str
    turns_left: int
    history_tokens: int = 0


class _Maker:
    """One reading of the workload. Each kind of choice has its own stream of random numbers, so that a change of one
    (say, the lengths) leaves the others as they were."""

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self._traffic = traffic
        self._seed = seed
        self._lengths = Random(f"{seed}/lengths")
        self._talks = Random(f"{seed}/sessions")
        self._who = Random(f"{seed}/clients")
        prompts, clients = traffic.system_prompts, traffic.clients
        self._system = None if prompts is None else Popularity(prompts.number, prompts.zipf)
        self._clients = None if clients is None else Popularity(clients.number, clients.zipf)
        self._lineages = count(0 if prompts is None else prompts.number)

    def arrivals(self) -> Iterator[Arrival]:
        sessions = self._traffic.sessions
        if sessions is None:
            times = arrival_times_ns(self._traffic.gaps, self._traffic.course, self._seed)
            return (self._turn(at_ns, self._begin(1)) for at_ns in times)
        return self._turns(sessions)

    def _turns(self, sessions: Sessions) -> Iterator[Arrival]:
        """Turns of all sessions in order of time, until the last session has begun."""
        traffic = self._traffic
        waiting: list[tuple[int, int, _Talk]] = []
        number = count()
        begins = arrival_times_ns(traffic.gaps, traffic.course, self._seed, thinned=sessions.turns_mean)
        for begin_ns in begins:
            heapq.heappush(waiting, (begin_ns, next(number), self._begin(self._turns_of(sessions))))
            while waiting and waiting[0][0] <= begin_ns:
                at_ns, _, talk = heapq.heappop(waiting)
                yield self._turn(at_ns, talk)
                if talk.turns_left:
                    gap_ns = round(-math.log(1.0 - self._talks.random()) * sessions.gap_s_mean * NS)
                    heapq.heappush(waiting, (at_ns + gap_ns, next(number), talk))

    def _turns_of(self, sessions: Sessions) -> int:
        drawn = self._talks.random()
        if sessions.turns_mean == 1:
            return 1
        return 1 + int(math.log(1.0 - drawn) / math.log(1.0 - 1.0 / sessions.turns_mean))

    def _begin(self, turns: int) -> _Talk:
        return _Talk(
            lineage=None if self._traffic.sessions is None else next(self._lineages),
            system=None if self._system is None else self._system.draw(self._who),
            client="" if self._clients is None else f"client-{self._clients.draw(self._who)}",
            turns_left=turns,
        )

    def _turn(self, at_ns: int, talk: _Talk) -> Arrival:
        traffic = self._traffic
        said, output = traffic.lengths.draw(self._lengths)
        system_tokens = 0 if traffic.system_prompts is None else traffic.system_prompts.tokens
        context = traffic.context_tokens
        if context is not None:
            said, output = fitted(said, output, context - system_tokens)
            if system_tokens + talk.history_tokens + said + output > context:
                # The conversation has filled the context: its client begins a new one.
                talk.history_tokens, talk.lineage = 0, None if talk.lineage is None else next(self._lineages)
        prompt = system_tokens + talk.history_tokens + said
        keys = chained(talk.system, system_tokens, talk.lineage, prompt)
        talk.history_tokens += said + output
        talk.turns_left -= 1
        return Arrival(at_ns, prompt, output, keys, traffic.model, talk.client)
