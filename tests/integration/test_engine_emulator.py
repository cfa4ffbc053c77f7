"""The emulated engine as a process of its own, over real sockets."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import httpx2
import openai
import pytest

from integration.system import soon
from serai.worker_agent.engine.process import free_port

CHAT = {"model": "m/1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMMAND = [sys.executable, "-m", "serai.engine_emulator", "--model", "m/1"]


class Emulator:
    """A running emulated engine."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True)
        self.errors = cast(IO[str], self.process.stderr)
        self.port = self._wait_for_port()
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

    def _wait_for_port(self) -> int:
        for line in self.errors:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                return int(found[1])
        pytest.fail(f"the emulated engine ended with status {self.process.wait()} before it listened")

    def chat(self, **fields: object) -> httpx2.Response:
        return self.client.post("/v1/chat/completions", json=CHAT | fields)

    def stream(self, **fields: object) -> list[str]:
        """The data of each event. Raises httpx2's errors when the body breaks off."""
        asked = CHAT | {"stream": True} | fields
        with self.client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]

    def fault(self, **fields: object) -> None:
        self.client.post("/emulator/faults", json=fields).raise_for_status()

    def state(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.client.get("/emulator/state").json())

    def wait_until(self, **expected: int) -> None:
        give_up_at_s = time.monotonic() + 10
        while (state := self.state()) | expected != state:
            assert time.monotonic() < give_up_at_s, f"{expected} expected, the state is {state}"
            time.sleep(0.01)

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        self.errors.close()


@contextmanager
def emulator(*flags: str) -> Iterator[Emulator]:
    running = Emulator(*flags)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def engine() -> Iterator[Emulator]:
    with emulator("--ttft-ms", "5", "--tpot-ms", "1") as running:
        yield running


def text_of(data: list[str]) -> str:
    chunks = [json.loads(one) for one in data if one.startswith("{")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_streamed_and_unary_answers_say_the_same(engine: Emulator) -> None:
    whole = engine.chat().json()
    data = engine.stream(stream_options={"include_usage": True}, ignore_eos=True, unheard_of=[1])
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"] == json.loads(data[-2])["usage"]
    assert whole["usage"]["completion_tokens"] == 4
    assert text_of(data) == whole["choices"][0]["message"]["content"]
    assert json.loads(data[-3])["choices"][0]["finish_reason"] == "length"
    assert data[-1] == "[DONE]"
    plain = engine.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3}).json()
    assert len(plain["choices"][0]["text"].split()) == 3


def test_the_openai_sdk_reads_it(engine: Emulator) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["m/1"]
    assert client.models.retrieve("m/1").id == "m/1"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
    client.close()


def test_an_answer_takes_the_time_it_should() -> None:
    with emulator("--ttft-ms", "200", "--tpot-ms", "20") as engine:

        def took_s() -> float:
            began_s = time.monotonic()
            engine.stream(max_tokens=11)
            return time.monotonic() - began_s

        assert soon(took_s, 0.8) >= 0.4


def test_continuing_with_the_words_said_gives_the_rest(engine: Emulator) -> None:
    whole = text_of(engine.stream(max_tokens=10))
    said = "".join(f" {word}" for word in whole.split()[:4])
    turns = [*cast(list[dict[str, str]], CHAT["messages"]), {"role": "assistant", "content": said}]
    assert said + text_of(engine.stream(messages=turns, max_tokens=6)) == whole


def test_a_request_on_a_connection_ahead_of_its_turn_is_answered_in_order(engine: Emulator) -> None:
    def request(tokens: int, connection: str) -> bytes:
        body = json.dumps(CHAT | {"max_tokens": tokens}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    with socket.create_connection(("127.0.0.1", engine.port), 10) as raw:
        raw.sendall(request(9, "keep-alive") + request(2, "keep-alive") + request(1, "close"))
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert re.findall(rb'"completion_tokens":(\d+)', answer) == [b"9", b"2", b"1"]


def test_a_client_that_leaves_frees_its_slot_at_once() -> None:
    with emulator("--max-concurrency", "1", "--tpot-ms", "50") as engine:
        with engine.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 9999}):
            assert engine.state()["running"] == 1
        engine.wait_until(running=0, aborted_total=1)
        # One that is still waiting for its slot leaves the queue.
        with engine.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 9999}):
            with pytest.raises(httpx2.ReadTimeout):
                engine.client.post("/v1/chat/completions", json=CHAT, timeout=0.2)
            engine.wait_until(running=1, waiting=0, aborted_total=2)
        engine.wait_until(running=0)
        assert engine.chat().status_code == 200


