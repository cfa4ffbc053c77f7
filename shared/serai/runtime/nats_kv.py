"""A JetStream KV bucket by plain requests to the server's API, and nothing that a client library puts on top of it.

No watch and no consumer is ever made: nats-py's `keys()` makes an ordered consumer for each call, which is left behind
when the process dies, and whose acknowledgement subjects kill nats-py's read loop on a server with `js_ack_fc_v2`
(cases H63, H67). A write is one round trip. Keys are removed without a tombstone, since nobody watches. Reads ask the
stream's leader, not any replica (a direct get may be older than our own write).
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, TypeVar

from serai.runtime.bus import BUCKET_TIMEOUT_S, BucketState, BusError, NoResponders

T = TypeVar("T")


class Request(Protocol):
    """Subject, payload, timeout in seconds, headers → the answer. Raises BusError or one of its kinds."""

    def __call__(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Awaitable[bytes]: ...


READS_AT_ONCE = 32
READ_ALL_FACTOR = 6
"""`entries` asks once a key: it may take so many times as long as one call."""
_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")
_NO_STREAM, _NO_MESSAGE = 10059, 10037
_WRITTEN_MEANWHILE = (10071, 10164)
_EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"


class NatsBucket:
    """`Bucket` by requests."""

    def __init__(
        self, request: Request, name: str, *, in_memory: bool = False, timeout_s: float = BUCKET_TIMEOUT_S
    ) -> None:
        self._request = request
        self._name = name
        self._in_memory = in_memory
        self._timeout_s = timeout_s

    async def put(self, key: str, value: bytes) -> None:
        await self._bounded(self._write(key, value))

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """The value of a key and its revision, for `update`; None when there is none."""

        async def read() -> tuple[bytes, int] | None:
            message = await self._last(self._subject(key))
            return None if message is None else (_decoded(message, "data"), int(message["seq"]))

        return await self._bounded(read())

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        """Compare-and-set: writes if the key's revision is still that one, 0 for a key that has no value; False, and
        nothing is written, when it is not."""
        return await self._bounded(self._write(key, value, {_EXPECTED_REVISION: str(revision)}))

    async def delete(self, key: str) -> None:
        await self._bounded(self._ask("STREAM.PURGE", {"filter": self._subject(key)}))

    async def entries(self) -> dict[str, bytes]:
        async def read() -> dict[str, bytes]:
            places = asyncio.Semaphore(READS_AT_ONCE)
            found: dict[str, bytes] = {}

            async def read_one(subject: str) -> None:
                async with places:
                    value = await self._value(subject)
                if value:
                    found[subject.removeprefix(self._subject())] = value

            subjects = await self._subjects()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for subject in subjects:
                        tasks.create_task(read_one(subject))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            return {key: found[key] for key in sorted(found)}

        return await self._bounded(read(), self._timeout_s * READ_ALL_FACTOR)

    async def state(self) -> BucketState | None:
        async def look() -> BucketState | None:
            answer = await self._ask("STREAM.INFO", {})
            if answer is None:
                return None
            return BucketState(str(answer["created"]), int(answer["state"].get("num_subjects", 0)))

        return await self._bounded(look())

    # -- inside --------------------------------------------------------------------------------------------------

    def _subject(self, key: str | None = None) -> str:
        if key is None:
            return f"$KV.{self._name}."
        if not _KEY.fullmatch(key) or key.startswith(".") or key.endswith(".") or ".." in key:
            raise self._error(f"{key!r} is no key: letters, digits and -/_=. only")
        return f"$KV.{self._name}.{key}"

    async def _subjects(self) -> list[str]:
        """Of all keys; the server gives them in pages."""
        subjects: list[str] = []
        while True:
            asked = {"subjects_filter": self._subject() + ">", "offset": len(subjects)}
            answer = await self._ask("STREAM.INFO", asked)
            page = [] if answer is None else list(answer["state"].get("subjects") or ())
            subjects += page
            if not page or len(subjects) >= int((answer or {}).get("total") or 0):
                return subjects

    async def _write(self, key: str, value: bytes, headers: dict[str, str] | None = None) -> bool:
        subject = self._subject(key)
        try:
            answer = await self._call(subject, value, headers)
        except NoResponders:  # No stream takes the subject: the bucket has gone, or has never been.
            await self._create()
            try:
                answer = await self._call(subject, value, headers)
            except NoResponders as error:
                raise self._error("made, and yet nobody takes what is written to it") from error
        if headers is not None and (json.loads(answer).get("error") or {}).get("err_code") in _WRITTEN_MEANWHILE:
            return False
        if "seq" not in (taken := self._read(answer) or {}):
            raise self._error(f"not written: {taken}")
        return True

    async def _value(self, subject: str) -> bytes | None:
        message = await self._last(subject)
        return None if message is None else _decoded(message, "data")

    async def _last(self, subject: str) -> dict[str, Any] | None:
        answer = await self._ask("STREAM.MSG.GET", {"last_by_subj": subject})
        if answer is None or "KV-Operation:" in _decoded(answer["message"], "hdrs").decode("latin-1"):
            return None  # Removed meanwhile, or the tombstone of another client.
        message: dict[str, Any] = answer["message"]
        return message

    async def _ask(self, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """One question to JetStream about the bucket's stream; None when the stream or the message is not there."""
        try:
            answer = await self._call(f"$JS.API.{what}.KV_{self._name}", json.dumps(body).encode())
        except NoResponders as error:
            raise self._error("the NATS server has JetStream off for this user's account") from error
        return self._read(answer)

    async def _call(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> bytes:
        try:
            return await self._request(subject, payload, self._timeout_s, headers)
        except NoResponders:
            raise
        except BusError as error:
            raise self._error(str(error)) from error

    async def _create(self) -> None:
        await self._ask(
            "STREAM.CREATE",
            {
                "name": f"KV_{self._name}",
                "subjects": [self._subject() + ">"],
                "storage": "memory" if self._in_memory else "file",
                "max_msgs_per_subject": 1,
                "discard": "new",
                "allow_rollup_hdrs": True,
                "deny_delete": True,
                "allow_direct": True,
                "num_replicas": 1,
            },
        )

    def _read(self, answer: bytes) -> dict[str, Any] | None:
        """The answer as an object; None for `not found`. Raises BusError for any other error in it."""
        found: dict[str, Any] = json.loads(answer)
        error = found.get("error")
        if error is None:
            return found
        if error.get("err_code") in (_NO_STREAM, _NO_MESSAGE):
            return None
        raise self._error(f"{error.get('description')} (JetStream error {error.get('err_code')})")

    def _error(self, text: str) -> BusError:
        return BusError(f"KV bucket {self._name}: {text}")

    async def _bounded(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        limit_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as error:
            raise self._error(f"no answer in {limit_s:g} s") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._error(f"cannot read the server's answer: {error!r}") from error


def _decoded(message: dict[str, Any], part: str) -> bytes:
    return base64.b64decode(message.get(part) or "")
