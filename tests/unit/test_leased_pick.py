"""Requests whose place a macro-scheduler decides: granted, refused, refused by the session, and left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    Grant,
    Lease,
    UsedGrant,
)
from serai.contracts.codec import decode, encode
from serai.contracts.inference import FailureCode
from serai.ingress.access import Access
from serai.ingress.configuration import Configuration
from serai.ingress.http_server import HttpServer
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.runtime.bus import Message
from serai.runtime.telemetry import Tracing
from unit.fakes import record_of
from unit.raw_http import Client, connected
from unit.test_calls import (
    AGAIN,
    BREAKS,
    DONE,
    END,
    NOBODY,
    PROMPT,
    SENT,
    STREAMED,
    AgentsBus,
    Part,
    ask,
    error,
    going_on,
    told,
)

Scheduler = Callable[[AdmissionAsk], AdmissionAnswer | None]
REFUSED = [error(FailureCode.LEASE_REFUSED, retry_safe=True)]


class ScheduledBus(AgentsBus):
    """… and with a macro-scheduler, if there is one."""

    def __init__(self, says: dict[str, list[Part] | None], scheduler: Scheduler | None) -> None:
        super().__init__(says)
        self.scheduler = scheduler
        self.asks: list[AdmissionAsk] = []
        self.spent: list[UsedGrant] = []
        self.grants: list[Grant] = []
        """That go with the next answers."""
        self.withdrawn: list[str] = []

    def publish(self, subject: str, payload: bytes, reply: str = "", *, at_once: bool = False) -> None:
        if not subject.startswith("admission."):
            super().publish(subject, payload, reply)
            return
        request = decode(AdmissionRequest, payload)
        self.asks += request.asks
        self.withdrawn += request.withdrawn
        self.spent += request.spent
        handler = self.handlers["_INBOX_test.x.admission.*"]
        if self.scheduler is None:
            asyncio.get_running_loop().call_soon(handler, Message(reply, b"", no_responders=True))
            return
        answers = [answer for one in request.asks if (answer := self.scheduler(one)) is not None]
        if answers:
            asyncio.get_running_loop().call_soon(
                handler, Message(reply, encode(AdmissionAnswers(answers, self.grants)))
            )
            self.grants = []

    def _reply(self, asked: Any, reply: str, parts: list[Part] | None) -> None:
        handlers = self.handlers
        self.handlers = {"_": handlers["_INBOX_test.x.stream.*"]}
        super()._reply(asked, reply, parts)
        self.handlers = handlers


def admit_at(*sessions: str) -> Scheduler:
    """Grants the first of these that is not excluded."""

    def scheduler(one: AdmissionAsk) -> AdmissionAnswer | None:
        session = next((name for name in sessions if name not in one.excluded), "")
        if not session:
            return AdmissionAnswer(one.request_id, Decision.UNKNOWN)
        return AdmissionAnswer(one.request_id, Decision.ADMIT, session, Lease(1, 7, 0.1, 100, 1.0))

    return scheduler


def serve(
    says: dict[str, list[Part] | None],
    scheduler: Scheduler | None,
    talk: Callable[[Client, ScheduledBus, Ingress], Awaitable[None]],
    policy: str = "macro-scheduled",
    fingerprint: str = "",
) -> None:
    async def main() -> None:
        bus = ScheduledBus(says, scheduler)
        settings = IngressSettings(anonymous=True, policy=policy, admission_patience_s=0.05)
        ingress = Ingress(settings, bus, Access(None, anonymous=True), Tracing("test", None, 0.0))
        await ingress._client.start()
        await ingress._asking.start()
        now = asyncio.get_running_loop().time()
        for session in says:
            ingress.replica.merge(record_of(session, fingerprint=fingerprint), now, heard=True)
        server = HttpServer(ingress.on_http, body_bytes_max=10_000)
        await server.start("127.0.0.1", 0)
        client = await connected(server)
        try:
            async with asyncio.timeout(10):
                await talk(client, bus, ingress)
                assert ingress._client.open_streams == 0
                assert ingress._asking.waiting == 0
        finally:
            client[1].close()
            await server.aclose()

    asyncio.run(main())


def test_a_request_goes_where_its_lease_says_and_takes_it_along() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        for _ in range(3):
            status, headers, _ = await ask(client, "x-slo-ttft-ms: 500", "x-slo-tpot-ms: 40", "x-slo-best-effort: no")
            assert (status, headers["x-serai-session"]) == (200, "s3")
        assert [asked.lease.sequence for _, asked in bus.asked if asked.lease] == [7, 7, 7]
        first = bus.asks[0]
        assert (first.slo_ttft_s, first.slo_tpot_s, first.best_effort) == (0.5, 0.04, False)
        assert first.prompt_tokens > 0
        assert len({one.request_id for one in bus.asks}) == 3

    serve({"s1": STREAMED, "s2": STREAMED, "s3": STREAMED}, admit_at("s3"), talk)


def test_other_policies_ask_nobody() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        assert (await ask(client))[0] == 200
        assert bus.asks == []

    serve({"s1": STREAMED}, admit_at("s1"), talk, policy="least-loaded")


def test_the_policy_of_a_model_may_change_while_requests_run() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        for policies, asks in (({}, 0), ({"m": "macro-scheduled"}, 1), ({"x": "macro-scheduled"}, 1)):
            ingress.apply(Configuration(policy="least-loaded", policies=policies))
            assert (await ask(client))[0] == 200
            assert len(bus.asks) == asks

    serve({"s1": STREAMED}, admit_at("s1"), talk)


@pytest.mark.parametrize("scheduler", [None, lambda one: None], ids=["nobody there", "silent"])
def test_without_a_scheduler_that_answers_the_least_loaded_is_taken(scheduler: Scheduler | None) -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        for _ in range(4):
            assert (await ask(client))[0] == 200
        assert sorted(bus.sessions_asked) == ["s1", "s1", "s2", "s2"]
        assert len(bus.asks) == 1
        assert all(asked.lease is None for _, asked in bus.asked)

    serve({"s1": STREAMED, "s2": STREAMED}, scheduler, talk)


def test_a_session_that_refuses_the_lease_costs_another_ask_without_it() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        status, headers, _ = await ask(client)
        assert (status, headers["x-serai-session"]) == (200, "s2")
        assert [one.excluded for one in bus.asks] == [[], ["s1"]]
        assert ingress._chooser.health.allowed("s1", 1e12)

    serve({"s1": REFUSED, "s2": STREAMED}, admit_at("s1", "s2"), talk)


def test_when_leases_are_refused_everywhere_the_request_goes_without_one_even_to_who_refused() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        status, _, body = await ask(client)
        assert (status, told(body)["code"]) == (503, "lease_refused")
        leases = [asked.lease is not None for _, asked in bus.asked]
        assert leases[:2] == [True, True]
        assert not any(leases[2:])
        assert bus.sessions_asked[:2] == ["s1", "s2"]
        assert 3 <= len(leases) <= 8

    serve({"s1": REFUSED, "s2": REFUSED}, admit_at("s1", "s2"), talk)


def test_a_stream_may_go_on_at_the_session_that_had_refused_its_lease() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        def refused_once(frame: Any, reply: str, parts: list[Part] | None) -> None:
            is_first = len(bus.sessions_asked) == 1
            ScheduledBus._reply(bus, frame, reply, REFUSED if is_first else parts)

        bus._reply = refused_once  # type: ignore[method-assign]
        _, _, body = await ask(client, body=PROMPT)
        assert bus.sessions_asked == ["s1", "s2", "s1"]
        assert body.startswith(SENT + b": serai continued on s1\n\n")
        assert body.endswith(DONE)

    serve({"s1": going_on(AGAIN, END), "s2": BREAKS}, admit_at("s1", "s2"), talk, fingerprint="f")


def test_one_instance_alone_that_refuses_a_lease_gets_the_request_without_it() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        def once(frame: Any, reply: str, parts: list[Part] | None) -> None:
            lease = bus.asked[-1][1].lease
            ScheduledBus._reply(bus, frame, reply, REFUSED if lease is not None else STREAMED)

        bus._reply = once  # type: ignore[method-assign]
        assert (await ask(client))[0] == 200
        assert [asked.lease is not None for _, asked in bus.asked] == [True, False]

    serve({"s1": STREAMED}, admit_at("s1"), talk)


def test_a_refusal_is_told_with_its_reason_and_when_to_come_again() -> None:
    def refuse(one: AdmissionAsk) -> AdmissionAnswer:
        return AdmissionAnswer(
            one.request_id, Decision.REFUSE, retry_after_s=3.2, reason="4.1 s of prefill wait before it"
        )

    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        status, headers, body = await ask(client, "x-slo-best-effort: no")
        assert (status, headers["retry-after"], told(body)["code"]) == (503, "4", "target_unreachable")
        assert "4.1 s of prefill wait before it." in told(body)["message"]
        assert bus.asked == []

    serve({"s1": STREAMED}, refuse, talk)


def test_a_lease_for_a_session_that_may_not_have_the_request_is_given_back() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        status, headers, _ = await ask(client)
        assert (status, headers["x-serai-session"]) == (200, "s1")
        assert bus.asked[0][1].lease is None
        await asyncio.sleep(0)
        assert bus.withdrawn == [bus.asks[0].request_id]

    serve({"s1": STREAMED}, admit_at("elsewhere"), talk)


def test_a_session_that_failed_is_excluded_from_the_next_ask() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        assert (await ask(client))[1]["x-serai-session"] == "s2"
        assert [one.excluded for one in bus.asks] == [[], ["s1"]]

    serve({"s1": NOBODY, "s2": STREAMED}, admit_at("s1", "s2"), talk)


def test_ids_that_clients_make_up_are_made_unique() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        for _ in range(2):
            await ask(client, "x-request-id: mine")
        assert all(one.request_id.startswith("mine~") for one in bus.asks)
        assert len({one.request_id for one in bus.asks}) == 2

    serve({"s1": STREAMED}, admit_at("s1"), talk)


def test_a_client_that_leaves_while_its_request_waits_withdraws_it() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        asking = asyncio.create_task(ask(client))
        while not bus.asks:
            await asyncio.sleep(0.001)
        client[1].close()
        while not bus.withdrawn:
            await asyncio.sleep(0.001)
        assert bus.withdrawn == [bus.asks[0].request_id]
        await asyncio.gather(asking, return_exceptions=True)

    serve({"s1": STREAMED}, lambda one: AdmissionAnswer(one.request_id, Decision.WAIT), talk)


def test_who_waits_when_the_gateway_stops_is_told_so() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        asking = asyncio.create_task(ask(client))
        while not bus.asks:
            await asyncio.sleep(0.001)
        ingress._asking.stop()
        status, headers, body = await asking
        assert (status, headers["retry-after"], told(body)["code"]) == (503, "1", "stopping")
        assert bus.withdrawn == [bus.asks[0].request_id]

    serve({"s1": STREAMED}, lambda one: AdmissionAnswer(one.request_id, Decision.WAIT), talk)


@pytest.mark.parametrize("refuser", ["s1", "s2", "s3"])
def test_a_refused_lease_takes_no_try_even_where_the_session_is_tried_without_one(refuser: str) -> None:
    """Two sessions are lost; the third answers, whoever refused a lease before."""

    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        lost: set[str] = set()

        def reply(frame: Any, to: str, parts: list[Part] | None) -> None:
            session, asked = bus.asked[-1][0], bus.asked[-1][1]
            if asked.lease is not None:
                ScheduledBus._reply(bus, frame, to, REFUSED)
            elif len(lost) < 2:
                lost.add(session)
                ScheduledBus._reply(bus, frame, to, [error(FailureCode.AGENT_SILENT)])
            else:
                ScheduledBus._reply(bus, frame, to, STREAMED)

        bus._reply = reply  # type: ignore[method-assign]
        assert (await ask(client))[0] == 200
        assert len(lost) == 2
        assert bus.sessions_asked[0] == refuser

    serve(dict.fromkeys(["s1", "s2", "s3"], STREAMED), admit_at(refuser), talk)


def granted(*sessions: str) -> list[Grant]:
    return [Grant(session, 1, 1_000, 0.1, 5.0, 0.1, 30.0) for session in sessions]


def test_a_request_goes_by_a_place_given_in_advance_and_nobody_is_asked() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        bus.grants = granted("s2", "s1")
        sessions = [(await ask(client))[1]["x-serai-session"] for _ in range(4)]
        assert sessions == ["s3", "s2", "s1", "s3"]
        assert len(bus.asks) == 2
        assert [asked.lease.sequence for _, asked in bus.asked if asked.lease] == [7, 0, 0, 7]
        assert [one.session for one in bus.spent] == ["s2", "s1"]
        assert (await ask(client, "x-slo-ttft-ms: 500"))[0] == 200

    serve({"s1": STREAMED, "s2": STREAMED, "s3": STREAMED}, admit_at("s3"), talk)


def test_a_session_that_refuses_such_a_place_is_asked_for_anew_and_its_other_places_are_forgotten() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        bus.grants = granted("s1", "s1", "s1")
        assert (await ask(client))[1]["x-serai-session"] == "s2"
        assert (await ask(client))[1]["x-serai-session"] == "s2"
        assert [one.excluded for one in bus.asks] == [[], ["s1"]]
        assert (await ask(client))[1]["x-serai-session"] == "s2"
        assert len(bus.spent) == 1

    serve({"s1": REFUSED, "s2": STREAMED}, admit_at("s2"), talk)


def test_a_place_at_a_session_that_has_left_is_asked_for_anew() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        bus.grants = granted("gone", "gone", "s1")
        assert [(await ask(client))[1]["x-serai-session"] for _ in range(3)] == ["s2", "s2", "s1"]
        assert [asked.lease.sequence for _, asked in bus.asked if asked.lease] == [7, 7, 0]

    serve({"s1": STREAMED, "s2": STREAMED}, admit_at("s2"), talk)


def test_an_ask_tells_what_other_requests_share_its_prefix() -> None:
    async def talk(client: Client, bus: ScheduledBus, ingress: Ingress) -> None:
        one, other = (json.dumps({"model": "m", "stream": True, "prompt": text}).encode() for text in ("Once", "Or"))
        for body in (one, one, other):
            await ask(client, body=body)
        await ask(client, "x-session-id: a")
        await ask(client, "x-session-id: b")
        await ask(client, "x-session-id: a")
        keys = [one.affinity for one in bus.asks]
        assert all(keys)
        assert keys[0] == keys[1]
        assert keys[3] == keys[5] != keys[4]
        assert len(set(keys)) == 4

    serve({"s1": STREAMED}, admit_at("s1"), talk)
