"""KV through an object store, put and got by engines that do nothing else meanwhile (`kv_connectors.ObjectStore`).

One `StoreTraffic` works for all instances of a cluster: it holds an engine while its objects are on their way, one
request after the other, and says when they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from serai.simulator.fast.instance import Instance
from serai.simulator.fast.kv_connectors import ObjectStore, segment
from serai.simulator.fast.links import Links
from serai.simulator.fast.run import NS

HELD = 2**62
"""An instance held until it is let go."""


class Parcel(NamedTuple):
    """One request's KV."""

    number: int
    prompt_tokens: int
    owner: Any
    """Whatever the caller wants to find again."""


class Clock(Protocol):
    """The cluster's events."""

    now_ns: int

    def at(self, at_ns: int, action: Callable[[Any], None], subject: Any) -> None:
        """Call `action(subject)` at a time."""
        ...


Done = Callable[[Instance, Sequence[Parcel]], None]


class _Errand:
    """What one instance is busy with: parcels, one after the other."""

    __slots__ = ("done", "instance", "is_put", "object_bytes", "parcels", "place", "store")

    def __init__(
        self, instance: Instance, store: ObjectStore, parcels: Sequence[Parcel], done: Done, *, is_put: bool
    ) -> None:
        self.instance = instance
        self.store = store
        self.parcels = parcels
        self.done = done
        self.is_put = is_put
        self.place = 0
        self.object_bytes = 0.0


class StoreTraffic:
    """Puts and gets of all instances. `instances` may grow; segments are where they are when an object is put."""

    def __init__(self, links: Links, instances: Sequence[Instance], clock: Clock) -> None:
        self._links = links
        self._clock = clock
        # Segments are mounted once, by each rank of each instance, before there are requests.
        self._nodes = [
            instance.spec.node
            for instance in instances
            if isinstance(instance.spec.connector, ObjectStore)
            for _ in range(instance.spec.connector.ranks)
        ]

    def put(self, instance: Instance, parcels: Sequence[Parcel], done: Done) -> None:
        """Hold `instance` until all `parcels` are in the store."""
        self._begin(instance, parcels, done, is_put=True)

    def get(self, instance: Instance, parcels: Sequence[Parcel], done: Done) -> None:
        """Hold `instance` until all `parcels` have come out of the store, and the step that got them has ended."""
        self._begin(instance, parcels, done, is_put=False)

    def _begin(self, instance: Instance, parcels: Sequence[Parcel], done: Done, *, is_put: bool) -> None:
        store = instance.spec.connector
        assert isinstance(store, ObjectStore)
        instance.held_until_ns = HELD
        self._next(_Errand(instance, store, parcels, done, is_put=is_put))

    def _next(self, errand: _Errand) -> None:
        now_ns = self._clock.now_ns
        if errand.place == len(errand.parcels):
            ends_ns = now_ns if errand.is_put else now_ns + round(errand.store.step_s * NS)
            self._clock.at(ends_ns, self._end, errand)
            return
        spec, store = errand.instance.spec, errand.store
        errand.object_bytes = store.object_bytes(
            errand.parcels[errand.place].prompt_tokens, spec.model.kv_bytes_per_token()
        )
        if errand.is_put:
            self._clock.at(now_ns + round(store.save_s(errand.object_bytes) * NS), self._saved, errand)
        else:
            loaded_ns = self._carried_ns(errand) + round(store.load_s(errand.object_bytes) * NS)
            self._clock.at(loaded_ns, self._moved, errand)

    def _saved(self, errand: _Errand) -> None:
        self._clock.at(self._carried_ns(errand), self._moved, errand)

    def _moved(self, errand: _Errand) -> None:
        errand.place += 1
        self._next(errand)

    def _carried_ns(self, errand: _Errand) -> int:
        """When the last rank's object will have crossed the network, if it must."""
        here, there_ns = errand.instance.spec.node, self._clock.now_ns
        number = errand.parcels[errand.place].number
        for rank in range(errand.store.ranks):
            node = self._nodes[segment(number, rank, len(self._nodes))]
            if node != here:
                ends = (here, node) if errand.is_put else (node, here)
                there_ns = max(there_ns, self._links.send(*ends, errand.object_bytes, self._clock.now_ns))
        return there_ns

    def _end(self, errand: _Errand) -> None:
        errand.instance.held_until_ns = self._clock.now_ns
        errand.done(errand.instance, errand.parcels)
