"""The batch scheduler: orders, limits and KV accounting, by example and by law."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.engine_emulator.batching.engine import BatchEngine, TooLong
from serai.engine_emulator.batching.sequence import Place, Sequence
from serai.engine_emulator.batching.settings import BadBatchSettings, BatchMode, BatchSettings, Phase
from serai.engine_emulator.batching.steps import RunningStep, StepOutcome
from serai.performance.latency_model import Step


class Unit:
    """A latency model whose steps take a second, and a thousandth more for each token."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step_s(self, step: Step) -> float:
        self.steps.append(step)
        return 1.0 + 0.001 * (step.decode_sequences + sum(chunk.new_tokens for chunk in step.chunks))

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        raise AssertionError("not asked by the scheduler")

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        raise AssertionError("not asked by the scheduler")

    def kv_capacity_tokens(self) -> int:
        return 0

    def kv_bytes_per_token(self) -> float:
        return 0.0


numbers = itertools.count()


def sequence(prompt: int, output: int, keys: tuple[int, ...] = (), **flags: bool) -> Sequence:
    return Sequence(next(numbers), prompt, output, block_keys=keys, **flags)


def engine_with(kv_tokens: int = 1600, mode: BatchMode = BatchMode.MIXED, **limits: int | float | None) -> BatchEngine:
    limits = {"sequences_max": 8, "step_tokens_max": 64} | limits
    return BatchEngine(Unit(), BatchSettings(kv_tokens, mode, **limits))  # type: ignore[arg-type]


@dataclass
class Told:
    """What one step did, in plain numbers."""

    kind: str
    prefilled: list[tuple[Sequence, int]]
    first: list[Sequence]
    decoded: list[Sequence]
    finished: list[Sequence]
    preempted: list[Sequence]


def steps(engine: BatchEngine, most: int = 10_000) -> Iterator[Told]:
    """Steps until nothing runs."""
    now = 0.0
    for _ in range(most):
        running = engine.begin_step(now)
        if running is None:
            return
        now = running.ends_at_s
        yield told(running, engine.end_step())
    pytest.fail(f"still running after {most} steps")


def told(running: RunningStep, outcome: StepOutcome) -> Told:
    decoded = list(outcome.decoded)
    assert len(decoded) == len(outcome.decoded)
    return Told(running.kind, list(running.prefilled), outcome.said_first, decoded, outcome.finished, outcome.preempted)


# Orders


def test_a_lone_request_says_its_first_token_with_its_prompt_and_one_a_step_after() -> None:
    engine, one = engine_with(), sequence(10, 3)
    engine.submit(one, 5.0)
    kinds = [(step.kind, len(step.first), len(step.decoded), len(step.finished)) for step in steps(engine)]
    assert kinds == [("prefill", 1, 0, 0), ("decode", 0, 1, 0), ("decode", 0, 1, 1)]
    assert (one.submitted_at_s, one.scheduled_at_s, one.first_token_at_s) == (5.0, 0.0, pytest.approx(1.010))
    assert (one.decode_began_at_s, one.finished_at_s) == (one.first_token_at_s, pytest.approx(3.012))
    assert (engine.produced(one), engine.kv_tokens_used, engine.running) == (3, 0, 0)


def test_mixed_steps_hold_decodes_then_unfinished_prompts_then_new_ones_within_one_budget() -> None:
    engine = engine_with(step_tokens_max=20, sequences_max=4)
    a, b, c = sequence(10, 9), sequence(30, 9), sequence(5, 9)
    for one in (a, b, c):
        engine.submit(one, 0.0)
    found = [(step.kind, step.prefilled, step.decoded) for step in itertools.islice(steps(engine), 4)]
    assert found == [
        ("prefill", [(a, 10), (b, 10)], []),
        ("mixed", [(b, 19)], [a]),
        ("mixed", [(b, 1), (c, 5)], [a]),
        ("decode", [], [a, b, c]),
    ]


def test_a_chunk_limit_lets_a_short_prompt_pass_beside_a_long_one() -> None:
    engine = engine_with(step_tokens_max=20, sequences_max=4, chunk_tokens_max=8)
    long, short = sequence(30, 2), sequence(5, 2)
    engine.submit(long, 0.0)
    engine.submit(short, 0.0)
    assert next(steps(engine)).prefilled == [(long, 8), (short, 5)]


