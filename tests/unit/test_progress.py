"""When an engine hangs and when it only works: silence, what explains it, and what is learnt of an engine's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.worker_agent.engine.counters import LLAMACPP_COUNTERS, VLLM_COUNTERS
from serai.worker_agent.engine_metrics import counters_of, samples_in
from serai.worker_agent.progress import LIMIT_S, ProgressWatch, RunningRequest
from serai.worker_agent.request_text import SETUP_S, answer_shape

LOOK_S = 0.2
STREAM = RunningRequest(posted_at_s=0.0, prompt_tokens=50, answered=True)
UNARY = RunningRequest(posted_at_s=0.0, prompt_tokens=50, shows_steps=False, output_tokens_max=1000)


def watch(**said: float) -> ProgressWatch:
    return ProgressWatch(**{"prefill_s_per_token": 0.002, "counter_grain_s": 0.0} | said)  # type: ignore[arg-type]


def stalls_at(progress: ProgressWatch, running: list[RunningRequest], until_s: float, since_s: float = 0.0) -> float:
    """The first look, every LOOK_S from `since_s`, that finds a stall; infinity when none does before `until_s`."""
    looks = int((until_s - since_s) / LOOK_S) + 1
    return next((at for n in range(looks) if progress.look(running, at := since_s + n * LOOK_S)), float("inf"))


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=40), st.booleans(), st.booleans())
def test_progress_every_two_seconds_is_never_a_stall(gaps: list[float], by_counters: bool, streamed: bool) -> None:
    progress = watch()
    running = [STREAM if streamed else replace(UNARY, output_tokens_max=1)]
    now = bytes_at = 0.0
    for count, gap in enumerate(gaps):
        if by_counters:
            for step in range(int(gap / LOOK_S)):
                progress.counted((float(count),), now + step * LOOK_S)
                assert progress.look(running, now + step * LOOK_S) == 0
            progress.counted((float(count + 1),), now + gap)
        else:
            bytes_at = now + gap
        assert stalls_at(progress, running, now + gap - LOOK_S / 2, now) == float("inf")
        assert progress.look(running, now + gap * 0.999) == 0
        progress.progressed(bytes_at)
        now += gap
        assert progress.look(running, now) == 0


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_an_idle_engine_is_never_stalled(last_progress_s: float, idle_s: float) -> None:
    progress = watch()
    progress.progressed(last_progress_s)
    assert progress.look([], last_progress_s + idle_s) == 0
    # And the first request after a long rest has as much time as any other.
    posted = replace(STREAM, posted_at_s=last_progress_s + idle_s, answered=False)
    assert progress.look([posted], posted.posted_at_s + LIMIT_S - 0.1) == 0


@given(
    st.floats(0, 100),
    st.lists(st.builds(replace, st.just(STREAM), prompt_tokens=st.integers(0, 20), answered=st.booleans()), min_size=1,
             max_size=4),
)  # fmt: skip
def test_short_prompts_stall_within_three_seconds_of_the_last_progress(
    last_s: float, running: list[RunningRequest]
) -> None:
    progress = watch()
    progress.progressed(last_s)
    found_s = stalls_at(progress, running, last_s + 10, last_s)
    assert LIMIT_S < found_s - last_s <= 3.0
    assert progress.look(running, found_s) == pytest.approx(found_s - last_s)


@given(st.lists(st.floats(0.01, 0.3), min_size=10, max_size=60))
def test_requests_that_go_on_arriving_do_not_hide_a_hang(gaps: list[float]) -> None:
    progress = watch()
    running, now, found_s = [STREAM], 0.0, float("inf")
    for gap in gaps:
        now += gap
        running.append(replace(STREAM, posted_at_s=now, prompt_tokens=20, answered=False))
        if progress.look(running, now):
            found_s = min(found_s, now)
    assert found_s <= 3.0 or now < 3.0


def test_rest_between_requests_is_no_silence() -> None:
    progress = watch()
    assert progress.look([STREAM], 0.5) == 0
    progress.progressed(1.0)
    assert progress.look([], 1.2) == 0
    later = replace(STREAM, posted_at_s=50.0, answered=False)
    assert progress.look([later], 50.5) == 0
    assert stalls_at(progress, [later], 60.0, 50.5) == pytest.approx(50 + LIMIT_S + 0.1, abs=2 * LOOK_S)


def test_a_long_prefill_is_no_hang_and_a_hang_after_it_is_one() -> None:
    progress = watch()
    prompt = RunningRequest(posted_at_s=0.0, prompt_tokens=100_000)
    assert stalls_at(progress, [prompt], 40.0) == float("inf")
    progress.progressed(40.0)
    assert stalls_at(progress, [replace(prompt, answered=True)], 50.0, 40.0) <= 43.0


def test_a_long_prefill_explains_that_others_wait_and_that_streams_pause() -> None:
    progress = watch()
    long = RunningRequest(posted_at_s=1.9, prompt_tokens=100_000)
    short = RunningRequest(posted_at_s=5.0, prompt_tokens=10)
    assert stalls_at(progress, [STREAM, long, short], 40.0) == float("inf")


def test_queued_prompts_add_up() -> None:
    prompts = [RunningRequest(posted_at_s=0.0, prompt_tokens=10_000) for _ in range(3)]
    assert stalls_at(watch(), prompts[:1], 100.0) == pytest.approx(10_000 * 0.002 + LIMIT_S, abs=2 * LOOK_S)
    assert stalls_at(watch(), prompts, 100.0) == pytest.approx(30_000 * 0.002 + LIMIT_S, abs=2 * LOOK_S)
    # But no engine prefills a queue of hundreds without a word in between.
    assert stalls_at(watch(), prompts * 100, 1000.0) < 100


def test_the_engine_s_own_speed_replaces_the_guess_with_a_margin() -> None:
    progress = watch()
    for _ in range(9):
        progress.first_token_after(0.4, 1000)
    assert progress.prefill_s_per_token == pytest.approx(0.0008)
    prompt = RunningRequest(posted_at_s=0.0, prompt_tokens=100_000)
    assert stalls_at(progress, [prompt], 200.0) == pytest.approx(80 + LIMIT_S, abs=2 * LOOK_S)
    progress.first_token_after(0.1, 100)  # Too short to say anything of prefill.
    assert progress.prefill_s_per_token == pytest.approx(0.0008)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(1, 1_000_000)), max_size=80))
def test_what_is_learnt_stays_within_bounds(samples: list[tuple[float, int]]) -> None:
    progress = watch()
    for waited_s, tokens in samples:
        progress.first_token_after(waited_s, tokens)
    assert 0.0001 <= progress.prefill_s_per_token <= 0.01


def test_a_whole_answer_takes_the_time_of_its_output_when_there_are_no_counters() -> None:
    assert stalls_at(watch(), [UNARY], 95.0) == float("inf")
    assert stalls_at(watch(), [UNARY], 120.0) == pytest.approx(100 + LIMIT_S, abs=2 * LOOK_S)
    unlimited = replace(UNARY, output_tokens_max=0)
    assert stalls_at(watch(), [unlimited], 300.0) == float("inf")


def test_counters_that_stand_still_tell_a_hang_of_whole_answers() -> None:
    for grain_s, moves in ((0.0, False), (6.0, False), (0.0, True), (None, False)):
        progress = ProgressWatch(prefill_s_per_token=0.002, counter_grain_s=grain_s)
        found_s = float("inf")
        for n in range(100):
            now = n * LOOK_S
            if now >= 1:
                progress.counted((float(n if moves else 0),), now)
            if progress.look([UNARY], now):
                found_s = min(found_s, now)
        if moves or grain_s is None:
            assert found_s == float("inf")
        else:
            assert found_s == pytest.approx(grain_s + LIMIT_S, abs=2 * LOOK_S)


def test_a_counter_sample_from_before_the_last_byte_says_nothing_of_the_silence_after_it() -> None:
    progress = watch()
    progress.counted((1.0,), 0.5)
    progress.progressed(1.0)
    progress.counted((50.0,), 2.0)
    assert stalls_at(progress, [STREAM], 10.0, 2.0) == pytest.approx(1.0 + LIMIT_S, abs=LOOK_S)


def test_a_stream_that_pauses_is_judged_beside_whole_answers() -> None:
    assert stalls_at(watch(), [UNARY, STREAM], 10.0) <= 3.0
    waiting_for_a_place = replace(STREAM, answered=False)
    assert stalls_at(watch(), [UNARY, waiting_for_a_place], 90.0) == float("inf")


def test_a_stall_lasts_until_there_is_progress_even_when_the_clients_give_up() -> None:
    progress = watch()
    found_s = stalls_at(progress, [STREAM], 10.0)
    assert progress.look([], found_s + 5) == pytest.approx(found_s + 5)
    assert progress.look([replace(STREAM, posted_at_s=found_s + 5)], found_s + 6) > 0
    progress.progressed(found_s + 6)
    assert progress.look([], found_s + 6.1) == 0
    assert not progress.stalled


def test_setup_before_the_first_token_is_waited_for() -> None:
    fetching = replace(STREAM, answered=False, setup_s=10.0)
    assert stalls_at(watch(), [fetching], 30.0) == pytest.approx(10 + LIMIT_S, abs=2 * LOOK_S)


@pytest.mark.parametrize(
    ("body", "tokens", "held_back", "setup_s"),
    [
        (b'{"prompt":"x"}', 0, False, 0.0),
        (b'{"max_tokens": 7}', 7, False, 0.0),
        (b'{"max_completion_tokens":12,"max_tokens":7}', 12, False, 0.0),
        (b'{"tools":[{}],"max_output_tokens":3}', 3, True, SETUP_S),
        (b'{"messages":[{"content":[{"image_url" : {}}]}]}', 0, False, SETUP_S),
        (b'{"guided_json":{}}', 0, True, SETUP_S),
        (b'{"prompt":"' + b"x" * 1_000_000 + b'","max_tokens":5}', 5, False, 0.0),
        (b"\xff\x00 not JSON", 0, False, 0.0),
    ],
)
def test_what_a_body_says_of_its_answer(body: bytes, tokens: int, held_back: bool, setup_s: float) -> None:
    shape = answer_shape([body[:10], body[10:]])
    assert (shape.output_tokens_max, shape.held_back, shape.setup_s) == (tokens, held_back, setup_s)


def test_counters_are_summed_over_their_labels() -> None:
    text = b"""# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a b"} 3.0
vllm:generation_tokens_total{engine="1",model_name="a b"} 4e1
vllm:generation_tokens_total_created{engine="1"} 99
vllm:prompt_tokens_total 5
vllm:iteration_tokens_total_count{engine="0"} nonsense
"""
    samples = samples_in(text, VLLM_COUNTERS)
    assert counters_of(samples, VLLM_COUNTERS) == (43.0, 5.0, 0.0)
    assert counters_of(samples, LLAMACPP_COUNTERS) is None
    assert counters_of(samples_in(b"vllm:prompt_tokens_total 0.0\n", VLLM_COUNTERS), VLLM_COUNTERS) is None
    assert counters_of(samples_in(b"", VLLM_COUNTERS), VLLM_COUNTERS) is None
