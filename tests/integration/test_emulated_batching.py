"""The emulated engine on the cost model, as a process of its own: what queues, caches, phases and aborts do to time."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2
import pytest

from integration.test_engine_emulator import COMMAND, Emulator
from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.batching.sequence import Sequence as EngineSequence
from serai.engine_emulator.modelled import ModelFlags, modelled_engine

pytestmark = pytest.mark.alone
MODEL = "meta-llama/Llama-3.1-8B"
GPU = ("--gpu", "h100", "--card", MODEL)


@contextmanager
def engine(*flags: str) -> Iterator[Emulator]:
    running = Emulator(*GPU, *flags)
    try:
        yield running
    finally:
        running.stop()


@dataclass
class Heard:
    """What came back of one request, and when (seconds since it was sent)."""

    text: str = ""
    at_s: list[float] = field(default_factory=list)
    status: int = 0
    done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.at_s[0]


async def hear(client: httpx2.AsyncClient, prompt: str, tokens: int) -> Heard:
    """Stream one answer."""
    heard, sent_s = Heard(), time.monotonic()
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        heard.status = answer.status_code
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                heard.done = True
            elif line.startswith("data: ") and (text := json.loads(line[6:])["choices"][0]["text"]):
                heard.at_s.append(time.monotonic() - sent_s)
                heard.text += text
    return heard


def all_of(port: int, requests: Sequence[tuple[str, int]]) -> list[Heard]:
    """The answers to requests sent at the same time."""

    async def ask() -> list[Heard]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as client:
            return await asyncio.gather(*[hear(client, prompt, tokens) for prompt, tokens in requests])

    return asyncio.run(ask())


def prompt_of(tokens: int, mark: str) -> str:
    """A prompt of about `tokens` tokens that shares no prefix with one of another mark."""
    return (mark + " ").ljust(12, ".") * (tokens // 3)


def metric(running: Emulator, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", running.client.get("/metrics").text, re.MULTILINE)
    assert found is not None, f"no {name}"
    return float(found[1])


def predicted_gaps_s(prompts: int, prompt_tokens: int, output_tokens: int, speed: float) -> list[float]:
    """Step times of a batch that starts together, from the scheduler alone."""
    modelled = modelled_engine(ModelFlags(MODEL, "h100", speed=speed))
    scheduler = BatchEngine(modelled.model, modelled.batch, step_noise=lambda: 1 / speed)
    for number in range(prompts):
        scheduler.submit(EngineSequence(number, prompt_tokens, output_tokens), 0.0)
    gaps, now = [], 0.0
    while (step := scheduler.begin_step(now)) is not None:
        if step.kind == "decode":
            gaps.append(step.ends_at_s - step.began_at_s)
        now = step.ends_at_s
        scheduler.end_step()
    return gaps


def test_time_to_first_token_grows_with_the_queue() -> None:
    with engine("--max-num-seqs", "2", "--speed", "0.5") as running:
        heard = all_of(running.port, [(prompt_of(500, f"q{n}"), 20) for n in range(8)])
        assert [one.done for one in heard] == [True] * 8
        # Four pairs, one after the other; a busy machine may add to that and takes nothing away.
        pair_s = sum(predicted_gaps_s(2, 500, 20, 0.5))
        times = sorted(one.ttft_s for one in heard)
        assert times[0] < pair_s
        assert all(times[place] > place // 2 * pair_s for place in range(2, 8))
        assert metric(running, "vllm:request_queue_time_seconds_sum") > 2 * (1 + 2 + 3) * 0.9 * pair_s
        running.wait_until(running=0, waiting=0)


def test_a_tiny_kv_cache_preempts_and_loses_nothing() -> None:
    with engine("--kv-tokens", "1024", "--speed", "20") as running:
        requests = [(prompt_of(100, f"p{n}"), 150) for n in range(8)]
        heard = all_of(running.port, requests)
        alone = all_of(running.port, requests[:1])
        assert metric(running, "vllm:num_preemptions_total") > 0
        assert [(one.done, len(one.text.split())) for one in heard] == [(True, 150)] * 8
        assert alone[0].text == heard[0].text
        assert running.state()["kv"]["tokens_used"] == 0


def test_a_prefix_in_the_cache_makes_the_first_token_come_sooner() -> None:
    with engine("--speed", "0.2") as running:
        prompt = prompt_of(6000, "same")
        (first,), (second,) = all_of(running.port, [(prompt, 1)]), all_of(running.port, [(prompt, 1)])
        assert second.ttft_s < 0.5 * first.ttft_s
        assert metric(running, "vllm:prefix_cache_hits_total") > 5900
    with engine("--speed", "0.2", "--no-prefix-cache") as running:
        (first,), (second,) = all_of(running.port, [(prompt, 1)]), all_of(running.port, [(prompt, 1)])
        assert second.ttft_s > 0.7 * first.ttft_s


def test_a_client_that_leaves_frees_slot_and_kv_at_once() -> None:
    with engine("--max-num-seqs", "1") as running:
        body = {"prompt": prompt_of(4000, "gone"), "max_tokens": 9999, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert running.state()["kv"]["tokens_used"] > 3900
        running.wait_until(running=0, waiting=0, aborted_total=1)
        assert running.state()["kv"]["tokens_used"] == 0
        assert all_of(running.port, [("next", 2)])[0].done


def test_with_a_closed_gate_no_first_token_comes_until_it_is_opened() -> None:
    with engine("--mode", "phase-gated", "--speed", "10") as running:

        def turn(**word: Any) -> dict[str, Any]:
            return dict(running.client.post("/emulator/phase", json=word).raise_for_status().json())

        assert running.state()["phase"] == "mixed"
        assert turn(phase="decode")["phase"] == "decode"
        heard: list[Heard] = []
        asking = threading.Thread(target=lambda: heard.extend(all_of(running.port, [("a", 5), ("b", 5)])))
        asking.start()
        running.wait_until(waiting=2, running=0)
        time.sleep(0.3)
        assert running.state()["generation_tokens_total"] == 0
        assert turn(phase="prefill", prompt_tokens_max=512)["prompt_tokens_max"] == 512
        asking.join(10)
        assert [one.done for one in heard] == [True, True]
        assert min(one.ttft_s for one in heard) > 0.3
        for wrong in ({"phase": "sleep"}, {"phase": "mixed", "prompt_tokens_max": 0}, {}, []):
            assert running.client.post("/emulator/phase", json=wrong).status_code == 400
        assert running.client.post("/emulator/phase", content=b"{").status_code == 400
    with engine() as running:
        assert running.client.post("/emulator/phase", json={"phase": "decode"}).status_code == 409


@pytest.mark.parametrize("speed", [0.5, 1, 4])
def test_steps_take_as_long_as_the_scheduler_predicts(speed: float) -> None:
    tokens = round(60 * max(1, speed))
    predicted_s = sum(predicted_gaps_s(8, 300, tokens, speed))
    body = {"max_tokens": tokens}
    found = []
    # Answers in one piece, since reading streams fast enough is more than this process can do beside others. A busy
    # machine can hold a run up, but nothing can make it faster: the best of a few.
    for attempt in range(6):
        with engine("--speed", str(speed)) as running:
            prompts = [prompt_of(300, f"{attempt}s{n}") for n in range(8)]
            asking = [
                threading.Thread(target=running.client.post, args=("/v1/completions",), kwargs={"json": one})
                for one in [{**body, "prompt": prompt} for prompt in prompts]
            ]
            for one in asking:
                one.start()
            for one in asking:
                one.join()
            found.append(metric(running, "vllm:request_decode_time_seconds_sum") / 8)
        if found[-1] < 1.07 * predicted_s:
            break
    # The first of them may have waited for the prompts of others that came a moment later.
    assert min(found) == pytest.approx(predicted_s, rel=0.1), found


def test_metrics_have_the_names_of_vllm() -> None:
    with engine("--kv-tokens", "32000") as running:
        all_of(running.port, [(prompt_of(100, "m"), 5)])
        text = running.client.get("/metrics").text
        names = set(re.findall(r"^(vllm:\w+?)(?:_bucket|_sum|_count)?\{", text, re.MULTILINE))
        assert names >= {
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:cache_config_info",
            "vllm:num_preemptions_total",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:iteration_tokens_total",
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:request_time_per_output_token_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:request_success_total",
        }
        assert 'num_gpu_blocks="2000"' in text
        assert metric(running, "vllm:inter_token_latency_seconds_count") == 4
        assert metric(running, "vllm:iteration_tokens_total_count") == 5
        assert re.search(r'vllm:request_success_total\{finished_reason="length",[^}]*\} 1\n', text)
        assert running.client.get("/version").json()["version"]
        assert running.client.get("/load").json() == {"server_load": 0}
        assert running.client.get("/v1/loads").status_code == 404


def test_as_sglang_it_has_its_names_and_reports_its_load() -> None:
    with engine("--engine", "sglang", "--max-num-seqs", "1", "--kv-tokens", "32000") as running:
        assert running.state()["mode"] == "prefill-first"
        body = {"prompt": prompt_of(1000, "busy"), "max_tokens": 999, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            load = running.client.get("/v1/loads").json()["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (1, 0, 1)
        assert load["max_total_num_tokens"] == load["memory"]["token_capacity"] == 32000
        assert 1000 < load["num_used_tokens"] < 1100
        assert load["token_usage"] == pytest.approx(load["num_used_tokens"] / 32000, abs=1e-5)
        assert load["total_prefill_uncached_tokens"] >= 999
        assert load["queues"] == {"waiting": 0, "paused": 0, "retracted": 0}
        text = running.client.get("/metrics").text
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "kv_available_tokens", "gen_throughput"):
            assert f"sglang:{name}{{" in text
        assert "sglang:time_to_first_token_seconds_bucket" in text
        assert "vllm:" not in text
        for path in ("/server_info", "/get_server_info"):
            assert running.client.get(path).json()["max_total_num_tokens"] == 32000
        assert running.client.get("/health_generate").status_code == 200


def test_usage_stands_in_every_chunk_when_asked_for() -> None:
    with engine("--speed", "20") as running:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = [json.loads(data) for data in running.stream(stream_options=options, priority=3)[:-1]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [0, 1, 2, 3, 4, 4, 4]
        assert chunks[2]["usage"]["total_tokens"] == chunks[2]["usage"]["prompt_tokens"] + 2
        assert running.chat(priority="high").status_code == 400


def test_what_can_never_fit_gets_400_with_its_numbers() -> None:
    with engine("--kv-tokens", "1024", "--context-tokens", "5000") as running:
        card = running.client.get("/v1/models").json()["data"][0]
        assert card["max_model_len"] == 1024
        for tokens, told in ((4000, "1024"), (9000, "5000")):
            answer = running.client.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": tokens})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert told in answer.json()["error"]["message"]
        assert running.state()["running"] == 0


def test_faults_work_between_batched_steps_as_well() -> None:
    with engine("--speed", "20", "--max-num-seqs", "2") as running:
        running.fault(kind="cut", tokens=3, count=1)
        with pytest.raises(httpx2.TransportError):
            running.stream(max_tokens=50)
        running.fault(kind="no-done", tokens=2, count=1)
        assert len(running.stream(max_tokens=50)) == 3
        running.fault(kind="error-event", tokens=1, count=1)
        assert "error" in json.loads(running.stream()[-2])
        running.fault(kind="malformed", tokens=1, count=1)
        assert running.stream()[-1] == "[DONE]"
        running.fault(kind="status", status=503, count=1)
        assert running.chat().status_code == 503
        running.fault(kind="wrong-content-type", count=1)
        assert running.chat().headers["content-type"].startswith("text/html")
        running.wait_until(running=0)
        assert running.state()["kv"]["tokens_used"] == 0
        running.fault(kind="exit", tokens=2)
        with pytest.raises(httpx2.TransportError):
            running.stream()
        assert running.process.wait(10) == 1


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_hang_holds_slot_and_kv_until_its_client_leaves(tokens: int) -> None:
    with engine("--speed", "20", "--max-num-seqs", "1") as running:
        running.fault(kind="hang", tokens=tokens, count=1)
        with pytest.raises(httpx2.ReadTimeout):
            running.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 400}],
                                "stream": True}, timeout=0.5)  # fmt: skip
        running.wait_until(running=0, aborted_total=1)
        running.fault(kind="hang", tokens=tokens, count=1)
        body = {"messages": [{"role": "user", "content": "x" * 400}], "stream": tokens > 0}
        hung = threading.Thread(target=lambda: _ignore(lambda: httpx2.post(
            f"http://127.0.0.1:{running.port}/v1/chat/completions", json=body, timeout=2)))  # fmt: skip
        hung.start()
        running.wait_until(running=1)
        time.sleep(0.2)
        assert running.state()["kv"]["tokens_used"] > 90
        with pytest.raises(httpx2.ReadTimeout):
            running.client.post("/v1/chat/completions", json=body, timeout=0.3)
        hung.join(10)
        running.wait_until(running=0, waiting=0)
        assert running.chat().status_code == 200
        assert running.state()["kv"]["tokens_used"] == 0


def _ignore(ask: Any) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        ask()


def test_a_slowed_request_takes_longer_than_the_others() -> None:
    with engine("--speed", "2") as running:
        running.fault(kind="slow", factor=5, count=1)
        slow = all_of(running.port, [("slow", 20)])[0]
        other = all_of(running.port, [("other", 20)])[0]
        assert slow.done
        assert slow.at_s[-1] > 3 * other.at_s[-1]


def test_noise_changes_step_times() -> None:
    def spread(*flags: str) -> float:
        """Of the middle half, of steps so long that a busy machine, which holds some of them up, hardly shows."""
        with engine("--speed", "0.2", *flags) as running:
            gaps = [later - sooner for sooner, later in pairwise(all_of(running.port, [("x", 40)])[0].at_s)]
        quarter, half, three_quarters = quantiles(gaps, n=4)
        return (three_quarters - quarter) / half

    assert spread("--step-noise", "0.5") > 2 * spread()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--gpu", "h1000"], r"--gpu: unknown GPU 'h1000': nearest are .*h100"),
        (["--gpu", "h100", "--card", MODEL, "--tp", "3"], r"--tp 3 --pp 1: .*`num_attention_heads` is 32"),
        (["--gpu", "h100"], r"--model m/1: no card .*; say with --card"),
        (["--gpu", "h100", "--card", "CONFIG"], r"--card: .*config\.json.*`\w+`"),
        (["--gpu", "h100", "--card", "none.json"], r"--card: cannot read none\.json: No such file"),
        (["--gpu", "a40", "--card", "meta-llama/Llama-3.1-70B"], r"GB of weights on each a40.*use more GPUs"),
        ([*GPU, "--max-num-batched-tokens", "100"], r"--max-num-batched-tokens must be at least --max-num-seqs"),
        ([*GPU, "--kv-tokens", "5"], r"--kv-tokens must hold one block of 16, not 5"),
        ([*GPU, "--weights", "fp7"], r"--weights must be one of fp32, bf16, .*, not fp7"),
        ([*GPU, "--kv-format", "int4"], r"--kv-format must be one of"),
        ([*GPU, "--speed", "0"], r"--speed must be above 0"),
        (["--mode", "mixed"], r"--mode needs --gpu"),
    ],
)
def test_flags_that_cannot_be_are_one_clear_line(tmp_path: Path, flags: list[str], told: str) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": 4096}')
    given = [str(config) if flag == "CONFIG" else flag for flag in flags]
    ended = subprocess.run([*COMMAND, *given], capture_output=True, text=True, timeout=20)
    lines = ended.stderr.strip().splitlines()
    assert (ended.returncode, len(lines)) == (2, 1), ended.stderr
    assert re.search(told, lines[0]), lines[0]


def test_the_model_name_may_be_that_of_a_shipped_card() -> None:
    command = [sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--gpu", "h100"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert f"serving {MODEL}" in process.stderr.readline()
    process.terminate()
    assert process.wait(10) == 0
    process.stderr.close()