def test_prefill_first_takes_a_batch_of_whole_prompts_and_never_mixes() -> None:
    engine = engine_with(mode=BatchMode.PREFILL_FIRST, step_tokens_max=20)
    a, b, c, d = sequence(10, 3), sequence(10, 3), sequence(30, 3), sequence(5, 3)
    for one in (a, b, c, d):
        engine.submit(one, 0.0)
    found = [(step.kind, [one for one, _ in step.prefilled], len(step.decoded)) for step in steps(engine)]
    # A prompt over the budget goes alone; what follows it waits for the next batch.
    assert found == [
        ("prefill", [a, b], 0),
        ("prefill", [c], 0),
        ("prefill", [d], 0),
        ("decode", [], 4),
        ("decode", [], 4),
    ]


def test_prefill_first_cuts_a_long_prompt_and_fills_the_batch_after_its_end() -> None:
    engine = engine_with(mode=BatchMode.PREFILL_FIRST, step_tokens_max=20, chunk_tokens_max=20)
    a, b = sequence(30, 1), sequence(15, 1)
    engine.submit(a, 0.0)
    engine.submit(b, 0.0)
    assert [step.prefilled for step in steps(engine)] == [[(a, 20)], [(a, 10), (b, 10)], [(b, 5)]]


def test_a_closed_gate_lets_decodes_run_and_nothing_else() -> None:
    engine = engine_with(mode=BatchMode.PHASE_GATED)
    engine.prefill_open = False
    a, b = sequence(10, 3), sequence(10, 3)
    engine.submit(a, 0.0)
    assert engine.begin_step(0.0) is None
    engine.prefill_open = True
    assert next(steps(engine)).first == [a]
    engine.submit(b, 0.0)
    engine.prefill_open = False
    assert [step.kind for step in steps(engine)] == ["decode", "decode"]
    engine.prefill_open = True
    assert [step.kind for step in steps(engine)] == ["prefill", "decode", "decode"]


def test_an_open_gate_with_nothing_that_fits_decodes() -> None:
    engine = engine_with(kv_tokens=64, mode=BatchMode.PHASE_GATED)
    a, b = sequence(40, 5), sequence(40, 5)
    engine.submit(a, 0.0)
    engine.submit(b, 0.0)
    assert [step.kind for step in steps(engine)] == ["prefill", *["decode"] * 4] * 2


# KV cache


def test_vllm_preempts_who_came_last_and_lets_it_come_first_again() -> None:
    engine = engine_with(kv_tokens=64)
    a, b, c = sequence(16, 30), sequence(16, 30), sequence(16, 4)
    for one in (a, b, c):
        engine.submit(one, 0.0)
    found = list(steps(engine))
    assert found[0].prefilled == [(a, 16), (b, 16), (c, 16)]
    # The first decode step needs three blocks and one is free: the last goes, and its block is enough. The next time
    # b goes, waits before c, and has 16 tokens of prompt and 17 said to compute again.
    assert (found[1].preempted, found[1].decoded) == ([c], [a, b])
    assert (found[17].preempted, found[17].decoded) == ([b], [a])
    again = [piece for step in found[1:] for piece in step.prefilled]
    assert again == [(b, 33), (c, 17)]
    assert [engine.produced(one) for one in (a, b, c)] == [30, 30, 4]
    assert b.first_token_at_s == c.first_token_at_s == a.first_token_at_s


def test_sglang_retracts_who_has_said_least() -> None:
    engine = engine_with(kv_tokens=96, mode=BatchMode.PREFILL_FIRST, decode_reserve=0.0)
    a, b = sequence(16, 60), sequence(16, 60)
    engine.submit(a, 0.0)
    list(itertools.islice(steps(engine), 20))
    engine.submit(b, 0.0)
    preempted = [one for step in steps(engine) for one in step.preempted]
    assert preempted
    assert set(preempted) == {b}


def test_a_reserve_keeps_new_requests_out_while_running_ones_grow() -> None:
    def preemptions(reserve: float) -> int:
        engine = engine_with(kv_tokens=160, mode=BatchMode.PREFILL_FIRST, decode_reserve=reserve)
        for _ in range(8):
            engine.submit(sequence(16, 40), 0.0)
        assert sum(len(step.finished) for step in steps(engine)) == 8
        return engine.preemptions_total

    assert preemptions(0.0) > 0
    assert preemptions(1.0) == 0


