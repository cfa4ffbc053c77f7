"""Every endpoint through the whole system: to the sessions that have it, in the words of its dialect."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import httpx2
import openai
import pytest

from integration.system import System, wait_for
from integration.test_real_engine import MODEL
from serai.cli.up import small_model

FAST = ("--ttft-ms", "1", "--tpot-ms", "1")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of caravans."}], "max_tokens": 8}


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_real_engines_endpoints_are_found_and_speak_their_own_words(small_system: System) -> None:
    engine = [sys.executable, "-m", "serai.worker_agent.engine.llamacpp_server", "--model-file", str(small_model())]
    agent = small_system.service("agent", "--model", "other", "--", *engine, "--alias", MODEL, "--embeddings")
    small_system.wait_for_sessions(1, "other", timeout_s=90)
    with small_system.client(timeout_s=60) as client, small_system.engine(agent) as direct:
        body = {"model": "other", "input": ["a camel", "a train"]}
        ours = client.post("/v1/embeddings", json=body)
        theirs = direct.post("/v1/embeddings", json=body | {"model": MODEL})
        assert ours.status_code == 200, ours.text
        assert [one["index"] for one in ours.json()["data"]] == [0, 1]
        assert len(ours.json()["data"][0]["embedding"]) == len(theirs.json()["data"][0]["embedding"]) > 100

        tokens = client.post("/tokenize/", json={"model": "other", "content": "a caravan"}).json()["tokens"]
        back = client.post("/detokenize", json={"model": "other", "tokens": tokens})
        assert back.json()["content"] == "a caravan"

        answer = client.post("/v1/rerank", json={"model": "other", "query": "x", "documents": ["y"]})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "endpoint_not_supported")
        assert "/v1/embeddings" in error_of(answer)["message"]
        assert "/v1/rerank" not in error_of(answer)["message"].split("It has")[1]

        messages = {"model": "other", "max_tokens": 4, "messages": CHAT["messages"]}
        whole = client.post("/v1/messages", json=messages)
        assert (whole.json()["type"], whole.json()["model"]) == ("message", "other")
        assert client.post("/v1/messages/count_tokens", json=messages).json()["input_tokens"] > 0
        streamed = client.post("/v1/messages", json=messages | {"stream": True}).text
        assert streamed.startswith("event: message_start\n")
        assert streamed.rstrip().endswith('data: {"type":"message_stop"}')
        assert "[DONE]" not in streamed

        asked = {"model": "other", "input": "hello", "max_output_tokens": 4}
        assert client.post("/v1/responses", json=asked).json()["object"] == "response"
        streamed = client.post("/v1/responses", json=asked | {"stream": True}).text
        assert "event: response.incomplete\n" in streamed
        assert "[DONE]" not in streamed


def test_audio_goes_to_the_engine_as_it_came_but_for_the_models_name(small_system: System) -> None:
    agent = small_system.start_agent(*FAST, "--model", "whisper", model="m", agent_flags=("--engine-model", "whisper"))
    small_system.wait_for_sessions(1)
    sound = bytes(range(256)) * 4096 + b"\r\n--not the boundary"
    client = openai.OpenAI(base_url=f"{small_system.url}/v1", api_key=small_system.key, max_retries=0)
    heard = client.audio.transcriptions.create(model="m", file=("a.wav", io.BytesIO(sound)), language="de")
    assert heard.text
    with small_system.client() as raw:
        form = {"model": "m", "response_format": "text"}
        answer = raw.post("/v1/audio/transcriptions", data=form, files={"file": ("a.wav", sound)})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/plain")
        answer = raw.post("/v1/audio/translations", data=form, files={"file": ("a.wav", sound)})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "endpoint_not_supported")
        answer = raw.post("/v1/audio/transcriptions", json={"model": "m"})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
        answer = raw.post("/v1/audio/transcriptions", files={"file": ("a.wav", sound)})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "model")
    client.close()
    assert agent.popen.poll() is None


def test_a_request_goes_only_to_sessions_that_have_its_endpoint(small_system: System) -> None:
    without = "/v1/rerank,/rerank,/v2/rerank"
    small_system.start_agent(*FAST, "--without", without)
    small_system.start_agent(*FAST, "--without", "/v1/chat/completions,/v1/rerank")
    small_system.wait_for_sessions(2)
    rerank = {"model": "m", "query": "camel", "documents": ["a camel", "a train"]}
    with small_system.client() as client:
        for _ in range(6):
            answer = client.post("/v2/rerank", json=rerank)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-serai-session"].startswith("local-a1-")
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert answer.headers["x-serai-session"].startswith("local-a0-")
        assert answer.headers["x-serai-attempts"] == "1"


@pytest.mark.parametrize("path", ["/v1/responses/r1", "/v1/responses/r1/cancel", "/v1/responses/r1/input_items"])
def test_kept_responses_are_refused_honestly(small_system: System, path: str) -> None:
    small_system.start_agent(*FAST, "--native", "responses")
    small_system.wait_for_sessions(1)
    with small_system.client() as client:
        answer = client.post(path) if path.endswith("cancel") else client.get(path)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "responses_not_kept")
        answer = client.post("/v1/responses", json={"model": "m", "input": "x", "previous_response_id": "r1"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "previous_response_id")


def test_a_client_hears_that_its_request_lives(system: System) -> None:
    system.start_registry()
    system.start_ingress("--keep-alive-s", "0.5")
    system.start_agent("--ttft-ms", "2500", "--tpot-ms", "1")
    system.wait_for_sessions(1)
    began_s = time.monotonic()
    with (
        system.client() as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
    ):
        assert time.monotonic() - began_s < 2.4, "the head is there before the first token"
        lines = list(answer.iter_lines())
    assert lines[0] == ": keep-alive"
    assert lines.count(": keep-alive") >= 2
    assert lines[-2] == "data: [DONE]"
    sdk = openai.OpenAI(base_url=f"{system.url}/v1", api_key=system.key, max_retries=0)
    chunks = list(sdk.chat.completions.create(**CHAT, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.APIError, match="context"):
        list(sdk.chat.completions.create(**CHAT | {"max_tokens": 100_000_000}, stream=True))
    sdk.close()


def test_what_http_clients_and_browsers_do(system: System) -> None:
    system.start_registry()
    system.start_ingress("--cors-origin", "https://chat.example.org")
    system.start_agent(*FAST, model="org/m")
    system.wait_for_sessions(1, "org/m")
    page = {"origin": "https://chat.example.org"}
    with system.client() as client:
        asks = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = client.options("/v1/chat/completions", headers=asks)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["allow"] == "OPTIONS, POST"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        answer = client.post("/v1/chat/completions", json=CHAT | {"model": "org/m", "stream": True}, headers=page)
        assert answer.headers["access-control-allow-origin"] == page["origin"]
        assert "x-serai-session" in answer.headers["access-control-expose-headers"]
        answer = client.post("/v1/chat/completions", json=CHAT, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (404, page["origin"])
        answer = client.get("/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers

        for path in ("/v1/models/org/m", "/v1/models/org%2Fm", "/v1/models/org/m/"):
            assert client.get(path).json()["id"] == "org/m"
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) > 50
        answer = client.put("/v1/models")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        described = client.get("/openapi.json").json()
        assert "/v1/audio/transcriptions" in described["paths"]
        wait_for(lambda: client.get("/health/ready").status_code == 200, "ready")
        assert json.loads(client.get("/version").content)["version"]
