"""Macro-schedulers as processes, on a real NATS: one leads, the next takes over, and instances know what is true."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import pytest

from integration.nats_parts import until
from integration.system import Process, System, freeze, private_system, soon, wait_for
from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    GateMode,
    HeldRequest,
    InstanceReport,
    InstanceState,
    Lease,
    Spread,
    TakeInstance,
)
from serai.contracts.codec import decode, encode
from serai.contracts.session_record import Lifecycle, SessionMetadata, SessionRecord, new_session_id
from serai.contracts.status import SessionStatus
from serai.contracts.subjects import ADMISSION, INSTANCE, SESSION, STATUS, TAKE
from serai.runtime.bus import Bus, Message
from serai.runtime.nats_bus import NatsAddress, NatsBus

LEASE_S = 1.0
MODEL = "m:7b"


@dataclass
class Instance:
    """An agent as far as a macro-scheduler sees it."""

    bus: Bus
    session: str
    epoch: int = 0
    owners: list[str] = field(default_factory=list)
    takes: int = 0
    held: list[HeldRequest] = field(default_factory=list)
    waiting_prefill_s: float = 0.0
    sequence: int = 0

    async def start(self) -> None:
        await self.bus.subscribe(TAKE.of(self.session), self.on_take)

    def live(self) -> None:
        """One turn of its life: record, sign of life, report."""
        self.sequence += 1
        metadata = SessionMetadata(
            model=MODEL,
            engine_model="x",
            engine="emulated",
            allocation=self.session.split("-")[1],
            kv_tokens_max=100_000,
        )
        record = SessionRecord(self.session, Lifecycle.SERVING, 1, metadata)
        status = SessionStatus(self.session, self.sequence, Lifecycle.SERVING, 1, 1.0)
        self.bus.publish(SESSION.of(self.session), encode(record))
        self.bus.publish(STATUS.of(self.session), encode(status))
        self.bus.publish(INSTANCE.of(self.session), encode(self.report()))

    def report(self) -> InstanceReport:
        return InstanceReport(
            session=self.session,
            sequence=self.sequence,
            epoch=self.epoch,
            applied=0,
            mode=GateMode.PADG,
            prefilling=self.sequence % 2 == 0,
            window_s=0.1,
            decoding=Spread(1, 5.0, 5.0, 5.0, 5.0),
            waiting=0,
            waiting_prefill_s=self.waiting_prefill_s,
            laxity_s=1e9 if not self.waiting_prefill_s else 0.0,
            kv_tokens_free=100_000,
            kv_tokens_total=100_000,
        )

    def on_take(self, message: Message) -> None:
        take = decode(TakeInstance, message.data)
        self.takes += 1
        accepted = take.epoch >= self.epoch
        if accepted and take.epoch > self.epoch:
            self.epoch = take.epoch
            self.owners.append(take.owner)
        self.bus.publish(message.reply, encode(InstanceState(self.report(), self.held, accepted)))


class Asker:
    """An ingress as far as a macro-scheduler sees it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.answers: list[AdmissionAnswer] = []
        self.absent = 0
        self._number = 0

    async def start(self) -> None:
        await self.bus.subscribe(f"{self.bus.inbox_prefix}.admission.*", self.on_answers)

    def on_answers(self, message: Message) -> None:
        if message.no_responders:
            self.absent += 1
        else:
            self.answers += decode(AdmissionAnswers, message.data).answers

    def ask(self, *, request_id: str = "", **targets: object) -> str:
        self._number += 1
        name = request_id or f"r{self._number}"
        ask = AdmissionAsk(name, 100, 50, **targets)  # type: ignore[arg-type]
        reply = f"{self.bus.inbox_prefix}.admission.1"
        self.bus.publish(ADMISSION.of_model(MODEL), encode(AdmissionRequest([ask])), reply, at_once=True)
        return name

    async def answer(self, request_id: str, timeout_s: float = 5.0) -> AdmissionAnswer:
        def found() -> AdmissionAnswer | None:
            return next((one for one in self.answers if one.request_id == request_id), None)

        await until(found, f"an answer to {request_id}", timeout_s)
        answer = found()
        assert answer is not None
        return answer

    async def granted(self, timeout_s: float) -> Lease:
        """Asks until somebody grants, as clients do that come one after the other."""
        give_up_at_s = time.monotonic() + timeout_s
        asked: set[str] = set()
        while time.monotonic() < give_up_at_s:
            asked.add(self.ask())
            await asyncio.sleep(0.03)
            for one in self.answers:
                if one.request_id in asked and one.lease is not None:  # A busy machine may answer the last but one.
                    return one.lease
        raise AssertionError(f"no lease within {timeout_s:g} s")


