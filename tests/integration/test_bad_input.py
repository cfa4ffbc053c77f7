"""Bad input: one clear line, or the OpenAI error object; what to do is in it; nothing is lost for anyone else."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from integration.system import Process, System
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.worker_agent.engine.process import free_port


def error_of(system: System, content: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict]:
    with system.client() as client:
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"} | headers)
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error


def test_every_kind_of_bad_request_is_told_what_is_wrong(small_system: System) -> None:
    small_system.start_agent()
    small_system.wait_for_sessions(1)
    cases = [
        (b'{"model": "m", ', 400, "invalid_json", "not valid JSON"),
        (b"[1]", 400, "invalid_json", "must be a JSON object"),
        (b'{"messages": []}', 400, "invalid_model", "`model` is missing"),
        (b'{"model": 7}', 400, "invalid_model", "`model` must be a non-empty string"),
        (b'{"model": "m", "stream": "yes"}', 400, "invalid_type", "`stream` must be true or false"),
        (b'{"model": "other"}', 404, "model_not_found", "Available: m."),
        (b'{"model": "m", "messages": "\xff"}', 400, "invalid_json", "not valid JSON"),
    ]
    for content, status, code, words in cases:
        got, error = error_of(small_system, content)
        assert (got, error["code"]) == (status, code), content
        assert words in error["message"]
    status, error = error_of(small_system, b'{"model": "m"}', Authorization="Bearer sk-serai-wrong")
    assert (status, error["code"]) == (401, "invalid_api_key")
    status, error = error_of(small_system, b'{"model": "m"}', Authorization="")
    assert status == 401
    assert "missing" in error["message"]
    status, error = error_of(small_system, b"{}", "/v1/nothing")
    assert (status, error["code"]) == (404, "unknown_path")
    with small_system.client() as client:
        answer = client.get("/v1/chat/completions")
        assert answer.status_code == 405
        assert "POST" in answer.json()["error"]["message"]


def test_an_expired_key_is_told_so_and_others_go_on(system: System) -> None:
    key, then = new_key(), datetime(2026, 1, 31, tzinfo=UTC)
    keys = [StoredKey("test", hashed(system.key)), StoredKey("old", hashed(key), expires=then)]
    write_keys(system.folder / "keys.json", keys)
    system.start_registry()
    system.start_ingress()
    system.start_agent()
    system.wait_for_sessions(1)
    asked = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    status, error = error_of(system, asked, Authorization=f"Bearer {key}")
    assert (status, error["code"]) == (401, "expired_api_key")
    assert "expired on 2026-01-31" in error["message"]
    with system.client() as client:
        assert client.post("/v1/chat/completions", content=asked).status_code == 200


def test_a_body_over_the_limit_is_refused_before_it_is_sent(system: System) -> None:
    system.start_registry()
    system.start_ingress("--body-bytes-max", "100000")
    with system.client() as client:
        answer = client.post("/v1/chat/completions", content=b"x" * 100_001)
        assert answer.status_code == 413
        assert "100001" in answer.json()["error"]["message"]
        assert "100000" in answer.json()["error"]["message"]
        answer = client.post("/v1/chat/completions", content=iter([b"x" * 60_000] * 3))  # No length announced.
        assert answer.status_code == 413
    port = int(system.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {system.key}\r\n"
        raw.sendall(f"{head}Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_an_engine_that_dies_at_start_is_told_with_its_last_lines(small_system: System) -> None:
    agent = small_system.start_agent("--fault", "refuse-start", wait=False)
    assert agent.popen.wait(15) == 2  # Memory that does not suffice is not tried again (H43).
    last = agent.log.splitlines()
    story = next(line for line in last if line.startswith("serai agent: the engine ended with exit code 1"))
    assert "before it served (config: the same start would fail the same way, so it is not repeated)" in story
    assert "; its last lines:" in story
    assert "out of memory" in agent.log.lower()
    assert small_system.sessions() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "m", "--", "/does/not/exist", "--port", "{port}"], "cannot start '/does/not/exist'"),
        (["--model", "m", "--", "some-server"], "write {port} where it belongs"),
        (["--model", "m"], "give the engine's command after `--`, or --engine-url"),
        (["--model", "m", "--engine", "tgi", "--", "x"], "--engine 'tgi': must be auto or one of"),
        (["--", "x"], "--model (or SERAI_MODEL) is required"),
        (["--model", "m", "--status-interval-s", "0", "--", "x"], "--status-interval-s 0: must be above 0"),
        (["--model", "m", "--concurrency-max", "many", "--", "x"], "--concurrency-max: 'many' is not a whole number"),
        (["--model", "m", "--engine-url", "127.0.0.1:8000"], "not an http:// or https:// address"),
    ],
)
def test_an_agent_that_cannot_work_says_why_in_one_line(small_system: System, flags: list[str], words: str) -> None:
    process = small_system.service("agent", *flags)
    assert process.popen.wait(15) == 2
    told = [line for line in process.log.splitlines() if line.startswith("serai")]
    assert len(told) == 1
    assert words in told[0]


def test_a_port_in_use_is_told(small_system: System, tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        ingress = small_system.service("ingress", "--port", str(port), "--anonymous")
        assert ingress.popen.wait(15) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in ingress.log
        assert "choose another --port" in ingress.log
        up = [sys.executable, "-m", "serai.cli.main", "up", "--emulated", "--port", str(port), "--state", str(tmp_path)]
        ran = subprocess.run(up, capture_output=True, text=True, timeout=20, check=False)
        assert ran.returncode == 2
        assert f"port {port} of 127.0.0.1 cannot be had: Address already in use" in ran.stderr
    listening = ran.stderr.splitlines()
    assert len(listening) == 1


@pytest.mark.parametrize("role", ["registry", "ingress", "agent"])
def test_a_missing_nats_is_told_with_its_address(tmp_path: Path, role: str) -> None:
    more = {"ingress": ["--anonymous"], "agent": ["--model", "m", "--", "x", "{port}"]}.get(role, [])
    command = [sys.executable, "-m", "serai.cli.main", role, "--nats-url", "nats://127.0.0.1:9", *more]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert ran.returncode == 1
    told = [line for line in ran.stderr.splitlines() if line.startswith("serai")]
    assert len(told) == 1
    assert "cannot reach NATS at nats://127.0.0.1:9" in told[0]
    assert "--nats-url" in told[0]


def registry_with_key(system: System, key_file: Path) -> Process:
    url = f"nats://127.0.0.1:{system.nats_port}"
    serai = [sys.executable, "-m", "serai.cli.main"]
    return system.start("registry", [*serai, "registry", "--nats-url", url, "--nats-nkey-file", str(key_file)])


def test_refused_credentials_are_told(system: System) -> None:
    stranger = system.folder / "stranger.nk"
    other = type(system.nats)(system.folder / "other")
    other.prepare(1)
    stranger.write_bytes(other.key_file("registry").read_bytes())
    process = registry_with_key(system, stranger)
    assert process.popen.wait(15) == 1
    assert "refuses these credentials" in process.log


def test_a_role_that_may_not_do_its_work_fails_loudly_at_start(system: System) -> None:
    process = registry_with_key(system, system.nats.key_file("agent"))
    assert process.popen.wait(15) == 1
    assert "wrong permissions of registry-" in process.log
