"""More asked than can be done, or than may be: who goes first, who is told what, and that nothing stays counted."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import httpx2
import pytest

from integration.system import Process, System, wait_for
from serai.ingress.access import StoredKey, hashed, new_key, write_keys

TOKENS = 20
TIMING = ("--ttft-ms", "20", "--tpot-ms", "20")
"""About 0.4 s for a request of 20 tokens."""
PLACES = ("--concurrency-max", "4")
ASKED = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": TOKENS}


class House:
    """A system whose ingresses have a configuration, and a key for each project."""

    def __init__(self, system: System, configuration: str, projects: tuple[str, ...] = ("default",)) -> None:
        self.system = system
        self.keys = {project: new_key() for project in projects}
        stored = [StoredKey(f"key-{project}", hashed(key), project=project) for project, key in self.keys.items()]
        write_keys(system.folder / "keys.json", stored)
        self._file = system.folder / "ingress.yaml"
        self._file.write_text(configuration)
        system.key = self.keys[projects[0]]
        system.start_registry()
        self.urls: list[str] = []

    def start_ingress(self) -> str:
        self.system.start_ingress("--config", str(self._file))
        self.urls.append(self.system.url)
        return self.system.url

    def start_agent(self, *flags: str, places: tuple[str, ...] = PLACES, timing: tuple[str, ...] = TIMING) -> Process:
        agent = self.system.start_agent(*timing, *flags, agent_flags=places)
        for url in self.urls:
            self.system.url = url
            self.system.wait_for_sessions(1)
        return agent

    def client(self, project: str | None = None, url: str | None = None) -> httpx2.AsyncClient:
        key = self.keys[project or next(iter(self.keys))]
        return httpx2.AsyncClient(
            base_url=url or self.urls[0],
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
            limits=httpx2.Limits(max_connections=None),
        )

    def metric(self, name: str, url: str | None = None) -> float:
        text = httpx2.get(f"{url or self.urls[0]}/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def is_quiet(self) -> bool:
        names = ("serai_ingress_queue_depth", "serai_ingress_requests_in_flight")
        return all(self.metric(name, url) == 0 for name in names for url in self.urls)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())


async def chat(client: httpx2.AsyncClient, headers: dict[str, str] | None = None, **changes: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json=ASKED | changes, headers=headers)


async def flood(client: httpx2.AsyncClient, count: int, **headers: str) -> list[asyncio.Task[httpx2.Response]]:
    """So many requests, all of which have reached the ingress."""
    return [asyncio.create_task(chat(client, headers)) for _ in range(count)]


def code(answer: httpx2.Response) -> str:
    return str(answer.json().get("error", {}).get("code"))


def with_projects(system: System, more: str = "") -> House:
    projects = "projects: {a: {}, b: {}, urgent: {priority: interactive}}\n"
    return House(system, projects + more, ("a", "b", "urgent"))


# -- the queue -------------------------------------------------------------------------------------------------------


def test_in_an_overload_refusals_are_early_and_what_retry_after_says_is_true(system: System) -> None:
    house = with_projects(system)
    house.start_ingress()
    house.start_agent()

    async def main() -> None:
        async with house.client("a") as client, house.client("urgent") as urgent:
            await asyncio.gather(*await flood(client, 8))  # From now on it is known how long requests take.
            began_s = time.monotonic()
            waiting = await flood(urgent, 48)
            await asyncio.to_thread(wait_for, lambda: house.metric("serai_ingress_queue_depth") >= 20, "they wait")
            headers = {"x-slo-ttft-ms": "300"}
            refused_s = time.monotonic()
            refused = await chat(client, headers)
            took_s = time.monotonic() - refused_s
            assert (refused.status_code, code(refused)) == (503, "deadline_unreachable")
            assert took_s < 2  # At once, and not when its time is over or its turn has come.
            told_s = float(refused.headers["retry-after"])
            while (answer := await chat(client, headers)).status_code == 503:
                await asyncio.sleep(0.1)
            real_s = time.monotonic() - refused_s - 0.4  # Without its own time.
            assert answer.status_code == 200
            assert real_s / 2 - 1 <= told_s <= real_s * 2 + 1, (told_s, real_s)
            answers = await asyncio.gather(*waiting)
            assert Counter(one.status_code for one in answers) == {200: 48}
            longest_ms = max(float(one.headers["x-serai-queue-ms"]) for one in answers)
            assert 1000 < longest_ms < (time.monotonic() - began_s) * 1000

    run(main())
    assert house.metric("serai_ingress_queue_refusals_total") >= 1
    assert house.metric("serai_ingress_queue_wait_seconds_count") >= 57
    wait_for(house.is_quiet, "nothing is counted any more", 5)


def test_projects_take_turns_and_urgent_ones_go_first(system: System) -> None:
    house = with_projects(system)
    house.start_ingress()
    house.start_agent()
    order: list[str] = []
    done_before: list[int] = []

    async def asks(client: httpx2.AsyncClient, who: str, headers: dict[str, str] | None = None) -> None:
        assert (await chat(client, headers)).status_code == 200
        order.append(who)

    async def main() -> None:
        async with house.client("a") as a, house.client("b") as b, house.client("urgent") as urgent:
            many = [asyncio.create_task(asks(a, "a")) for _ in range(40)]
            await asyncio.to_thread(wait_for, lambda: house.metric("serai_ingress_queue_depth") >= 20, "they wait")
            done_before.append(len(order))
            few = [asyncio.create_task(asks(b, "b")) for _ in range(8)]
            low = asyncio.create_task(asks(urgent, "lowered", {"x-priority": "batch"}))
            first = asyncio.create_task(asks(urgent, "urgent"))
            await asyncio.gather(*many, *few, low, first)

    run(main())
    # What was done or was running when the others came, and twice as many as run at once for a machine that is slow to
    # bring them; then the urgent one, and the two projects in turn.
    (done,) = done_before
    assert order.index("urgent") <= done + 12, order
    last = max(place for place, who in enumerate(order) if who == "b")
    assert order[:last].count("a") <= done + 20 < 40, order
    assert order.index("lowered") >= len(order) - 6, order


def test_who_leaves_the_queue_is_never_seen_by_an_engine(system: System) -> None:
    house = with_projects(system)
    house.start_ingress()
    agent = house.start_agent()

    def received() -> float:
        with system.engine(agent) as engine:
            text = engine.get("/metrics").text
        return sum(float(value) for value in re.findall(r"^vllm:request_success_total{.*} (\S+)$", text, re.MULTILINE))

    async def main() -> None:
        async with house.client() as client:
            served = await flood(client, 4)
            await asyncio.to_thread(wait_for, lambda: house.metric("serai_ingress_requests_in_flight") == 4, "four run")
            leaving = await flood(client, 12)
            await asyncio.to_thread(wait_for, lambda: house.metric("serai_ingress_queue_depth") == 12, "they wait")
            for task in leaving:
                task.cancel()
            await asyncio.to_thread(wait_for, lambda: house.metric("serai_ingress_queue_depth") == 0, "left", 5)
            assert all(one.status_code == 200 for one in await asyncio.gather(*served))

    before = received()
    with_tokens = ASKED["max_tokens"]
    ASKED["max_tokens"] = 200  # Nobody's place becomes free meanwhile.
    try:
        run(main())
    finally:
        ASKED["max_tokens"] = with_tokens
    wait_for(house.is_quiet, "nothing is counted any more", 5)
    assert received() - before < 8  # The four, and the agent's own canaries.


def test_after_many_have_left_at_all_stages_every_count_is_zero(system: System) -> None:
    house = House(system, "projects: {a: {concurrent_max: 30, tokens_per_minute: 100000}}", ("a",))
    house.start_ingress()
    house.start_agent()
    chance = random.Random(7)

    async def leaves(client: httpx2.AsyncClient) -> None:
        try:
            async with asyncio.timeout(chance.uniform(0.0, 1.5)):
                answer = await chat(client, stream=chance.random() < 0.5)
                assert answer.status_code in (200, 429)
        except TimeoutError:
            pass

    async def main() -> None:
        async with house.client() as client:
            await asyncio.gather(*[leaves(client) for _ in range(80)])
            await asyncio.to_thread(wait_for, house.is_quiet, "nothing is counted any more", 10)
            # All places are there again, at the session, in the queue and of the project.
            answers = await asyncio.gather(*await flood(client, 30))
            assert Counter(one.status_code for one in answers) == {200: 30}

    run(main())
    wait_for(house.is_quiet, "nothing is counted any more", 5)


def test_what_two_ingresses_send_at_once_to_a_full_session_waits_and_is_not_refused(system: System) -> None:
    house = with_projects(system)
    house.start_ingress()
    house.start_ingress()
    house.start_agent(places=("--concurrency-max", "2"))

    async def main() -> None:
        async with house.client(url=house.urls[0]) as one, house.client(url=house.urls[1]) as other:
            began_s = time.monotonic()
            answers = await asyncio.gather(*await flood(one, 8), *await flood(other, 8))
            assert Counter(answer.status_code for answer in answers) == {200: 16}
            # Not asked over and over while it is full: only after it has told anew how much it has, once a second.
            most = max(int(answer.headers["x-serai-attempts"]) for answer in answers)
            assert most <= 3 + (time.monotonic() - began_s), most

    run(main())


def test_a_request_waits_while_the_next_allocation_takes_over(system: System) -> None:
    house = with_projects(system, "queue: {gap_max_s: 50}\n")  # A busy machine may take its time to start an agent.
    house.start_ingress()
    first = house.start_agent()

    async def main() -> None:
        async with house.client() as client:
            assert (await chat(client)).status_code == 200
            first.kill()
            await asyncio.to_thread(system.wait_for_sessions, 0)
            # Another is on its way, so that the model is known.
            system.start_agent(*TIMING, "--start-delay-s", "2", agent_flags=PLACES, wait=False)
            there = f"{house.urls[0]}/v1/models/m?all=true"
            headers = {"authorization": f"Bearer {system.key}"}
            await asyncio.to_thread(
                wait_for,
                lambda: (
                    len(httpx2.get(there, headers=headers).json().get("sessions", {})) > 0
                    and httpx2.post(
                        f"{house.urls[0]}/v1/chat/completions",
                        json=ASKED,
                        headers={**headers, "x-request-timeout": "0.05"},
                    ).status_code
                    == 504
                ),
                "the model is known and nobody serves it",
            )
            began_s = time.monotonic()
            answer = await chat(client)
            assert answer.status_code == 200, answer.text
            assert float(answer.headers["x-serai-queue-ms"]) <= (time.monotonic() - began_s) * 1000

    run(main())


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_request_has_the_time_it_says_in_the_queue_and_at_the_engine(system: System) -> None:
    house = with_projects(system)
    house.start_ingress()
    house.start_agent(places=("--concurrency-max", "1"))

    async def main() -> None:
        async with house.client() as client:
            began_s = time.monotonic()
            late = await chat(client, {"x-request-timeout": "0.5"}, max_tokens=2000)
            assert (late.status_code, code(late)) == (504, "deadline")
            assert 0.4 < time.monotonic() - began_s < 3
            stream = await chat(client, {"x-request-timeout": "0.5"}, max_tokens=2000, stream=True)
            assert stream.status_code == 200
            *_, error, done = [line for line in stream.text.split("\n\n") if line]
            assert done == "data: [DONE]"
            assert '"code":"deadline"' in error
            long = asyncio.create_task(chat(client, max_tokens=200))
            await asyncio.to_thread(wait_for, lambda: house.metric("serai_ingress_requests_in_flight") == 1, "it runs")
            waited = await chat(client, {"x-request-timeout": "0.3"})
            assert (waited.status_code, code(waited)) == (504, "deadline")
            assert int(waited.headers["x-serai-queue-ms"]) >= 290
            assert (await long).status_code == 200
            wrong = await chat(client, {"x-slo-ttft-ms": "soon"})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-slo-ttft-ms")

    run(main())


# -- limits ----------------------------------------------------------------------------------------------------------

BUDGET = """
projects: {a: {budget: 0.2, budget_period: month}}
prices: {m: {prompt: 0, output: 1000}}
"""
"""A thousandth for a token, two hundredths for a request: ten of them."""


@pytest.mark.parametrize("ingresses", [1, 2])
def test_a_hundred_at_once_cannot_overrun_a_budget_for_ten(system: System, ingresses: int) -> None:
    """H54."""
    house = House(system, BUDGET, ("a",))
    for _ in range(ingresses):
        house.start_ingress()
    house.start_agent(places=())

    async def main() -> None:
        clients = [house.client(url=url) for url in house.urls]
        floods = [await flood(client, 100 // ingresses) for client in clients]
        answers = await asyncio.gather(*[task for tasks in floods for task in tasks])
        assert Counter(answer.status_code for answer in answers) == {200: 10, 429: 90}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert code(refused) == "insufficient_quota"
        assert int(refused.headers["retry-after"]) >= 1
        for client in clients:
            assert (await chat(client)).status_code == 429
            await client.aclose()

    run(main())
    # Nor does a restart make it new.
    for process in [process for process in system.processes if process.name == "ingress"]:
        process.terminate()
    house.urls.clear()
    house.start_ingress()
    system.wait_for_sessions(1)
    with system.client() as client:
        assert client.post("/v1/chat/completions", json=ASKED).status_code == 429


def test_an_ingress_that_is_killed_takes_no_more_of_a_budget_than_its_lease(system: System) -> None:
    house = House(system, BUDGET.replace("0.2", "2"), ("a",))
    first, second = house.start_ingress(), house.start_ingress()
    house.start_agent(places=())

    async def main() -> None:
        async with house.client(url=first) as one, house.client(url=second) as other:
            assert all(answer.status_code == 200 for answer in await asyncio.gather(*await flood(one, 10)))
            next(process for process in system.processes if process.name == "ingress").kill()
            answers = await asyncio.gather(*await flood(other, 120))
            served = Counter(answer.status_code for answer in answers)[200]
            # Of the hundred, ten were used, and as many more may be reserved, or leased ahead, by the one that died.
            assert 70 <= served <= 90

    run(main())


def test_rates_hold_over_two_ingresses_and_answers_say_what_is_left(system: System) -> None:
    house = House(system, "projects: {a: {requests_per_minute: 12, tokens_per_minute: 100000}}", ("a",))
    first, second = house.start_ingress(), house.start_ingress()
    house.start_agent(places=())

    async def main() -> None:
        async with house.client(url=first) as one, house.client(url=second) as other:
            answer = await chat(other)
            assert answer.headers["x-ratelimit-limit-requests"] == "12"
            assert answer.headers["x-ratelimit-remaining-requests"] == "11"
            assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
            await asyncio.sleep(1.0)  # Five times as long as it takes to tell.
            statuses = Counter([(await chat(one)).status_code for _ in range(11)])
            assert statuses[200] in (11, 10)  # A slow machine gives one back every five seconds.
            await asyncio.sleep(1.0)
            refused = await chat(other)
            while refused.status_code == 200:
                refused = await chat(other)
            assert (refused.status_code, code(refused)) == (429, "rate_limit_exceeded")
            assert 1 <= int(refused.headers["retry-after"]) <= 5
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"

    run(main())
    assert house.metric("serai_ingress_limited_total", second) >= 1