def test_a_prefix_computed_before_is_found_up_to_its_first_gap_and_never_whole() -> None:
    engine = engine_with()
    engine.submit(sequence(48, 1, (1, 2, 3)), 0.0)
    list(steps(engine))
    same, longer, other = sequence(48, 1, (1, 2, 3)), sequence(70, 1, (1, 2, 3, 4)), sequence(48, 1, (1, 9, 3))
    for one in (same, longer, other):
        engine.submit(one, 0.0)
        list(steps(engine))
    assert [one.cached_tokens for one in (same, longer, other)] == [32, 48, 16]
    assert (engine.prefix_queries_tokens, engine.prefix_hits_tokens) == (48 + 48 + 70 + 48, 96)
    assert (engine.kv_tokens_used, engine.kv_tokens_free) == (0, 1600)
    assert engine.kv_tokens_idle == 16 * 5  # of keys 1, 2, 3, 4 and 9


def test_idle_prefixes_give_way_the_longest_unused_first() -> None:
    engine = engine_with(kv_tokens=64)
    for keys in ((1, 2), (3, 4)):
        engine.submit(sequence(32, 1, keys), 0.0)
        list(steps(engine))
    engine.submit(sequence(17, 1), 0.0)  # two blocks of its own
    list(steps(engine))
    old, young = sequence(33, 1, (1, 2)), sequence(33, 1, (3, 4))
    engine.submit(young, 0.0)
    list(steps(engine))
    engine.submit(old, 0.0)
    list(steps(engine))
    assert (young.cached_tokens, old.cached_tokens) == (32, 0)


def test_without_a_prefix_cache_nothing_is_found_or_counted() -> None:
    engine = engine_with(prefix_cache=False)
    for _ in range(2):
        engine.submit(sequence(48, 1, (1, 2, 3)), 0.0)
        list(steps(engine))
    assert (engine.prefix_queries_tokens, engine.prefix_hits_tokens, engine.kv_tokens_idle) == (0, 0, 0)


def test_what_can_never_fit_is_refused_with_its_numbers() -> None:
    engine = engine_with(kv_tokens=64)
    engine.submit(sequence(60, 5), 0.0)  # its last token is never written
    with pytest.raises(TooLong, match=r"60 tokens of prompt and 6 of output need 65 .* has 64"):
        engine.submit(sequence(60, 6), 0.0)
    engine.submit(sequence(64, 99, prefill_only=True), 0.0)
    for wrong in (sequence(0, 1), sequence(1, 0), sequence(16, 1, (1, 2)), sequence(5, 1, prefilled=True)):
        with pytest.raises(ValueError, match="Sequence"):
            engine.submit(wrong, 0.0)


def test_settings_that_no_engine_runs_with_name_their_number() -> None:
    with pytest.raises(BadBatchSettings, match="step_tokens_max must be at least sequences_max \\(256\\)"):
        BatchSettings(1600, step_tokens_max=100)
    with pytest.raises(BadBatchSettings, match="kv_tokens must hold one block of 16, not 15"):
        BatchSettings(15)
    with pytest.raises(BadBatchSettings, match="chunk_tokens_max"):
        BatchSettings(1600, chunk_tokens_max=0)


def test_an_unfinished_prompt_takes_the_room_of_those_that_came_after_it() -> None:
    engine = engine_with(kv_tokens=96, step_tokens_max=20, chunk_tokens_max=16)
    long, short = sequence(96, 1), sequence(4, 60)
    engine.submit(long, 0.0)
    engine.submit(short, 0.0)
    found = list(steps(engine))
    # The last chunk needs the block that the other decodes in: it goes, and the step decodes nothing.
    assert [(step.kind, step.preempted) for step in found[:6]] == [
        ("prefill", []),
        *[("mixed", [])] * 4,
        ("prefill", [short]),
    ]
    assert [engine.produced(one) for one in (long, short)] == [1, 60]


def test_who_can_only_run_alone_is_let_in_whatever_the_reserve() -> None:
    engine = engine_with(kv_tokens=160, mode=BatchMode.PREFILL_FIRST, decode_reserve=5.0)
    for _ in range(2):
        engine.submit(sequence(16, 100), 0.0)
    assert sum(len(step.finished) for step in steps(engine)) == 2