@dataclass
class Place:
    system: System
    instances: list[Instance]
    asker: Asker


@asynccontextmanager
async def place(folder: Path, instances: int = 2) -> AsyncIterator[Place]:
    with private_system(folder) as system:
        address = f"nats://127.0.0.1:{system.nats_port}"
        agents, ingress = [
            await NatsBus.connect(NatsAddress(address, system.nats.key_file(role)), role)
            for role in ("agent", "ingress")
        ]
        made = Place(
            system,
            [
                Instance(agents, new_session_id("local", f"a{number}", 0, f"c0ffee{number:06d}"))
                for number in range(instances)
            ],
            Asker(ingress),
        )
        for instance in made.instances:
            await instance.start()
        await made.asker.start()
        await agents.barrier()
        await ingress.barrier()

        async def living() -> None:
            while True:
                for instance in made.instances:
                    instance.live()
                await asyncio.sleep(0.1)

        alive = asyncio.create_task(living())
        try:
            yield made
        finally:
            alive.cancel()
            for bus in (agents, ingress):
                await bus.aclose()


def scheduler(system: System, *flags: str) -> Process:
    return system.service("macro-scheduler", "--lease-s", str(LEASE_S), "--beat-s", "0.1", *flags)


def leads(process: Process) -> bool:
    return "macro.leads " in process.log or '"macro.leads"' in process.log


