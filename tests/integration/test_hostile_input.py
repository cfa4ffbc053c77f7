"""Requests that are meant to break something, and H53 and H56: the right status and the error object, quickly; no
traceback; and nothing lost for anybody else.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.system import Process, System, private_system, wait_for
from serai.bench.faults.raw_client import CUT, WHOLE, Answer, Connection, request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}], "max_tokens": 2}
RAW = json.dumps(CHAT).encode()
PATH = "/v1/chat/completions"
QUICK_S = 4.0
"""On a small and busy machine."""


class Door:
    """The ingress as those see it who mean no good."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.port = int(system.url.rpartition(":")[2])
        self.headers = {"Authorization": f"Bearer {system.key}"}
        self.ingress = next(process for process in system.processes if process.name == "ingress")

    def send(self, data: bytes, timeout_s: float = 10.0) -> Answer:
        """Bytes as they are, and what comes back."""

        async def main() -> Answer:
            async with Connection(self.port) as connection:
                await connection.send(data)
                return await connection.answer(timeout_s)

        return asyncio.run(main())

    def post(self, body: bytes, **headers: str) -> Answer:
        return self.send(request("POST", PATH, body, self.headers | headers), 30)

    def assert_no_bug(self) -> None:
        """Its log has no traceback, and it still answers."""
        log = self.ingress.log
        for words in ("Traceback", "http.failed", "http.handler_failed", "Exception in callback"):
            assert words not in log, log[log.index(words) - 2000 :][:4000]
        assert self.post(RAW).status == 200


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """An ingress with one emulated engine behind it; one for all tests, since none may do it harm."""
    with private_system(tmp_path_factory.mktemp("door")) as system:
        system.start_registry()
        system.start_ingress()
        system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
        system.wait_for_sessions(1)
        yield Door(system)


@pytest.fixture
def door(opened: Door) -> Iterator[Door]:
    yield opened
    opened.assert_no_bug()


@contextmanager
def others_notice_nothing(door: Door) -> Iterator[None]:
    """Somebody else asks all the while, and is answered each time."""
    answers: list[Answer] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(door.post(RAW))

    other = threading.Thread(target=ask)
    other.start()
    try:
        yield
    finally:
        over.set()
        other.join()
    assert answers
    assert {answer.status for answer in answers} == {200}


def refused(answer: Answer, status: int, code: str) -> None:
    assert (answer.status, answer.end) == (status, WHOLE), answer
    assert answer.error is not None
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["code"] == code, answer.error
    assert answer.ms < QUICK_S * 1000


DEPTH = 1_000_000
BODIES: dict[str, tuple[bytes, int, str]] = {
    "nested lists": (b'{"model": "m", "messages": %s%s}' % (b"[" * DEPTH, b"]" * DEPTH), 400, "invalid_json"),
    "nested objects": (b'{"model": "m", "a": %s1%s}' % (b'{"a":' * DEPTH, b"}" * DEPTH), 400, "invalid_json"),
    "nothing but brackets": (b"[" * DEPTH, 400, "invalid_json"),
    "1e400": (RAW[:-1] + b', "temperature": 1e400}', 400, "invalid_json"),
    "NaN": (RAW[:-1] + b', "temperature": NaN}', 400, "invalid_json"),
    "NUL bytes": (RAW.replace(b"caravans", b"a\x00b"), 400, "invalid_json"),
    "only NULs": (b"\x00" * 1000, 400, "invalid_json"),
    "half a character": (RAW.replace(b"caravans", b"\xf0\x9f\x90"), 400, "invalid_json"),
    "half a surrogate, raw": (RAW.replace(b"caravans", b"\xed\xa0\x80"), 400, "invalid_json"),
    "a byte order mark": (b"\xef\xbb\xbf" + RAW, 400, "invalid_json"),
    "nothing": (b"", 400, "invalid_json"),
    "null": (b"null", 400, "invalid_json"),
    "model is a list": (b'{"model": ["m"]}', 400, "invalid_model"),
    "model is empty": (b'{"model": ""}', 400, "invalid_model"),
    "model is a megabyte": (b'{"model": "%s"}' % (b"m" * 1_000_000), 404, "model_not_found"),
    "model is NUL": (b'{"model": "\\u0000"}', 404, "model_not_found"),
    "model is a subject of ours": (b'{"model": "inference.*.>"}', 404, "model_not_found"),
}