def test_a_prefilled_request_waits_for_room_in_which_it_can_go_on() -> None:
    engine = engine_with(kv_tokens=64)
    running = sequence(16, 30)
    engine.submit(running, 0.0)
    next(steps(engine))
    # Three blocks are free; its KV would fit, but not with the one that both need for the coming step.
    arriving = sequence(32, 5, prefilled=True)
    engine.submit(arriving, 0.0)
    list(steps(engine))
    assert (arriving.preemptions, engine.preemptions_total) == (0, 0)
    assert (engine.produced(running), engine.produced(arriving)) == (30, 5)


def test_an_idle_prefix_that_is_hit_is_no_longer_room_for_others() -> None:
    engine = engine_with(kv_tokens=64)
    engine.submit(sequence(32, 1, (1, 2)), 0.0)
    list(steps(engine))
    engine.submit(sequence(32, 16), 0.0)
    next(steps(engine))
    hit = sequence(40, 1, (1, 2))
    engine.submit(hit, 0.0)
    assert next(steps(engine)).prefilled == []  # one block is free, two are hit: it would need all three
    assert engine.kv_tokens_free == 16
    list(steps(engine))
    assert hit.place is Place.ENDED


def test_a_prefix_that_gave_way_while_its_request_waited_is_computed() -> None:
    engine = engine_with(kv_tokens=80, mode=BatchMode.PREFILL_FIRST, decode_reserve=0.0)
    engine.submit(sequence(32, 1, (1, 2)), 0.0)
    list(steps(engine))
    grows, waits = sequence(32, 30), sequence(70, 1, (1, 2))
    engine.submit(grows, 0.0)
    next(steps(engine))
    engine.submit(waits, 0.0)
    list(steps(engine))
    assert (grows.preemptions, waits.cached_tokens, waits.place) == (0, 16, Place.ENDED)


def test_the_end_of_a_prefix_gives_way_before_its_beginning() -> None:
    engine = engine_with(kv_tokens=64)
    engine.submit(sequence(48, 1, (1, 2, 3)), 0.0)
    list(steps(engine))
    engine.submit(sequence(32, 1), 0.0)
    list(steps(engine))
    again = sequence(49, 1, (1, 2, 3))
    engine.submit(again, 0.0)
    list(steps(engine))
    assert again.cached_tokens == 32


def test_what_waits_may_run_where_all_that_ran_had_to_give_way() -> None:
    engine = engine_with(kv_tokens=64, mode=BatchMode.PREFILL_FIRST, decode_reserve=0.0)
    kept, grows, short = sequence(32, 2, prefill_only=True), sequence(32, 8), sequence(20, 1)
    engine.submit(kept, 0.0)
    list(steps(engine))
    engine.submit(grows, 0.0)
    next(steps(engine))
    engine.submit(short, 0.0)
    # What grows finds no block: it goes to the end of the queue, and the short one runs.
    assert [(step.prefilled, step.preempted) for step in steps(engine)] == [([(short, 20)], [grows])]
    assert engine.waiting == 1
    engine.release(kept)
    assert sum(len(step.finished) for step in steps(engine)) == 1


# Disaggregation and aborts


def test_a_prefill_only_request_keeps_its_blocks_until_they_are_released() -> None:
    engine, one = engine_with(), sequence(40, 100, prefill_only=True)
    engine.submit(one, 0.0)
    assert [(step.kind, step.first, step.finished) for step in steps(engine)] == [("prefill", [one], [one])]
    assert (engine.running, engine.kv_tokens_used) == (0, 48)
    engine.release(one)
    engine.release(one)
    assert engine.kv_tokens_used == 0


def test_a_prefilled_request_decodes_without_a_prefill() -> None:
    engine, one = engine_with(mode=BatchMode.PHASE_GATED), sequence(32, 4, prefilled=True)
    engine.prefill_open = False
    engine.submit(one, 0.0)
    assert [(step.kind, step.decoded) for step in steps(engine)] == [("decode", [one])] * 3
    assert (engine.produced(one), one.first_token_at_s, one.decode_began_at_s) == (4, None, 0.0)


@pytest.mark.parametrize("running", [False, True])
def test_an_abort_frees_at_once_also_while_a_step_runs(running: bool) -> None:
    engine = engine_with(sequences_max=2, kv_tokens=320)
    decoding, prefilling, waiting = sequence(10, 9), sequence(100, 9), sequence(10, 9)
    for one in (decoding, prefilling, waiting):
        engine.submit(one, 0.0)
    next(steps(engine))
    if running:
        assert engine.begin_step(1.0) is not None
    for one in (waiting, prefilling, decoding, decoding):
        engine.abort(one, 2.0)
    assert (engine.running, engine.waiting, engine.kv_tokens_used, engine.prefill_backlog_tokens) == (0, 0, 0, 0)
    if running:
        outcome = engine.end_step()
        assert (outcome.said_first, list(outcome.decoded), outcome.finished) == ([], [], [])
    assert engine.begin_step(3.0) is None


