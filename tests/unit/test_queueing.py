"""Who waits, who goes next, who is refused when, and that each of them hears of it once."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress.queueing import (
    Arrived,
    Cancelled,
    Capacity,
    Closed,
    Dispatch,
    Effect,
    Ended,
    Event,
    QueueMisuse,
    QueueSettings,
    Refusal,
    Refuse,
    RequestQueue,
    Tick,
    dispatched,
)


def asked(
    request: str, project: str = "p", priority: int = 1, begin_by_s: float = math.inf, tokens: int = 100, size: int = 1
) -> Arrived:
    return Arrived(request, project, priority, size, tokens, 0, begin_by_s)


def full(settings: QueueSettings | None = None, took_s: float | None = None) -> RequestQueue:
    """A queue with one place, which is taken; its requests are known to take `took_s`."""
    queue = RequestQueue(settings, capacity=1)
    if took_s is not None:
        queue.handle(asked("before", "other"), -took_s)
        queue.handle(Ended("before"), 0)
    assert dispatched(queue.handle(asked("first", "other"), 0)) == ["first"]
    return queue


def served(queue: RequestQueue, now: float = 0.0, step_s: float = 0.0) -> list[str]:
    """All that wait, in the order in which they go when one ends after the other."""
    order, running = [], ["first"]
    while running:
        now += step_s
        running = dispatched(queue.handle(Ended(running[0]), now))
        order += running
    return order


def put(queue: RequestQueue, *events: Event, now: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in queue.handle(event, now)]


# -- room ------------------------------------------------------------------------------------------------------------


def test_without_a_limit_everything_goes_at_once() -> None:
    queue = RequestQueue()
    assert put(queue, asked("a"), asked("b"), now=5) == [Dispatch("a", 0.0), Dispatch("b", 0.0)]
    assert (queue.waiting, queue.running, queue.next_wake_s) == (0, 2, None)


def test_with_room_and_nobody_waiting_a_request_may_go_without_an_event() -> None:
    queue = RequestQueue(capacity=1)
    assert not queue.go(asked("late", begin_by_s=-1), 0)
    assert queue.go(asked("a"), 0)
    assert queue.runs("a")
    assert not queue.go(asked("b"), 0)
    put(queue, asked("b"))
    assert dispatched(queue.handle(Ended("a", 10, 10), 2)) == ["b"]
    assert (queue.duration_s, queue.go(asked("c"), 2)) == (2, False)
    queue.handle(Ended("b"), 3)
    assert not queue.runs("b")
    assert queue.go(asked("c"), 3)
    put(queue, Capacity(2), asked("d"), Capacity(3), asked("e", begin_by_s=1))
    assert (queue.running, queue.waiting) == (3, 0)


def test_requests_go_as_others_end_and_are_told_how_long_they_waited() -> None:
    queue = full()
    assert put(queue, asked("a")) == []
    assert queue.handle(Ended("first"), 2.5) == [Dispatch("a", 2.5)]


def test_capacity_may_grow_and_shrink_while_requests_wait() -> None:
    queue = full()
    put(queue, *[asked(str(n)) for n in range(5)])
    assert dispatched(queue.handle(Capacity(3), 0)) == ["0", "1"]
    assert dispatched(queue.handle(Capacity(1), 0)) == []
    assert dispatched(put(queue, Ended("first"), Ended("0"))) == []
    assert dispatched(queue.handle(Ended("1"), 0)) == ["2"]
    assert dispatched(queue.handle(Capacity(None), 0)) == ["3", "4"]


def test_what_cannot_be_is_a_fault_of_the_shell() -> None:
    queue = full()
    for event in (asked("first"), Ended("never")):
        with pytest.raises(QueueMisuse, match="request"):
            queue.handle(event, 0)


# -- order -----------------------------------------------------------------------------------------------------------


def test_higher_classes_go_first_and_priorities_out_of_range_count_as_the_nearest() -> None:
    queue = full()
    put(queue, asked("batch", priority=2), asked("normal", priority=1), asked("lowest", priority=99))
    put(queue, asked("urgent", priority=0), asked("most urgent", priority=-5))
    assert served(queue) == ["urgent", "most urgent", "normal", "batch", "lowest"]


def test_within_a_project_the_earliest_deadline_goes_first() -> None:
    queue = full()
    put(queue, asked("none"), asked("late", begin_by_s=30), asked("soon", begin_by_s=10), asked("later", begin_by_s=50))
    assert served(queue) == ["soon", "late", "later", "none"]


def test_projects_take_turns_whatever_they_send() -> None:
    queue = full()
    put(queue, *[asked(f"a{n}", "a") for n in range(6)], *[asked(f"b{n}", "b") for n in range(2)], asked("c0", "c"))
    assert served(queue)[:5] == ["a0", "b0", "c0", "a1", "b1"]


def test_turns_are_by_tokens_and_weight_not_by_requests() -> None:
    queue = full()
    long = [Arrived(f"long{n}", "long", prompt_tokens=300) for n in range(9)]
    short = [Arrived(f"short{n}", "short", prompt_tokens=100) for n in range(9)]
    twice = [Arrived(f"twice{n}", "twice", prompt_tokens=100, weight=2.0) for n in range(18)]
    put(queue, *long, *short, *twice)
    counts = Counter(request.rstrip("0123456789") for request in served(queue)[:20])
    assert counts["short"] in (5, 6, 7)
    assert counts["twice"] in (11, 12, 13)
    assert counts["long"] in (2, 3)


def test_what_was_used_is_settled_at_the_end() -> None:
    queue = full()
    put(queue, Arrived("a0", "a", prompt_tokens=10), Arrived("b0", "b", prompt_tokens=10))
    put(queue, Arrived("a1", "a", prompt_tokens=10), Arrived("b1", "b", prompt_tokens=10))
    assert dispatched(queue.handle(Ended("first"), 0)) == ["a0"]
    assert dispatched(queue.handle(Ended("a0", 10, 500), 0)) == ["b0"]  # It said much more than was thought.
    put(queue, Arrived("b2", "b", prompt_tokens=10))
    assert served_after(queue, "b0") == ["b1", "b2", "a1"]


def test_what_was_charged_and_not_used_is_given_back() -> None:
    queue = full()
    put(queue, Arrived("a0", "a", prompt_tokens=10, output_tokens=4000), Arrived("b0", "b", prompt_tokens=100))
    put(queue, Arrived("a1", "a", prompt_tokens=10), Arrived("b1", "b", prompt_tokens=100))
    assert dispatched(queue.handle(Ended("first"), 0)) == ["a0"]
    assert dispatched(queue.handle(Ended("a0", 10, 1), 0)) == ["b0"]
    assert served_after(queue, "b0") == ["a1", "b1"]


def test_projects_that_have_gone_are_forgotten_once_they_owe_nothing() -> None:
    queue = full()
    put(queue, *[asked(f"steady {n}", "steady") for n in range(3)])
    running = "first"
    for number in range(200):
        put(queue, asked(f"r{number}", f"p{number}"), asked(f"steadily {number}", "steady"))
        for _ in range(2):
            running = dispatched(queue.handle(Ended(running), 0))[0]
    assert queue.waiting <= 5
    assert len(queue._used) <= 5


def served_after(queue: RequestQueue, request: str) -> list[str]:
    order = []
    while found := dispatched(queue.handle(Ended(request), 0)):
        order += found
        request = found[0]
    return order


def test_a_project_that_was_away_has_saved_nothing_up() -> None:
    queue = full()
    put(queue, *[asked(f"a{n}", "a") for n in range(20)])
    running = "first"
    for _ in range(10):
        running = dispatched(queue.handle(Ended(running), 0))[0]
    put(queue, *[asked(f"b{n}", "b") for n in range(9)])
    order = served_after(queue, running)
    assert Counter(request[0] for request in order[:8]) == {"a": 4, "b": 4}


def test_with_nobody_left_all_are_quits() -> None:
    queue = full()
    put(queue, asked("a0", "a", tokens=10_000))
    served(queue)
    assert not queue._used
    put(queue, asked("first", "other"), asked("a1", "a"), asked("b1", "b"))
    assert served(queue) == ["a1", "b1"]


# -- nothing starves -------------------------------------------------------------------------------------------------


def starved_for(old: Arrived, newcomer: dict[str, object], settings: QueueSettings) -> float:
    """How long `old` waits while a request like `newcomer` comes every second, as often as one can be served."""
    queue = full(settings)
    put(queue, old)
    running = "first"
    for second in range(1, 1000):
        queue.handle(Arrived(f"n{second}", begin_by_s=second + 5.0, **newcomer), second)  # type: ignore[arg-type]
        running = dispatched(queue.handle(Ended(running), second))[0]
        if running == old.request:
            return second
    return math.inf


@pytest.mark.parametrize("priority", [0, 1, 2])
def test_nobody_waits_for_ever_behind_higher_classes_or_earlier_deadlines(priority: int) -> None:
    settings = QueueSettings(ageing_s=15, patience_s=60)
    same = starved_for(asked("old", "p", priority), {"project": "p", "priority": 0}, settings)
    assert same <= 60
    other = starved_for(asked("old", "p", priority), {"project": "q", "priority": 0}, settings)
    assert other <= 15 * priority + 2


def test_a_request_moves_up_a_class_with_age() -> None:
    queue = full(QueueSettings(ageing_s=10))
    put(queue, asked("old", priority=2))
    put(queue, asked("young", priority=1), now=11)
    put(queue, asked("urgent", priority=0), now=12)
    assert served(queue, 12) == ["urgent", "old", "young"]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_who_cannot_begin_in_time_is_refused_at_once_and_told_when() -> None:
    queue = full(took_s=4.0)
    put(queue, asked("a", priority=0), asked("b", priority=0))
    assert queue.wait_s(asked("x"), 0) == 12.0
    assert put(queue, asked("x", begin_by_s=5.0)) == [Refuse("x", Refusal.TOO_LATE, 7.0, 0.0, 2)]
    assert put(queue, asked("first of its class", priority=0, begin_by_s=4.5)) == []
    # It would go first, too, and still have to wait for who runs.
    assert put(queue, asked("y", priority=0, begin_by_s=2.5)) == [Refuse("y", Refusal.TOO_LATE, 2.0, 0.0, 3)]


def test_what_retry_after_says_is_true() -> None:
    queue = full(took_s=4.0)
    put(queue, asked("a", priority=0), asked("b", priority=0))
    [refused] = put(queue, asked("x", begin_by_s=5.0))
    assert isinstance(refused, Refuse)
    queue.handle(Ended("first"), 4.0)
    again = refused.retry_after_s
    assert isinstance(put(queue, asked("x", begin_by_s=again - 1.5 + 5.0), now=again - 1.5)[0], Refuse)
    assert put(queue, asked("x", begin_by_s=again + 5.0), now=again) == []


def test_with_several_places_the_wait_is_until_the_one_that_becomes_free() -> None:
    queue = RequestQueue(capacity=2)
    put(queue, asked("before"), now=-10)
    put(queue, Ended("before"), asked("a"))
    put(queue, asked("b"), now=3)
    waits = []
    for number in range(5):
        waits.append(queue.wait_s(asked(f"x{number}"), 4))
        put(queue, asked(f"x{number}"), now=4)
    assert waits == [6, 9, 16, 19, 26]
    queue.handle(Capacity(1), 4)
    assert queue.wait_s(asked("y"), 4) == 9 + 5 * 10  # The first to end makes no place.


def test_nothing_is_refused_for_a_wait_that_nobody_knows_yet() -> None:
    queue = full()
    assert queue.wait_s(asked("x"), 0) is None
    assert put(queue, asked("x", begin_by_s=0.5)) == []
    queue.handle(Capacity(0), 0)
    assert queue.wait_s(asked("y"), 0) is None


def test_a_deadline_in_the_past_is_refused_even_when_there_is_room() -> None:
    assert put(RequestQueue(), asked("x", begin_by_s=1), now=2) == [Refuse("x", Refusal.TOO_LATE, 1.0, 0.0, 0)]


def test_a_light_projects_wait_is_not_that_of_the_heavy_ones() -> None:
    queue = full(took_s=1.0)
    put(queue, *[asked(f"a{n}", "a", tokens=1000) for n in range(50)], asked("b0", "b", tokens=10))
    assert queue.wait_s(asked("b1", "b", tokens=10), 0) == 3.0
    assert queue.wait_s(asked("a50", "a", tokens=1000), 0) == 52.0


def test_who_waits_beyond_its_deadline_is_refused_then() -> None:
    queue = full()
    put(queue, asked("late", begin_by_s=9), asked("soon", begin_by_s=3))
    assert queue.next_wake_s == 3
    assert queue.handle(Tick(), 2.9) == []
    [refused] = queue.handle(Tick(), 3)
    assert isinstance(refused, Refuse)
    assert (refused.request, refused.why, refused.waited_s) == ("soon", Refusal.DEADLINE_PASSED, 3)
    assert queue.next_wake_s == 9
    put(queue, Cancelled("late"))
    assert queue.next_wake_s is None


def test_a_full_queue_refuses_and_says_when_a_place_becomes_free() -> None:
    queue = full(QueueSettings(entries_max=2), took_s=2.5)
    put(queue, asked("a"), asked("b"))
    assert put(queue, asked("c")) == [Refuse("c", Refusal.QUEUE_FULL, 3.0, 0.0, 2)]


def test_bytes_are_bounded_too_and_nobody_is_put_off_in_vain() -> None:
    queue = full(QueueSettings(bytes_max=100))
    assert put(queue, asked("a", size=60), asked("b", size=40), asked("batch", priority=2, size=0)) == []
    [refused] = put(queue, asked("c", size=1))
    assert isinstance(refused, Refuse)
    assert queue.waiting_bytes == 100
    [refused] = put(queue, asked("huge", priority=0, size=101))
    assert isinstance(refused, Refuse)
    assert (refused.request, queue.waiting) == ("huge", 3)
    put(queue, Cancelled("a"))
    assert put(queue, asked("d", size=60)) == []


def test_a_full_queue_makes_place_for_a_higher_class_and_for_a_project_that_holds_less() -> None:
    def victim(effects: list[Effect]) -> tuple[str, Refusal, bool]:
        [refused] = effects
        assert isinstance(refused, Refuse)
        return refused.request, refused.why, refused.own_share

    queue = full(QueueSettings(entries_max=4))
    put(queue, asked("a0", "a"), asked("a1", "a"), asked("a2", "a"), asked("batch", "c", priority=2))
    assert victim(put(queue, asked("b0", "b"))) == ("batch", Refusal.DISPLACED, False)
    assert victim(put(queue, asked("b1", "b"))) == ("a2", Refusal.DISPLACED, True)
    assert victim(put(queue, asked("b2", "b"))) == ("b2", Refusal.QUEUE_FULL, True)
    assert victim(put(queue, asked("a3", "a"))) == ("a3", Refusal.QUEUE_FULL, True)
    assert victim(put(queue, asked("more batch", "d", priority=2))) == ("more batch", Refusal.QUEUE_FULL, False)


def test_when_nobody_will_serve_the_model_all_that_wait_are_told() -> None:
    queue = full()
    put(queue, asked("a"), asked("b"))
    effects = queue.handle(Closed(retry_after_s=7.2), 1)
    assert [(e.request, e.why, e.retry_after_s) for e in effects if isinstance(e, Refuse)] == [
        ("a", Refusal.CLOSED, 8.0),
        ("b", Refusal.CLOSED, 8.0),
    ]
    assert queue.running == 1


def test_in_a_gap_only_those_are_told_who_have_waited_long_enough() -> None:
    queue = full()
    put(queue, asked("early"))
    put(queue, asked("late"), now=3)
    [refused] = queue.handle(Closed(arrived_before_s=2), 9)
    assert (refused.request, queue.waiting) == ("early", 1)


# -- cancellation ----------------------------------------------------------------------------------------------------


def test_who_is_cancelled_while_waiting_is_gone_without_a_word() -> None:
    queue = full()
    put(queue, asked("a"), asked("b"), Cancelled("a"), Cancelled("a"), Cancelled("never"), Cancelled("first"))
    assert (queue.waiting, queue.running) == (1, 1)
    assert served(queue) == ["b"]


def test_a_request_that_failed_says_nothing_of_how_long_others_take() -> None:
    queue = RequestQueue(capacity=1)
    put(queue, asked("a"))
    queue.handle(Ended("a", served=False), 9)
    assert queue.duration_s is None


# -- all together ----------------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "end", "cancel", "capacity", "tick", "close"]),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.1, 2.0, 30.0]),
        st.sampled_from(["p", "q", "r"]),
        st.sampled_from([0.0, 1.0, 20.0, math.inf]),
    ),
    max_size=50,
)


@given(moves, st.integers(0, 5))
def test_every_request_hears_once_and_every_bound_holds(
    history: list[tuple[str, int, float, str, float]], capacity: int
) -> None:
    settings = QueueSettings(entries_max=5, bytes_max=20)
    queue, now, room = RequestQueue(settings, capacity), 0.0, capacity
    heard: dict[str, list[Effect]] = defaultdict(list)
    waiting: dict[str, None] = {}
    running: dict[str, None] = {}
    cancelled: set[str] = set()
    for number, (kind, choice, pause, project, patience) in enumerate(history):
        now += pause
        event: Event = Tick()
        if kind == "arrive":
            event = Arrived(f"r{number}", project, choice % 3, choice, choice * 10, 5, now + patience)
            waiting[event.request] = None
        elif kind == "end" and running:
            event = Ended(list(running)[choice % len(running)], output_tokens=choice)
            del running[event.request]
        elif kind == "cancel" and waiting:
            event = Cancelled(list(waiting)[choice % len(waiting)])
            del waiting[event.request]
            cancelled.add(event.request)
        elif kind == "capacity":
            event = Capacity(room := choice)
        elif kind == "close":
            event = Closed()
        for effect in queue.handle(event, now):
            heard[effect.request].append(effect)
            if effect.request in cancelled:
                assert isinstance(effect, Refuse)  # Its time was over in the very moment in which it was cancelled.
                assert effect.why is Refusal.DEADLINE_PASSED
            else:
                del waiting[effect.request]
            if isinstance(effect, Dispatch):
                running[effect.request] = None
            else:
                assert 1 <= effect.retry_after_s <= 600
            assert effect.request in cancelled or effect.waited_s >= 0
        assert all(len(effects) == 1 for effects in heard.values())
        assert (queue.waiting, queue.running) == (len(waiting), len(running))
        assert queue.waiting <= 5
        assert queue.waiting_bytes <= 20
        assert not waiting or len(running) >= room
        assert queue.next_wake_s is None or queue.next_wake_s > now
    for request in list(waiting):
        queue.handle(Cancelled(request), now)
    for request in list(running):
        heard[request] += queue.handle(Ended(request), now)
    assert (queue.waiting, queue.waiting_bytes, queue.running) == (0, 0, 0)
    assert not queue._used
    assert not queue._active
    assert not any(level.projects for level in queue._levels)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=20, max_size=50))
def test_while_two_projects_wait_their_use_stays_close(requests: list[tuple[str, int]]) -> None:
    """The VTC bound: the difference in what two projects get while both wait is at most twice the largest request."""
    queue = full()
    sizes = {f"r{number}": (project, tokens) for number, (project, tokens) in enumerate(requests)}
    put(queue, *[Arrived(request, project, prompt_tokens=tokens) for request, (project, tokens) in sizes.items()])
    left, used = Counter(project for project, _ in requests), Counter[str]()
    for request in served(queue):
        if all(left[project] for project in set(left)):
            shares = [used[project] for project in left]
            assert max(shares) - min(shares) <= 2 * 50
        project, tokens = sizes[request]
        used[project] += tokens
        left[project] -= 1
