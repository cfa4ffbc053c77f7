"""The real vLLM under `serai_vllm.scheduler.PhaseScheduler`, told its phases by the test in the agent's place:
`make test-vllm`. What a step holds is what its scheduler says of it, and what the streams show."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from integration.system import port_answers, wait_for
from integration.test_vllm import ENVIRONMENT, MODEL, MODEL_FOLDER, START_S, VLLM
from serai.worker_agent.engine.phase_socket import VARIABLE, PhaseSocket, socket_name
from serai.worker_agent.engine.process import free_port
from serai.worker_agent.engine_pulse import EngineStep

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PATIENCE_S = 300.0
LONG = " ".join(f"caravan {n}" for n in range(150))
"""A prompt that takes several steps."""


class Phases:
    """The agent's side of the channel, on a loop of its own."""

    def __init__(self, port: int) -> None:
        self.steps: list[EngineStep] = []
        self._socket = PhaseSocket(socket_name(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._in_loop(lambda: self._socket.open(self.steps.append))

    def _in_loop(self, do: Callable[[], Any]) -> Any:
        async def doing() -> Any:
            return do()

        return asyncio.run_coroutine_threadsafe(doing(), self._loop).result(10)

    @property
    def dialled(self) -> bool:
        return bool(self._in_loop(lambda: self._socket.peers))

    def say(self, phase: str, prompt_tokens_max: int | None = None) -> None:
        """And all that was said of steps before is forgotten, but for the one under way."""
        self._in_loop(lambda: self._socket.say(phase, prompt_tokens_max))
        self.wait_for_steps(2)
        self.steps.clear()

    def wait_for_steps(self, count: int) -> list[EngineStep]:
        before = len(self.steps)
        wait_for(lambda: len(self.steps) >= before + count, f"{count} steps", PATIENCE_S)
        return self.steps[before:]

    def leave(self, phase: str) -> None:
        """With this as the last word."""
        self._in_loop(lambda: self._socket.say(phase))
        self._in_loop(self._socket.close)

    def close(self) -> None:
        self._in_loop(self._socket.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Stream:
    """One streamed answer, read by a thread."""

    def __init__(self, port: int, prompt: str, tokens: int) -> None:
        self.text = ""
        self.events = 0
        self.done = False
        self._asked = {
            "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True
        }  # fmt: skip
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._stream()
        except httpx2.HTTPError:
            pass  # The engine was ended: what has come stays.

    def _stream(self) -> None:
        with httpx2.Client(timeout=600) as client, client.stream("POST", self._url, json=self._asked) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.events += 1
        self.done = True


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Phases]]:
    """Where it listens, and its channel."""
    if not (VLLM.exists() and (MODEL_FOLDER / "config.json").exists()):
        reason = "vLLM's build for CPUs, or its model, is not installed: make vllm"
        if os.environ.get("SERAI_REQUIRE_VLLM"):
            pytest.fail(reason)
        pytest.skip(reason)
    port = free_port()
    phases = Phases(port)
    command = [
        *(str(VLLM), "serve", str(MODEL_FOLDER), "--served-model-name", MODEL, "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "256", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--scheduler-cls", "serai_vllm.scheduler.PhaseScheduler"),
    ]
    log = tmp_path_factory.mktemp("phases") / "vllm.log"
    environment = os.environ | ENVIRONMENT | {VARIABLE: socket_name(port), "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        wait_for(lambda: port_answers(port) or process.poll() is not None, "vLLM serves", START_S)
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        wait_for(lambda: phases.dialled, "its scheduler dials", 30)
        yield port, phases
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        phases.close()


def test_phases_are_kept_step_by_step_and_the_text_is_the_same(engine: tuple[int, Phases]) -> None:
    port, phases = engine
    alone = Stream(port, "A caravan is", 12)
    wait_for(lambda: alone.done, "an answer under no phase", PATIENCE_S)

    first = Stream(port, "A caravan is", 400)
    wait_for(lambda: first.events > 2, "it decodes", PATIENCE_S)
    phases.say("decode")
    long = Stream(port, LONG, 2)
    steps = phases.wait_for_steps(6)
    assert all(step.decodes == 1 and step.prefill_tokens == 0 for step in steps), "prompts are held back"
    assert steps[-1].backlog_tokens > 400, "and wait in the engine"
    assert long.events == 0
    before = first.events

    phases.say("prefill", 64)
    wait_for(lambda: long.events > 0, "its first token", PATIENCE_S)
    steps = list(phases.steps)
    worked = [step for step in steps if step.prefill_tokens]
    assert len(worked) >= 3, "more than one step's prompt tokens were there"
    assert all(step.decodes == 0 for step in worked), "decodes are held back while prompts are worked on"
    assert max(step.prefill_tokens for step in worked) <= 64
    backlogs = [step.backlog_tokens for step in worked]
    assert backlogs == sorted(backlogs, reverse=True)

    phases.say("prefill")
    assert all(step.decodes for step in phases.wait_for_steps(3)), "with nothing to prefill it decodes"
    assert first.events > before

    phases.say("mixed")
    other = Stream(port, LONG + " again", 2)
    wait_for(lambda: other.events > 0, "its first token", PATIENCE_S)
    assert any(step.decodes and step.prefill_tokens for step in phases.steps), "as vLLM does it by itself"
    wait_for(lambda: long.done and other.done, "both end", PATIENCE_S)
    wait_for(lambda: first.events >= 14, "as far as the one under no phase", PATIENCE_S)
    assert first.text.startswith(alone.text)


def test_without_its_agent_it_serves_as_vllm_does(engine: tuple[int, Phases]) -> None:
    port, phases = engine
    phases.leave("prefill")
    began_s = time.monotonic()
    stream = Stream(port, "A caravan is", 4)
    wait_for(lambda: stream.done, "an answer", PATIENCE_S)
    assert stream.events >= 4
    print(f"4 tokens after {time.monotonic() - began_s:.1f} s")
