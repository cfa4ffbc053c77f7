"""Bad input: refused with a reason, counted, logged once a minute at most, and the map is unharmed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from serai.contracts.codec import encode
from serai.contracts.session_record import new_session_id
from serai.contracts.subjects import SESSION
from serai.runtime import refusals
from serai.runtime.bus import Message
from serai.runtime.refusals import LOG_EVERY_S, REFUSED, Refusals
from unit.fakes import Clock, record_of

S1 = new_session_id("local", "a1", 0, "x")
GOOD = record_of(S1, allocation="a1")


def message_of(change: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None) -> Message:
    fields = json.loads(encode(GOOD)) | (change or {})
    fields["metadata"] |= metadata or {}
    return Message(SESSION.of(S1), json.dumps(fields).encode())


def test_a_good_record_passes() -> None:
    assert Refusals().record_in(message_of()) == GOOD


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (message_of({"lifecycle": 9}), "malformed"),
        (message_of({"lifecycle": "SERVING"}), "malformed"),
        (message_of({"version": -1}), "bad-field"),
        (message_of({"version": 1.5}), "malformed"),
        (message_of({"session": "s" * 500}), "bad-field"),
        (message_of({"session": new_session_id("local", "a1", 0, "y")}), "foreign-subject"),
        (message_of(metadata={"site": "elsewhere"}), "forged-site"),
        (message_of(metadata={"allocation": "another"}), "forged-site"),
        (message_of(metadata={"labels": {"x": "x" * 1_000_000}}), "too-large"),
        (message_of(metadata={"labels": {"x": "x" * 1_000}}), "bad-field"),
        (message_of(metadata={"labels": {f"l{n}": "" for n in range(100)}}), "bad-field"),
        (message_of(metadata={"loading_progress": float("nan")}), "malformed"),
        (message_of(metadata={"loading_progress": 2.0}), "bad-field"),
        (message_of(metadata={"model": ""}), "bad-field"),
        (Message(SESSION.of(S1), b"\xff\xfe{"), "malformed"),
        (Message(SESSION.of(S1), b""), "malformed"),
        (Message(SESSION.of(S1), b"[" * 10_000), "malformed"),
    ],
)
def test_a_bad_record_is_refused_with_a_reason_and_counted(message: Message, reason: str) -> None:
    before = REFUSED.of(reason).value
    with capture_logs() as logs:
        assert Refusals().record_in(message) is None
    assert REFUSED.of(reason).value == before + 1
    assert [entry["reason"] for entry in logs] == [reason]
    assert len(str(logs[0]["error"])) <= 300


def test_the_same_reason_is_logged_once_a_minute_and_others_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.put_into(monkeypatch, refusals)
    noted = Refusals()
    with capture_logs() as logs:
        for _ in range(1000):
            noted.note("malformed", "bad")
        noted.note("too-large", "big")
        clock.advance(LOG_EVERY_S - 1)
        noted.note("malformed", "bad")
        clock.advance(2)
        noted.note("malformed", "bad")
    told = [(entry["reason"], entry["more_since_last_time"]) for entry in logs]
    assert told == [("malformed", 0), ("too-large", 0), ("malformed", 1000)]
