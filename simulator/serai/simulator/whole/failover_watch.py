"""Who owns which instance, and who gives leases of it: watched at every message."""

from __future__ import annotations

from serai.contracts.admission import AdmissionAnswers, AdmissionRequest, Decision
from serai.contracts.codec import MalformedMessage, decode, decode_frames
from serai.contracts.inference import FailureCode, FrameKind
from serai.contracts.subjects import ADMISSION, TAKE
from serai.macro_scheduler.ownership import leader_epoch_of
from serai.macro_scheduler.service import MacroScheduler
from serai.simulator.whole.simulated_bus import Passage
from serai.simulator.whole.system import Node, SimulatedSystem
from serai.worker_agent.phase_gate_shell import GateShell
from serai.worker_agent.service import NodeAgent

_TAKE_PREFIX = TAKE.of("")
_ADMISSION_PREFIX = ADMISSION.of("")
_REFUSED = str(FailureCode.LEASE_REFUSED).encode()


class OwnerWatch:
    """Of one system. `doubles` is empty after a good run."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system
        self.doubles: list[str] = []
        self.leases = 0
        self.grants_used = 0
        """Requests that had a place granted in advance, as their ingresses tell."""
        self.waits = 0
        self.refused = 0
        self.takeover_s: float | None = None
        self._died_at_s: float | None = None
        self._owners: dict[tuple[str, int], str] = {}
        """Owner of each epoch of a session, as its agent obeyed it."""
        self._epochs: dict[str, int] = {}
        self._givers: dict[tuple[str, int], str] = {}
        """Which connection gave leases of an epoch of a session."""
        self._given: dict[tuple[str, int, int], str] = {}
        """Which request got a lease."""
        self._last_giver = ""
        system.nats.observers.append(self.observe)

    def observe(self, passage: Passage) -> None:
        """Every message, when it is sent and when it arrives."""
        subject = passage.subject
        if passage.delivered:
            if subject.startswith(_TAKE_PREFIX):
                self._look(passage.connection)
        elif subject.startswith("_INBOX_ingress.") and ".admission." in subject:
            self._answers(passage)
        elif subject.startswith(_ADMISSION_PREFIX):
            self.grants_used += len(decode(AdmissionRequest, passage.data).spent)
        elif _REFUSED in passage.data and subject.startswith("_INBOX_ingress."):
            self.refused += sum(frame.kind == FrameKind.ERROR for frame in decode_frames(passage.data))

    def leader_dies(self) -> None:
        """From now on the next one is waited for."""
        self._died_at_s = self._system.loop.time()

    @property
    def placed(self) -> int:
        """Requests whose place a scheduler decided."""
        return self.leases + self.grants_used

    def all_obey(self) -> bool:
        """Whether there is one leader, and every agent's instance obeys it."""
        leading = [
            candidate
            for node in self._system.macro_schedulers
            if node.running and isinstance(node.service, MacroScheduler)
            for candidate in node.service.candidates.values()
            if candidate.term is not None and candidate.lease.held
        ]
        if len(leading) != 1 or leading[0].term is None:
            return False
        epochs = [gate.obeyed[1] for node in self._system.agents if (gate := _gate(node)) is not None]
        ours = leading[0].term.epoch
        return len(epochs) == len(self._system.agents) and all(leader_epoch_of(epoch) == ours for epoch in epochs)

    # -- inside --------------------------------------------------------------------------------------------------

    def _look(self, connection: str) -> None:
        """What the agent obeys after it was told."""
        node = next((node for node in self._system.agents if node.name == connection), None)
        gate = _gate(node) if node is not None else None
        if gate is None or not gate.obeyed[1]:
            return
        session, (owner, epoch) = gate._session, gate.obeyed
        known = self._owners.setdefault((session, epoch), owner)
        if known != owner:
            self._double(f"{session} obeyed {known} and {owner}, both in epoch {epoch}")
        if epoch < self._epochs.get(session, 0):
            self._double(f"{session} went back from epoch {self._epochs[session]} to {epoch}")
        self._epochs[session] = epoch

    def _answers(self, passage: Passage) -> None:
        try:
            answers = decode(AdmissionAnswers, passage.data).answers
        except MalformedMessage as error:
            self._double(f"{passage.connection} answers an ask with what is none: {error}")
            return
        for answer in answers:
            self.waits += answer.decision is Decision.WAIT
            if answer.lease is not None:
                self._lease(passage, answer.session, answer.lease.epoch, answer.lease.sequence, answer.request_id)

    def _lease(self, passage: Passage, session: str, epoch: int, sequence: int, request_id: str) -> None:
        self.leases += 1
        giver = self._givers.setdefault((session, epoch), passage.connection)
        if giver != passage.connection:
            self._double(f"{giver} and {passage.connection} gave leases of {session} in epoch {epoch}")
        known = self._given.setdefault((session, epoch, sequence), request_id)
        if known != request_id:
            self._double(f"lease {sequence} of {session} in epoch {epoch} was given to {known} and to {request_id}")
        if self._died_at_s is not None and passage.connection != self._last_giver:
            took_s = passage.at_s - self._died_at_s
            self.takeover_s = took_s if self.takeover_s is None else max(took_s, self.takeover_s)
            self._died_at_s = None
        self._last_giver = passage.connection

    def _double(self, text: str) -> None:
        self.doubles.append(text)
        self._system.trace.note("OWNER", text)


def _gate(node: Node) -> GateShell | None:
    return node.service.session._gate if isinstance(node.service, NodeAgent) else None
