"""What a client sees when all goes well, and when it leaves. Real NATS, real processes, emulated engines."""

from __future__ import annotations

import json
import socket
import time

import httpx2
import openai
import pytest

from integration.system import System, soon, wait_for

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}]}


def events(answer: httpx2.Response) -> list[str]:
    """The data of each SSE event."""
    return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]


def text_of(data: list[str]) -> str:
    chunks = [json.loads(one) for one in data if one != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


def test_streamed_and_unary_answers_are_the_engines_own(small_system: System) -> None:
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "1")
    small_system.wait_for_sessions(1)
    with small_system.client() as client, small_system.engine(agent) as engine:
        for body in (CHAT | {"max_tokens": 20}, CHAT | {"max_tokens": 20, "unheard_of": {"x": [1, None]}}):
            ours = client.post("/v1/chat/completions", json=body)
            theirs = engine.post("/v1/chat/completions", json=body)
            assert ours.status_code == 200
            assert ours.headers["content-type"] == theirs.headers["content-type"]
            assert ours.json()["choices"] == theirs.json()["choices"]
            assert ours.json()["usage"] == theirs.json()["usage"]
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 20, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-serai-session"].startswith("local-a0-")
            data = events(answer)
        assert data[-1] == "[DONE]"
        assert text_of(data) == ours.json()["choices"][0]["message"]["content"]
        answer = client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_the_openai_sdk_streams_lists_and_reads_errors(small_system: System) -> None:
    small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "1", model="org/llama-3.1:8b")
    small_system.wait_for_sessions(1, "org/llama-3.1:8b")
    client = openai.OpenAI(base_url=f"{small_system.url}/v1", api_key=small_system.key, max_retries=0)
    assert [model.id for model in client.models.list()] == ["org/llama-3.1:8b"]
    model = client.models.retrieve("org/llama-3.1:8b")
    assert (model.owned_by, model.object, model.created) == ("local", "model", 0)
    assert model.model_extra
    assert model.model_extra["state"] == "serving"  # Beside OpenAI's fields, which stay what they are.
    stream = client.chat.completions.create(
        model="org/llama-3.1:8b",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        max_tokens=12,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    with pytest.raises(openai.NotFoundError, match=r"does not exist. Available: org/llama-3.1:8b") as caught:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{small_system.url}/v1", api_key="sk-wrong", max_retries=0).models.list()
    client.close()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("moment", ["before the first byte", "between tokens"])
def test_a_client_that_leaves_frees_the_engine_within_a_second(
    small_system: System, streamed: bool, moment: str
) -> None:
    agent = small_system.start_agent("--ttft-ms", "10", "--tpot-ms", "20")
    small_system.wait_for_sessions(1)
    body = json.dumps(CHAT | {"max_tokens": 100_000, "stream": streamed}).encode()
    with small_system.engine(agent) as engine:

        def running() -> int:
            return int(engine.get("/emulator/state").json()["running"])

        def free_after_s() -> float:
            if moment == "before the first byte":
                engine.post("/emulator/faults", json={"kind": "hang", "tokens": 0, "count": 1}).raise_for_status()
            port = int(small_system.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {small_system.key}\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_for(lambda: running() == 1, "the engine works", 5)
                if streamed and moment == "between tokens":
                    seen = b""
                    while seen.count(b"data: ") < 5:
                        seen += client.recv(65536)
            left_at_s = time.monotonic()
            wait_for(lambda: running() == 0, "the engine is free", 10)
            return time.monotonic() - left_at_s

        soon(free_after_s, 1.0)


def test_a_large_prompt_is_split_and_arrives_whole(small_system: System) -> None:
    small_system.start_agent("--ttft-ms", "1", "--tpot-ms", "1")
    small_system.wait_for_sessions(1)
    with small_system.client() as client:
        for size in (600_000, 5_000_000, 31_000_000):
            body = CHAT | {"messages": [{"role": "user", "content": "é" * (size // 2)}], "max_tokens": 2}
            raw = json.dumps(body, ensure_ascii=False).encode()
            answer = client.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200, answer.text[:300]
            assert answer.json()["usage"]["completion_tokens"] == 2


def test_requests_are_spread_over_sessions(small_system: System) -> None:
    for _ in range(2):
        small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "1")
    small_system.wait_for_sessions(2)
    with small_system.client() as client:
        sessions = [
            client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).headers["x-serai-session"]
            for _ in range(10)
        ]
    assert len(set(sessions)) == 2
    assert 4 <= sessions.count(sessions[0]) <= 6


def test_one_request_is_one_trace_across_processes(small_system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_file = small_system.folder / "spans.jsonl"
    monkeypatch.setenv("SERAI_TRACE_FILE", str(trace_file))
    ingress = small_system.start_ingress()
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "1")
    small_system.wait_for_sessions(1)
    trace = "0af7651916cd43dd8448eb211c80319c"
    with small_system.client() as client:
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "my-request"}
        answer = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}, headers=headers)
        assert answer.headers["x-request-id"] == "my-request"
        client.post(
            "/v1/chat/completions",
            json=CHAT | {"max_tokens": 2},
            headers={"traceparent": f"00-{'1' * 32}-b7ad6b7169203331-00"},
        )
    assert agent.terminate() == 0
    assert ingress.terminate() == 0
    spans = [json.loads(line) for line in trace_file.read_text().splitlines()]
    mine = {span["attributes"]["serai.hop"]: span for span in spans if span["trace_id"] == trace}
    assert {hop: span["name"] for hop, span in mine.items()} == {
        "ingress": "chat m",
        "inference": "inference",
        "engine": "chat m",
    }
    said = mine["ingress"]["attributes"]
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", "m")
    assert (said["gen_ai.provider.name"], said["gen_ai.request.max_tokens"]) == ("emulated", 2)
    assert said["gen_ai.usage.output_tokens"] == 2
    assert said["gen_ai.usage.input_tokens"] > 0
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.response.id"]
    assert mine["engine"]["attributes"]["server.address"] == "127.0.0.1"
    assert CHAT["messages"][0]["content"] not in trace_file.read_text(), "content stays out of traces"
    assert mine["ingress"]["parent_id"] == "b7ad6b7169203331"
    assert mine["inference"]["parent_id"] == mine["ingress"]["span_id"]
    assert mine["engine"]["parent_id"] == mine["inference"]["span_id"]
    assert mine["ingress"]["start_ns"] <= mine["inference"]["start_ns"] <= mine["engine"]["start_ns"]
    assert mine["engine"]["end_ns"] <= mine["ingress"]["end_ns"]
    assert not [span for span in spans if span["trace_id"] == "1" * 32], "the caller asked not to record it"
