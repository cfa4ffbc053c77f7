"""A simulated NATS: `SimulatedNats` is a server, `SimulatedBus` a connection to it that services take for the real one.

Kept of NATS: at most once; order within a connection; messages on their way are lost with the connection; interest by
subject and wildcard; the server's word that nobody listens; the payload limit; reconnects with the real client's
pauses, and its callbacks; a server that stops, with or without its KV; connections that die, are cut off and noticed
late (`partition`), or whose process stops reading (`stall`); a KV that acknowledges and loses, goes blind or vanishes.
Servers of several sites are joined by `link`, as leaf nodes are, in a tree.
Left out: permissions, queue groups (nobody uses them), streams other than KV, and the server's own limits on rates.
The same expectations are tested against this and against a real server (tests/simulation/test_whole_bus.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog

from serai.runtime.bus import (
    BUCKET_TIMEOUT_S,
    BucketState,
    BusDisconnected,
    BusError,
    Handler,
    Loss,
    LossReason,
    Message,
    MessageTooLarge,
    NoResponders,
    RequestTimeout,
    Subscription,
)
from serai.runtime.reconnect_curve import SPAN_FEW_S, SPAN_MANY_S, span_s, wait_s
from serai.simulator.whole.links import LAN, WAN, Delay, Lane, Stress
from serai.simulator.whole.virtual_loop import VirtualLoop

log = structlog.get_logger()

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
PENDING_BYTES_MAX = 64 * 1024 * 1024
"""Of one connection, at the server: what does not read for so long is cut off (`max_pending`)."""
PING_EVERY_S = 10.0
PINGS_OUTSTANDING = 2
"""As `runtime.nats_bus` sets them: after the third unanswered ping the client gives the connection up."""
REMEMBERED_SUBJECTS = 100_000
"""Of each side of a link: whether the far side wants them."""
SERVER_STALE_S = 240.0
"""A server drops a connection that answers no pings after so long (2 minutes, twice)."""


@dataclass(slots=True)
class KvFaults:
    """How the KV of one server lies."""

    lose_acknowledged: float = 0.0
    """Share of writes that are acknowledged and not kept."""
    refuse: bool = False
    """Every operation fails."""
    blind: bool = False
    """Reads find nothing, as from a replica that lags."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A message that is published by, or delivered to, one connection: what observers see."""

    at_s: float
    connection: str
    subject: str
    data: bytes
    reply: str
    delivered: bool
    """False: it is just being published."""


Observer = Callable[[Passage], None]


class _Interest:
    """One subscription, as its client keeps it."""

    __slots__ = ("handler", "subject")

    def __init__(self, subject: str, handler: Handler) -> None:
        self.subject = subject
        self.handler: Handler | None = handler


class _Registration:
    """One subscription, as its server keeps it: of one connection. After a reconnect the old one may linger."""

    __slots__ = ("interest", "session", "subject")

    def __init__(self, interest: _Interest, session: _Session) -> None:
        self.interest = interest
        self.session = session
        self.subject = interest.subject


