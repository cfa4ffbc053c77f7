"""Which session gets a request: fair turns, the least load, and another allocation for a second try."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import GpuDevice, SessionRecord
from serai.ingress.routing import (
    LOAD_BOUND,
    LOAD_FREE,
    POLICIES,
    Ask,
    Candidate,
    CountedChance,
    HardwareWeighted,
    LeastLoaded,
    MacroScheduled,
    OwnShare,
    Policy,
    PolicyChoice,
    PolicyNeeds,
    PrefixAffine,
    RoundRobin,
    SessionSpeeds,
    SessionSticky,
    UniformRandom,
    UnknownPolicy,
    capacity,
    prompt_head,
    untried,
    with_room,
)
from unit.fakes import record_of

M = Ask("m")

loads = st.integers(0, 4)


def candidates_with(pairs: list[tuple[int, int]]) -> list[Candidate]:
    return [Candidate(record_of(f"s{number}"), own, reported) for number, (own, reported) in enumerate(pairs)]


@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 5))
def test_round_robin_gives_every_session_its_turn_per_model(sessions: int, requests: int, others: int) -> None:
    policy, candidates = RoundRobin(), candidates_with([(0, 0)] * sessions)
    turns: Counter[str] = Counter()
    for number in range(requests):
        turns[policy.pick(M, candidates).record.session] += 1
        if number < others:
            policy.pick(Ask("another"), candidates)
    counts = [turns[candidate.record.session] for candidate in candidates]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == requests


@given(st.lists(loads, min_size=1, max_size=6), st.integers(0, 9))
def test_least_loaded_never_picks_a_session_with_a_higher_load_when_all_requests_are_its_own(
    owns: list[int], before: int
) -> None:
    policy, candidates = LeastLoaded(), candidates_with([(own, own) for own in owns])
    for _ in range(before):
        policy.pick(M, candidates)
    assert policy.pick(M, candidates).load == min(owns)


@pytest.mark.parametrize("seed", range(5))
def test_two_choices_are_two_different_ones(seed: int) -> None:
    policy = LeastLoaded(random.Random(seed))
    for pairs, less in (([(0, 4), (0, 3)], "s1"), ([(0, 3), (0, 4)], "s0")):
        assert policy.pick(M, candidates_with(pairs)).record.session == less
    three = candidates_with([(0, 3), (0, 4), (0, 5)])
    picked = Counter(policy.pick(M, three).record.session for _ in range(60))
    assert 30 <= picked["s0"] <= 50  # Two of three times it is one of the two.
    assert set(picked) == {"s0", "s1"}


@given(st.lists(st.tuples(loads, loads), min_size=2, max_size=6), st.integers(0, 99))
def test_least_loaded_never_picks_the_worst_when_others_send_there_too(pairs: list[tuple[int, int]], seed: int) -> None:
    candidates = candidates_with(pairs)
    picked = LeastLoaded(random.Random(seed)).pick(M, candidates)
    found = sorted(candidate.load for candidate in candidates)
    assert picked.load < found[-1] or found[-2] == found[-1]


@given(st.integers(1, 6), loads)
def test_least_loaded_shares_the_work_among_equals(sessions: int, load: int) -> None:
    policy, candidates = LeastLoaded(), candidates_with([(load, load)] * sessions)
    picked = {policy.pick(M, candidates).record.session for _ in range(sessions)}
    assert len(picked) == sessions


def test_load_is_what_is_known_of_it_whoever_knows_more() -> None:
    assert [candidate.load for candidate in candidates_with([(3, 1), (1, 3), (0, 0)])] == [3, 3, 0]


def test_load_adds_our_own_to_what_others_had_when_the_session_reported() -> None:
    share, record = OwnShare(), record_of("s1")

    def load(sequence: int, own: int, reported: int, penalty: float = 0.0) -> float:
        return Candidate(record, own, reported, penalty, share.when_reported("s1", sequence, own)).load

    assert load(1, own=2, reported=5) == 5
    assert load(1, own=6, reported=5) == 9  # Three are others'; ours have become six since.
    assert load(1, own=0, reported=5) == 3
    assert load(2, own=0, reported=0) == 0
    assert load(2, own=4, reported=0, penalty=1.5) == 5.5
    share.retain([])
    assert load(2, own=3, reported=4) == 4  # Forgotten, so it is noted anew.


def herd_peak(make: type[LeastLoaded], seed: int) -> float:
    """The longest queue, on average over time, when eight ingresses send to ten sessions whose reports are a second
    old. 400 requests a second in all, each takes a session about 20 ms."""
    rng = random.Random(seed)
    sessions = 10
    policies = [make(random.Random(n)) for n in range(8)]
    queues = [0] * sessions
    own = [[0] * sessions for _ in policies]
    reported = [0] * sessions
    held: list[list[int]] = [[] for _ in range(sessions)]
    records = [record_of(f"s{n}") for n in range(sessions)]
    shares = [OwnShare() for _ in policies]
    peaks = 0.0
    for step in range(2_000):  # Of 10 ms.
        if step % 100 == 0:
            reported = list(queues)
        for _ in range(4):
            ingress = rng.randrange(8)
            mine = own[ingress]
            candidates = [
                Candidate(
                    records[n],
                    mine[n],
                    reported[n],
                    0.0,
                    shares[ingress].when_reported(f"s{n}", step // 100, mine[n]),
                )
                for n in range(sessions)
            ]
            chosen = int(policies[ingress].pick(M, candidates).record.session[1:])
            mine[chosen] += 1
            queues[chosen] += 1
            held[chosen].append(ingress)
        for n in range(sessions):
            if held[n] and rng.random() < 0.44:
                own[held[n].pop(0)][n] -= 1
                queues[n] -= 1
        peaks += max(queues)
    return peaks / 2_000


class GlobalBest(LeastLoaded):
    """What `LeastLoaded` would be if it believed old reports."""

    def pick(self, ask: Ask, candidates: object) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.load)  # type: ignore[call-overload, no-any-return]


def test_two_choices_keep_queues_shorter_than_the_best_of_all_by_old_reports() -> None:
    assert herd_peak(LeastLoaded, 1) < 0.8 * herd_peak(GlobalBest, 1)


@given(st.integers(1, 8), st.integers(0, 9))
def test_uniform_random_reaches_every_session(sessions: int, seed: int) -> None:
    policy, candidates = UniformRandom(random.Random(seed)), candidates_with([(0, 0)] * sessions)
    counts = Counter(policy.pick(M, candidates).record.session for _ in range(60 * sessions))
    assert len(counts) == sessions
    assert max(counts.values()) < 2.5 * 60


def test_counted_chance_is_even_within_its_bounds_and_the_same_each_time() -> None:
    chance = CountedChance(7)
    drawn = [chance.random() for _ in range(4000)]
    assert all(0 <= number < 1 for number in drawn)
    shares = Counter(int(number * 10) for number in drawn)
    assert all(320 < shares[tenth] < 480 for tenth in range(10))
    again = CountedChance(7)
    assert [again.random() for _ in range(9)] == drawn[:9]


# -- by speed --------------------------------------------------------------------------------------------------------

weights = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(weights, st.integers(1, 200))
def test_turns_are_in_proportion_to_speed_at_every_moment(speeds: list[int], requests: int) -> None:
    known = SessionSpeeds()
    for number, speed in enumerate(speeds):
        known.published(f"s{number}", float(speed))
    policy, candidates = HardwareWeighted(known), candidates_with([(0, 0)] * len(speeds))
    counts = Counter(policy.pick(M, candidates).record.session for _ in range(requests))
    for number, speed in enumerate(speeds):
        due = requests * speed / sum(speeds)
        assert abs(counts[f"s{number}"] - due) < len(speeds)


def test_turns_of_a_fast_session_are_spread() -> None:
    known = SessionSpeeds()
    for session, speed in (("s0", 5.0), ("s1", 1.0), ("s2", 1.0)):
        known.published(session, speed)
    policy, candidates = HardwareWeighted(known), candidates_with([(0, 0)] * 3)
    assert [policy.pick(M, candidates).record.session[1] for _ in range(7)] == list("0010200")


def of_kind(session: str, gpu: str) -> Candidate:
    return Candidate(record_of(session, gpus=[GpuDevice("u", gpu)] if gpu else []), 0, 0)


def test_speed_is_as_published_else_observed_else_by_kind_of_gpu_on_their_scale_else_average() -> None:
    speeds = SessionSpeeds({"H100": 3.0, "A100": 1.5})
    candidates = [of_kind("s0", "H100"), of_kind("s1", "A100"), of_kind("s2", ""), of_kind("s3", "unheard-of")]
    assert speeds.weights(candidates) == [3.0, 1.5, 2.25, 2.25]
    speeds.observed("s0", 100, 1.0)
    assert speeds.weights(candidates) == pytest.approx([100, 50, 75, 75])
    speeds.observed("s0", 200, 1.0)
    assert speeds.weights(candidates)[0] == pytest.approx(110)
    speeds.published("s1", 40)
    speeds.observed("s1", 500, 1.0)
    assert speeds.weights(candidates)[1] == 40
    for useless in (0.0, -1.0, float("nan"), float("inf")):
        speeds.published("s2", useless)
        speeds.observed("s2", 5, useless)
    speeds.retain(["s1"])
    assert speeds.weights(candidates) == pytest.approx([80, 40, 60, 60])
    assert SessionSpeeds().weights(candidates) == [1.0] * 4


def test_hardware_weighted_forgets_sessions_that_left() -> None:
    policy = HardwareWeighted()
    for generation in range(50):
        policy.pick(M, [Candidate(record_of(f"s{generation}-{n}"), 0, 0) for n in range(4)])
    assert len(policy._due["m"]) <= 2 * 4 + 8 + 4


# -- by affinity -----------------------------------------------------------------------------------------------------


def affine(policy: Policy, key: str, candidates: list[Candidate]) -> str:
    ask = Ask("m", prompt_head=key.encode(), session_key=key)
    return policy.pick(ask, candidates).record.session


@pytest.mark.parametrize("make", [PrefixAffine, SessionSticky])
def test_a_key_stays_where_it_was_when_others_come_and_go(make: type[PrefixAffine]) -> None:
    policy, fleet = make(), candidates_with([(0, 0)] * 9)
    before = {f"key {n}": affine(policy, f"key {n}", fleet) for n in range(400)}
    shares = Counter(before.values())
    assert len(shares) == 9
    assert max(shares.values()) < 1.6 * 400 / 9
    left = [candidate for candidate in fleet if candidate.record.session != "s4"]
    after = {key: affine(make(), key, left) for key in before}  # Another ingress sees the same order.
    assert all(after[key] == session for key, session in before.items() if session != "s4")
    moved = Counter(after[key] for key, session in before.items() if session == "s4")
    assert len(moved) >= 6  # Not all to one neighbour.


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.text(min_size=1, max_size=9))
def test_nobody_gets_a_request_by_its_key_beyond_the_bound(owns: list[int], key: str) -> None:
    candidates = candidates_with([(own, 0) for own in owns])
    session = affine(PrefixAffine(), key, candidates)
    load = owns[int(session[1:])]
    assert load + 1 <= max(LOAD_FREE, LOAD_BOUND * (sum(owns) + 1) / len(owns) + 1)


def test_a_head_that_all_share_spreads_over_the_fleet_and_comes_home() -> None:
    owns, homes = [0] * 5, []
    for _ in range(100):
        session = affine(PrefixAffine(), "same head", candidates_with([(own, 0) for own in owns]))
        homes.append(session)
        owns[int(session[1:])] += 1
    assert len(set(homes[:LOAD_FREE])) == 1
    assert max(owns) <= 26
    assert affine(PrefixAffine(), "same head", candidates_with([(0, 0)] * 5)) == homes[0]


def test_who_has_no_key_is_served_by_load() -> None:
    candidates = candidates_with([(3, 3), (1, 1), (2, 2)])
    assert affine(PrefixAffine(), "", candidates) == affine(SessionSticky(), "", candidates) == "s1"


def test_penalties_count_as_load_for_affinity_and_never_leave_nobody() -> None:
    ill = [Candidate(record_of(f"s{n}"), 0, 0, penalty=7.9 + n / 10) for n in range(3)]
    assert affine(PrefixAffine(), "k", ill)
    home_of_k = affine(PrefixAffine(), "k", candidates_with([(0, 0)] * 3))
    one_ill = [Candidate(record_of(f"s{n}"), 0, 0, penalty=20.0 * (f"s{n}" == home_of_k)) for n in range(3)]
    assert affine(PrefixAffine(), "k", one_ill) != home_of_k


def test_all_turns_of_a_conversation_have_one_head() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "How are you?"}]
    assert prompt_head({"messages": first}) == prompt_head({"messages": later})
    assert prompt_head({"messages": first[1:]}) != prompt_head({"messages": first})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "text"},
        {"messages": [None]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 9000}, 3, None]}]},
        {"messages": [{"role": "system", "content": "y" * 9000}] * 3},
        {"prompt": "z" * 9000},
        {"prompt": [1, 2, 3] * 5000},
        {"prompt": ["a", "b"]},
        {"input": "embed me"},
        {"prompt": "\ud800"},
    ],
)
def test_a_head_is_bounded_whatever_the_body(body: dict[str, object]) -> None:
    assert len(prompt_head(body, 100)) <= 100


def test_heads_tell_prompts_apart() -> None:
    bodies: list[dict[str, object]] = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": [1, 2]}, {"prompt": [1, 3]}]
    assert len({prompt_head(body) for body in bodies}) == 4


# -- by lease --------------------------------------------------------------------------------------------------------


class Leases:
    def __init__(self, session: str | None) -> None:
        self.session = session

    def lease(self, ask: Ask, candidates: object) -> str | None:
        return self.session


def test_macro_scheduled_follows_its_lease_and_falls_back_when_there_is_none() -> None:
    leases = Leases("s2")
    policy, candidates = MacroScheduled(leases), candidates_with([(0, 0), (1, 1), (9, 9)])
    assert policy.pick(M, candidates).record.session == "s2"
    assert policy.pick(M, candidates[:2]).record.session == "s0"  # The leased one has failed it, or is not allowed.
    leases.session = None
    assert policy.pick(M, candidates).record.session == "s0"
    assert MacroScheduled().pick(M, candidates).record.session == "s0"
    assert (policy.by_lease, policy.without_lease) == (1, 2)


# -- the choice ------------------------------------------------------------------------------------------------------


def test_each_model_has_the_policy_of_its_configuration_and_it_may_change() -> None:
    choice = PolicyChoice("least-loaded", {"a": "round-robin"})
    turns = choice.of("a")
    assert isinstance(turns, RoundRobin)
    assert not isinstance(turns, LeastLoaded)
    assert (choice.name("a"), choice.name("b")) == ("round-robin", "least-loaded")
    assert choice.of("b") is choice.of("c")
    choice.change("prefix-affine", {"a": "round-robin", "c": "uniform-random"})
    assert choice.of("a") is turns  # It keeps what it remembers.
    assert isinstance(choice.of("b"), PrefixAffine)
    assert isinstance(choice.of("c"), UniformRandom)


@pytest.mark.parametrize(
    ("default", "by_model", "named"),
    [("fastest", {}, "default policy"), ("round-robin", {"a": "fastest"}, "policy of model 'a'")],
)
def test_an_unknown_policy_is_refused_and_nothing_changes(default: str, by_model: dict[str, str], named: str) -> None:
    choice = PolicyChoice()
    with pytest.raises(UnknownPolicy, match=f"{named}: no policy 'fastest'; use one of least-loaded, round-robin"):
        choice.change(default, by_model)
    assert choice.name("a") == "least-loaded"


def test_policies_get_what_they_need() -> None:
    needs = PolicyNeeds(chance=random.Random(1), speeds=SessionSpeeds(), leases=Leases("s1"))
    candidates = candidates_with([(0, 0), (9, 9)])
    assert PolicyChoice("macro-scheduled", needs=needs).of("m").pick(M, candidates).record.session == "s1"


@given(st.sampled_from(sorted(POLICIES)), st.lists(st.tuples(loads, loads), min_size=1, max_size=5), st.integers(1, 9))
def test_every_policy_picks_one_of_the_candidates(name: str, pairs: list[tuple[int, int]], times: int) -> None:
    policy = POLICIES[name]()
    for size in range(len(pairs), 0, -1):  # Sessions leave between two picks.
        candidates = candidates_with(pairs[:size])
        for _ in range(times):
            ask = Ask("m", prompt_head=b"h", session_key="k")
            picked = policy.pick(ask, candidates)
            assert picked in candidates
            policy.on_request_start(picked.record.session)
            policy.on_request_end(picked.record.session, whole=True)


rooms = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6)


@given(rooms)
def test_capacity_is_what_is_out_and_what_fits_beside_others(sessions: list[tuple[int, int, int]]) -> None:
    candidates = [
        Candidate(record_of(f"s{n}", concurrency_max=most), own, own + others, 0.0, own)
        for n, (own, others, most) in enumerate(sessions)
    ]
    more = sum(max(0, most - own - others) for own, others, most in sessions)
    assert capacity(candidates) == sum(own for own, _, _ in sessions) + more
    roomy = [c for c, (own, others, most) in zip(candidates, sessions, strict=True) if own + others < most]
    assert list(with_room(candidates)) == (roomy or candidates)
    assert bool(roomy) == (more > 0)
    assert capacity([*candidates, Candidate(record_of("unbounded"), 9, 9)]) is None
    assert capacity([]) == 0


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
