"""Asking a macro-scheduler: one message per turn and model, silence that costs milliseconds, waiting that lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from serai.contracts.admission import (
    AdmissionAnswer,
    AdmissionAnswers,
    AdmissionAsk,
    AdmissionRequest,
    Decision,
    Grant,
    Lease,
)
from serai.contracts.codec import decode, encode
from serai.ingress import macro_scheduled
from serai.ingress.macro_scheduled import AdmissionClient, Ask, Outcome
from serai.runtime.bus import Message
from unit.fakes import FakeBus

PATIENCE_S = 0.01
LEASE = Lease(1, 1, 0.1, 100, 1.0)


class Desk:
    """The client, and the test as its schedulers."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.client = AdmissionClient(self.bus, PATIENCE_S)
        self.replies: dict[str, str] = {}

    def ask(self, request_id: str, model: str = "m", until_s: float = 1e12) -> asyncio.Task[AdmissionAnswer | Outcome]:
        ask = AdmissionAsk(request_id, 10)
        return asyncio.get_running_loop().create_task(self.client.ask(Ask(model, ask, until_s)))

    def heard(self) -> list[tuple[str, AdmissionRequest]]:
        """What was asked since the last call, by subject."""
        taken = self.bus.take()
        self.replies |= {one.subject: one.reply for one in taken}
        return [(one.subject, decode(AdmissionRequest, one.payload)) for one in taken]

    def say(self, *answers: AdmissionAnswer, subject: str = "admission.m") -> None:
        self.client.on_answers(Message(self.replies[subject], encode(AdmissionAnswers(list(answers)))))

    def nobody_there(self, subject: str = "admission.m") -> None:
        self.client.on_answers(Message(self.replies[subject], b"", no_responders=True))


def admit(request_id: str) -> AdmissionAnswer:
    return AdmissionAnswer(request_id, Decision.ADMIT, "s1", LEASE)


def word(request_id: str, decision: Decision) -> AdmissionAnswer:
    return AdmissionAnswer(request_id, decision)


