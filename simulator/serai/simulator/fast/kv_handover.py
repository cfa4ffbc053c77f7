"""KV on its way from prefill instances to decode instances: who waits, for what, and who is held meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serai.engine_emulator.batching.sequence import Place
from serai.engine_emulator.batching.sequence import Sequence as EngineSequence
from serai.simulator.fast.dispatch import BadDispatch, Ended, Event, Prefilled, Transfer
from serai.simulator.fast.instance import Instance, Role
from serai.simulator.fast.kv_connectors import ObjectStore, received_together
from serai.simulator.fast.life import Life
from serai.simulator.fast.links import Lane, Links, Network
from serai.simulator.fast.run import NS
from serai.simulator.fast.store_traffic import Parcel, StoreTraffic
from serai.simulator.workloads.workload import Arrival


class Host(Protocol):
    """The cluster, as far as KV concerns it."""

    now_ns: int
    lives: list[Life]
    """By a request's number."""
    instances: list[Instance]
    """By number."""
    touched: list[Instance]
    """Who may be able to begin a step at the next `wake`."""

    def at(self, at_ns: int, action: Callable[[Any], None], subject: Any) -> None:
        """Call `action(subject)` at a time."""
        ...

    def tell(self, event: Event) -> None:
        """To the policy."""
        ...

    def wake(self) -> None:
        """Begin a step wherever something has changed and none runs."""
        ...


class KvHandOver:
    """All KV of a cluster with `network`; its instances' connectors say how."""

    def __init__(self, host: Host, network: Network, *, copies_between_steps: bool) -> None:
        self._host = host
        self._links = Links(network)
        self._store = StoreTraffic(self._links, host.instances, host)
        self._copies_between_steps = copies_between_steps

    @property
    def lanes(self) -> dict[tuple[str, int], Lane]:
        """What each link has carried."""
        return self._links.lanes

    def expect(self, transfer: Transfer) -> None:
        """The policy has chosen where to. Raises BadDispatch where there is nothing to move, or nobody to take it."""
        life = self._host.lives[transfer.number]
        if life.kept is None:
            raise BadDispatch(f"{transfer}: no prefill instance holds its KV")
        instance = self._host.instances[transfer.instance]
        if instance.spec.role is not Role.DECODE:
            raise BadDispatch(f"{transfer}: that instance does not decode for others")
        source = life.instance
        room = instance.room_for(life.arrival.prompt_tokens)
        if room > instance.engine.kv_tokens_total or not _fits_alone(instance, life.arrival):
            self._give_up(life, source, instance)
            return
        instance.expected.append((transfer.number, source))
        self._start(instance)

    def _give_up(self, life: Life, source: int, instance: Instance) -> None:
        """Its KV can never be held where it should go."""
        assert life.kept is not None
        prefill = self._host.instances[source]
        prefill.engine.release(life.kept)
        self._host.touched.append(prefill)
        life.kept, life.refused = None, True
        self._host.tell(Ended(life.request, instance.number, False))

    def _start(self, instance: Instance) -> None:
        """Let KV come while there is room, in the order in which it was asked for."""
        connector = instance.spec.connector
        if isinstance(connector, ObjectStore):
            self._receive(instance)
            return
        between_steps = self._copies_between_steps or connector is not None
        if between_steps and instance.engine.step is not None:
            return  # once it has ended
        while instance.expected:
            if connector is not None and not connector.accepts(
                instance.reserved_tokens, instance.engine.kv_tokens_total
            ):
                return
            number, source = instance.expected[0]
            life = self._host.lives[number]
            room = instance.room_for(life.arrival.prompt_tokens)
            if room > instance.engine.kv_tokens_free - instance.reserved_tokens:
                return
            instance.expected.popleft()
            instance.reserved_tokens += room
            prefill = self._host.instances[source]
            message_bytes = life.arrival.prompt_tokens * prefill.spec.model.kv_bytes_per_token()
            there_ns = self._links.send(prefill.spec.node, instance.spec.node, message_bytes, self._host.now_ns)
            life.instance = instance.number
            if between_steps:
                instance.held_until_ns = there_ns
            self._host.at(there_ns, self._transferred, (life, prefill))

    def _transferred(self, subject: tuple[Life, Instance]) -> None:
        life, prefill = subject
        assert life.kept is not None
        prefill.engine.release(life.kept)
        life.kept = None
        instance = self._host.instances[life.instance]
        self._arrived_whole(life, instance)
        self._host.touched += [prefill, instance]
        self._host.wake()

    def _arrived_whole(self, life: Life, instance: Instance) -> None:
        sequence = EngineSequence(
            life.request.number,
            life.arrival.prompt_tokens,
            life.arrival.output_tokens,
            prefilled=True,
            owner=life,
        )
        instance.engine.submit(sequence, self._host.now_ns / NS)
        instance.arriving.append(sequence)

    def step_ended(self, instance: Instance) -> None:
        """Of a prefill or decode instance: what it could not do meanwhile."""
        if instance.expected:
            self._start(instance)
        if instance.to_put:
            self._put(instance)

    def _put(self, instance: Instance) -> None:
        """What the step has computed goes to the store before anything else happens there."""
        parcels = [_parcel(sequence.owner) for sequence in instance.to_put]
        instance.to_put.clear()
        self._store.put(instance, parcels, self._put_done)

    def _put_done(self, instance: Instance, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            life: Life = parcel.owner
            assert life.kept is not None
            instance.engine.release(life.kept)
            self._host.tell(Prefilled(life.request, instance.number))
        self._host.touched.append(instance)
        self._host.wake()

    def _receive(self, instance: Instance) -> None:
        """A step that gets the KV of those whose turn it is, before any that decodes (vLLM V0: prompts first)."""
        engine = instance.engine
        if engine.step is not None or instance.held_until_ns > self._host.now_ns:
            return  # once that has ended
        lives = [self._host.lives[number] for number, _ in instance.expected]
        count = received_together(
            [life.arrival.prompt_tokens for life in lives],
            step_tokens_max=instance.spec.settings.step_tokens_max,
            slots=instance.spec.settings.sequences_max - engine.running - len(instance.arriving),
            room_tokens=engine.kv_tokens_free - instance.reserved_tokens,
            room_for=instance.room_for,
        )
        if not count:
            return
        for life in lives[:count]:
            instance.expected.popleft()
            instance.reserved_tokens += instance.room_for(life.arrival.prompt_tokens)
            instance.coming.add(life.request.number)
            life.instance = instance.number
        self._store.get(instance, [_parcel(life) for life in lives[:count]], self._received)

    def _received(self, instance: Instance, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            life: Life = parcel.owner
            instance.coming.discard(parcel.number)
            life.kept = None
            # The client hears its first token from here: what the prefill instance said, nobody passed on.
            life.first_ns = life.spoke_ns = self._host.now_ns
            self._arrived_whole(life, instance)
        self._start(instance)
        self._host.touched.append(instance)
        self._host.wake()

    def admitted(self, instance: Instance) -> None:
        """Room that was promised is in use once the engine has taken its sequence in."""
        still = []
        for sequence in instance.arriving:
            if sequence.place is Place.ARRIVED:
                still.append(sequence)
            else:
                instance.reserved_tokens -= instance.room_for(sequence.prompt_tokens)
        instance.arriving = still


def _parcel(life: Life) -> Parcel:
    return Parcel(life.request.number, life.arrival.prompt_tokens, life)


def _fits_alone(instance: Instance, arrival: Arrival) -> bool:
    return arrival.prompt_tokens + arrival.output_tokens - 1 <= instance.engine.kv_tokens_total
