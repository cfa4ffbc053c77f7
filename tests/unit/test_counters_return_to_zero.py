"""H51: whatever ends a request, and however often, nothing of it is counted afterwards, and nothing twice.

Counts are sizes of sets of what is there: of streams at the ingress, of places in the queue, of answers that are kept
alive. Disconnects, retries, failures and ends that come twice are mixed in any order.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.contracts.inference import FailureCode
from serai.ingress.access import Access
from serai.ingress.http_server import HttpServer
from serai.ingress.service import Ingress
from serai.ingress.settings import IngressSettings
from serai.runtime.telemetry import Tracing
from unit.fakes import Clock, record_of
from unit.raw_http import Client, connected, post
from unit.test_calls import (
    ASKED,
    ASKED_WHOLE,
    DONE,
    EVENT,
    STREAMED,
    AgentsBus,
    Part,
    clock,
    data,
    end,
    error,
    head,
    whole,
)

__all__ = ["clock"]  # A fixture.

SAYS: dict[str, list[Part] | None] = {
    "whole": whole(200, b"{}"),
    "streamed": STREAMED,
    "ended twice": [*STREAMED, end(len(EVENT + DONE))],
    "failed after its end": [*STREAMED, error(FailureCode.ENGINE_CUT)],
    "begun after its end": [*whole(200, b"{}"), head(), data(EVENT)],
    "failed twice": [error(FailureCode.ENGINE_CUT), error(FailureCode.AGENT_LEFT)],
    "busy": [error(FailureCode.BUSY, retry_safe=True)],
    "answers 503": whole(503, b"{}"),
    "cut": [head(), data(EVENT), error(FailureCode.ENGINE_CUT)],
    "cut, then ended": [head(), data(EVENT), error(FailureCode.ENGINE_CUT), end(1)],
    "never ends": [head(), data(EVENT)],
    "says nothing": [],
    "nobody there": None,
}
LEAVES = ("at once", "when something came", "at its end")

plans = st.lists(st.tuples(st.sampled_from((ASKED, ASKED_WHOLE)), st.sampled_from(LEAVES)), min_size=1, max_size=8)
fleets = st.lists(st.sampled_from(sorted(SAYS)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans, fleets)
def test_every_counter_returns_to_zero(clock: Clock, plan: list[tuple[bytes, str]], fleet: list[str]) -> None:
    async def client_of(server: HttpServer, body: bytes, leaves: str) -> None:
        client: Client = await connected(server)
        client[1].write(post(body, path="/v1/completions"))
        if leaves == "when something came":
            with suppress(TimeoutError):
                await asyncio.wait_for(client[0].read(1), 0.02)
        elif leaves == "at its end":
            with suppress(TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(client[0].readuntil(b"[DONE]"), 0.02)
        client[1].transport.abort()

    async def main() -> None:
        says = {f"s{number}": SAYS[name] for number, name in enumerate(fleet)}
        ingress = Ingress(
            IngressSettings(anonymous=True), AgentsBus(says), Access(None, anonymous=True), Tracing("test", None, 0.0)
        )
        await ingress._client.start()
        for session in says:
            ingress.replica.merge(record_of(session), clock.now_s, heard=True)
        server = HttpServer(ingress.on_http, body_bytes_max=10_000)
        await server.start("127.0.0.1", 0)
        try:
            await asyncio.gather(*[client_of(server, body, leaves) for body, leaves in plan])
            async with asyncio.timeout(5):
                while server.connections:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            assert ingress._client.open_streams == 0
            assert [ingress._client.in_flight(session) for session in says] == [0] * len(says)
            turns = ingress._calls._admission.turns
            assert (turns.running, turns.waiting) == (0, 0)
            assert not ingress._calls._relayed
            assert not ingress._calls._keep_alive._open
        finally:
            await server.aclose()

    asyncio.run(main())


def test_the_count_is_of_what_is_there(clock: Clock) -> None:
    """The same with requests that are held, so that nothing above holds for the reason that nothing is ever counted."""

    async def main() -> None:
        ingress = Ingress(
            IngressSettings(anonymous=True),
            AgentsBus({"s0": SAYS["never ends"]}),
            Access(None, anonymous=True),
            Tracing("test", None, 0.0),
        )
        await ingress._client.start()
        ingress.replica.merge(record_of("s0"), clock.now_s, heard=True)
        server = HttpServer(ingress.on_http, body_bytes_max=10_000)
        await server.start("127.0.0.1", 0)
        clients = [await connected(server) for _ in range(3)]
        for reader, writer in clients:
            writer.write(post(ASKED, path="/v1/completions"))
            await reader.readuntil(b"\r\n\r\n")
        assert ingress._client.open_streams == ingress._client.in_flight("s0") == 3
        assert ingress._calls._admission.turns.running == 3
        for _, writer in clients:
            writer.transport.abort()
        await server.aclose()

    asyncio.run(main())