def run(story: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        desk = Desk()
        await desk.client.start()
        async with asyncio.timeout(5):
            await story(desk)

    asyncio.run(main())


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_asks_of_one_turn_share_a_message_per_model() -> None:
    async def story(desk: Desk) -> None:
        tasks = [desk.ask("a"), desk.ask("b"), desk.ask("c", "other")]
        await turn()
        heard = desk.heard()
        assert [(subject, [ask.request_id for ask in asked.asks]) for subject, asked in heard] == [
            ("admission.m", ["a", "b"]),
            ("admission.other", ["c"]),
        ]
        desk.say(admit("b"), admit("a"))
        desk.say(admit("c"), subject="admission.other")
        assert [await task for task in tasks] == [admit("a"), admit("b"), admit("c")]
        assert desk.client.waiting == 0

    run(story)


def test_where_nobody_is_a_request_pays_nothing_and_the_next_one_is_not_even_asked() -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.ask("a"), desk.ask("b")
        await turn()
        desk.heard()
        desk.nobody_there()
        assert (await first, await second) == (Outcome.ABSENT, Outcome.ABSENT)
        assert await desk.ask("c") is Outcome.ABSENT
        assert desk.heard() == []

    run(story)


def test_silence_is_left_alone_for_a_while_and_a_late_lease_is_given_back() -> None:
    async def story(desk: Desk) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await desk.ask("a") is Outcome.SILENT
        assert PATIENCE_S <= loop.time() - began_s < 1
        assert await desk.ask("b") is Outcome.SILENT
        await turn()
        asked, withdrawn = desk.heard()
        assert [ask.request_id for ask in asked[1].asks] == ["a"]
        assert withdrawn[1] == AdmissionRequest([], ["a"])
        desk.say(admit("a"))
        await turn()
        assert desk.heard()[0][1] == AdmissionRequest([], ["a"])
        again = desk.ask("c")  # It speaks: it is asked again at once.
        await turn()
        desk.heard()
        desk.say(admit("c"))
        assert await again == admit("c")

    run(story)


def test_who_waits_outlasts_the_patience_and_gets_the_final_word() -> None:
    async def story(desk: Desk) -> None:
        task = desk.ask("a")
        await turn()
        desk.heard()
        desk.say(word("a", Decision.WAIT))
        await asyncio.sleep(5 * PATIENCE_S)
        assert not task.done()
        desk.say(admit("a"))
        assert await task == admit("a")

    run(story)


def test_who_waits_asks_again_and_gives_up_when_nothing_is_heard(monkeypatch: Any) -> None:
    monkeypatch.setattr(macro_scheduled, "AGAIN_S", 0.05)
    monkeypatch.setattr(macro_scheduled, "UNHEARD_S", 0.03)

    async def story(desk: Desk) -> None:
        task = desk.ask("a")
        await turn()
        desk.heard()
        desk.say(word("a", Decision.WAIT))
        assert await task is Outcome.SILENT
        await turn()
        heard = [request for _, request in desk.heard()]
        assert [ask.request_id for request in heard for ask in request.asks] == ["a"]
        assert heard[0].asks[0].waited_s > 0
        assert heard[-1].withdrawn == ["a"]

    run(story)


def test_who_waits_has_an_end_of_its_own() -> None:
    async def story(desk: Desk) -> None:
        until_s = macro_scheduled.time.monotonic() + 0.05
        task = desk.ask("a", until_s=until_s)
        await turn()
        desk.heard()
        desk.say(word("a", Decision.WAIT))
        assert await task is Outcome.TIMED_OUT
        assert macro_scheduled.time.monotonic() >= until_s
        await turn()
        assert desk.heard()[-1][1].withdrawn == ["a"]

    run(story)


def test_a_leader_that_dies_fails_those_that_wait_as_soon_as_anybody_asks() -> None:
    async def story(desk: Desk) -> None:
        waits = desk.ask("a")
        await turn()
        desk.heard()
        desk.say(word("a", Decision.WAIT))
        other = desk.ask("b")
        await turn()
        desk.heard()
        desk.nobody_there()
        assert (await waits, await other) == (Outcome.ABSENT, Outcome.ABSENT)

    run(story)


def test_a_client_that_leaves_withdraws_whether_it_was_answered_or_not() -> None:
    async def story(desk: Desk) -> None:
        unanswered, granted = desk.ask("a"), desk.ask("b")
        await turn()
        desk.heard()
        desk.say(admit("b"))
        for task in (unanswered, granted):
            task.cancel()  # `granted` has its answer, and has not seen it yet.
        await asyncio.gather(unanswered, granted, return_exceptions=True)
        assert unanswered.cancelled()
        assert granted.cancelled()
        await turn()
        assert sorted(desk.heard()[0][1].withdrawn) == ["a", "b"]
        assert desk.client.waiting == 0

    run(story)


def test_a_lost_connection_and_a_malformed_answer_end_in_another_policy() -> None:
    async def story(desk: Desk) -> None:
        task = desk.ask("a")
        await turn()
        desk.heard()
        desk.bus.lose_connection()
        assert await task is Outcome.BUS_LOST
        assert await desk.ask("b") is Outcome.BUS_LOST
        desk.bus.reconnect()
        task = desk.ask("c")
        await turn()
        desk.heard()
        desk.client.on_answers(Message(desk.replies["admission.m"], b"{"))
        desk.say(AdmissionAnswer("c", Decision.ADMIT))  # Without a session.
        assert await task is Outcome.UNKNOWN

    run(story)


def test_models_that_are_gone_are_forgotten_once_nothing_is_out() -> None:
    async def story(desk: Desk) -> None:
        task = desk.ask("a")
        await turn()
        desk.heard()
        desk.client.retain(set())
        desk.say(admit("a"))
        assert await task == admit("a")
        desk.client.retain(set())
        desk.say(admit("a"))  # To nobody.
        await turn()
        assert desk.heard() == []

    run(story)


# -- places given in advance -------------------------------------------------------------------------------------------


def grant(session: str = "s1", within_s: float = 30.0, **fields: Any) -> Grant:
    return Grant(session, 7, 100, 0.05, 5.0, 0.1, within_s, **fields)


async def desk_with(desk: Desk, *grants: Grant) -> None:
    """One ask was answered, and with it places came."""
    task = desk.ask("first")
    await turn()
    desk.heard()
    answers = AdmissionAnswers([admit("first")], list(grants))
    desk.client.on_answers(Message(desk.replies["admission.m"], encode(answers)))
    await task


def test_a_place_given_in_advance_is_used_at_once_and_told_a_little_later() -> None:
    async def story(desk: Desk) -> None:
        await desk_with(desk, *[grant(f"s{number}") for number in range(5)])
        answers = [desk.client.spend("m", AdmissionAsk(f"r{number}", 80, waited_s=0.2)) for number in range(2)]
        assert [(one.session, one.decision) for one in answers if one] == [("s0", "admit"), ("s1", "admit")]
        lease = answers[0].lease if answers[0] else None
        assert lease is not None
        assert (lease.epoch, lease.sequence, lease.slo_ttft_s, lease.slo_tpot_s) == (7, 0, 4.8, 0.1)
        await turn()
        assert desk.heard() == []
        await asyncio.sleep(1.5 * macro_scheduled.SPENT_WITHIN_S)
        ((_, told),) = desk.heard()
        assert [(one.ask.request_id, one.session) for one in told.spent] == [("r0", "s0"), ("r1", "s1")]

    run(story)


def test_when_as_many_are_used_as_are_left_it_is_told_at_once() -> None:
    async def story(desk: Desk) -> None:
        await desk_with(desk, grant(), grant())
        assert desk.client.spend("m", AdmissionAsk("r", 80)) is not None
        await turn()
        ((_, told),) = desk.heard()
        assert [one.ask.request_id for one in told.spent] == ["r"]

    run(story)


def test_who_needs_more_than_a_place_gives_has_to_ask() -> None:
    async def story(desk: Desk) -> None:
        await desk_with(desk, grant())
        for strict in (
            AdmissionAsk("long", 101),
            AdmissionAsk("soon", 80, slo_ttft_s=4.9),
            AdmissionAsk("fast", 80, slo_tpot_s=0.09),
            AdmissionAsk("waited", 80, waited_s=0.6),
        ):
            assert desk.client.spend("m", strict) is None
        assert desk.client.spend("other", AdmissionAsk("r", 80)) is None
        assert desk.client.spend("m", AdmissionAsk("r", 80, slo_ttft_s=5.0, slo_tpot_s=0.2)) is not None
        assert desk.client.spend("m", AdmissionAsk("r2", 80)) is None

    run(story)


def test_a_place_that_is_over_or_whose_session_refused_one_is_not_used() -> None:
    async def story(desk: Desk) -> None:
        await desk_with(desk, grant("old", within_s=0.0), grant("refuses"), grant("good"))
        desk.client.forget_grants("m", "refuses")
        answer = desk.client.spend("m", AdmissionAsk("r", 80))
        assert answer is not None
        assert answer.session == "good"

    run(story)