def test_bodies_that_cannot_be(door: Door) -> None:
    with others_notice_nothing(door):
        for name, (body, status, code) in BODIES.items():
            try:
                refused(door.post(body), status, code)
            except AssertionError as error:
                raise AssertionError(name) from error


def test_what_is_odd_but_allowed_reaches_the_engine(door: Door) -> None:
    for more in (
        b'"seed": ' + b"9" * 100_000,
        b'"x": 1E-999999999',
        b'"y": "\\u0000"',
        b'"z": ' + b"[" * 500 + b"]" * 500,
    ):
        answer = door.post(RAW[:-1] + b", " + more + b"}")
        assert answer.status in (200, 400), more[:40]
        assert answer.status == 200 or answer.error is not None


HEADS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50, (400,)),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", (400,)),
    "two lengths": (b"POST /x HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd", (400,)),
    "length and chunks": (
        b"POST /x HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (400,),
    ),
    "a length that is none": (b"POST /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", (400,)),
    "a chunk that is none": (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", (400,)),
    "an encoding that is none": (b"POST /x HTTP/1.1\r\nTransfer-Encoding: cow\r\n\r\n", (400, 501)),
    "a folded header": (b"GET /health/live HTTP/1.1\r\nX: a\r\n b\r\n\r\n", (400, 200)),
    "a header without a name": (b"GET /health/live HTTP/1.1\r\n: a\r\n\r\n", (400,)),
    "NUL in a header": (b"GET /health/live HTTP/1.1\r\nX: a\x00b\r\n\r\n", (400,)),
    "an endless header": (b"GET / HTTP/1.1\r\nX: " + b"a" * 5_000_000, (431,)),
    "endless headers": (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 500_000, (431,)),
    "an endless path": (b"GET /" + b"a" * 5_000_000, (431,)),
    "a path of percent signs": (b"GET /%%%%zz%ff%00 HTTP/1.1\r\n\r\n", (404, 400)),
    "HTTP/2 from the start": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 404, 405, 505)),
}


def test_heads_that_cannot_be(door: Door) -> None:
    with others_notice_nothing(door):
        for name, (data, statuses) in HEADS.items():
            answer = door.send(data, 5)
            assert answer.status in statuses or (answer.end == CUT and answer.status == 0), (name, answer)
            assert answer.ms < QUICK_S * 1000, name


def test_slow_lorises_keep_nobody_waiting(door: Door) -> None:
    async def main() -> list[Answer]:
        lorises = [Connection(door.port) for _ in range(300)]
        await asyncio.gather(*[loris.__aenter__() for loris in lorises])
        for loris in lorises[:150]:
            await loris.send(b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        for loris in lorises[150:]:
            await loris.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
        answers = []
        for _ in range(10):
            for loris in lorises:
                await loris.send(b"a")
            async with Connection(door.port) as connection:
                await connection.send(request("POST", PATH, RAW, door.headers))
                answers.append(await connection.answer(10))
        for loris in lorises:
            loris.leave()
        return answers

    answers = asyncio.run(main())
    assert {answer.status for answer in answers} == {200}
    assert max(answer.ms for answer in answers) < QUICK_S * 1000


# -- anything at all -------------------------------------------------------------------------------------------------

FUZZ = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORDS = (
    b"GET |POST |/v1/models|/v1/chat/completions| HTTP/1.1\r\n|\r\n|\r\n\r\n|Content-Length: |7|\x00|\xff|"
    b"Transfer-Encoding: chunked\r\n|Content-Encoding: gzip\r\n|Expect: 100-continue\r\n"
)
PIECES = st.sampled_from(WORDS.split(b"|"))


@FUZZ
@given(st.lists(PIECES | st.binary(max_size=40), max_size=12))
def test_any_bytes_are_answered_or_dropped_and_never_a_bug(door: Door, pieces: list[bytes]) -> None:
    answer = door.send(b"".join(pieces) + b"\r\n\r\n", 0.3)
    assert answer.status < 500


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["model", "messages", "stream", "stream_options", "max_tokens", "temperature", "n", "stop", "tools", "seed", "user"]
)


