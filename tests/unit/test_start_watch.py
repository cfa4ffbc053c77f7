"""How far an engine's start is, and when to give it up; time is passed in, so ten minutes take none."""

from __future__ import annotations

from collections.abc import Callable

from serai.worker_agent.engine.start_watch import Phase, Progress, Signs, StartWatch

GIB, MIB = 1 << 30, 1 << 20
PATIENCE_S = 600.0


def run(
    watch: StartWatch, seconds: int, signs: Callable[[int], Signs], *, since_s: int = 0, every_s: int = 2, **seen: bool
) -> list[Progress]:
    """Looks every two seconds; stops when the watch gives up."""
    told = []
    for now in range(since_s, since_s + seconds, every_s):
        told.append(watch.look(signs(now), now, **seen))
        if watch.overdue(now):
            break
    return told


def test_h28_a_container_that_is_imported_for_ten_minutes_is_left_alone() -> None:
    watch = StartWatch(0, PATIENCE_S, 0.0)
    told = run(watch, 3600, lambda now: Signs(read_bytes=now * 20 * MIB, written_bytes=now * 20 * MIB))
    assert len(told) == 1800
    assert not watch.overdue(3600)


def test_h34_a_slow_load_is_not_given_up_while_it_moves_and_tells_its_rate() -> None:
    model = 400 * GIB
    watch = StartWatch(model, PATIENCE_S, 0.0)
    rate = 100_000_000

    def signs(now: int) -> Signs:
        return Signs(read_bytes=min(model, max(0, now - 20) * rate))

    told = run(watch, 4400, signs)
    assert len(told) == 2200  # Nobody gave up, seven times as long as the patience.
    half = told[1085]
    assert half.phase is Phase.LOAD
    assert half.share is not None
    assert 0.45 < half.share < 0.55
    assert abs(half.bytes_per_s / rate - 1) < 0.05
    assert told[-1].phase is Phase.COMPILE


def test_h34_a_load_that_stands_still_is_given_up_after_what_its_size_explains() -> None:
    model = 40 * GIB
    watch = StartWatch(model, PATIENCE_S, 0.0)
    stands_at_s = 100
    told = run(watch, 20_000, lambda now: Signs(read_bytes=min(now, stands_at_s) * 100 * MIB))
    gave_up_at_s = len(told) * 2
    explained_s = 40 * GIB / (100 * MIB)
    assert PATIENCE_S + explained_s < gave_up_at_s < PATIENCE_S + 5 * explained_s
    assert told[-1].phase is Phase.LOAD


def test_a_start_of_which_nothing_is_seen_has_its_patience_and_no_more() -> None:
    watch = StartWatch(0, PATIENCE_S, 0.0)
    told = run(watch, 10_000, lambda now: Signs(resident_bytes=100 * MIB + now % 3 * MIB))
    assert PATIENCE_S <= len(told) * 2 <= PATIENCE_S + 4


def test_small_talk_of_a_hung_process_is_no_movement() -> None:
    watch = StartWatch(0, PATIENCE_S, 0.0)
    told = run(watch, 10_000, lambda now: Signs(read_bytes=now * 2000, written_bytes=now * 500))
    assert len(told) * 2 <= PATIENCE_S + 4


def test_h37_a_compiler_after_the_load_gets_a_share_of_the_patience_beyond_it() -> None:
    watch = StartWatch(10 * GIB, PATIENCE_S, 0.0)
    loaded_s = 700
    told = run(watch, 10_000, lambda now: Signs(read_bytes=int(min(now, loaded_s) / loaded_s * 10 * GIB)))
    assert told[-1].phase is Phase.COMPILE
    assert len(told) * 2 >= loaded_s + PATIENCE_S / 3


def test_a_download_is_told_from_a_load_by_what_is_written() -> None:
    watch = StartWatch(0, PATIENCE_S, 0.0)
    run(watch, 20, lambda now: Signs())
    told = run(watch, 60, lambda now: Signs(written_bytes=(now - 20) * 50 * MIB), since_s=20)
    assert told[-1].phase is Phase.DOWNLOAD
    assert told[-1].share is None
    told = run(
        watch,
        60,
        lambda now: Signs(written_bytes=3 * GIB, read_bytes=(now - 80) * 200 * MIB, gpu_bytes=(now - 80) * 200 * MIB),
        since_s=80,
    )
    assert told[-1].phase is Phase.LOAD


def test_a_mapped_model_shows_as_memory() -> None:
    watch = StartWatch(20 * GIB, PATIENCE_S, 0.0)
    told = run(watch, 100, lambda now: Signs(resident_bytes=now * 200 * MIB))
    assert told[-1].phase is Phase.LOAD
    assert told[-1].share is not None
    assert told[-1].share > 0.5


def test_h44_the_open_port_is_warm_up_and_only_the_listed_model_a_canary() -> None:
    watch = StartWatch(0, PATIENCE_S, 0.0)
    assert watch.look(Signs(), 0).phase is Phase.IMPORT
    assert watch.look(Signs(), 1, port_open=True).phase is Phase.WARM_UP
    assert watch.look(Signs(), 2).phase is Phase.WARM_UP  # A look that found it busy.
    assert watch.look(Signs(), 3, port_open=True, listed=True).phase is Phase.CANARY