def explained(system: System, *words: str) -> str:
    nats = [
        "--nats-url",
        f"nats://127.0.0.1:{system.nats_port}",
        "--nats-nkey-file",
        str(system.nats.key_file("tools")),
    ]
    command = [sys.executable, "-m", "serai.cli.main", "macro", "explain", *nats, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_is_killed_or_hangs_is_succeeded_and_old_epochs_are_over(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Of the killed one NATS says at once that it has gone; the other one's lease must run out."""
    killed = how is signal.SIGKILL
    took_s = soon(lambda: succession(Path(mkdtemp(dir=tmp_path)), how), LEASE_S if killed else LEASE_S + 1.5)
    assert killed or took_s > LEASE_S / 2


def succession(folder: Path, how: signal.Signals) -> float:
    """How long nobody grants (s)."""
    killed = how is signal.SIGKILL

    async def story() -> float:
        async with place(folder) as here:
            first, second = scheduler(here.system), scheduler(here.system)
            lease = await here.asker.granted(15)
            await until(lambda: leads(first) or leads(second), "one leads")
            leader, follower = (first, second) if leads(first) else (second, first)
            assert not leads(follower)
            assert all(instance.epoch == lease.epoch or instance.epoch for instance in here.instances)
            text = await asyncio.to_thread(explained, here.system, "--model", MODEL)
            assert "2 of 2 instances obey" in text
            assert "█" in text
            before = [instance.epoch for instance in here.instances]
            killed_at_s = time.monotonic()
            leader.kill() if killed else freeze(leader.popen.pid)
            here.asker.answers.clear()
            again = await here.asker.granted(LEASE_S + 4)
            took_s = time.monotonic() - killed_at_s
            assert leads(follower)
            if killed:
                assert here.asker.absent or took_s < 0.2
            else:
                leader.popen.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.3)  # It wakes, and answers nothing.
                here.asker.answers.clear()
                late = here.asker.ask()
                assert (await here.asker.answer(late)).lease
                await asyncio.sleep(0.1)
                assert [one.request_id for one in here.asker.answers] == [late]
            after = [instance.epoch for instance in here.instances]
            assert all(new > old for new, old in zip(after, before, strict=True))
            assert again.epoch in after
            return took_s

    return asyncio.run(story())


def test_a_leader_that_is_told_to_stop_hands_over_sooner(tmp_path: Path) -> None:
    async def story() -> float:
        async with place(Path(mkdtemp(dir=tmp_path))) as here:
            first = scheduler(here.system)
            await here.asker.granted(15)
            second = scheduler(here.system)
            await until(lambda: "macro.ready" in second.log, "the second is there")
            await asyncio.sleep(LEASE_S / 3)  # It has seen the first one's beat.
            assert await asyncio.to_thread(first.terminate) == 0
            stopped_s = time.monotonic()
            await here.asker.granted(15)
            return time.monotonic() - stopped_s

    soon(lambda: asyncio.run(story()), LEASE_S)


def test_who_waits_is_told_so_at_once_and_by_the_next_leader_too(tmp_path: Path) -> None:
    """And a client that has gone has left nothing behind."""

    async def story() -> None:
        async with place(tmp_path, 1) as here:
            first = scheduler(here.system)
            await here.asker.granted(15)
            here.instances[0].waiting_prefill_s = 4.5
            await asyncio.sleep(0.25)
            name = here.asker.ask(request_id="waits", slo_ttft_s=4.0)
            assert (await here.asker.answer(name)).decision is Decision.WAIT
            second = scheduler(here.system)
            await until(lambda: "macro.ready" in second.log, "the second is there")
            first.kill()
            await until(lambda: leads(second), "the second leads", LEASE_S + 4)
            here.asker.answers.clear()
            here.asker.ask(request_id="waits", slo_ttft_s=30.0)
            here.instances[0].waiting_prefill_s = 0.0
            await until(lambda: here.asker.answers and here.asker.answers[-1].lease, "a place")

    asyncio.run(story())


def test_an_instance_knows_what_kv_has_forgotten(tmp_path: Path) -> None:
    """It obeys a higher epoch than anybody could read: the leader goes above that."""

    async def story() -> None:
        async with place(tmp_path) as here:
            here.instances[0].epoch = 77 << 20 | 5
            scheduler(here.system)
            await until(lambda: here.instances[0].owners and here.instances[1].owners, "both obey", 15)
            assert here.instances[0].epoch > 77 << 20 | 5
            await here.asker.granted(5)

    asyncio.run(story())


@pytest.mark.parametrize("targets", [{"slo_ttft_s": 0.001, "best_effort": False}])
def test_what_cannot_be_met_is_refused_at_once_with_the_reason_and_explained(
    tmp_path: Path, targets: dict[str, object]
) -> None:
    async def story() -> None:
        async with place(tmp_path) as here:
            scheduler(here.system)
            await here.asker.granted(15)
            name = here.asker.ask(request_id="mine~0a1b", **targets)
            answer = await here.asker.answer(name)
            assert answer.decision is Decision.REFUSE
            assert answer.reason
            assert answer.retry_after_s > 0
            assert "refuse" in await asyncio.to_thread(explained, here.system, "mine")
            assert "nothing is known" in await asyncio.to_thread(explained, here.system, "nobody")

    asyncio.run(story())


def test_without_permission_it_says_what_is_missing(tmp_path: Path) -> None:
    with private_system(tmp_path) as system:
        nats = [
            "--nats-url",
            f"nats://127.0.0.1:{system.nats_port}",
            "--nats-nkey-file",
            str(system.nats.key_file("agent")),
        ]
        process = system.start("macro", [sys.executable, "-m", "serai.cli.main", "macro-scheduler", *nats])
        wait_for(lambda: process.popen.poll() is not None, "it ends")
        assert "add 'take.*' to `publish`" in process.log