def test_noise_and_energy_are_asked_once_a_step() -> None:
    settings = BatchSettings(1600, sequences_max=8)
    engine = BatchEngine(Unit(), settings, step_noise=lambda: 2.0, energy_j=lambda step: 10.0)
    engine.submit(sequence(10, 2), 0.0)
    list(steps(engine))
    assert (engine.busy_s, engine.prefill_busy_s) == (pytest.approx(2 * 2.011), pytest.approx(2 * 1.010))
    assert engine.energy_j == 20.0


# Laws


@dataclass
class Plain:
    """One sequence of the reference model."""

    sequence: Sequence
    said: int = 0
    written: int = 0
    goal: int = 0


@dataclass
class Reference:
    """MIXED without prefix cache as one would write it down: every sequence looked at in every step."""

    settings: BatchSettings
    waiting: list[Plain] = field(default_factory=list)
    running: list[Plain] = field(default_factory=list)

    def submit(self, one: Sequence) -> None:
        self.waiting.append(Plain(one, goal=one.prompt_tokens))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)

    @property
    def used(self) -> int:
        return sum(self.blocks(one.written) for one in self.running)

    def preempt_last(self) -> Plain:
        last = self.running.pop()
        last.goal, last.written = last.sequence.prompt_tokens + last.said, 0
        self.waiting.insert(0, last)
        return last

    def step(self) -> tuple[list[Chunk], int, int] | None:
        """Chunks, decodes and their context, as in `Step`; None when nothing runs."""
        total, preempted = self.settings.kv_tokens // self.settings.block_tokens, False
        decoding = [one for one in self.running if one.written >= one.goal]
        while decoding and sum(self.blocks(one.written + 1) - self.blocks(one.written) for one in decoding) > (
            total - self.used
        ):
            preempted = True
            last = self.preempt_last()
            decoding = [one for one in decoding if one is not last]
        context = {id(one): one.written for one in decoding}
        for one in decoding:
            one.written += 1
        budget, chunks = self.settings.step_tokens_max - len(decoding), []
        for one in [one for one in self.running if one.written < one.goal]:
            tokens = min(one.goal - one.written, budget, self.settings.chunk_tokens_max or budget)
            if one not in self.running or not tokens:
                continue
            while self.blocks(one.written + tokens) - self.blocks(one.written) > total - self.used:
                preempted = True
                if self.preempt_last() is one:
                    break
            if one in self.running:
                chunks.append((one, tokens, one.written))
                one.written += tokens
                budget -= tokens
        decoding = [one for one in decoding if one in self.running]
        while not preempted and self.waiting and budget and len(self.running) < self.settings.sequences_max:
            one = self.waiting[0]
            tokens = min(one.goal, budget, self.settings.chunk_tokens_max or budget)
            if self.blocks(tokens) > total - self.used:
                break
            self.running.append(self.waiting.pop(0))
            chunks.append((one, tokens, 0))
            one.written = tokens
            budget -= tokens
        if not chunks and not decoding:
            return None
        for one in [*decoding, *[one for one, _, _ in chunks if one.written >= one.goal]]:
            one.said += 1
            if one.said == one.sequence.output_tokens:
                self.running.remove(one)
        asked = [(tokens, before) for _, tokens, before in chunks]
        return asked, len(decoding), sum(context[id(one)] for one in decoding)


Chunk = tuple[int, int]
lengths = st.tuples(st.integers(1, 60), st.integers(1, 40))


@given(st.lists(lengths, min_size=1, max_size=12), st.integers(7, 30), st.sampled_from([None, 8]))
def test_counting_by_steps_gives_what_looking_at_every_sequence_gives(
    asked: list[tuple[int, int]], blocks: int, chunk: int | None
) -> None:
    limits = BatchSettings(blocks * 16, sequences_max=5, step_tokens_max=24, chunk_tokens_max=chunk)
    model, reference = Unit(), Reference(limits)
    engine = BatchEngine(model, limits)
    for number, (prompt, output) in enumerate(asked):
        one = sequence(prompt, output)
        engine.submit(one, 0.0)
        reference.submit(one)
        if number % 3 == 2:  # some come while others run
            compare(engine, model, reference, most=5)
    compare(engine, model, reference, most=10_000)


