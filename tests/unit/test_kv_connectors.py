"""How engines hand KV over: what the released code's rules say, without a cluster."""

from __future__ import annotations

from collections import Counter

import pytest

from serai.simulator.fast.instance import Role
from serai.simulator.fast.kv_connectors import Migration, ObjectStore, received_together, segment
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import (
    DISAGGREGATED,
    IDEAL,
    Overheads,
    connector,
    default_policy,
    disaggregated_system,
    engine_preset,
)


def blocks(tokens: int) -> int:
    return -(-(tokens + 1) // 16) * 16


def test_a_decoding_stage_accepts_while_few_wait_for_their_first_step() -> None:
    rule = Migration(waiting_share=0.05)
    assert rule.accepts(0, 1000)
    assert rule.accepts(49, 1000)
    assert not rule.accepts(50, 1000)


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_a_waiting_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="waiting_share"):
        Migration(share)


def test_each_rank_puts_its_share_of_the_kv_and_all_hidden_states() -> None:
    store = ObjectStore(ranks=4, hidden_bytes_per_token=10.0)
    assert store.object_bytes(100, 400.0) == 100 * (400 / 4 + 10)


def test_copies_take_time_by_their_size() -> None:
    store = ObjectStore(save_bytes_s=2e9, load_bytes_s=4e9)
    assert (store.save_s(1e9), store.load_s(1e9)) == (0.5, 0.25)


@pytest.mark.parametrize("fields", [{"ranks": 0}, {"save_bytes_s": 0.0}, {"load_bytes_s": -1.0}])
def test_a_store_without_ranks_or_speed_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ObjectStore(**fields)  # type: ignore[arg-type]


def test_objects_are_spread_evenly_and_always_alike() -> None:
    drawn = [segment(number, rank, 16) for number in range(4000) for rank in range(2)]
    counts = Counter(drawn)
    assert set(counts) == set(range(16))
    assert max(counts.values()) < 1.2 * min(counts.values())
    assert drawn == [segment(number, rank, 16) for number in range(4000) for rank in range(2)]
    # Ranks of one request are apart as if drawn independently: together once in 16.
    together = sum(1 for number in range(4000) if segment(number, 0, 16) == segment(number, 1, 16))
    assert 0 <= together < 500


@pytest.mark.parametrize(
    ("waiting", "limits", "count"),
    [
        ([100, 100, 100], {}, 3),
        ([100, 100, 100], {"step_tokens_max": 200}, 2),
        ([300, 100], {"step_tokens_max": 200}, 1),
        ([100, 100, 100], {"slots": 1}, 1),
        ([100, 100, 100], {"slots": 0}, 0),
        ([100, 100, 100], {"room_tokens": 2 * 112}, 2),
        ([100, 100, 100], {"room_tokens": 111}, 0),
        ([300, 10], {"room_tokens": 100}, 0),
        ([], {}, 0),
    ],
)
def test_a_step_receives_what_it_would_have_computed(waiting: list[int], limits: dict[str, int], count: int) -> None:
    roomy = {"step_tokens_max": 8192, "slots": 256, "room_tokens": 10_000}
    assert received_together(waiting, room_for=blocks, **(roomy | limits)) == count  # type: ignore[arg-type]


def test_released_systems_have_connectors_and_ideal_ones_none() -> None:
    model = CLUSTERS["a800"].latency_model("codellama-34b")
    overheads = Overheads(step_s=0.018)
    assert connector("distserve", model, overheads) == Migration(0.05)
    assert connector("mooncake", model, overheads) == ObjectStore(2, 2.0 * 8192, 0.018)
    direct = connector("mooncake-direct", model, overheads)
    assert isinstance(direct, ObjectStore)
    assert (direct.save_s(1e12), direct.load_s(1e12), direct.ranks) == (0, 0, 2)
    assert [connector(name, model, overheads) for name in IDEAL.values()] == [None, None]
    engines = connector("mooncake", model, Overheads())
    assert isinstance(engines, ObjectStore)
    assert engines.step_s == model.profile.overheads.step_s


def test_each_released_system_has_its_own_engine_and_choice() -> None:
    assert engine_preset("distserve").step_tokens_max == 4096
    assert [engine_preset(name).step_tokens_max for name in DISAGGREGATED if name != "distserve"] == [8192] * 4
    assert default_policy("mooncake") == default_policy("mooncake-direct") == "round-robin"
    assert default_policy("distserve") == default_policy("mooncake-ideal") == "least-loaded"


def test_distserve_has_pairs_within_a_node() -> None:
    model = CLUSTERS["a800"].latency_model("codellama-34b")
    specs = disaggregated_system("distserve", model, 4, 4, 4).instances
    assert [spec.role for spec in specs] == [Role.PREFILL, Role.DECODE] * 4
    assert [spec.node for spec in specs] == [0] * 4 + [1] * 4


def test_mooncake_had_a_node_for_each_instance_where_there_were_enough() -> None:
    l20, a800 = CLUSTERS["l20"], CLUSTERS["a800"]
    assert l20.instances_per_node("llama-30b") == 2
    assert l20.instances_per_node("llama-30b", "mooncake") == 1
    assert a800.instances_per_node("llama-30b", "mooncake") == 4
