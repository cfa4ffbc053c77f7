"""KV links: first in, first out, and never faster than they are."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from serai.performance.hardware import Link
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.links import Links, Network
from serai.simulator.fast.presets import disaggregated_system
from serai.simulator.workloads.workload import Arrival
from simulation.test_fast_cluster import Stub

NETWORK = Network(Link("inside", 10e9, 0.0, ""), Link("between", 1e9, 0.001, ""), share=0.5)


def test_messages_share_a_lane_one_after_the_other() -> None:
    links = Links(NETWORK)
    assert links.send(0, 1, 500e6, 0) == 1_001_000_000
    assert links.send(0, 2, 500e6, 0) == 2_001_000_000, "the sender's lane is taken"
    assert links.send(3, 1, 500e6, 0) == 2_001_000_000, "the receiver's lane was taken for one second"
    assert links.send(4, 5, 500e6, 0) == 1_001_000_000, "others are free"
    assert links.send(0, 0, 500e6, 0) == 100_000_000, "inside a node there is another link"


def test_a_link_is_first_in_first_out() -> None:
    links, random, now_ns, ends = Links(NETWORK), Random(1), 0, []
    for _ in range(200):
        now_ns += random.randint(0, 200_000_000)
        ends.append(links.send(0, 1, random.randint(1, 100_000_000), now_ns))
    assert ends == sorted(ends)
    lane = links.lanes["out", 0]
    assert lane.busy_ns <= ends[-1]
    assert lane.messages == 200


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="a link's share"):
        Network(NETWORK.inside, NETWORK.between, share)


def test_a_slow_link_holds_first_tokens_prefill_memory_and_decoding_back() -> None:
    """2,000 tokens of 100 kB over 5 MB/s: forty seconds each, one after the other."""
    slow = Network(NETWORK.inside, Link("slow", 10e6, 0.0, ""), share=0.5)
    chosen = disaggregated_system("mooncake-ideal", Stub(), 1, 1, 1)
    work = [Arrival(n, 2000, 3) for n in range(4)]
    result = simulate(chosen.instances, work, chosen.dispatch(), ClusterSettings(slow))
    began = [(o.decode_began_ns or 0) / 1e9 for o in result.outcomes]
    firsts = [(o.first_token_ns or 0) / 1e9 for o in result.outcomes]
    assert [round(later - earlier) for earlier, later in pairwise(began)] == [40, 40, 40]
    # Two prompts fill the prefill instance; the third begins when the first one's KV is away.
    assert firsts[1] < 1
    assert firsts[2] > 40
    assert sum(figures.kv_tokens_held for figures in result.instances) == 0
    assert result.figures()["kv_bytes_moved"] == 4 * 2000 * 100_000