def compare(engine: BatchEngine, model: Unit, reference: Reference, most: int) -> None:
    for _ in range(most):
        expected = reference.step()
        running = engine.begin_step(0.0)
        if expected is None:
            assert running is None
            return
        step = model.steps[-1]
        chunks = [(chunk.new_tokens, chunk.cached_tokens) for chunk in step.chunks]
        assert (chunks, step.decode_sequences, step.decode_context_tokens) == expected
        engine.end_step()
        assert engine.kv_tokens_used == reference.used * 16
        assert engine.running == len(reference.running)
        for one in reference.running:
            assert engine.produced(one.sequence) == one.said


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prompt = draw(st.integers(1, 60))
    # Few keys, so that prompts share prefixes; chained, as a prefix is more than its last block.
    depth = draw(st.integers(0, prompt // 16))
    family = draw(st.integers(0, 2))
    keys = tuple(100 * family + place for place in range(depth))
    kind = draw(st.sampled_from(["whole", "whole", "whole", "prefill_only", "prefilled"]))
    return sequence(
        prompt, draw(st.integers(2, 40)), keys, prefill_only=kind == "prefill_only", prefilled=kind == "prefilled"
    )


limits_drawn = st.builds(
    BatchSettings,
    kv_tokens=st.integers(7, 20).map(lambda blocks: blocks * 16),
    mode=st.sampled_from(BatchMode),
    sequences_max=st.integers(1, 6),
    step_tokens_max=st.integers(6, 40),
    chunk_tokens_max=st.sampled_from([None, 7, 20]),
    prefix_cache=st.booleans(),
    decode_reserve=st.sampled_from([None, 0.0, 1.0]),
)
deeds = st.one_of(sequences(), st.sampled_from(["step", "step", "step", "gate"]), st.integers(0, 30))


@settings(max_examples=300)
@given(limits_drawn, st.lists(deeds, max_size=60))
def test_nothing_leaks_nothing_sticks_and_limits_hold(limits: BatchSettings, todo: list[Sequence | str | int]) -> None:
    run = Run(limits)
    for deed in todo:
        if isinstance(deed, Sequence):
            run.submit(deed)
        elif isinstance(deed, int):
            run.abort(deed)
        elif deed == "gate":
            run.engine.prefill_open = not run.engine.prefill_open
        else:
            run.step()
    run.to_the_end()


class Run:
    """An engine with everything checked after everything."""

    def __init__(self, limits: BatchSettings) -> None:
        self.limits = limits
        self.engine = BatchEngine(Unit(), limits)
        self.all: list[Sequence] = []
        self.aborted: set[Sequence] = set()
        self.said: dict[Sequence, int] = {}
        self.firsts: list[Sequence] = []
        self.now = 0.0

    def submit(self, one: Sequence) -> None:
        # A sequence is drawn once but may be used in a replay: only fresh ones are submitted.
        fresh = Sequence(
            one.request_id,
            one.prompt_tokens,
            one.output_tokens,
            block_keys=one.block_keys,
            prefill_only=one.prefill_only,
            prefilled=one.prefilled,
        )
        self.engine.submit(fresh, self.now)
        self.all.append(fresh)
        self.said[fresh] = 1 if fresh.prefilled else 0

    def abort(self, number: int) -> None:
        if self.all:
            one = self.all[number % len(self.all)]
            if one.place is not Place.ENDED:
                self.aborted.add(one)
            self.engine.abort(one, self.now)
            self.check()

    def step(self) -> bool:
        running = self.engine.begin_step(self.now)
        self.check()
        if running is None:
            return False
        self.check_step(running)
        # A step has begun with the room for its tokens; an abort in its middle must not confuse the accounts.
        if len(self.all) % 5 == 4:
            self.abort(len(self.said) * 7 + self.engine.decode_steps)
        self.now = running.ends_at_s
        outcome = told(running, self.engine.end_step())
        self.firsts += outcome.first
        for one in [*outcome.first, *outcome.decoded]:
            self.said[one] += 1
        assert len(set(outcome.first) | set(outcome.decoded)) == len(outcome.first) + len(outcome.decoded)
        assert set(outcome.finished) <= set(outcome.first) | set(outcome.decoded)
        for one in self.all:
            assert self.engine.produced(one) == self.said[one] <= one.output_tokens
        for one in outcome.finished:
            assert self.said[one] == (1 if one.prefill_only else one.output_tokens)
        self.check()
        return True

    def check_step(self, running: RunningStep) -> None:
        limits, step = self.limits, running.step
        tokens = sum(tokens for _, tokens in running.prefilled)
        assert step.decode_sequences <= limits.sequences_max
        kinds = {(True, False): "prefill", (False, True): "decode", (True, True): "mixed"}
        assert running.kind == kinds[tokens > 0, step.decode_sequences > 0]
        for one, piece in running.prefilled:
            assert 0 < piece <= (limits.chunk_tokens_max or 1000)
            assert one.cached_tokens <= one.prompt_tokens - 1
        if limits.mode is BatchMode.MIXED:
            assert tokens + step.decode_sequences <= limits.step_tokens_max
            return
        assert not (tokens and step.decode_sequences)
        if limits.chunk_tokens_max is not None or len(running.prefilled) > 1:
            assert tokens <= limits.step_tokens_max or len(running.prefilled) == 1
        if limits.mode is BatchMode.PHASE_GATED and not self.engine.prefill_open:
            assert not tokens

    def check(self) -> None:
        engine = self.engine
        assert engine.kv_tokens_used + engine.kv_tokens_free == engine.kv_tokens_total
        assert 0 <= engine.kv_tokens_idle <= engine.kv_tokens_free
        assert engine.running <= self.limits.sequences_max
        places = [one.place for one in self.all]
        assert engine.running == places.count(Place.PREFILLING) + places.count(Place.DECODING)
        assert engine.waiting == places.count(Place.WAITING) + places.count(Place.ARRIVED)
        assert set(engine.decoding) == {one for one in self.all if one.place is Place.DECODING}
        owed = sum(one.goal - one.computed for one in self.all if one.place in (Place.WAITING, Place.PREFILLING))
        assert engine.prefill_backlog_tokens == owed

    def to_the_end(self) -> None:
        self.engine.prefill_open = True
        for _ in range(20_000):
            for one in self.all:
                self.engine.release(one)
            if not self.step():
                break
        else:
            pytest.fail("the engine does not come to an end")
        for one in self.all:
            self.engine.release(one)
        assert {one.place for one in self.all} <= {Place.ENDED}
        for one in self.all:
            expected = 1 if one.prefill_only else one.output_tokens
            assert one in self.aborted or self.said[one] == expected
        assert (self.engine.kv_tokens_used, self.engine.running, self.engine.waiting) == (0, 0, 0)
        assert self.engine.prefill_backlog_tokens == 0
        if not self.engine.preemptions_total:
            # First come, first served: scheduled in the order of submission, but for those that need no prefill.
            order = [one.scheduled_at_s for one in self.all if one.scheduled_at_s is not None and not one.prefilled]
            assert order == sorted(order)


# The third position


def test_a_mixed_phase_shares_steps_and_its_budget_cuts_prompts() -> None:
    engine = engine_with(mode=BatchMode.PHASE_GATED, kv_tokens=640)
    a, b = sequence(10, 9), sequence(50, 3)
    engine.submit(a, 0.0)
    next(steps(engine))
    engine.submit(b, 0.0)
    engine.phase, engine.prompt_tokens_max = Phase.MIXED, 20
    found = list(itertools.islice(steps(engine), 3))
    assert [step.kind for step in found] == ["mixed"] * 3
    assert [step.prefilled for step in found] == [[(b, 20)], [(b, 20)], [(b, 10)]]


def test_a_prompt_that_was_cut_goes_on_in_every_phase_with_the_blocks_it_needs() -> None:
    engine = engine_with(mode=BatchMode.PHASE_GATED, kv_tokens=640)
    a, b = sequence(10, 30), sequence(100, 3)
    engine.submit(a, 0.0)
    next(steps(engine))
    engine.submit(b, 0.0)
    engine.phase, engine.prompt_tokens_max = Phase.MIXED, 20
    next(steps(engine))
    engine.phase = Phase.DECODE
    assert next(steps(engine)).kind == "decode"
    engine.phase, engine.prompt_tokens_max = Phase.PREFILL, None
    assert next(steps(engine)).prefilled == [(b, 80)]
    list(steps(engine))
    assert (engine.kv_tokens_used, engine.produced(a), engine.produced(b)) == (0, 30, 3)
