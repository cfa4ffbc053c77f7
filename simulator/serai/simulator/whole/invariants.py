"""What must hold at every step of a run, whatever fails. A violation is a bug of ours, never of the faults."""

from __future__ import annotations

from collections.abc import Sequence

from serai.contracts.codec import decode_frames
from serai.contracts.inference import Frame, FrameKind
from serai.contracts.session_record import Lifecycle
from serai.contracts.subjects import INFERENCE, SESSION
from serai.ingress.service import Ingress
from serai.macro_scheduler.service import MacroScheduler
from serai.runtime.registry_replica import RegistryReplica
from serai.simulator.whole.client import ChatResult, Outcome
from serai.simulator.whole.simulated_bus import Passage
from serai.simulator.whole.system import Node, SimulatedSystem
from serai.worker_agent.service import NodeAgent

_SESSION_PREFIX = SESSION.of("")
_INFERENCE_PREFIX = INFERENCE.of("")
_ENDS = (int(FrameKind.END), int(FrameKind.ERROR))
_REQUEST = int(FrameKind.REQUEST)

Stream = tuple[str, int, int]
"""Ingress inbox, stream, attempt."""


class Invariants:
    """Watches one system. `violations` is empty after a good run."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system
        self.violations: list[str] = []
        self.trace_at_first: list[str] = []
        """The last events before the first violation: what came later explains nothing."""
        self._ended: dict[Stream, str] = {}
        """Streams whose agent has sent the end, and which agent's life that was."""
        self._lifecycles: dict[tuple[str, str], Lifecycle] = {}
        """Highest lifecycle per life of a node and session in that node's copy."""
        system.nats.observers.append(self.observe)

    # -- at every delivery ---------------------------------------------------------------------------------------

    def observe(self, passage: Passage) -> None:
        subject = passage.subject
        if subject.startswith(_SESSION_PREFIX):
            if passage.delivered:
                self._check_copy(passage.connection, subject[len(_SESSION_PREFIX) :])
        elif passage.delivered:
            pass
        elif subject.startswith(_INFERENCE_PREFIX):
            self._check_receiver(passage, subject[len(_INFERENCE_PREFIX) :])
        elif subject.startswith("_INBOX_ingress.") and ".stream." in subject:
            for frame in decode_frames(passage.data):
                self._check_frame(passage, frame)

    def _check_frame(self, passage: Passage, frame: Frame) -> None:
        """No frame after the end of a stream, from whoever ended it."""
        stream = (passage.subject.rpartition(".")[0], frame.stream, frame.attempt)
        ended_by = self._ended.get(stream)
        if ended_by == passage.connection:
            self.violate(f"{ended_by}: {FrameKind(frame.kind).name} of stream {stream} after its end")
        if frame.kind in _ENDS:
            self._ended[stream] = passage.connection

    def _check_receiver(self, passage: Passage, session: str) -> None:
        """Nothing new to a session of which the ingress itself knows that it has left."""
        frames = decode_frames(passage.data)
        if not frames or frames[0].kind != _REQUEST:
            return
        node = self._node(passage.connection)
        record = node.replica.get(session) if node is not None and node.replica is not None else None
        if record is None or record.lifecycle is Lifecycle.LEFT:
            known = "unknown" if record is None else "LEFT"
            self.violate(f"{passage.connection}: a request to {session}, which is {known} to it")

    def _check_copy(self, connection: str, session: str) -> None:
        node = self._node(connection)
        if node is not None and node.replica is not None:
            self._check_lifecycle(connection, session, node.replica)

    def _check_lifecycle(self, connection: str, session: str, replica: RegistryReplica) -> None:
        record = replica.get(session)
        if record is None:
            return
        before = self._lifecycles.get((connection, session), Lifecycle.JOIN)
        if record.lifecycle < before:
            self.violate(f"{connection}: {session} went back from {before.name} to {record.lifecycle.name}")
        self._lifecycles[connection, session] = record.lifecycle

    # -- now and then --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """What no single delivery shows: copies filled from snapshots, failures inside, handlers that raised."""
        system = self._system
        for node in system.nodes:
            if node.running and node.replica is not None:
                for record in node.replica.records():
                    self._check_lifecycle(node.name, record.session, node.replica)
            self._collect(node.failures)
        self._collect(system.nats.handler_failures)
        self._collect(system.loop.problems)

    def _collect(self, texts: list[str]) -> None:
        for text in texts:
            self.violate(text)
        texts.clear()

    # -- of each request, and at the end -------------------------------------------------------------------------

    def check_result(self, result: ChatResult) -> None:
        """A request ended: in time, once, and not as a lie."""
        request = result.request
        kind = "stream" if request.stream else "one piece"
        name = f"request {request.number} ({kind}, {result.session or 'no session'})"
        if result.answers > 1:
            self.violate(f"{name} was answered {result.answers} times")
        if result.outcome is Outcome.UNMARKED:
            self.violate(f"{name} ended as if it were whole: {result.events[-1][1]}")
        if result.outcome is Outcome.LATE:
            self.violate(f"{name} did not end within {self._system.scene.request_limit_s:g} s")

    def check_idle(self) -> None:
        """Every counter is back at zero while all nodes still run."""
        for node in self._system.nodes:
            match node.service:
                case Ingress():
                    client = node.service._client
                    self._expect_zero(node, "open streams", client.open_streams)
                    self._expect_zero(node, "sessions with streams", len(client._by_session))
                    self._expect_zero(node, "relayed requests", len(node.service._calls._relayed))
                    self._expect_zero(node, "asks for a place", node.service._asking.waiting)
                case NodeAgent():
                    self._check_agent_idle(node, node.service)
                case MacroScheduler():
                    self._check_scheduler_idle(node, node.service)

    def _check_agent_idle(self, node: Node, agent: NodeAgent) -> None:
        desk = agent.session.desk
        if desk is not None:
            self._expect_zero(node, "requests at the desk", desk.in_flight)
        if agent.session._gate is not None:
            self._expect_zero(node, "requests at the phase gate", len(agent.session._gate._requests))
        host = node.engines
        if host is not None and host.engine is not None:
            self._expect_zero(node, "generations in the engine", host.engine.generations)

    def _check_scheduler_idle(self, node: Node, scheduler: MacroScheduler) -> None:
        for term in [one.term for one in scheduler.candidates.values() if one.term is not None]:
            self._expect_zero(node, "requests that wait", len(term._waiting) + len(term.group.pending))
            leases = sum(len(view.leases) for view in term.group.views.values())
            self._expect_zero(node, "leases on their way", leases)

    def check_stopped(self) -> None:
        """Nothing is left when all nodes have ended."""
        system = self._system
        if system.nats.subscriptions:
            self.violate(f"{system.nats.subscriptions} subscriptions are left at the NATS server")
        if system.nats.buses:
            self.violate(f"connections are left: {[bus.name for bus in system.nats.buses]}")
        if system.network.open_ends or system.network.listening:
            self.violate(f"{system.network.open_ends} ends of TCP connections and {system.network.listening} are left")

    def _expect_zero(self, node: Node, what: str, count: int) -> None:
        if count:
            self.violate(f"{node.name}: {count} {what} left")

    # -- inside --------------------------------------------------------------------------------------------------

    def violate(self, text: str) -> None:
        """Notes a violation."""
        self.violations.append(text)
        self._system.trace.note("INVARIANT", text)
        if not self.trace_at_first:
            self.trace_at_first = self._system.trace.last()

    def _node(self, connection: str) -> Node | None:
        found: Sequence[Node] = [node for node in self._system.nodes if node.name == connection]
        return found[0] if found else None