def test_metrics_have_the_names_of_vllm() -> None:
    with emulator("--max-concurrency", "1", "--kv-tokens", "1000") as engine:
        engine.fault(kind="hang", tokens=1)
        with engine.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}):
            metrics = engine.client.get("/metrics").text
        assert 'vllm:num_requests_running{model_name="m/1"} 1\n' in metrics
        assert 'vllm:num_requests_waiting{model_name="m/1"} 0\n' in metrics
        usage = re.search(r'^vllm:kv_cache_usage_perc\{model_name="m/1"\} (.+)$', metrics, re.MULTILINE)
        assert usage is not None
        assert 0 < float(usage[1]) < 0.1


def test_a_prompt_of_32_megabytes_works(engine: Emulator) -> None:
    answer = engine.chat(messages=[{"role": "user", "content": "x" * 32_000_000}])
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] >= 8_000_000


def test_a_body_over_the_limit_gets_413_before_it_is_sent() -> None:
    with emulator("--body-limit-mb", "1") as engine:
        with socket.create_connection(("127.0.0.1", engine.port), 10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        # A client that sends all of it before it reads must find the answer, not a reset connection.
        with socket.create_connection(("127.0.0.1", engine.port), 10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
            for _ in range(9):
                raw.sendall(b"x" * 1_000_000)
            assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        chunked = engine.client.post("/v1/completions", content=(b"x" * 65536 for _ in range(20)))
        assert chunked.status_code == 413
        assert "1048576" in chunked.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"model":"other","messages":[{"role":"user","content":"x"}]}', 404, "model_not_found"),
        (b'{"messages":[]}', 400, None),
        (b'{"messages":["x"]}', 400, None),
        (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":-1}', 400, None),
        (b'{"messages":[{"role":"user","content":"x"}],"n":0}', 400, None),
        (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":99999999}', 400, "context_length_exceeded"),
    ],
)
def test_bad_requests_get_openai_error_objects(engine: Emulator, body: bytes, status: int, code: str | None) -> None:
    answer = engine.client.post("/v1/chat/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_paths_and_methods_that_are_not_there(engine: Emulator) -> None:
    assert engine.client.get("/nothing").status_code == 404
    assert engine.client.get("/v1/chat/completions").status_code == 405
    assert engine.client.get("/health").status_code == 200


def test_the_last_request_is_kept_as_it_came(engine: Emulator) -> None:
    engine.client.post("/v1/chat/completions", json=CHAT, headers={"X-Mark": "7"})
    last = engine.client.get("/emulator/last-request").json()
    assert json.loads(last["body"]) == CHAT
    assert last["headers"]["x-mark"] == "7"


@pytest.mark.parametrize("kind", ["cut", "reset"])
def test_a_connection_is_cut_after_some_tokens(engine: Emulator, kind: str) -> None:
    engine.fault(kind=kind, tokens=2, count=2)
    lines: list[str] = []
    with (
        pytest.raises(httpx2.TransportError),
        engine.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
    ):
        lines.extend(answer.iter_lines())
    # The role, two tokens; a reset may take the last of them with it.
    assert len([line for line in lines if line]) in ((3,) if kind == "cut" else (0, 1, 2, 3))
    with pytest.raises(httpx2.TransportError):
        engine.chat()
    assert engine.chat().status_code == 200
    assert engine.state()["failed_total"] == 2


def test_a_hang_before_the_first_byte_holds_the_slot_until_the_client_leaves(engine: Emulator) -> None:
    engine.fault(kind="hang", count=1)
    with pytest.raises(httpx2.ReadTimeout):
        engine.client.post("/v1/chat/completions", json=CHAT | {"stream": True}, timeout=0.3)
    engine.wait_until(running=0, aborted_total=1)


def test_status_faults_say_when_to_come_back(engine: Emulator) -> None:
    engine.fault(kind="status", status=429, retry_after_s=7, count=1)
    engine.fault(kind="status", status=503, count=1)
    busy, down, fine = engine.chat(), engine.chat(), engine.chat()
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "7")
    assert busy.json()["error"]["type"] == "rate_limit_error"
    assert (down.status_code, fine.status_code) == (503, 200)


def test_bodies_that_are_not_what_they_should_be(engine: Emulator) -> None:
    engine.fault(kind="malformed", tokens=1, count=2)
    data = engine.stream()
    with pytest.raises(json.JSONDecodeError):
        json.loads(data[2])
    assert data[-1] == "[DONE]"
    with pytest.raises(json.JSONDecodeError):
        engine.chat().json()
    engine.fault(kind="wrong-content-type", count=1)
    assert engine.chat().headers["content-type"].startswith("text/html")
    engine.fault(kind="error-event", tokens=1, count=1)
    assert "error" in json.loads(engine.stream()[-2])


def test_a_body_may_end_cleanly_without_done(engine: Emulator) -> None:
    engine.fault(kind="no-done", tokens=2, count=1)
    data = engine.stream()
    assert len(data) == 3
    assert "[DONE]" not in data
    assert engine.stream()[-1] == "[DONE]"
    assert engine.state()["running"] == 0


def test_a_slowed_request_takes_longer(engine: Emulator) -> None:
    engine.fault(kind="slow", factor=100, count=1)
    began_s = time.monotonic()
    engine.chat()
    assert time.monotonic() - began_s >= 0.5


def test_the_process_can_die_in_an_answer(engine: Emulator) -> None:
    engine.fault(kind="exit", tokens=2)
    with pytest.raises(httpx2.TransportError):
        engine.stream()
    assert engine.process.wait(10) == 1


def test_wrong_faults_are_refused(engine: Emulator) -> None:
    for body in (b"{", b'{"kind":"explode"}', b'{"kind":"refuse-start"}', b'["x"]', b"3"):
        assert engine.client.post("/emulator/faults", content=body).status_code == 400
    engine.fault(kind="cut")
    assert [fault["kind"] for fault in engine.client.get("/emulator/faults").json()["faults"]] == ["cut"]
    engine.client.delete("/emulator/faults")
    assert engine.chat().status_code == 200


def test_it_refuses_to_start_as_an_engine_out_of_memory_does() -> None:
    ended = subprocess.run([*COMMAND, "--fault", "refuse-start"], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert "CUDA out of memory" in ended.stderr


def test_it_does_not_listen_while_it_loads() -> None:
    port = free_port()  # Of this worker's own: nobody beside it listens there meanwhile.
    flags = ("--port", str(port), "--start-delay-s", "60")
    process = subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True)
    errors = cast(IO[str], process.stderr)
    assert "loading m/1: 60 s" in errors.readline()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    errors.close()


def test_a_port_in_use_is_one_clear_line(engine: Emulator) -> None:
    ended = subprocess.run([*COMMAND, "--port", str(engine.port)], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines() == [
        f"serai engine emulate: cannot listen on 127.0.0.1:{engine.port}: Address already in use; "
        "choose another with --port"
    ]


def test_sigterm_ends_it_with_requests_running(engine: Emulator) -> None:
    engine.fault(kind="hang", tokens=1)
    outcome: list[BaseException | list[str]] = []

    def ask() -> None:
        try:
            outcome.append(engine.stream())
        except httpx2.TransportError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    engine.wait_until(running=1)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(10) == 0
    asking.join(10)
    assert isinstance(outcome[0], httpx2.TransportError)
