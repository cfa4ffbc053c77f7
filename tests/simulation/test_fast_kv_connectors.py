"""Released disaggregated engines in the cluster: who waits for whom while KV changes hands, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serai.performance.hardware import Link
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.dispatch import Arrived, BadDispatch, Prefilled, Request, Send, Transfer
from serai.simulator.fast.instance import Instance
from serai.simulator.fast.kv_connectors import Migration, ObjectStore, segment
from serai.simulator.fast.links import Network
from serai.simulator.fast.presets import System, disaggregated_system
from serai.simulator.fast.run import Run
from serai.simulator.workloads.workload import Arrival
from simulation.test_fast_cluster import Stub

MS = 1_000_000
# 100 kB a token: 1,000 tokens cross in 100 ms between nodes, in 10 ms within one.
NETWORK = Network(Link("inside", 20e9, 0.0, ""), Link("between", 2e9, 0.0, ""), share=0.5)
SETTINGS = ClusterSettings(NETWORK)
STORE = ObjectStore(ranks=1, step_s=0.005, save_bytes_s=2e9, load_bytes_s=4e9)
"""1,000 tokens: 50 ms to save, 25 ms to load."""


def mooncake(prefill: int = 1, decode: int = 1, store: ObjectStore = STORE) -> System:
    found = disaggregated_system("mooncake", Stub(token_s=0.0001), prefill, decode, 1)
    return replace(found, instances=[replace(spec, connector=store) for spec in found.instances])


def run(system: System, work: list[Arrival], settings: ClusterSettings = SETTINGS) -> Run:
    result = simulate(system.instances, work, system.dispatch(), settings)
    assert result.unfinished == 0
    assert sum(figures.kv_tokens_held for figures in result.instances) == 0
    return result


def begins_ms(result: Run) -> list[float]:
    return [began / MS for began in result.outcomes.columns["decode_began_ns"]]


def test_kv_goes_through_the_host_the_store_and_the_host() -> None:
    result = run(mooncake(), [Arrival(0, 1000, 3)])
    # 10 ms and 0.1 ms a token to compute; save, cross once (the segment is on one of the two nodes), load; the
    # receiving step's own 5 ms.
    assert begins_ms(result) == [pytest.approx(110 + 50 + 100 + 25 + 5)]
    assert result.outcomes.columns["first_token_ns"][0] / MS == pytest.approx(290), "the decode instance says it"


def test_an_object_may_lie_on_a_third_node_and_cross_twice() -> None:
    system = mooncake(prefill=1, decode=2)
    number = next(n for n in range(99) if n % 2 == 0 and segment(n, 0, 3) == 2)
    # Decode instances take turns: even numbers go to node 1, and this one's object lies on node 2.
    work = [Arrival(n * 10**10, 1000, 3) for n in range(number + 1)]
    result = run(system, work)
    assert begins_ms(result)[number] - number * 1e4 == pytest.approx(110 + 50 + 200 + 25 + 5)


def test_a_prefill_instance_computes_nothing_while_it_sends() -> None:
    result = run(mooncake(), [Arrival(0, 1000, 3), Arrival(1, 1000, 3)])
    put_crosses = [segment(number, 0, 2) == 1 for number in (0, 1)]
    # The second is computed once the first is in the store.
    sent_ms = 110 + 50 + 100 * put_crosses[0]
    second_ms = sent_ms + 110 + 50 + 100 * put_crosses[1]
    got_ms = max(second_ms, begins_ms(result)[0]) + 100 * (not put_crosses[1]) + 25 + 5
    assert begins_ms(result)[1] >= got_ms - 1e-6


def test_who_decodes_waits_while_others_are_received() -> None:
    alone = run(mooncake(), [Arrival(0, 1000, 200)])
    both = run(mooncake(), [Arrival(0, 1000, 200), Arrival(1, 1000, 2)])
    ended = [result.outcomes.columns["finished_ns"][0] / MS for result in (alone, both)]
    crosses_out = segment(1, 0, 2) == 0
    assert ended[1] - ended[0] == pytest.approx(100 * crosses_out + 25 + 5, abs=0.1)
    assert both.outcomes.columns["itl_max_ns"][0] / MS == pytest.approx(10 + 100 * crosses_out + 25 + 5, abs=0.1)
    assert alone.outcomes.columns["itl_max_ns"][0] / MS == pytest.approx(10, abs=0.1)


def test_faster_copies_end_sooner_and_the_ideal_soonest() -> None:
    work = [Arrival(n * 150 * MS, 400, 40) for n in range(60)]
    ends = [
        run(mooncake(store=replace(STORE, save_bytes_s=rate, load_bytes_s=rate)), work).duration_ns
        for rate in (1e9, 4e9)
    ]
    ideal = disaggregated_system("mooncake-ideal", Stub(token_s=0.0001), 1, 1, 1)
    ends.append(run(ideal, work).duration_ns)
    assert ends == sorted(ends, reverse=True)


def test_a_prefill_instance_forgets_what_is_in_the_store() -> None:
    """Both kinds have room for two of these; each pair decodes for 2.4 s. The ideal one computes no further than the
    decode instance takes it away, the released one as fast as the store takes it."""
    work = [Arrival(n, 1800, 240) for n in range(12)]
    last_computed_ms = []
    for system in (mooncake(), disaggregated_system("mooncake-ideal", Stub(token_s=0.0001), 1, 1, 1)):
        computed: list[int] = []

        def watch(instance: Instance, now_ns: int, computed: list[int] = computed) -> None:
            if instance.number == 0:
                computed.append(now_ns)

        simulate(system.instances, work, system.dispatch(), SETTINGS, watch=watch)
        last_computed_ms.append(computed[-1] / MS)
    assert last_computed_ms[0] < 12 * (190 + 90 + 180)
    assert last_computed_ms[1] > 3 * 2400


def test_nothing_is_received_without_a_slot() -> None:
    system = mooncake()
    few = replace(system.instances[1].settings, sequences_max=1)
    system = replace(system, instances=[system.instances[0], replace(system.instances[1], settings=few)])
    result = run(system, [Arrival(0, 1000, 100), Arrival(1, 1000, 3)])
    first_ended = result.outcomes.columns["finished_ns"][0] / MS
    assert begins_ms(result)[1] >= first_ended + 25 + 5


def test_a_store_needs_a_network() -> None:
    system = mooncake()
    with pytest.raises(BadDispatch, match="no network"):
        simulate(system.instances, [Arrival(0, 100, 3)], system.dispatch(), ClusterSettings())


# DistServe


def distserve(pairs: int = 1, rule: Migration | None = None) -> System:
    found = disaggregated_system("distserve", Stub(token_s=0.0001), pairs, pairs, 2 * pairs)
    return replace(found, instances=[replace(spec, connector=rule or Migration()) for spec in found.instances])


def test_a_decoding_stage_copies_or_computes_without_being_told_to() -> None:
    ends = [
        run(system, [Arrival(0, 1000, 50), Arrival(1, 1000, 2)]).outcomes.columns["finished_ns"][0] / MS
        for system in (distserve(), disaggregated_system("distserve-ideal", Stub(token_s=0.0001), 1, 1, 2))
    ]
    assert ends[0] - ends[1] == pytest.approx(10, abs=0.1), "the second one's KV takes 10 ms"


def test_few_are_accepted_between_two_steps() -> None:
    """Ten short prompts computed in one batch: all come before the next decode step, or as many as the rule lets."""
    work = [Arrival(0, 100, 30), *(Arrival(1, 100, 30) for _ in range(10))]
    rule, anyone = run(distserve(rule=Migration(0.05)), work), run(distserve(rule=Migration(1.0)), work)
    # 5 % of 4,096 tokens are 205: the second brings it to 224, so two come between two steps.
    assert len(set(begins_ms(anyone)[1:])) == 1
    begun = sorted(begins_ms(rule)[1:])
    assert [begun.count(at) for at in dict.fromkeys(begun)] == [2] * 5


def test_a_pair_is_one_server() -> None:
    """The first request decodes on for long; all others go to the other pair, though both contexts are idle."""
    work = [Arrival(0, 100, 1500), *(Arrival(n * 10**9, 100, 3) for n in range(1, 6))]
    result = run(distserve(pairs=2), work)
    assert list(result.outcomes.columns["instance"]) == [1] + [3] * 5


def test_kv_stays_within_its_pair() -> None:
    dispatch = distserve(pairs=3).dispatch()
    sent = []
    for number in range(6):
        request = Request(number, number, 100, (), "", "")
        (send,) = dispatch.handle(Arrived(request), number)
        assert isinstance(send, Send)
        sent.append((request, send.instance))
    assert {instance for _, instance in sent} == {0, 2, 4}
    for request, instance in reversed(sent):
        (transfer,) = dispatch.handle(Prefilled(request, instance), 10)
        assert isinstance(transfer, Transfer)
        assert transfer.instance == instance + 1
