"""Whole runs under faults: the seeds hold, a seed is a run, and what is broken on purpose is caught."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from serai.contracts.codec import frame_bytes
from serai.contracts.inference import FailureCode, FrameKind
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.ingress import calls
from serai.ingress.sse_relay import SseRelay
from serai.runtime.registry_replica import RegistryReplica
from serai.simulator.whole.client import ChatClient, ChatRequest, Outcome
from serai.simulator.whole.fault_run import FaultPlan, fault_run
from serai.simulator.whole.faults import FaultKind, plan
from serai.simulator.whole.links import Stress
from serai.simulator.whole.system import ENGINE_SEED, INGRESS_PORT, Scene, SimulatedSystem, simulate
from serai.worker_agent.desk import Desk
from serai.worker_agent.exchange import Exchange

SHORT = FaultPlan(duration_s=20.0, requests_per_s=6.0, fault_every_s=2.0, scene=Scene(agents=3, ingresses=2))


@pytest.mark.parametrize("seed", range(1, 6))
def test_everything_holds(seed: int) -> None:
    result = fault_run(seed, SHORT)
    assert not result.violations, result.line
    assert result.outcomes[Outcome.WHOLE] > 0


def test_the_same_seed_is_the_same_run_in_another_process_and_another_seed_is_not() -> None:
    """Also with other hash seeds, which change the order of every real set."""
    lines = [_line_of("--seed", "3", PYTHONHASHSEED=hash_seed) for hash_seed in ("1", "2")]
    assert lines[0] == lines[1]
    assert lines[0].startswith("seed 3: ")
    assert _line_of("--seed", "4", PYTHONHASHSEED="1") != lines[0]


def _line_of(*flags: str, **environment: str) -> str:
    command = [sys.executable, "-m", "serai.cli.main", "simulate", "faults", "--once", "--duration-s", "10", *flags]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-2]


def test_figures_as_json() -> None:
    command = [
        sys.executable,
        "-m",
        "serai.cli.main",
        "simulate",
        "faults",
        "--seeds",
        "2",
        "--duration-s",
        "5",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    figures = json.loads(done.stdout)
    wanted = {"runs": 2, "violations": 0, "streams_unmarked": 0, "hash_stable": True}
    assert {name: figures[name] for name in wanted} == wanted
    assert figures["requests"] > 0
    assert figures["failed_unary"] >= 0


def test_an_unknown_kind_is_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "serai.cli.main", "simulate", "faults", "--kinds", "kill-everyone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "kill-everyone" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_loss_of_one_agent_fails_no_answer_in_one_piece() -> None:
    """They are tried elsewhere. Faults so far apart that one is over before the next."""
    for kind in (FaultKind.KILL_AGENT, FaultKind.LOSE_AGENT, FaultKind.STOP_AGENT, FaultKind.KILL_ENGINE):
        result = fault_run(7, FaultPlan(duration_s=16.0, requests_per_s=4.0, fault_every_s=8.0, kinds=(kind,)))
        assert (result.failed_unary, result.violations) == (0, []), f"{kind}: {result.line}"
        assert result.faults > 0


def test_registry_and_its_store_may_fail_as_they_like() -> None:
    kinds = (
        FaultKind.KILL_REGISTRY,
        FaultKind.PARTITION_REGISTRY,
        FaultKind.KV_LOSES,
        FaultKind.KV_REFUSES,
        FaultKind.KV_BLIND,
        FaultKind.KV_VANISHES,
    )
    result = fault_run(8, FaultPlan(duration_s=15.0, requests_per_s=5.0, fault_every_s=1.0, kinds=kinds))
    assert not result.violations
    # Cut: clients that read nothing for too long.
    assert set(result.outcomes) <= {Outcome.WHOLE, Outcome.CANCELLED, Outcome.CUT}
    assert result.failed_unary == 0


@pytest.mark.parametrize("stress", [Stress(lost=0.02), Stress(doubled=0.05), Stress(reordered=0.05)], ids=str)
def test_even_a_bus_that_loses_doubles_or_reorders_makes_no_stream_lie(stress: Stress) -> None:
    def stressed(system: SimulatedSystem) -> None:
        ours = system.nats.stress
        ours.lost, ours.doubled, ours.reordered = stress.lost, stress.doubled, stress.reordered

    result = fault_run(9, SHORT, stressed)
    assert not result.violations, result.line


def test_plans_are_their_seeds() -> None:
    plans = [plan(Random(seed), duration_s=600.0, every_s=1.0) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert {fault.kind for fault in plans[0]} == set(FaultKind)


# -- broken on purpose: each invariant can fail -------------------------------------------------------------------


def _violations(seed: int = 1, prepare: Callable[[SimulatedSystem], None] = lambda system: None) -> str:
    return "\n".join(fault_run(seed, SHORT, prepare).violations)


def test_an_ingress_that_takes_a_cut_stream_for_whole_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credulous(SseRelay):
        done = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]

    monkeypatch.setattr(calls, "relay_of", lambda dialect: Credulous())
    kinds = (FaultKind.ENGINE_CUT, FaultKind.KILL_ENGINE)
    result = fault_run(1, FaultPlan(duration_s=20.0, fault_every_s=1.0, kinds=kinds))
    assert any("as if it were whole" in text for text in result.violations), result.line
    assert result.outcomes[Outcome.UNMARKED] > 0


def test_an_agent_that_goes_on_after_the_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Exchange._finish

    def twice(self: Exchange, code: Any) -> None:
        finish(self, code)
        self._frames.append(frame_bytes(FrameKind.ALIVE, self.stream, self.attempt, 0))

    monkeypatch.setattr(Exchange, "_finish", twice)
    assert "after its end" in _violations()


def test_a_copy_that_goes_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    get = RegistryReplica.get

    def forgetful(self: RegistryReplica, session: str) -> SessionRecord | None:
        record = get(self, session)
        left = record is not None and record.lifecycle is Lifecycle.LEFT
        return replace(record, lifecycle=Lifecycle.JOIN) if record is not None and left else record

    monkeypatch.setattr(RegistryReplica, "get", forgetful)
    assert "went back" in _violations()


def test_a_request_to_a_session_that_left_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    get = RegistryReplica.get

    def sees_all_gone(self: RegistryReplica, session: str) -> SessionRecord | None:
        record = get(self, session)
        return replace(record, lifecycle=Lifecycle.LEFT) if record is not None else None

    monkeypatch.setattr(RegistryReplica, "get", sees_all_gone)
    assert "which is LEFT to it" in _violations()


def test_a_request_that_is_not_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Desk._on_done

    def keeps(self: Desk, exchange: Exchange, code: FailureCode | None) -> None:
        done(self, exchange, code)
        if code is FailureCode.CANCELLED:
            self._exchanges[(exchange.reply, exchange.attempt)] = exchange

    monkeypatch.setattr(Desk, "_on_done", keeps)
    assert "requests at the desk left" in _violations()


def test_an_error_that_only_the_log_would_show_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Desk, message: Any) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(Desk, "on_cancel", raises)
    assert "a bug of ours" in _violations()


def test_a_request_without_an_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits_for_ever(self: calls.Calls, *arguments: Any) -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    monkeypatch.setattr(calls.Calls, "_try_until_answered", waits_for_ever)
    assert "did not end within" in _violations()


def test_an_engine_is_free_within_a_second_of_its_ingress_death() -> None:
    """Of a stream that flows, and of one that waits for credit, which no dead ingress gives."""

    async def main(system: SimulatedSystem) -> list[tuple[float, int]]:
        system.start()
        await system.until_serving(30.0)
        client = ChatClient(port=INGRESS_PORT, engine_seed=ENGINE_SEED, limit_s=60.0)
        requests = [
            ChatRequest(1, "m", "flows", 3000, stream=True),
            ChatRequest(2, "m", "waits", 3000, stream=True, pauses_after_s=0.1, pauses_for_s=60.0),
        ]
        asked = [asyncio.ensure_future(client.ask(request, "ingress-0")) for request in requests]
        await asyncio.sleep(9.0)
        counts = [(0.0, _generations(system))]
        await system.ingresses[0].kill()
        await asyncio.sleep(1.0)
        counts.append((1.0, _generations(system)))
        await asyncio.gather(*asked)
        await system.stop()
        return counts

    counts, _ = simulate(1, main, Scene(agents=1, ingresses=1))
    assert counts == [(0.0, 2), (1.0, 0)]


def _generations(system: SimulatedSystem) -> int:
    return sum(node.engines.engine.generations for node in system.agents if node.engines and node.engines.engine)
