"""What the benchmarks of admission compute, apart from what they measure."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serai.bench import admission, padg_live
from serai.bench.live_run import LiveRun
from serai.bench.open_client import send_all
from serai.bench.padg_live import QUICK, SLO, SYSTEMS, Compared
from serai.bench.processes import BenchFailed
from serai.simulator.fast.run import NS
from serai.simulator.outcomes import Outcome, Outcomes
from serai.simulator.workloads.workload import Arrival


@pytest.mark.parametrize("policy", admission.POLICIES)
def test_all_decisions_of_a_full_group_admit(policy: str) -> None:
    group, sessions = admission.full_group(policy)
    assert len(group.views) == len(sessions) == admission.INSTANCES
    assert all(view.epoch for view in group.views.values())
    assert all(took_s > 0 for took_s in admission.decision_s(policy, 200))
    assert len(admission.decision_s(policy, 200)) == 200


def test_what_a_request_pays_is_the_worst_rates_median() -> None:
    samples = [
        {"target": target, "rate": rate, "round": number, "p50_ms": p50_ms}
        for number, rate, plain, asked in (
            *((0, 16, 1.0, 1.2), (1, 16, 2.0, 2.6), (0, 64, 1.0, 1.9), (1, 64, 1.0, 1.5)),
            *((0, 0, 1.0, 1.1), (1, 0, 1.0, 1.3)),
        )
        for target, p50_ms in (("least-loaded", plain), ("macro-scheduled", asked))
    ]
    figures = admission._request_figures(samples)
    assert figures["added_p50_ms_c1"] == pytest.approx(0.2)
    assert figures["added_p50_ms_16rps"] == pytest.approx(0.4)
    assert figures["added_p50_ms"] == figures["added_p50_ms_64rps"] == pytest.approx(0.7)


def outcomes(*ttfts_s: float) -> Outcomes:
    return Outcomes(
        Outcome(number * NS, 10, 11, 0, round((number + ttft_s) * NS), None, round((number + ttft_s + 0.2) * NS))
        for number, ttft_s in enumerate(ttfts_s)
    )


def test_gaps_are_between_mean_attainments() -> None:
    late = SLO.ttft_s + 0.3
    found = [
        Compared("serai", 1, LiveRun(outcomes(0.1, 0.1), outcomes(0.1, 0.1), 0.001)),
        Compared("serai", 2, LiveRun(outcomes(0.1, late), outcomes(0.1, 0.1), 0.002)),
    ]
    figures = padg_live.figures_of(found)
    assert figures["serai_simulated_600ms_40ms"] == 1.0
    assert figures["serai_live_600ms_40ms"] == 0.75
    assert figures["serai_gap_points"] == figures["attainment_gap_points"] == 25.0
    assert figures["serai_gap_points_worst_run"] == 50.0
    assert found[1].raw()["requests"] == 2


def test_both_sides_get_the_same_requests_and_what_is_simulated_is_whole() -> None:
    requests = padg_live.arrivals(5.0, replace(QUICK, counted_s=3.0), 1)
    assert requests == padg_live.arrivals(5.0, replace(QUICK, counted_s=3.0), 1)
    assert max(one.output_tokens for one in requests) <= QUICK.answer_tokens_max
    for system in SYSTEMS.values():
        assert len(padg_live.simulated(system, requests)) == len(requests)


def test_the_client_counts_tokens_and_refusals_and_tells_a_cut_answer() -> None:
    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        body = await reader.readexactly(size)
        if b'"max_tokens": 3' in body:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nx-serai-session: s1\r\n\r\n")
            writer.write(b'data: {"choices":[{"text":" a"}]}\n\ndata: {"choices":[{"te')
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(b'xt":" b"}]}\n\n')
        writer.close()

    async def ask(*arrivals: Arrival) -> Outcomes:
        async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return (await send_all([port], "m", {"x-key": "k"}, arrivals))[0]

    found = asyncio.run(ask(Arrival(0, 5, 2), Arrival(1000, 5, 3)))
    assert [one.refused for one in found] == [False, True]
    first = found[0]
    assert first.first_token_ns is not None
    assert first.finished_ns is not None
    assert first.finished_ns - first.first_token_ns > 0.01 * NS
    with pytest.raises(BenchFailed, match="2 tokens came of 7"):
        asyncio.run(ask(Arrival(0, 5, 7)))
