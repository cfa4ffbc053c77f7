"""The real vLLM, its build for CPUs with SmolLM2-135M, behind the whole system: `make test-vllm`.

Such a small model says little that is true; what is looked at is how things are asked and answered. The tests run in
their order: the last ones end the engine that the others use.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from integration.system import Process, System, private_system, wait_for
from serai.contracts.admission import GateMode, InstanceReport, InstanceState, TakeInstance
from serai.contracts.codec import decode, encode
from serai.contracts.subjects import INSTANCE, TAKE
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.worker_agent.engine.counters import VLLM_COUNTERS, VLLM_GAUGES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

ENGINES = Path(__file__).parents[2] / ".engines"
VLLM, MODEL_FOLDER = ENGINES / "vllm" / "bin" / "vllm", ENGINES / "smollm2"
MODEL = "smollm2"
START_S = 900.0
"""Half a minute on an idle machine, of which most is for imports."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}
QUESTION: Any = [{"role": "user", "content": "Tell me of caravans in the desert."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Merv", "Aleppo"]}},
            "required": ["town"],
        },
    },
}


def start_agent(system: System, *, wait: bool = True) -> Process:
    """As an operator writes it. float32: many CPUs compute nothing else fast."""
    command = [str(VLLM), "serve", str(MODEL_FOLDER), "--served-model-name", MODEL, "--dtype", "float32"]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # As long as nobody takes the instance it schedules as vLLM's own does, so all that follows is to hold with it, too.
    phases = ["--scheduler-cls", "serai_vllm.scheduler.PhaseScheduler"]
    # A CPU reads prompts a hundred times slower than what is assumed of vLLM.
    flags = ["--model", MODEL, "--prefill-s-per-token", "0.1", "--engine-stop-s", "30", "--drain-s", "120"]
    agent = system.service("agent", *flags, "--", *command, *limits, *tools, *phases, environment=ENVIRONMENT)
    if wait:
        wait_until_serving(agent)
        system.wait_for_sessions(1, MODEL)
    return agent


def wait_until_serving(agent: Process, times: int = 1) -> None:
    wait_for(lambda: agent.log.count("agent.serving") >= times or agent.popen.poll() is not None, "serves", START_S)
    assert agent.popen.poll() is None, agent.log[-4000:]


@dataclass
class Serving:
    system: System
    agent: Process
    start_s: float

    def metrics(self) -> str:
        with self.system.engine(self.agent) as engine:
            return engine.get("/metrics").text

    def running(self) -> float:
        return metric(self.metrics(), "vllm:num_requests_running")

    def record(self) -> Any:
        """What the registry knows of the session."""
        tool = [sys.executable, "-m", "serai.cli.main", "registry"]
        nats = [
            *("--nats-url", f"nats://127.0.0.1:{self.system.nats_port}"),
            *("--nats-nkey-file", str(self.system.nats.key_file("tools")), "--json"),
        ]
        listed = json.loads(subprocess.check_output([*tool, "ls", *nats]))["sessions"]
        session = next(row["session"] for row in listed if row["model"] == MODEL and row["state"] == "serving")
        return json.loads(subprocess.check_output([*tool, "show", session, *nats]))["record"]


