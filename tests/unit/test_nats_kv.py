"""The KV bucket by requests, against answers that a server gives and ones that none should."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from serai.runtime.bus import BucketState, BusDisconnected, BusError, NoResponders
from serai.runtime.nats_kv import NatsBucket

Answer = Callable[[str, dict[str, Any]], Any]


class Server:
    """Answers each request by `answer(what, body)`: an object, bytes, or an error to raise."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.headers: dict[str, str] | None = None

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> bytes:
        self.headers = headers
        what = subject.removeprefix("$JS.API.").removesuffix(".KV_b")
        self.asked.append(what)
        body = json.loads(payload) if subject.startswith("$JS.") else {}
        answer = self.answer(what, body)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def bucket(self, timeout_s: float = 5.0) -> NatsBucket:
        return NatsBucket(self.request, "b", timeout_s=timeout_s)


def missing(code: int = 10059) -> dict[str, Any]:
    return {"error": {"code": 404, "err_code": code, "description": "not found"}}


def test_keys_come_page_by_page_and_tombstones_and_vanished_keys_are_none() -> None:
    keys = ["c", "a", "gone", "dead", "b"]

    def answer(what: str, body: dict[str, Any]) -> Any:
        if what == "STREAM.INFO":
            page = keys[body["offset"] : body["offset"] + 2]
            return {"created": "x", "total": len(keys), "state": {"subjects": {f"$KV.b.{key}": 1 for key in page}}}
        key = body["last_by_subj"].removeprefix("$KV.b.")
        if key == "gone":
            return missing(10037)
        headers = b"NATS/1.0\r\nKV-Operation: PURGE\r\n\r\n" if key == "dead" else b""
        return {
            "message": {"data": base64.b64encode(key.encode()).decode(), "hdrs": base64.b64encode(headers).decode()}
        }

    server = Server(answer)
    found = asyncio.run(server.bucket().entries())
    assert list(found.items()) == [("a", b"a"), ("b", b"b"), ("c", b"c")]
    assert server.asked.count("STREAM.INFO") == 3


def test_a_put_makes_a_missing_bucket_and_writes_once_more() -> None:
    made = False

    def answer(what: str, body: dict[str, Any]) -> Any:
        nonlocal made
        if what == "STREAM.CREATE":
            assert (body["name"], body["subjects"], body["max_msgs_per_subject"]) == ("KV_b", ["$KV.b.>"], 1)
            made = True
            return {}
        return {"stream": "KV_b", "seq": 1} if made else NoResponders("nobody")

    server = Server(answer)
    asyncio.run(server.bucket().put("k", b"v"))
    assert server.asked == ["$KV.b.k", "STREAM.CREATE", "$KV.b.k"]


def test_a_value_comes_with_its_revision_and_is_replaced_only_while_it_has_that() -> None:
    def answer(what: str, body: dict[str, Any]) -> Any:
        if what == "STREAM.MSG.GET":
            return {"message": {"data": base64.b64encode(b"v").decode(), "seq": 7}}
        if server.headers == {"Nats-Expected-Last-Subject-Sequence": "7"}:
            return {"stream": "KV_b", "seq": 8}
        return {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 7"}}

    server = Server(answer)
    assert asyncio.run(server.bucket().get("k")) == (b"v", 7)
    assert asyncio.run(server.bucket().update("k", b"w", 7))
    assert not asyncio.run(server.bucket().update("k", b"w", 6))

    def nothing(what: str, body: dict[str, Any]) -> Any:
        return missing(10037)

    assert asyncio.run(Server(nothing).bucket().get("k")) is None


def test_state_is_none_without_a_bucket() -> None:
    assert asyncio.run(Server(lambda what, body: missing()).bucket().state()) is None
    there = {"created": "2026", "state": {"num_subjects": 7}}
    assert asyncio.run(Server(lambda what, body: there).bucket().state()) == BucketState("2026", 7)


@pytest.mark.parametrize(
    "answer",
    [
        NoResponders("nobody answers"),
        BusDisconnected("lost NATS"),
        b"",
        b"no json",
        b"[]",
        b'"text"',
        b"null",
        {},
        {"error": {"err_code": 10039, "description": "JetStream not enabled for account"}},
        {"error": "text"},
    ],
    ids=repr,
)
def test_whatever_goes_wrong_is_a_bus_error_that_names_the_bucket(answer: Any) -> None:
    def always(what: str, body: dict[str, Any]) -> Any:
        return answer

    for call in (lambda one: one.put("k", b"v"), lambda one: one.state()):
        with pytest.raises(BusError, match="KV bucket b: "):
            asyncio.run(call(Server(always).bucket()))
    if answer != {}:
        with pytest.raises(BusError):
            asyncio.run(Server(always).bucket().entries())


def test_one_value_that_cannot_be_read_fails_all_of_them_with_one_error() -> None:
    def answer(what: str, body: dict[str, Any]) -> Any:
        if what == "STREAM.INFO":
            return {"total": 3, "state": {"subjects": {f"$KV.b.{key}": 1 for key in "xyz"}}}
        return b"junk"

    with pytest.raises(BusError, match="cannot read the server's answer"):
        asyncio.run(Server(answer).bucket().entries())


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a*", "a>", "ü", "a\r\nPUB x 0"])
def test_what_is_no_key_is_never_sent(key: str) -> None:
    server = Server(lambda what, body: {})
    for call in (server.bucket().put(key, b""), server.bucket().delete(key)):
        with pytest.raises(BusError, match="is no key"):
            asyncio.run(call)
    assert server.asked == []
