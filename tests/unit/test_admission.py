"""What calls reserve and pay, and what they are told when they may not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serai.contracts.codec import encode
from serai.contracts.placement import StartableModels
from serai.contracts.subjects import PLACEMENT_KNOCK, PLACEMENT_STARTABLE
from serai.ingress.access import Access
from serai.ingress.admission import Admission
from serai.ingress.call import Call, Outcome
from serai.ingress.caller import Caller
from serai.ingress.choosing import Wish
from serai.ingress.configuration import Configuration, Project
from serai.ingress.endpoints import BY_PATH
from serai.ingress.http_server import ClientGone
from serai.ingress.limits import Limits, Price
from serai.ingress.openai_format import ApiError
from serai.ingress.queueing import QueueSettings
from serai.ingress.routing import Ask
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.runtime.bus import Message
from serai.runtime.telemetry import Tracing
from unit.fakes import FakeBus, record_of

CHAT = "/v1/chat/completions"
SCOPE = "project:p"
LIMITS = Limits(tokens_per_minute=100_000, concurrent_max=3, budget_micros=1_000_000)
CONFIGURATION = Configuration(
    projects={"p": Project(LIMITS)},
    prices={"m": Price(1_000_000, 2_000_000)},
    queue=QueueSettings(entries_max=1, gap_max_s=0.1),
)


def call_of(path: str = CHAT, model: str = "m", **changes: Any) -> Call:
    caller = Caller("key", "p", scopes=("key:key", SCOPE))
    now = time.monotonic()
    usual: dict[str, Any] = {"prompt_tokens": 100, "output_tokens_max": 50, "stream": True, "deadline_s": now + 5}
    endpoint = BY_PATH[path]
    stream = changes.pop("stream", usual.pop("stream"))
    return Call(
        "r", endpoint, caller, model, stream, b"{}", {}, now, 0, Wish(Ask(model), endpoint=endpoint), **usual | changes
    )


class Desk:
    """An ingress with one session of `m`, and what its project has left."""

    def __init__(self, **metadata: Any) -> None:
        access = Access(None, anonymous=True)
        self.bus = FakeBus()
        self.ingress = Ingress(IngressSettings(anonymous=True), self.bus, access, Tracing("test", None, 0.0))
        self.ingress.apply(CONFIGURATION)
        self.record = record_of("s1", **metadata)
        self.ingress.replica.merge(self.record, time.monotonic(), heard=True)

    @property
    def admission(self) -> Admission:
        return self.ingress._admission

    @property
    def spent(self) -> int:
        return self._scope.spent_micros

    @property
    def reserved(self) -> int:
        return self._scope.reserved_micros

    @property
    def _scope(self) -> Any:
        return self.admission._limiter.scope(SCOPE)

    @property
    def is_quiet(self) -> bool:
        turns = self.admission.turns
        return (turns.waiting, turns.running, self._scope.running) == (0, 0, 0)


def run(main: Callable[[Desk], Awaitable[None]], **metadata: Any) -> None:
    async def bounded() -> None:
        desk = Desk(**metadata)
        async with asyncio.timeout(10):
            await main(desk)
        assert desk.is_quiet

    asyncio.run(bounded())


USAGE = {"prompt_tokens": 80, "completion_tokens": 20}


@pytest.mark.parametrize(
    ("ending", "error", "spent"),
    [
        ({"usage": USAGE, "status": 200}, None, 80 + 2 * 20),
        ({"usage": {"input_tokens": 80, "output_tokens": 20}, "status": 200}, None, 80 + 2 * 20),
        ({"events": 7, "status": 200}, ClientGone(), 100 + 2 * 7),  # Never free.
        ({"events": 7, "status": 200}, None, 100 + 2 * 7),  # Truncated.
        ({"usage": USAGE, "status": 200}, asyncio.CancelledError(), 80 + 2 * 20),
        ({}, asyncio.CancelledError(), 100),  # Before the first byte: the prompt was read.
        ({"status": 400}, None, 0),
        ({}, ApiError(502, "broken"), 0),
    ],
)
def test_what_a_call_pays(ending: dict[str, Any], error: BaseException | None, spent: int) -> None:
    async def main(desk: Desk) -> None:
        call = call_of()
        try:
            async with desk.admission.admitted(call):
                assert desk.reserved == 100 + 2 * 50
                call.tried.append(desk.record)
                for name, value in ending.items():
                    setattr(call, name, value)
                if error is not None:
                    raise error
        except (ClientGone, asyncio.CancelledError, ApiError):
            pass
        assert (desk.spent, desk.reserved) == (spent, 0)

    run(main)


@pytest.mark.parametrize(
    ("changes", "metadata", "reserved"),
    [
        ({"outputs": 3}, {}, 100 + 3 * 2 * 50),
        ({"output_tokens_max": 0}, {"context_tokens_max": 300}, 100 + 2 * 200),
        ({"output_tokens_max": 0}, {}, 100 + 2 * 4096),
        ({"output_tokens_max": 1 << 31}, {"context_tokens_max": 300}, 100 + 2 * 300),
        ({"path": "/v1/embeddings"}, {}, 100),
        ({"model": "another"}, {}, 0),
    ],
)
def test_what_a_call_reserves(changes: dict[str, Any], metadata: dict[str, Any], reserved: int) -> None:
    async def main(desk: Desk) -> None:
        async with desk.admission.admitted(call_of(**changes)):
            assert desk.reserved == reserved

    run(main, **metadata)


async def refused(desk: Desk, call: Call) -> ApiError:
    with pytest.raises(ApiError) as found:
        async with desk.admission.admitted(call):
            pass
    return found.value


def test_who_is_over_a_limit_is_told_which_and_answers_say_what_is_left() -> None:
    async def main(desk: Desk) -> None:
        call = call_of(outputs=3)
        async with desk.admission.admitted(call), desk.admission.admitted(call_of()):
            assert call.answer_headers["x-ratelimit-remaining-tokens"] == "99750"
            assert call.answer_headers["x-serai-queue-ms"] == "0"
            async with desk.admission.admitted(call_of()):
                error = await refused(desk, over := call_of())
        assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 1)
        assert "requests at once" in error.message
        assert "x-ratelimit-limit-tokens" in over.answer_headers
        error = await refused(desk, call_of(outputs=20_000))
        assert (error.status, error.code) == (429, "insufficient_quota")

    run(main)


def test_a_full_queue_and_a_time_that_is_over_are_told_apart() -> None:
    async def main(desk: Desk) -> None:
        holding = desk.admission.admitted(call_of())
        await holding.__aenter__()
        desk.ingress._client._by_session["s1"] = {1}
        waiting = asyncio.create_task(refused(desk, call_of(deadline_s=time.monotonic() + 0.1)))
        await asyncio.sleep(0)
        error = await refused(desk, call_of())
        assert (error.status, error.code) == (503, "queue_full")
        error = await waiting
        assert (error.status, error.code) == (504, "deadline")
        await holding.__aexit__(None, None, None)

    run(main, concurrency_max=1)


@pytest.mark.parametrize(("outcome", "is_known"), [(Outcome.COMPLETE, True), (Outcome.TRUNCATED, False)])
def test_only_whole_answers_say_how_long_one_takes(outcome: Outcome, is_known: bool) -> None:
    async def main(desk: Desk) -> None:
        call = call_of()
        async with desk.admission.admitted(call):
            call.outcome = outcome
        turns = desk.admission.turns.get("m")
        assert turns is not None
        assert (turns.queue.duration_s is not None) is is_known

    run(main)


def test_a_known_model_without_a_session_is_waited_for_and_an_unknown_one_is_not() -> None:
    async def main(desk: Desk) -> None:
        desk.ingress.replica.unreachable("s1")
        began_s = time.monotonic()
        error = await refused(desk, call_of())
        assert (error.status, error.code) == (503, "no_session")
        assert 0.1 <= time.monotonic() - began_s < 2
        async with desk.admission.admitted(call_of(model="unknown")):
            pass  # It is for the next step to say so.
        desk.bus.connected = False
        async with desk.admission.admitted(call_of()):
            pass  # As is this.

    run(main)


def startable(desk: Desk, **models: float) -> None:
    said = StartableModels("local", 15.0, models)
    desk.ingress._cold.on_startable(Message(PLACEMENT_STARTABLE.of_site("local"), encode(said)))


def test_who_cannot_wait_for_a_cold_model_hears_when_it_will_be_there() -> None:
    async def main(desk: Desk) -> None:
        startable(desk, cold=300.0)
        with pytest.raises(ApiError) as refused:
            async with desk.admission.admitted(call_of(model="cold")):
                pytest.fail("nothing serves it")
        assert (refused.value.status, refused.value.code) == (503, "model_starting")
        assert refused.value.retry_after_s == 300.0
        assert [one.subject for one in desk.bus.take()] == [PLACEMENT_KNOCK.of_site("local")]

    run(main)


def test_who_can_wait_for_a_cold_model_is_served_when_it_is_there() -> None:
    async def main(desk: Desk) -> None:
        startable(desk, cold=1.0)
        call = call_of(model="cold")

        async def ask() -> None:
            async with desk.admission.admitted(call):
                call.status, call.outcome = 200, Outcome.COMPLETE

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.3)
        assert not asking.done(), "longer than a gap is waited for"
        desk.ingress.replica.merge(record_of("s2", model="cold"), time.monotonic(), heard=True)
        await asking
        assert call.queued_s > 0.2

    run(main)


def test_a_model_that_nobody_starts_is_not_waited_for() -> None:
    async def main(desk: Desk) -> None:
        startable(desk, cold=300.0)
        call = call_of(model="strange")
        async with desk.admission.admitted(call):
            assert call.queued_s == 0.0, "the next step says that there is no such model"

    run(main)