class _Session:
    """One TCP connection between a bus and its server: two lanes, and the server's list of interests."""

    def __init__(self, bus: SimulatedBus, delay: Delay) -> None:
        server, loop = bus.server, bus.server.loop
        self.bus = bus
        self.up: Lane[tuple[Any, ...]] = Lane(loop, delay, bus.chance, self._at_server, bus.context)
        self.down: Lane[tuple[Any, ...]] = Lane(loop, delay, bus.chance, self._at_client, bus.context)
        for lane, kind in ((self.up, "PUB"), (self.down, "MSG")):
            lane.stress = server.stress
            lane.stressed = lambda item, kind=kind: item[0] == kind  # type: ignore[misc]
        self.registered: dict[_Interest, _Registration] = {}
        self.server = server
        self.alive = True

    def _at_server(self, command: tuple[Any, ...]) -> None:
        match command:
            case ("PUB", subject, data, reply):
                self.server._publish(self, subject, data, reply)
            case ("SUB", interest):
                made = self.registered[interest] = _Registration(interest, self)
                self.server._interests.add(made)
                self.server._interest.epoch += 1
            case ("UNSUB", interest):
                if known := self.registered.pop(interest, None):
                    self.server._interests.remove(known)
                    self.server._interest.epoch += 1
            case ("CALL", work, done):
                self._answer(work, done)
            case ("CLOSE",):
                self.server._drop(self)

    def _answer(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        try:
            result: Any = work()
        except BusError as error:
            result = error
        self.down.send(("DONE", done, result))

    def _at_client(self, item: tuple[Any, ...]) -> None:
        if item[0] == "MSG":
            self.bus._deliver(item[1], item[2])
            return
        done, result = item[1], item[2]
        if done.done():
            return
        if isinstance(result, BusError):
            done.set_exception(result)
        else:
            done.set_result(result)

    def deliver(self, interest: _Interest, message: Message) -> None:
        """From the server to the client, unless too much waits there already."""
        if self.server.one_hop and not self.down.frozen:
            self.bus._deliver(interest, message)
            return
        self.down.send(("MSG", interest, message))
        kept = self.down.kept
        if kept and sum(len(item[2].data) for item in kept if item[0] == "MSG") > PENDING_BYTES_MAX:
            self.bus._lost("slow consumer")


class _Interests:
    """Subscriptions of one server, found by subject: exact ones and `prefix.*` by a look-up, others by a walk."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[_Registration, None]] = {}
        self._children: dict[str, dict[_Registration, None]] = {}
        self._others: dict[_Registration, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._exact.values())) + sum(map(len, self._children.values())) + len(self._others)

    def _shelf(self, subject: str) -> tuple[dict[str, dict[_Registration, None]] | None, str]:
        head, _, last = subject.rpartition(".")
        if "*" not in subject and ">" not in subject:
            return self._exact, subject
        if last == "*" and "*" not in head:
            return self._children, head
        return None, subject

    def add(self, one: _Registration) -> None:
        shelf, key = self._shelf(one.subject)
        place = self._others if shelf is None else shelf.setdefault(key, {})
        place[one] = None

    def remove(self, one: _Registration) -> None:
        shelf, key = self._shelf(one.subject)
        if shelf is None:
            self._others.pop(one, None)
        elif key in shelf:
            shelf[key].pop(one, None)
            if not shelf[key]:
                del shelf[key]

    def matching(self, subject: str) -> Iterator[_Registration]:
        if found := self._exact.get(subject):
            yield from tuple(found)
        if found := self._children.get(subject.rpartition(".")[0]):
            yield from tuple(found)
        for one in tuple(self._others):
            if matches(one.subject, subject):
                yield one

    def any(self, subject: str) -> bool:
        return next(self.matching(subject), None) is not None


def matches(pattern: str, subject: str) -> bool:
    """Whether `subject` is one of those that `pattern` means: `*` is one token, a final `>` one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


class _InterestEpoch:
    """Counts changes of who subscribes to what, anywhere in one tree of servers: while it stands still, what a link
    knows of the far side's interest holds."""

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0


class NatsLink:
    """A leaf-node connection between two servers."""

    def __init__(self, one: SimulatedNats, other: SimulatedNats, delay: Delay) -> None:
        self.ends = (one, other)
        self.up = True
        chance = Random(f"{one.seed}/{one.name}-{other.name}")
        self._wanted: dict[SimulatedNats, dict[str, bool]] = {one: {}, other: {}}
        self._wanted_epoch = -1
        self._lanes = {
            one: Lane[Message](one.loop, delay, chance, lambda message: other._arrive(message, self)),
            other: Lane[Message](one.loop, delay, chance, lambda message: one._arrive(message, self)),
        }
        self.stress = Stress()
        for lane in self._lanes.values():
            lane.stress = self.stress

    def cut(self) -> None:
        """What is on its way is lost; the servers know at once that the other's subscribers are not there."""
        self.up = False
        self.ends[0]._interest.epoch += 1
        for lane in self._lanes.values():
            lane.clear()

    def freeze(self) -> None:
        """Nothing passes, and nobody is told: TCP keeps what is sent. Whoever does not heal it in time must `cut` it,
        as servers do when their pings are not answered."""
        for lane in self._lanes.values():
            lane.freeze()

    def heal(self) -> None:
        self.up = True
        self.ends[0]._interest.epoch += 1
        for lane in self._lanes.values():
            lane.thaw()

    def other(self, server: SimulatedNats) -> SimulatedNats:
        return self.ends[1] if server is self.ends[0] else self.ends[0]

    def wanted(self, server: SimulatedNats, subject: str) -> bool:
        """Whether somebody on the far side, seen from `server`, subscribes to `subject`."""
        if not self.up:
            return False
        epoch = server._interest.epoch
        if self._wanted_epoch != epoch:
            self._wanted_epoch = epoch
            for known in self._wanted.values():
                known.clear()
        answers = self._wanted[server]
        answer = answers.get(subject)
        if answer is None:
            if len(answers) > REMEMBERED_SUBJECTS:
                answers.clear()
            answer = answers[subject] = self.other(server)._anybody(subject, self)
        return answer

    def send(self, server: SimulatedNats, message: Message) -> None:
        self._lanes[server].send(message)


class SimulatedNats:
    """One NATS server with its JetStream KV."""

    def __init__(
        self, loop: VirtualLoop, seed: int | str, *, name: str = "nats", delay: Delay = LAN, one_hop: bool = False
    ) -> None:
        """`one_hop`: a message is with its receivers as soon as it is with the server. Half the work, for runs with
        thousands of connections."""
        self.loop = loop
        self.one_hop = one_hop
        self.seed = seed
        self.name = name
        self.delay = delay
        self.running = True
        self.stress = Stress()
        self.kv: dict[str, dict[str, bytes]] = {}
        self.kv_made_at_s: dict[str, float] = {}
        """When each bucket was made last."""
        self.kv_revisions: dict[str, dict[str, int]] = {}
        """Of the keys of each bucket; counted anew in one that was made anew."""
        self.kv_faults = KvFaults()
        self.observers: list[Observer] = []
        self.buses: dict[SimulatedBus, None] = {}
        self.handler_failures: list[str] = []
        self._sessions: dict[_Session, None] = {}
        self._interests = _Interests()
        self._interest = _InterestEpoch()
        self._links: list[NatsLink] = []
        self._chance = Random(f"{seed}/{name}")
        self._names: dict[str, int] = {}
        self._connections = 0

    @property
    def subscriptions(self) -> int:
        """Interests the server holds now."""
        return len(self._interests)

    # -- faults --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Every connection is lost at once, with all that is on its way."""
        self.running = False
        for link in self._links:
            link.cut()
        for session in tuple(self._sessions):
            self._drop(session)
            if session.bus._session is session:
                session.bus._lost("server stopped")

    def start(self, *, keep_kv: bool = True) -> None:
        """It listens again; clients come back one by one."""
        self.running = True
        self._connections = 0
        if not keep_kv:
            self.kv.clear()
        for link in self._links:
            link.heal()

    def link(self, other: SimulatedNats, delay: Delay = WAN) -> NatsLink:
        """Joins two servers. Raises ValueError when that would make a ring."""
        if other in self._reachable(set()):
            raise ValueError(f"{self.name} and {other.name} are joined already: servers form a tree")
        for server in other._reachable(set()):
            server._interest = self._interest
        self._interest.epoch += 1
        made = NatsLink(self, other, delay)
        self._links.append(made)
        other._links.append(made)
        return made

    # -- inside --------------------------------------------------------------------------------------------------

    def _reachable(self, seen: set[SimulatedNats]) -> set[SimulatedNats]:
        if self not in seen:
            seen.add(self)
            for link in self._links:
                link.other(self)._reachable(seen)
        return seen

    def _anybody(self, subject: str, came_by: NatsLink | None) -> bool:
        if self._interests.any(subject):
            return True
        return any(link.wanted(self, subject) for link in self._links if link is not came_by)

    def _publish(self, session: _Session, subject: str, data: bytes, reply: str) -> None:
        message = Message(subject, data, reply)
        if not self._route(message, None) and reply:
            nobody = Message(reply, b"", no_responders=True)
            for one in self._interests.matching(reply):
                if one.session is session:
                    session.deliver(one.interest, nobody)

    def _arrive(self, message: Message, link: NatsLink) -> None:
        self._route(message, link)

    def _route(self, message: Message, came_by: NatsLink | None) -> bool:
        """To whoever is interested, here and beyond the links; False when nobody is."""
        if not self.running:
            return True
        heard = False
        for one in self._interests.matching(message.subject):
            one.session.deliver(one.interest, message)
            heard = True
        for link in self._links:
            if link is not came_by and link.wanted(self, message.subject):
                link.send(self, message)
                heard = True
        return heard

    def _open(self, bus: SimulatedBus) -> _Session:
        session = _Session(bus, bus.delay)
        self._sessions[session] = None
        self._connections += 1
        bus.number = self._connections
        return session

    def _drop(self, session: _Session) -> None:
        session.alive = False
        self._sessions.pop(session, None)
        for one in session.registered.values():
            self._interests.remove(one)
        self._interest.epoch += 1
        session.registered.clear()
        session.up.clear()
        session.down.clear()

    def _name(self, role: str) -> str:
        number = self._names.get(role, 0)
        self._names[role] = number + 1
        return f"{role}-{number}"


@dataclass(slots=True)
class _Callbacks:
    lost: list[Callable[[], None]] = field(default_factory=list)
    back: list[Callable[[], None]] = field(default_factory=list)
    losses: list[Callable[[Loss], None]] = field(default_factory=list)


class SimulatedBus:
    """`Bus` on a `SimulatedNats`. Open with `connect`, close with `aclose`; `kill` is what a dying process does."""

    def __init__(self, server: SimulatedNats, role: str, name: str | None = None, delay: Delay | None = None) -> None:
        self.server = server
        self.name = name or server._name(role)
        self.delay = delay or server.delay
        self.number = 0
        """The server's, of this connection."""
        self._span_max_s = SPAN_MANY_S if role == "agent" else SPAN_FEW_S
        self.chance = Random(f"{server.seed}/{server.name}/{self.name}")
        self.inbox_prefix = f"_INBOX_{role}.{self.chance.getrandbits(96):024x}"
        self.context = copy_context()
        """In which this connection's handlers and callbacks run: that of the process it belongs to."""
        self._callbacks = _Callbacks()
        self._interests: dict[_Interest, None] = {}
        self._session: _Session | None = None
        self._ghosts: list[_Session] = []
        self._closed = False
        self._partitioned = False
        self._partitions = 0
        self._calls: dict[asyncio.Future[Any], None] = {}
        self._requests: dict[str, asyncio.Future[Message]] = {}
        self._request_number = 0
        self._answers: _Interest | None = None
        self._reconnecting: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(
        cls, server: SimulatedNats, role: str, *, name: str | None = None, delay: Delay | None = None
    ) -> SimulatedBus:
        """Connects, or raises BusError with one line that says what to do."""
        bus = cls(server, role, name, delay)
        if not server.running:
            raise BusError(f"cannot reach NATS at {server.name}; is it running?")
        server.buses[bus] = None
        bus._session = server._open(bus)
        await bus._call(lambda: None)
        return bus

    # -- Bus -----------------------------------------------------------------------------------------------------

    @property
    def message_bytes_max(self) -> int:
        return int(PAYLOAD_BYTES_MAX * 0.9)

    @property
    def connected(self) -> bool:
        return self._session is not None

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        session = self._session
        if session is None:
            raise BusDisconnected(f"not connected to NATS at {self.server.name}")
        if len(payload) > self.message_bytes_max:
            raise MessageTooLarge(f"{len(payload)} bytes for {subject}; at most {self.message_bytes_max}")
        if self.server.observers:
            self._observe(subject, payload, reply, delivered=False)
        session.up.send(("PUB", subject, payload, reply))

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        interest = _Interest(subject, handler)
        self._interests[interest] = None
        if self._session is not None:
            self._session.up.send(("SUB", interest))
        return _Subscription(self, interest)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message:
        if self._answers is None:
            self._answers = _Interest(f"{self.inbox_prefix}.answer.*", self._on_answer)
            self._interests[self._answers] = None
            if self._session is not None:
                self._session.up.send(("SUB", self._answers))
        self._request_number += 1
        reply = f"{self.inbox_prefix}.answer.{self._request_number}"
        answer: asyncio.Future[Message] = self.server.loop.create_future()
        self._requests[reply] = answer
        try:
            self.publish(subject, payload, reply)
            async with asyncio.timeout(timeout_s):
                message: Message = await answer
        except TimeoutError as error:
            raise RequestTimeout(f"no answer on {subject} in {timeout_s:g} s") from error
        finally:
            del self._requests[reply]
        if message.no_responders:
            raise NoResponders(f"nobody answers on {subject}")
        return message

    async def barrier(self) -> None:
        await self._call(lambda: None)

    def bucket(self, name: str, *, in_memory: bool = False, timeout_s: float = BUCKET_TIMEOUT_S) -> _SimulatedBucket:
        return _SimulatedBucket(self, name, timeout_s)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.lost.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.back.append(callback)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        self._callbacks.losses.append(callback)

    async def aclose(self) -> None:
        """Sends what was published, then closes."""
        if self._session is not None and not self._closed:
            try:
                async with asyncio.timeout(2):
                    await self.barrier()
            except (BusError, TimeoutError):
                pass
        self.kill()

    # -- faults --------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """The process is gone: what it had sent is on its way still, and the server knows at once."""
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        self.server.buses.pop(self, None)
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if session is not None and session.alive:
            session.up.send(("CLOSE",))
            session.down.clear()
            if self._partitioned:  # Even its end does not reach the server.
                self.server.loop.call_later(SERVER_STALE_S, self.server._drop, session)
        self._drop_ghosts()
        self._fail_calls()

    def cut(self) -> None:
        """The TCP connection breaks, both ends notice, and the client comes back by itself."""
        if self._session is not None:
            self.server._drop(self._session)
            self._lost("cut")

    def partition(self) -> None:
        """Nothing passes between the process and its server, and nobody is told. TCP keeps what is sent: when it
        ends soon, all arrives late; when it lasts, the client gives up by its pings, and the server much later."""
        self._partitioned = True
        self._partitions += 1
        if session := self._session:
            session.up.freeze()
            session.down.freeze()
            wait_s = PING_EVERY_S * (PINGS_OUTSTANDING + self.chance.random())
            self.server.loop.call_later(wait_s, self._pings_unanswered, session, self._partitions)

    def heal(self) -> None:
        """The partition ends."""
        self._partitioned = False
        self._drop_ghosts()
        if session := self._session:
            session.up.thaw()
            session.down.thaw()

    def stall(self) -> None:
        """The process reads nothing (it is stopped, or busy); the server keeps it until it is too much."""
        if self._session is not None:
            self._session.down.freeze()

    def resume(self) -> None:
        """It reads again."""
        if self._session is not None and not self._partitioned:
            self._session.down.thaw()

    # -- inside --------------------------------------------------------------------------------------------------

    def _observe(self, subject: str, data: bytes, reply: str, *, delivered: bool) -> None:
        passage = Passage(self.server.loop.time(), self.name, subject, data, reply, delivered)
        for observer in self.server.observers:
            observer(passage)

    def _deliver(self, interest: _Interest, message: Message) -> None:
        handler = interest.handler
        if handler is None or self._closed:
            return
        try:
            handler(message)
        except Exception as error:
            log.exception("bus.handler_failed", subject=message.subject)
            self.server.handler_failures.append(f"{self.name} on {message.subject}: {error!r}")
        if self.server.observers:  # After the handler, so that they see what it has made of the message.
            self._observe(message.subject, message.data, message.reply, delivered=True)

    def _on_answer(self, message: Message) -> None:
        answer = self._requests.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Has the server do `work` after all that was sent before; its result. Raises BusDisconnected."""
        if self._session is None:
            raise BusDisconnected(f"lost NATS at {self.server.name}")
        done: asyncio.Future[Any] = self.server.loop.create_future()
        self._calls[done] = None
        self._session.up.send(("CALL", work, done))
        try:
            return await done
        finally:
            del self._calls[done]

    def _fail_calls(self) -> None:
        for done in tuple(self._calls):
            if not done.done():
                done.set_exception(BusDisconnected(f"lost NATS at {self.server.name}"))

    def _pings_unanswered(self, session: _Session, partition: int) -> None:
        if self._partitioned and self._partitions == partition and self._session is session:
            self._ghosts.append(session)
            self.server.loop.call_later(SERVER_STALE_S, self.server._drop, session)
            self._lost("pings unanswered")

    def _drop_ghosts(self) -> None:
        for ghost in self._ghosts:
            self.server._drop(ghost)
        self._ghosts.clear()

    def _lost(self, why: str) -> None:
        """The client notices that its connection is gone."""
        session, self._session = self._session, None
        if session is None or self._closed:
            return
        if session not in self._ghosts:
            self.server._drop(session)
        log.warning("bus.disconnected", server=self.server.name, why=why)
        self._fail_calls()
        for callback in self._callbacks.lost:
            self.server.loop.call_soon(callback, context=self.context)
        for told in self._callbacks.losses:
            self.server.loop.call_soon(told, Loss(LossReason.DISCONNECTED, detail=why), context=self.context)
        self._reconnect_later(0)

    def _reconnect_later(self, tries: int) -> None:
        pause_s = wait_s(tries, span_s(self.number, self._span_max_s), self.chance.random)
        self._reconnecting = self.server.loop.call_later(pause_s, self._reconnect, tries)

    def _reconnect(self, tries: int) -> None:
        self._reconnecting = None
        if self._closed:
            return
        if not self.server.running or self._partitioned:
            self._reconnect_later(tries + 1)
            return
        session = self.server._open(self)
        for interest in self._interests:
            session.up.send(("SUB", interest))
        session.up.send(("CALL", lambda: None, done := self.server.loop.create_future()))
        self._session = session
        done.add_done_callback(lambda _: self._back(session))

    def _back(self, session: _Session) -> None:
        if self._session is session:
            log.info("bus.reconnected", server=self.server.name)
            for callback in self._callbacks.back:
                self.server.loop.call_soon(callback, context=self.context)


class _Subscription:
    def __init__(self, bus: SimulatedBus, interest: _Interest) -> None:
        self._bus = bus
        self._interest = interest

    async def unsubscribe(self) -> None:
        self._interest.handler = None
        known = self._interest in self._bus._interests
        self._bus._interests.pop(self._interest, None)
        if known and self._bus._session is not None:
            self._bus._session.up.send(("UNSUB", self._interest))


class _SimulatedBucket:
    def __init__(self, bus: SimulatedBus, name: str, timeout_s: float) -> None:
        self._bus = bus
        self._server = bus.server
        self._name = name
        self._timeout_s = timeout_s

    async def put(self, key: str, value: bytes) -> None:
        await self._do(lambda: self._write(key, value))

    async def get(self, key: str) -> tuple[bytes, int] | None:
        def read() -> tuple[bytes, int] | None:
            faults = self._check()
            kept = self._server.kv.get(self._name, {})
            return None if faults.blind or key not in kept else (kept[key], self._revision(key))

        found: tuple[bytes, int] | None = await self._do(read)
        return found

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        def compare_and_set() -> bool:
            self._check()
            if self._revision(key) != revision:
                return False
            self._write(key, value)
            return True

        done: bool = await self._do(compare_and_set)
        return done

    def _write(self, key: str, value: bytes) -> None:
        faults, server = self._check(), self._server
        if self._name not in server.kv:
            server.kv_made_at_s[self._name] = server.loop.time()
            server.kv_revisions[self._name] = {}
        kept = server.kv.setdefault(self._name, {})
        if not (faults.lose_acknowledged and server._chance.random() < faults.lose_acknowledged):
            kept[key] = value
            revisions = server.kv_revisions.setdefault(self._name, {})
            revisions[key] = 1 + max(revisions.values(), default=0)

    def _revision(self, key: str) -> int:
        """0 for a key that has no value."""
        known = key in self._server.kv.get(self._name, {})
        return self._server.kv_revisions.get(self._name, {}).get(key, 0) if known else 0

    async def delete(self, key: str) -> None:
        def purge() -> None:
            self._check()
            self._server.kv.get(self._name, {}).pop(key, None)

        await self._do(purge)

    async def entries(self) -> dict[str, bytes]:
        def read() -> dict[str, bytes]:
            faults = self._check()
            return {} if faults.blind else dict(self._server.kv.get(self._name, {}))

        found: dict[str, bytes] = await self._do(read)
        return found

    async def state(self) -> BucketState | None:
        def look() -> BucketState | None:
            faults = self._check()
            if self._name not in self._server.kv:
                return None
            made_at_s = self._server.kv_made_at_s.get(self._name, 0.0)
            return BucketState(f"{made_at_s:.9f}", 0 if faults.blind else len(self._server.kv[self._name]))

        found: BucketState | None = await self._do(look)
        return found

    def _check(self) -> KvFaults:
        faults = self._server.kv_faults
        if faults.refuse:
            raise BusError(f"KV bucket {self._name}: no answer from JetStream")
        return faults

    async def _do(self, work: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._bus._call(work)
        except TimeoutError as error:
            raise BusError(f"KV bucket {self._name}: no answer in {self._timeout_s:g} s") from error
