"""The main job with a real model: SmolLM2-135M on llama.cpp, through the whole system."""

from __future__ import annotations

import sys
import time

import httpx2
import openai
import pytest

from integration.system import Process, System, wait_for
from serai.cli.up import small_model

MODEL = "smollm2"


def start_llamacpp_agent(system: System) -> Process:
    engine = [sys.executable, "-m", "serai.worker_agent.engine.llamacpp_server", "--model-file", str(small_model())]
    agent = system.service("agent", "--model", MODEL, "--", *engine, "--alias", MODEL, "--threads", "2")
    system.wait_for_sessions(1, MODEL)
    return agent


def busy_slots(engine: httpx2.Client) -> float:
    lines = engine.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("llamacpp:requests_processing"))


@pytest.mark.alone  # llama.cpp ends a step before it looks at its socket, and steps are long on busy cores.
def test_the_sdk_streams_a_real_answer_and_an_abort_frees_the_slot_within_a_second(small_system: System) -> None:
    agent = start_llamacpp_agent(small_system)
    client = openai.OpenAI(base_url=f"{small_system.url}/v1", api_key=small_system.key, max_retries=0)
    question = [{"role": "user", "content": "Write the word caravan."}]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=question,
        stream=True,
        max_tokens=24,
        temperature=0,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip()
    assert chunks[-1].usage is not None
    assert 1 <= chunks[-1].usage.completion_tokens <= 24
    whole = client.chat.completions.create(model=MODEL, messages=question, max_tokens=24, temperature=0)
    assert whole.choices[0].message.content == text, "streamed or not, the answer is the same"

    with small_system.engine(agent) as engine:
        long = client.chat.completions.create(model=MODEL, messages=question, stream=True, max_tokens=1500)
        next(iter(long))
        wait_for(lambda: busy_slots(engine) == 1, "the engine works", 5)
        long.close()
        left_at_s = time.monotonic()
        wait_for(lambda: busy_slots(engine) == 0, "the slot is free", 2)
        assert time.monotonic() - left_at_s < 1.0
    client.close()
    with small_system.client() as raw:
        metrics = raw.get("/metrics").text
    assert f'serai_ingress_tokens_total{{model="{MODEL}",type="completion"}}' in metrics
    assert agent.terminate() == 0


def test_an_agent_attaches_to_an_engine_that_runs_already(small_system: System) -> None:
    first = start_llamacpp_agent(small_system)
    url = f"http://127.0.0.1:{small_system.engine_port(first)}"
    small_system.service("agent", "--model", "other-name", "--engine-url", url)
    small_system.wait_for_sessions(1, "other-name")
    with small_system.client() as client:
        body = {"model": "other-name", "prompt": "One, two,", "max_tokens": 2}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["model"] == MODEL, "the engine was asked by its own name"