def metric(text: str, name: str) -> float:
    """The sum over all labels."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    if not (VLLM.exists() and (MODEL_FOLDER / "config.json").exists()):
        reason = "vLLM's build for CPUs, or its model, is not installed: make vllm"
        if os.environ.get("SERAI_REQUIRE_VLLM"):
            pytest.fail(reason)
        pytest.skip(reason)
    with private_system(tmp_path_factory.mktemp("vllm")) as system:
        system.start_registry()
        system.start_ingress()
        began_s = time.monotonic()
        agent = start_agent(system)
        yield Serving(system, agent, time.monotonic() - began_s)


@pytest.fixture(scope="module")
def sdk(serving: Serving) -> Iterator[openai.OpenAI]:
    url, key = f"{serving.system.url}/v1", serving.system.key
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300) as client:
        yield client


def test_its_start_is_told_and_its_endpoints_are_found(serving: Serving) -> None:
    print(f"vLLM served {serving.start_s:.1f} s after the agent's start")
    assert serving.agent.log.count("engine.phase") >= 2, "a start has phases"
    metadata = serving.record()["metadata"]
    assert metadata["engine"] == "vllm"
    assert metadata["context_tokens_max"] == 2048
    found = set(metadata["endpoints"])
    expected = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert found >= expected | {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    assert "/v1/embeddings" not in found
    # The watchdog and the status plane live on these.
    text = serving.metrics()
    for name in (*VLLM_COUNTERS, VLLM_GAUGES[0], "vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert metric(text, name) >= 0


def test_whole_and_streamed_answers_are_the_same_and_counted(serving: Serving, sdk: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    whole = sdk.chat.completions.create(**asked)
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (40, 16)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (40, 16)
    logged = sdk.chat.completions.create(**asked | {"max_tokens": 2}, logprobs=True, top_logprobs=2)
    assert logged.choices[0].logprobs is not None
    assert [len(token.top_logprobs) for token in logged.choices[0].logprobs.content or []] == [2, 2]
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        sdk.chat.completions.create(**asked | {"max_tokens": 99_999})


def test_a_tool_is_called(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=60, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    assert answer.choices[0].finish_reason == "tool_calls"
    print(f"arguments: {calls[0].function.arguments}")


def test_messages_responses_and_tokens_are_the_engines_own(serving: Serving) -> None:
    with serving.system.client(300) as client:
        asked: Any = {"model": MODEL, "max_tokens": 4, "messages": QUESTION}
        message = client.post("/v1/messages", json=asked).json()
        assert message["type"] == "message"
        assert message["usage"]["input_tokens"] == 40
        response = client.post("/v1/responses", json={"model": MODEL, "input": "Caravans?", "max_output_tokens": 4})
        assert response.json()["status"] == "incomplete"
        # An engine's own answer has fields that a translation would not make up.
        assert "kv_transfer_params" in response.json()
        tokens = client.post("/tokenize", json={"model": MODEL, "messages": QUESTION}).json()
        assert tokens["count"] == 40
        text = client.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}).json()["prompt"]
        assert "caravans in the desert" in text
        refused = client.post("/v1/embeddings", json={"model": MODEL, "input": "caravans"})
        assert refused.status_code == 404
        assert "/v1/embeddings" in refused.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_place_within_a_second(serving: Serving, sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, max_tokens=1500)
    came_at_s = []
    for _ in range(6):
        next(iter(stream))
        came_at_s.append(time.monotonic())
    # An engine drops a request between two of its steps, which are long on a busy CPU.
    step_s = max(later - earlier for earlier, later in pairwise(came_at_s))
    wait_for(lambda: serving.running() == 1, "the engine works", 20)
    stream.close()
    left_at_s = time.monotonic()
    wait_for(lambda: serving.running() == 0, "the place is free", 10)
    took_s = time.monotonic() - left_at_s
    print(f"free after {took_s:.2f} s; a step took up to {step_s:.2f} s")
    assert took_s < 1.0 + step_s


def test_its_scheduler_tells_the_phase_gate_of_its_steps(serving: Serving, sdk: openai.OpenAI) -> None:
    """The test is the macro-scheduler for a moment; when it falls silent the instance goes on by itself."""
    assert '"schedulers":1' in serving.agent.log, "it has dialled the agent"
    line = next(line for line in serving.agent.log.splitlines() if "agent.serving" in line)
    session, system = json.loads(line)["session"], serving.system
    reports: list[InstanceReport] = []

    async def macro(done: threading.Event) -> InstanceState:
        address = NatsAddress(f"nats://127.0.0.1:{system.nats_port}", system.nats.key_file("macro-scheduler"))
        bus = await NatsBus.connect(address, "macro-scheduler")
        await bus.subscribe(INSTANCE.of(session), lambda message: reports.append(decode(InstanceReport, message.data)))
        take = encode(TakeInstance("test", 1, GateMode.PADG, 0.1, 2.0))
        state = decode(InstanceState, (await bus.request(TAKE.of(session), take, 5)).data)
        while not done.is_set():
            await asyncio.sleep(0.5)
            await bus.request(TAKE.of(session), take, 5)
        await bus.aclose()
        return state

    done = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        taking = threads.submit(lambda: asyncio.run(macro(done)))
        asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        wait_for(lambda: reports or taking.done(), "it reports", 20)
        answers = list(threads.map(lambda _: sdk.chat.completions.create(**asked), range(3)))
        done.set()
        assert taking.result().accepted
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert all(answer.usage is not None and answer.usage.completion_tokens == 12 for answer in answers)
    assert max(report.kv_tokens_total for report in reports) > 1000
    assert max(report.step_s for report in reports) > 0, "steps were told"
    assert any(report.prefilling for report in reports), "windows were seen"
    wait_for(lambda: "take.owner_silent" in serving.agent.log, "two beats without an owner", 20)


def test_a_broken_stream_goes_on_with_the_same_text(serving: Serving, sdk: openai.OpenAI) -> None:
    """Two more sessions of the same engine, and the agent of the one that answers is killed."""
    system = serving.system
    url = f"http://127.0.0.1:{system.engine_port(serving.agent)}"
    flags = ["--model", "twin", "--engine", "vllm", "--engine-url", url, "--engine-model", MODEL]
    patient = ["--prefill-s-per-token", "0.1"]
    twins = [system.service("agent", *flags, *patient, "--allocation", f"twin{n}") for n in range(2)]
    system.wait_for_sessions(2, "twin", 120)
    asked: Any = {"model": "twin", "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    whole = sdk.chat.completions.create(**asked)
    text, killed, comments = "", False, 0
    with (
        system.client(300) as client,
        client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as a,
    ):
        session = a.headers["x-serai-session"]
        for line in a.iter_lines():
            comments += line.startswith(":")
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
            if len(text) > 60 and not killed:
                killed = True
                next(twin for twin in twins if session in twin.log).kill()
    assert killed
    assert comments, "the stream was continued"
    assert text == whole.choices[0].message.content
    for twin in twins:
        if twin.popen.poll() is None:
            twin.terminate()


# -- these end the engine --------------------------------------------------------------------------------------------


def descendants(pid: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    states = {}
    for pid in pids:
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return {pid for pid, state in states.items() if state != "Z"}


def test_an_agent_told_to_end_lets_its_streams_finish(serving: Serving, sdk: openai.OpenAI) -> None:
    """Told to the agent alone: vLLM's workers end at once when they get a SIGTERM (docs/engines.md)."""
    processes = descendants(serving.agent.popen.pid)
    assert len(processes) >= 2, "an API server and an engine core"
    stream = sdk.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, max_tokens=24, temperature=0)
    chunks = [next(iter(stream))]
    serving.agent.popen.terminate()
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert serving.agent.popen.wait(120) == 0, serving.agent.log[-4000:]
    assert not alive(processes)
    assert "agent.drain_incomplete" not in serving.agent.log


def test_a_killed_engine_leaves_nothing_behind_and_one_started_again_serves(serving: Serving) -> None:
    system = serving.system
    serving.agent = agent = start_agent(system)
    with system.client(300) as client:
        asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
    processes = descendants(agent.popen.pid)
    server = min(processes)
    workers = processes - {server}
    os.kill(server, signal.SIGKILL)
    killed_at_s = time.monotonic()
    wait_for(lambda: not alive(workers), "the engine core has ended with its server", 30)
    print(f"after {time.monotonic() - killed_at_s:.1f} s nothing of the killed engine was left")
    wait_for(lambda: system.sessions(MODEL) == 0, "nobody is sent there", 10)
    # An accident is not the end of the agent: it starts the engine again, as a new session.
    wait_for(lambda: agent.log.count("engine.starting") == 2, "it is started again", 60)
    wait_for(lambda: descendants(agent.popen.pid), "it runs")
    processes = descendants(agent.popen.pid)
    agent.kill()
    wait_for(lambda: not alive(processes), "nothing outlives a killed agent", 30)
