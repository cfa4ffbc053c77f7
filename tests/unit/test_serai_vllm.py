"""What runs inside vLLM, without vLLM: the phase of a step, and the channel's thread against a plain socket."""

from __future__ import annotations

import json
import os
import queue
import socket
from pathlib import Path

from serai_vllm.channel import Channel
from serai_vllm.phases import Phase, Phases


def planned(phases: Phases, tokens: int, *, prefillable: bool = True, decodable: bool = True) -> Phase:
    phase = phases.plan(prefillable=prefillable, decodable=decodable)
    phases.planned(phase, tokens)
    return phase


def test_phases_order_work_and_never_idle_the_engine() -> None:
    phases = Phases()
    assert planned(phases, 5) is Phase.MIXED
    phases.target = Phase.DECODE
    assert planned(phases, 5) is Phase.DECODE
    phases.target = Phase.PREFILL
    assert planned(phases, 5) is Phase.PREFILL
    assert planned(phases, 5, prefillable=False) is Phase.MIXED
    assert planned(phases, 5, decodable=False) is Phase.MIXED


def test_prompts_that_cannot_be_taken_let_decodes_go_on_for_longer_each_time() -> None:
    phases = Phases()
    phases.target = Phase.PREFILL
    steps = [planned(phases, 0) for _ in range(60)]
    vain = [n for n, phase in enumerate(steps) if phase is Phase.PREFILL]
    assert vain == [0, 2, 5, 10, 19, 36, 53]
    assert planned(phases, 0) is Phase.MIXED
    while planned(phases, 64) is not Phase.PREFILL:
        pass
    # One that bears fruit makes it forget.
    assert [planned(phases, 64) for _ in range(3)] == [Phase.PREFILL] * 3


def test_the_channel_tells_phases_and_steps(tmp_path: Path) -> None:
    heard: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
    name = f"@serai-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind("\0" + name[1:])
        agent.listen()
        agent.settimeout(10)
        channel = Channel(name, lambda *word: heard.put(word))
        engine, _ = agent.accept()
        with engine:
            engine.settimeout(10)
            engine.send(b"nonsense")
            engine.send(json.dumps({"phase": "decode"}).encode())
            engine.send(json.dumps({"phase": "mixed", "prompt_tokens_max": 512}).encode())
            assert [heard.get(timeout=10) for _ in range(2)] == [("decode", None), ("mixed", 512)]
            channel.say({"decodes": 1})
            channel.say({"decodes": 2})
            assert [json.loads(engine.recv(4096))["decodes"] for _ in range(2)] == [1, 2]
        # Gone: from then on vLLM serves as it does by itself.
        assert heard.get(timeout=10) == ("mixed", None)
        channel.close()


def test_nobody_waits_for_an_agent_that_does_not_read() -> None:
    name = f"@serai-test-full-{os.getpid()}"
    heard: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind("\0" + name[1:])
        agent.listen()
        agent.settimeout(10)
        channel = Channel(name, lambda *word: heard.put(word))
        engine, _ = agent.accept()
        with engine:
            engine.send(json.dumps({"phase": "prefill"}).encode())
            assert heard.get(timeout=10) == ("prefill", None)
            for n in range(5000):
                channel.say({"decodes": n, "words": "x" * 500})
        channel.close()
