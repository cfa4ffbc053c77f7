"""The ingress's own routing policies (`serai.ingress.routing`) behind the dispatch seam: the code that serves, not a
copy of it.

As in production, a router counts its own requests exactly and others' by what instances report. With `queue_limit`
(the agents' `concurrency_max`) an instance gets no more than that; who finds all full waits here, first come, first
served. Without, everything goes straight to an engine, which queues by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord
from serai.ingress.routing import POLICIES, Ask, Candidate, Policy
from serai.simulator.fast.dispatch import Arrived, Effect, Ended, Event, Joined, Request, Send, StepEnded


class UnknownPolicy(ValueError):
    """No routing policy of that name; the text names those there are."""


def routing_policy(name: str) -> Callable[[], Policy]:
    """What makes the ingress's policy `name`. Raises UnknownPolicy."""
    found = POLICIES.get(name)
    if found is None:
        raise UnknownPolicy(f"no routing policy {name!r}: use one of {', '.join(POLICIES)}")
    return found


class Routed:
    """`routers` ingresses in front of instances, each with a policy and counts of its own. Requests come to them in
    turn."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        instances: Sequence[int],
        *,
        models: Sequence[str] = (),
        queue_limit: int | None = None,
        routers: int = 1,
    ) -> None:
        names = models or [""] * len(instances)
        records = [_record(instance, model) for instance, model in zip(instances, names, strict=True)]
        self._routers = [_Router(policy(), records, queue_limit) for _ in range(routers)]
        self._instances = list(instances)
        self._routed: dict[int, _Router] = {}
        # One router's own count is exact, so reports only matter to several.
        self.watches_steps = routers > 1

    def handle(self, event: Event, now_ns: int) -> Iterable[Effect]:
        """A `Send` where a request finds room."""
        match event:
            case Arrived(request):
                router = self._routers[request.number % len(self._routers)]
                self._routed[request.number] = router
                return router.arrived(request)
            case Ended(request, instance, whole):
                return self._routed.pop(request.number).ended(instance, whole=whole)
            case Joined(instance):
                return [effect for router in self._routers for effect in router.joined(_record(instance, ""))]
            case StepEnded():
                for router in self._routers:
                    router.report(event.instance, event.running + event.waiting)
        return ()

    @property
    def pending(self) -> int:
        """Requests that wait in the routers."""
        return sum(len(router.waiting) for router in self._routers)


class _Router:
    """One ingress."""

    def __init__(self, policy: Policy, records: Sequence[SessionRecord], queue_limit: int | None) -> None:
        self.waiting: deque[Request] = deque()
        self._policy = policy
        self._limit = queue_limit
        self._places = {_instance(record): place for place, record in enumerate(records)}
        self._candidates = [Candidate(record, 0, 0) for record in records]

    def arrived(self, request: Request) -> Iterable[Effect]:
        if not self.waiting and (candidates := self._open_to(request)):
            return (self._send(request, candidates),)
        self.waiting.append(request)
        return ()

    def joined(self, record: SessionRecord) -> Iterable[Effect]:
        """One that serves whatever is asked for."""
        if _instance(record) not in self._places:
            self._places[_instance(record)] = len(self._candidates)
            self._candidates.append(Candidate(record, 0, 0))
        return self._sent_from_queue()

    def ended(self, instance: int, *, whole: bool) -> Iterable[Effect]:
        place = self._places[instance]
        self._policy.on_request_end(self._candidates[place].record.session, whole=whole)
        self._count(place, -1)
        return self._sent_from_queue()

    def _sent_from_queue(self) -> list[Effect]:
        sent: list[Effect] = []
        while self.waiting and (candidates := self._open_to(self.waiting[0])):
            sent.append(self._send(self.waiting.popleft(), candidates))
        return sent

    def report(self, instance: int, in_flight: int) -> None:
        place = self._places.get(instance)
        if place is not None and self._candidates[place].reported_in_flight != in_flight:
            self._candidates[place] = replace(self._candidates[place], reported_in_flight=in_flight)

    def _open_to(self, request: Request) -> Sequence[Candidate]:
        found: Sequence[Candidate] = self._candidates
        if request.model:
            found = [c for c in found if c.record.metadata.model in (request.model, "")]
        if self._limit is not None:
            found = [candidate for candidate in found if candidate.own_in_flight < self._limit]
        return found

    def _send(self, request: Request, candidates: Sequence[Candidate]) -> Send:
        chosen = self._policy.pick(Ask(request.model), candidates)
        instance = _instance(chosen.record)
        self._policy.on_request_start(chosen.record.session)
        self._count(self._places[instance], 1)
        return Send(request.number, instance)

    def _count(self, place: int, change: int) -> None:
        candidate = self._candidates[place]
        self._candidates[place] = Candidate(
            candidate.record, candidate.own_in_flight + change, candidate.reported_in_flight
        )


def _record(instance: int, model: str) -> SessionRecord:
    """An instance as the registry would describe it. Session ids sort like instance numbers, as candidates must."""
    metadata = SessionMetadata(model, model, "emulated", allocation=str(instance))
    return SessionRecord(f"instance-{instance:05d}", Lifecycle.SERVING, 1, metadata)


def _instance(record: SessionRecord) -> int:
    return int(record.metadata.allocation)
