"""Agents notice that an ingress is gone, and only then cancel what it asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from serai.contracts.codec import encode, encode_frames
from serai.contracts.inference import FailureCode, Frame, FrameKind, InferenceRequest
from serai.runtime.bus import Message
from serai.runtime.telemetry import Tracing
from serai.worker_agent.desk import Desk, DeskLimits
from serai.worker_agent.outbox import Outbox
from serai.worker_agent.readers import Readers
from unit.fakes import FakeBus, FakePool


class Agent:
    def __init__(self, session: str = "s1") -> None:
        self.bus = FakeBus()
        self.pool = FakePool()
        outbox, tracing = Outbox(cast(Any, self.bus)), Tracing("test", None, 0.0)
        self.desk = Desk(cast(Any, self.pool), outbox, DeskLimits(), tracing, {})
        self.readers = Readers(cast(Any, self.bus), self.desk, session)

    def request(self, ingress: str, stream: int) -> None:
        asked = InferenceRequest("r", "/v1/completions", 0, 0, 65536, 60.0)
        frame = Frame(FrameKind.REQUEST, stream, 1, 0, encode(asked))
        self.desk.on_inference(Message("inference.s", encode_frames([frame]), f"_INBOX_{ingress}.stream.{stream}"))

    def questions(self) -> dict[str, str]:
        """Who is asked after now, and where the answer goes."""
        self.bus.take()
        self.readers.ask()
        taken = self.bus.take()
        assert all(frame.kind == FrameKind.ALIVE for message in taken for frame in message.frames)
        return {message.subject.split(".")[0]: message.reply for message in taken}

    def bounce(self, reply: str) -> None:
        self.readers.on_answer(Message(reply, b"", no_responders=True))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(Outbox, "ready", lambda self, source, at_once=False: None)  # No loop here.
    return Agent()


def test_nobody_is_asked_after_when_nothing_runs(agent: Agent) -> None:
    assert agent.questions() == {}


def test_each_ingress_is_asked_after_once_with_a_reply_of_its_own(agent: Agent) -> None:
    for ingress, stream in (("a", 1), ("a", 2), ("b", 1)):
        agent.request(ingress, stream)
    questions = agent.questions()
    assert set(questions) == {"_INBOX_a", "_INBOX_b"}
    assert len(set(questions.values())) == 2
    assert all(reply.startswith("_INBOX_test.x.reader.") for reply in questions.values())
    assert agent.questions() == questions


def test_sessions_that_share_a_connection_do_not_hear_each_others_answers(agent: Agent) -> None:
    other = Agent("s2")
    agent.request("a", 1)
    other.request("a", 1)
    assert agent.questions()["_INBOX_a"].rpartition(".")[0] != other.questions()["_INBOX_a"].rpartition(".")[0]


def test_a_bounce_cancels_all_of_that_ingress_and_nothing_else(agent: Agent) -> None:
    for ingress, stream in (("a", 1), ("a", 2), ("b", 1)):
        agent.request(ingress, stream)
    agent.bounce(agent.questions()["_INBOX_a"])
    assert agent.desk.in_flight == 1
    assert set(agent.questions()) == {"_INBOX_b"}


def test_other_words_on_the_reply_subject_change_nothing(agent: Agent) -> None:
    agent.request("a", 1)
    reply = agent.questions()["_INBOX_a"]
    agent.readers.on_answer(Message(reply, b"here"))
    agent.bounce("_INBOX_test.x.reader.999")
    assert agent.desk.in_flight == 1


def test_a_bounce_that_comes_after_the_end_hits_nobody_who_came_later(agent: Agent) -> None:
    agent.request("a", 1)
    late = agent.questions()["_INBOX_a"]
    agent.desk.fail_all(FailureCode.BUS_LOST, "gone")
    agent.request("b", 1)
    agent.request("c", 1)
    agent.questions()
    agent.bounce(late)
    assert agent.desk.in_flight == 2


def test_a_lost_connection_is_no_reason_to_fail(agent: Agent) -> None:
    agent.request("a", 1)
    agent.bus.connected = False
    agent.readers.ask()
    assert agent.desk.in_flight == 1
