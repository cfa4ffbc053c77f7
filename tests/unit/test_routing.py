"""Which session gets a request: fair turns, the least load, and another allocation for a second try."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import SessionRecord
from serai.ingress.routing import POLICIES, Candidate, LeastLoaded, RoundRobin, untried
from unit.fakes import record_of

loads = st.integers(0, 4)


def candidates_with(pairs: list[tuple[int, int]]) -> list[Candidate]:
    return [Candidate(record_of(f"s{number}"), own, reported) for number, (own, reported) in enumerate(pairs)]


@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 5))
def test_round_robin_gives_every_session_its_turn_per_model(sessions: int, requests: int, others: int) -> None:
    policy, candidates = RoundRobin(), candidates_with([(0, 0)] * sessions)
    turns: Counter[str] = Counter()
    for number in range(requests):
        turns[policy.pick("m", candidates).record.session] += 1
        if number < others:
            policy.pick("another", candidates)
    counts = [turns[candidate.record.session] for candidate in candidates]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == requests


@given(st.lists(st.tuples(loads, loads), min_size=1, max_size=6), st.integers(0, 9))
def test_least_loaded_never_picks_a_session_with_a_higher_load(pairs: list[tuple[int, int]], before: int) -> None:
    policy, candidates = LeastLoaded(), candidates_with(pairs)
    for _ in range(before):
        policy.pick("m", candidates)
    picked = policy.pick("m", candidates)
    assert max(picked.own_in_flight, picked.reported_in_flight) == min(max(pair) for pair in pairs)


@given(st.integers(1, 6), loads)
def test_least_loaded_shares_the_work_among_equals(sessions: int, load: int) -> None:
    policy, candidates = LeastLoaded(), candidates_with([(load, load)] * sessions)
    picked = {policy.pick("m", candidates).record.session for _ in range(sessions)}
    assert len(picked) == sessions


def test_load_is_what_is_known_of_it_whoever_knows_more() -> None:
    assert [candidate.load for candidate in candidates_with([(3, 1), (1, 3), (0, 0)])] == [3, 3, 0]


@given(st.sampled_from(sorted(POLICIES)), st.lists(st.tuples(loads, loads), min_size=1, max_size=5), st.integers(1, 9))
def test_every_policy_picks_one_of_the_candidates(name: str, pairs: list[tuple[int, int]], times: int) -> None:
    policy = POLICIES[name]()
    for size in range(len(pairs), 0, -1):  # Sessions leave between two picks.
        candidates = candidates_with(pairs[:size])
        for _ in range(times):
            assert policy.pick("m", candidates) in candidates


fleets = st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from("ab")), min_size=1, max_size=8).map(
    lambda places: [record_of(f"s{n}", site=site, allocation=name) for n, (site, name) in enumerate(places)]
)


@given(fleets, st.data())
def test_a_session_is_never_tried_twice_and_another_allocation_comes_first(
    fleet: list[SessionRecord], data: st.DataObject
) -> None:
    tried = [fleet[n] for n in data.draw(st.sets(st.integers(0, len(fleet) - 1)))]
    fresh = [record for record in fleet if record not in tried]
    used = {(record.metadata.site, record.metadata.allocation) for record in tried}
    elsewhere = [record for record in fresh if (record.metadata.site, record.metadata.allocation) not in used]
    assert untried(fleet, tried) == (elsewhere or fresh)


def test_allocations_of_two_sites_with_one_name_are_two() -> None:
    here, there = record_of("s1", site="x", allocation="1"), record_of("s2", site="y", allocation="1")
    beside = record_of("s3", site="x", allocation="1")
    assert untried([here, there, beside], [here]) == [there]
    assert untried([here, beside], [here]) == [beside]
    assert untried([here], [here]) == []
