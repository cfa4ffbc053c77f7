"""The pool agent's shell, with engines that are played: what it obeys, hosts, reports, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from serai.contracts.codec import decode, encode
from serai.contracts.drain import DrainAnswer, DrainRequest
from serai.contracts.placement import Assignment, Assignments, PoolReport, RunState
from serai.contracts.session_record import Lifecycle
from serai.contracts.subjects import ASSIGN, DRAIN, POOL
from serai.runtime.bus import BusError, Message
from serai.runtime.fields import BadInput
from serai.runtime.service import ServiceFailure
from serai.worker_agent.drain_shell import Notice
from serai.worker_agent.pool import Pool
from serai.worker_agent.pool_settings import PoolSettings
from serai.worker_agent.pool_templates import BUILT_IN, command_of, read_templates
from unit.fakes import FakeBus, record_of


class Host:
    """A session that serves at once, and ends when it is told, or when the test says so."""

    def __init__(self, settings: Any, command: list[str], gpus: Sequence[Any]) -> None:
        self.settings, self.command, self.gpus = settings, command, gpus
        self.record = record_of(f"s-{settings.label_values['assignment']}", Lifecycle.JOIN, model=settings.model)
        self.failure: Exception | None = None
        self.broken = asyncio.Event()
        self.why: list[str] = []
        self.session = self
        self.disconnects = 0

    def on_disconnect(self) -> None:
        self.disconnects += 1

    def on_reconnect(self) -> None: ...

    async def host_sessions(self, notice: Notice) -> None:
        self.record = record_of(self.record.session, Lifecycle.SERVING, model=self.settings.model)
        ends = [asyncio.ensure_future(event.wait()) for event in (notice.given, self.broken)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self.failure is not None:
            raise self.failure
        self.why = [told.ending.why for told, _ in notice.words(0)]


class Keys:
    def __init__(self) -> None:
        self.value: bytes | None = None
        self.away = False

    async def get(self, key: str) -> tuple[bytes, int] | None:
        if self.away:
            raise BusError("no answer in 5 s")
        return None if self.value is None else (self.value, 1)


class Agent:
    """A pool agent with two said GPUs."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.bus = FakeBus()
        self.keys = keys or Keys()
        self.settings = PoolSettings(pool=True, pool_gpus="H100:2", pool_name="p", drain_s=1.0, engine_stop_s=0.1)
        self.hosts: dict[str, Host] = {}
        self.pool = Pool(
            self.settings, self.bus, self.keys, BUILT_IN, self.settings.said_gpus, self.make  # type: ignore[arg-type]
        )  # fmt: skip
        self.stop = asyncio.Event()

    def make(self, settings: Any, template: Any, command: list[str], gpus: Sequence[Any]) -> Any:
        host = Host(settings, command, gpus)
        self.hosts[settings.label_values["assignment"]] = host
        return host

    def tell(self, generation: int, *ids: str, gpus: int = 1) -> PoolReport:
        run = [Assignment(id, "m", "emulated", gpus, arguments=["--seed", "3"]) for id in ids]
        self.bus.handlers[ASSIGN.of("p")](Message("", encode(Assignments("p", generation, run, drain_s=1.0)), "reply"))
        return next(decode(PoolReport, one.payload) for one in reversed(self.bus.published) if one.subject == "reply")

    def states(self) -> dict[str, RunState]:
        return {run.assignment.id: run.state for run in self.pool.report().runs}

    async def until(self, there: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not there():
                await asyncio.sleep(0.01)


def run(work: Callable[[Agent], Awaitable[None]], keys: Keys | None = None) -> Agent:
    """Runs the agent until `work` is done, then tells it to stop."""

    async def main() -> Agent:
        agent = Agent(keys)
        running = asyncio.create_task(agent.pool.run(agent.stop))
        await agent.until(lambda: ASSIGN.of("p") in agent.bus.handlers)
        await work(agent)
        agent.stop.set()
        async with asyncio.timeout(5):
            await running
        return agent

    return asyncio.run(main())


def test_assigned_engines_are_sessions_side_by_side() -> None:
    async def work(agent: Agent) -> None:
        answer = agent.tell(1, "x", "y")
        assert (answer.refused, answer.generation, len(answer.runs)) == ("", 1, 2)
        await agent.until(lambda: set(agent.states().values()) == {RunState.SERVING})
        x = agent.hosts["x"]
        assert x.settings.label_values["pool"] == "p"
        assert x.settings.model == "m"
        assert x.command[-2:] == ["--seed", "3"]
        assert {host.gpus[0].uuid for host in agent.hosts.values()} == {"said-0", "said-1"}
        agent.bus.lose_connection()
        assert x.disconnects == 1

    agent = run(work)
    assert agent.states() == {}


def test_what_is_not_named_drains_and_the_rest_goes_on() -> None:
    async def work(agent: Agent) -> None:
        agent.tell(1, "x", "y")
        await agent.until(lambda: set(agent.states().values()) == {RunState.SERVING})
        agent.tell(2, "y")
        await agent.until(lambda: set(agent.states()) == {"y"})
        assert agent.hosts["x"].why == ["placement 2 does not have it"]
        assert "generation 2 is not newer than 2" in agent.tell(2).refused
        assert agent.states() == {"y": RunState.SERVING}

    run(work)


def test_a_failure_of_one_engine_is_told_and_ends_nothing_else() -> None:
    async def work(agent: Agent) -> None:
        agent.tell(1, "x", "y", "z")
        agent.tell(2, "x", "y")
        await agent.until(lambda: set(agent.states().values()) == {RunState.SERVING})
        agent.hosts["x"].failure = ServiceFailure("the engine ended with exit code 1")
        agent.hosts["x"].broken.set()
        agent.hosts["y"].failure = RuntimeError("a mistake of ours")
        agent.hosts["y"].broken.set()
        await agent.until(lambda: set(agent.states().values()) == {RunState.FAILED})
        problems = [one.problem for one in agent.pool.report().runs]
        assert problems == ["the engine ended with exit code 1", "RuntimeError: a mistake of ours"]
        assert agent.tell(3, "w").refused == ""
        await agent.until(lambda: agent.states() == {"w": RunState.SERVING})

    run(work)


def test_it_reports_each_change_and_answers_garbage() -> None:
    async def work(agent: Agent) -> None:
        agent.tell(1, "x")
        await agent.until(lambda: agent.states() == {"x": RunState.SERVING})

        def said() -> list[RunState]:
            reports = [decode(PoolReport, one.payload) for one in agent.bus.published if one.subject == POOL.of("p")]
            return [run.state for report in reports for run in report.runs]

        await agent.until(lambda: RunState.SERVING in said())
        agent.bus.handlers[ASSIGN.of("p")](Message("", b"{}", "reply"))
        assert "Assignments" in decode(PoolReport, agent.bus.published[-1].payload).refused
        assert agent.states() == {"x": RunState.SERVING}

    run(work)


def test_what_lies_in_kv_runs_again_without_a_placer() -> None:
    keys = Keys()
    keys.value = encode(Assignments("p", 7, [Assignment("x", "m", "emulated")]))

    async def work(agent: Agent) -> None:
        await agent.until(lambda: agent.states() == {"x": RunState.SERVING})
        keys.value = b"not a message"
        await agent.pool._read()
        keys.away = True
        await agent.pool._read()
        assert agent.states() == {"x": RunState.SERVING}
        assert agent.pool.report().generation == 7

    run(work, keys)


def test_asked_to_end_it_first_lets_the_placer_start_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(agent: Agent) -> None:
        agent.tell(1, "x")
        await agent.until(lambda: agent.states() == {"x": RunState.SERVING})
        agent.bus.handlers[DRAIN.of("p")](Message("", encode(DrainRequest("its successor serves", 0.6)), "reply"))
        answer = decode(DrainAnswer, agent.bus.published[-1].payload)
        assert (answer.session, answer.accepted, answer.in_flight) == ("p", True, 1)
        assert agent.pool.report().stopping
        assert agent.tell(2).refused == "this agent is about to end"
        await asyncio.sleep(0.05)
        assert agent.states() == {"x": RunState.SERVING}
        await agent.until(lambda: agent.states() == {})
        assert agent.hosts["x"].why == ["its successor serves"]

    run(work)


# -- templates and settings ------------------------------------------------------------------------------------------


def test_the_built_in_commands() -> None:
    one = Assignment("i", "chat", "vllm", 4, 2, 2, 1, "fp8", "/models/llama", ["--max-num-seqs", "64"])
    assert " ".join(command_of(BUILT_IN["vllm"], one)) == (
        "vllm serve /models/llama --served-model-name chat --tensor-parallel-size 2 --pipeline-parallel-size 2 "
        "--data-parallel-size 1 --quantization fp8 --max-num-seqs 64"
    )
    plain = Assignment("i", "chat", "sglang", 1, quantization="bf16")
    assert " ".join(command_of(BUILT_IN["sglang"], plain)) == (
        "sglang serve --model-path chat --served-model-name chat --tp-size 1 --pp-size 1 --dp-size 1"
    )


def test_templates_of_a_file() -> None:
    text = (
        'engines: {mine: {command: [run, "{model}", [--q, "{quantization}"], --port, "{port}", "{gpu}"], kind: vllm}}'
    )
    read = read_templates(text, "templates.yaml")
    assert set(read) == {*BUILT_IN, "mine"}
    command = command_of(read["mine"], Assignment("i", "m", "mine"), "H100")
    assert command == ["run", "m", "--port", "{port}", "H100"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engines: {x: {command: []}}", "engines.x.command: is []; write a list of words"),
        ("engines: {x: {command: ['{modle}']}}", "engines.x.command[0]: `{modle}` is not known; known: model"),
        ("engines: {x: {command: [[a]]}}", "engines.x.command[0]: is a list; write the program's name first"),
        ("engines: {x: {command: [a], kind: vlm}}", "engines.x.kind: `vlm` is not known"),
        ("engines: {x: {command: [a], port: 1}}", "engines.x.port: is not known"),
        ("engines: [", "templates.yaml: line"),
        ("", "templates.yaml: engines: is missing"),
        ("engines:\n  x: {command: 3}\n", "templates.yaml:2: engines.x.command: is 3"),
    ],
)
def test_templates_that_are_none(text: str, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_templates(text, "templates.yaml")
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "--model (or SERAI_MODEL) is required"),
        ({"pool": True, "model": "m"}, "a pool agent has none of its own"),
        ({"pool": True, "pool_gpus": "H100"}, "must look like H100:2"),
        ({"pool": True, "pool_gpus": "H100:0"}, "must be 1 to 64 GPUs"),
        ({"pool": True, "engine_url": "http://127.0.0.1:1"}, "excludes --engine-url"),
        ({"model": "m", "pool_gpus": "H100:1"}, "give --pool, too"),
        ({"pool": True, "pool_report_s": 0.0}, "--pool-report-s 0"),
    ],
)
def test_settings_that_contradict_each_other(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="--") as refused:
        PoolSettings(**fields)
    assert told in str(refused.value)


def test_a_pool_has_the_name_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert PoolSettings(pool=True).pool_token.startswith("slurm-4711-")
    assert PoolSettings(pool=True, pool_name="rack 7").pool_token == "rack=207"