@FUZZ
@given(st.dictionaries(FIELDS, VALUES, max_size=4), st.sampled_from([PATH, "/v1/completions", "/v1/embeddings"]))
def test_any_fields_are_the_callers_fault_or_nobodys(door: Door, fields: dict[str, object], path: str) -> None:
    body = json.dumps(CHAT | fields).encode("utf-8", "surrogatepass")
    answer = door.send(request("POST", path, body, door.headers), 10)
    assert 200 <= answer.status < 500, answer
    assert answer.status == 200 or answer.error is not None


@FUZZ
@given(st.integers(0, len(RAW)), st.integers(0, 30), st.binary(max_size=20))
def test_any_damage_to_a_body_is_told_or_does_not_matter(door: Door, at: int, cut: int, put: bytes) -> None:
    answer = door.post(RAW[:at] + put + RAW[at + cut :])
    assert 200 <= answer.status < 500, answer
    assert answer.status == 200 or answer.error is not None


# -- H53 -------------------------------------------------------------------------------------------------------------


def test_h53_a_thousand_timeouts_leave_nothing_behind(system: System) -> None:
    system.start_registry()
    ingress = system.start_ingress("--request-timeout-s", "1")
    agent = system.start_agent("--fault", "hang:tokens=0,skip=1", "--max-concurrency", "2000")
    system.wait_for_sessions(1)
    door = Door(system)
    before = resources(ingress)

    async def time_out() -> Answer:
        async with Connection(door.port) as connection:
            await connection.send(request("POST", PATH, RAW, door.headers))
            return await connection.answer(30)

    async def many() -> list[Answer]:
        return await asyncio.gather(*[time_out() for _ in range(250)])

    answers = [answer for _ in range(4) for answer in asyncio.run(many())]
    seen = Counter((answer.status, (answer.error or {}).get("code")) for answer in answers)
    assert seen.keys() <= {(504, "deadline"), (503, "no_session"), (503, "busy")}, seen
    assert seen[504, "deadline"] > 0

    def is_quiet() -> bool:
        with system.engine(agent) as engine, system.client() as client:
            held = engine.get("/emulator/state").json()["running"]
            return held == 0 and "\nserai_ingress_requests_in_flight 0.0" in client.get("/metrics").text

    wait_for(is_quiet, "nothing is held any more")
    wait_for(lambda: resources(ingress)[0] <= before[0] + 5, "sockets are closed")
    assert resources(ingress)[1] <= before[1] + 40e6
    for line in ingress.log.splitlines():
        assert isinstance(json.loads(line), dict), "one writer: lines are whole"


def resources(process: Process) -> tuple[int, float]:
    """Open files, and resident bytes."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    with suppress(OSError):
        return len(list(Path(f"/proc/{process.popen.pid}/fd").iterdir())), rss * 1024.0
    return 0, rss * 1024.0


# -- H56 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("megabytes", "status"), [(0.9, 200), (1.0, 200), (1.1, 200), (7.9, 200), (8.1, 200), (33.6, 413)]
)
def test_h56_one_limit_for_bodies_and_no_other_on_the_way(door: Door, megabytes: float, status: int) -> None:
    """NATS takes 1 MiB a message and proxies often 8; neither shows."""
    empty = json.dumps(CHAT | {"pad": ""}).encode()
    body = json.dumps(CHAT | {"pad": "x" * (int(megabytes * 1e6) - len(empty))}).encode()
    began_s = time.monotonic()
    answer = door.post(body)
    assert answer.status == status, answer.body[:300]
    if status == 413:
        refused(answer, 413, "body_too_large")
        assert answer.error is not None
        assert str(32 * 1024 * 1024) in answer.error["message"]
        assert time.monotonic() - began_s < QUICK_S
