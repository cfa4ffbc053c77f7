"""The load generator against the emulated engine: it counts what comes back, and it hides no error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from serai.bench.load import ClosedRun, Connection, LoadOutcome, LoadTask, carry_out

pytestmark = pytest.mark.alone
MODEL = "m"


class Engine:
    """An emulated engine: no time to first token, 2 ms a token."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--ttft-ms", "0", "--tpot-ms", "2"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = re.search(r":(\d+)$", self.process.stderr.readline().strip())
        assert found, "the engine says where it listens"
        self.port = int(found[1])

    def ask(self, path: str, fields: object = None) -> Any:
        data = None if fields is None else json.dumps(fields).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=10) as answer:
            return json.loads(answer.read())

    def load(self, *, tokens: int = 1, stream: bool = False, **fields: Any) -> LoadOutcome:
        messages = [{"role": "user", "content": "x"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}
        expected = tokens if stream else 0
        times = {"warmup_s": 0.1, "duration_s": 0.5} | fields
        task = LoadTask(self.port, "/v1/chat/completions", body, tokens_expected=expected, **times)
        return uvloop.run(carry_out(task))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine()
    yield running
    running.stop()


def test_every_request_is_counted_once(engine: Engine) -> None:
    outcome = engine.load(connections=4, warmup_s=0.0, requests_max=40, duration_s=3.0)
    assert outcome.completed == 40
    assert len(outcome.latencies_ms) == 40
    assert outcome.errors == {}
    assert engine.ask("/emulator/state")["finished_total"] == 40


def test_every_token_is_counted_once(engine: Engine) -> None:
    outcome = engine.load(connections=3, tokens=50, stream=True, warmup_s=0.0, requests_max=6, duration_s=4.0)
    assert (outcome.completed, outcome.tokens, outcome.errors) == (6, 300, {})
    assert len(outcome.first_tokens_ms) == 6
    assert max(outcome.first_tokens_ms) < min(outcome.latencies_ms)
    # 49 token times of 2 ms after the first.
    assert min(outcome.latencies_ms) >= 97


def test_an_open_loop_sends_at_its_rate_and_waits_for_the_last_answers(engine: Engine) -> None:
    outcome = engine.load(rate=100.0, connections=2, tokens=50, warmup_s=0.0, duration_s=1.0)
    assert 60 <= len(outcome.latencies_ms) <= 140
    assert min(outcome.latencies_ms) >= 97
    assert outcome.errors == {}
    assert engine.ask("/emulator/state")["aborted_total"] == 0


def test_the_same_seed_sends_at_the_same_times(engine: Engine) -> None:
    counts = [len(engine.load(rate=40.0, warmup_s=0.0, seed=seed).latencies_ms) for seed in (1, 1)]
    assert abs(counts[0] - counts[1]) <= 1


@pytest.mark.parametrize(
    ("fault", "stream", "error"),
    [
        ({"kind": "status", "status": 503}, False, "status 503"),
        ({"kind": "cut"}, False, "connection lost in an answer"),
        ({"kind": "cut", "tokens": 2}, True, "connection lost in an answer"),
        ({"kind": "no-done", "tokens": 2}, True, "stream not whole"),
        ({"kind": "error-event", "tokens": 2}, True, "stream not whole"),
        ({"kind": "hang"}, False, "timeout"),
    ],
)
def test_errors_are_counted_and_the_run_goes_on(
    engine: Engine, fault: dict[str, object], stream: bool, error: str
) -> None:
    engine.ask("/emulator/faults", fault | {"count": 3})
    outcome = engine.load(tokens=4, stream=stream, warmup_s=0.0, timeout_s=0.4, duration_s=2.4)
    assert outcome.errors == {error: 3}
    assert outcome.completed > 0


def test_an_answer_still_missing_at_the_end_of_an_open_loop_is_an_error(engine: Engine) -> None:
    engine.ask("/emulator/faults", {"kind": "hang", "count": 1})
    outcome = engine.load(rate=50.0, warmup_s=0.0, timeout_s=1.0)
    assert sum(outcome.errors.values()) == 1


def test_nobody_there_is_an_error_and_no_busy_loop(engine: Engine) -> None:
    engine.stop()
    outcome = engine.load(connections=1)
    assert outcome.completed == 0
    assert 1 <= sum(outcome.errors.values()) <= 20


def test_marks_that_are_cut_by_reads_count_once() -> None:
    body = b"".join(b'data: {"choices":[{"delta":{"content":" kato%d"}}]}\n\n' % index for index in range(3))
    for spaced in (body, body.replace(b'"content":', b'"content": ')):
        for size in (1, 7, 12, 13, len(body) + 9):
            assert uvloop.run(_count(spaced, size)) == 3


async def _count(body: bytes, size: int) -> int:
    run = ClosedRun(LoadTask(1, "/", {"stream": True}))
    run.measuring = True
    connection = Connection(run)
    for start in range(0, len(body), size):
        connection.on_body(body[start : start + size])
    return run.outcome.tokens
