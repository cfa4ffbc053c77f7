"""Arrivals, lengths, prefixes and traces: rates and shapes hold, seeds decide everything, bad input is named."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime.fields import BadInput
from serai.simulator.data_folder import data_folder
from serai.simulator.workloads.fields import workload_from_fields
from serai.simulator.workloads.lengths import (
    ClampedNormal,
    Fixed,
    Histogram,
    Independent,
    LogNormal,
    Recorded,
    dataset,
    fitted,
)
from serai.simulator.workloads.prefixes import Clients, Sessions, SystemPrompts
from serai.simulator.workloads.processes import (
    NS,
    EvenGaps,
    GammaGaps,
    Gaps,
    OnOff,
    PoissonGaps,
    Segment,
    WeibullGaps,
    arrival_times_ns,
    steady,
    steps_and_ramps,
)
from serai.simulator.workloads.servegen import read_clients, servegen
from serai.simulator.workloads.synthetic import Traffic, synthetic
from serai.simulator.workloads.traces import (
    Replay,
    TraceFile,
    TraceFormat,
    block_keys,
    chain,
    length_pairs,
    replayed,
)
from serai.simulator.workloads.workload import BLOCK_TOKENS, Arrival, Workload, mixed

GOLDEN = Path(__file__).parents[1] / "golden" / "simulator" / "workload_digests.json"
TRACES = data_folder() / "traces"
needs_data = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"no recorded traces in {TRACES}: name their folder with SERAI_DATA_DIR"
)
FAMILIES: list[tuple[Gaps, float]] = [
    (PoissonGaps(), 1.0),
    (EvenGaps(), 0.0),
    (GammaGaps(0.5), 0.5),
    (GammaGaps(2.0), 2.0),
    (WeibullGaps(0.5), 0.5),
    (WeibullGaps(2.0), 2.0),
]


# Processes


@pytest.mark.parametrize(("gaps", "cv"), FAMILIES)
def test_rate_and_variation_of_gaps_are_those_asked_for(gaps: Gaps, cv: float) -> None:
    times = list(arrival_times_ns(gaps, steady(50.0, 600.0), seed=3))
    between = [after - before for before, after in pairwise(times)]
    assert len(times) / 600 == pytest.approx(50.0, rel=0.05)
    assert pstdev(between) / fmean(between) == pytest.approx(cv, rel=0.06, abs=1e-6)


@pytest.mark.parametrize("gaps", [GammaGaps(4.0), WeibullGaps(4.0), PoissonGaps(), EvenGaps()])
def test_bursty_families_keep_their_rate_in_short_runs_too(gaps: Gaps) -> None:
    # Without the stationary beginning, CV 4 would bring 7.5 arrivals more than the 20 of its rate.
    counts = [sum(1 for _ in arrival_times_ns(gaps, steady(4.0, 5.0), seed)) for seed in range(1500)]
    assert fmean(counts) == pytest.approx(20.0, rel=0.1)


def test_weibull_with_variation_1_is_exponential() -> None:
    assert WeibullGaps(1.0).shape == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.floats(0.5, 30), st.floats(0, 40), st.floats(0, 40)), min_size=1, max_size=4),
    st.sampled_from([gaps for gaps, _ in FAMILIES]),
    st.integers(0, 2**32),
)
def test_any_course_gives_sorted_whole_times_within_it(
    course: list[tuple[float, float, float]], gaps: Gaps, seed: int
) -> None:
    segments = steps_and_ramps(Segment(*part) for part in course)
    times = list(arrival_times_ns(gaps, segments, seed))
    assert times == sorted(times)
    assert all(type(time) is int for time in times)
    assert not times or 0 <= times[0] <= times[-1] <= sum(round(part[0] * NS) for part in course)
    assert times == list(arrival_times_ns(gaps, segments, seed))


def test_ramps_and_steps_put_arrivals_where_the_rate_is() -> None:
    course = steps_and_ramps([Segment(100, 0, 40), Segment(100, 10, 10), Segment(100, 40, 0)])
    times = list(arrival_times_ns(EvenGaps(), course, 1))
    # Integrals of the rate over each half: a quarter of a ramp lies in its lower half.
    halves = [sum(1 for time in times if 50 * place <= time / NS < 50 * place + 50) for place in range(6)]
    assert halves == [500, 1500, 500, 500, 1500, 500]


def test_two_rates_with_one_seed_are_the_same_pattern() -> None:
    slow = list(arrival_times_ns(GammaGaps(2.0), steady(10.0, 100.0), 7))
    fast = list(arrival_times_ns(GammaGaps(2.0), steady(20.0, 50.0), 7))
    assert len(slow) == len(fast)
    assert all(abs(a - 2 * b) <= 2 for a, b in zip(slow, fast, strict=True))


def test_bursts_have_the_mean_rate_of_their_states_and_more_variation() -> None:
    course = OnOff(60.0, 2.0, 3.0, 9.0, 6000.0)
    times = list(arrival_times_ns(PoissonGaps(), course, 2))
    between = [after - before for before, after in pairwise(times)]
    assert len(times) / 6000 == pytest.approx(course.mean_rate_per_s, rel=0.1)
    assert pstdev(between) / fmean(between) > 2


# Lengths


@pytest.mark.parametrize(
    ("name", "prompt", "prompt_median", "output", "output_median"),
    [
        ("alpaca", 20.63, 17, 163.80, 119),
        ("sharegpt", 343.76, 148, 237.20, 152),
        ("longbench", 2686.89, 2736.5, 101.78, 19),
    ],
)
def test_datasets_have_their_published_means_and_medians(
    name: str, prompt: float, prompt_median: float, output: float, output_median: float
) -> None:
    # As a workload with seed 1 draws them. LongBench's answers vary so much that 2 % is two deviations of the mean.
    random, lengths = Random("1/lengths"), dataset(name)
    pairs = [lengths.draw(random) for _ in range(50_000)]
    assert fmean(pair[0] for pair in pairs) == pytest.approx(prompt, rel=0.02)
    assert fmean(pair[1] for pair in pairs) == pytest.approx(output, rel=0.02)
    assert median(pair[0] for pair in pairs) == pytest.approx(prompt_median, rel=0.03)
    assert median(pair[1] for pair in pairs) == pytest.approx(output_median, rel=0.06)
    assert min(min(pair) for pair in pairs) >= 1


@pytest.mark.parametrize(
    ("mean", "deviation", "minimum", "after"),
    [
        (599, 822, 1, 710),
        (74, 211, 5, 128),
        (1169, 1276, 1, 1292),
        (532, 435, 5, 556),
        (727, 777, 1, 799),
        (64, 190, 5, 114),
    ],
)
def test_opentelas_clamped_normals_have_the_means_calculated_for_them(
    mean: float, deviation: float, minimum: int, after: float
) -> None:
    random = Random(5)
    drawn = [ClampedNormal(mean, deviation, minimum).draw(random) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(after, rel=0.02)
    assert min(drawn) == minimum


@given(st.floats(20, 500), st.floats(1.05, 3.0))
@settings(max_examples=10)
def test_a_log_normal_cut_off_still_has_its_mean_and_median(middle: float, times: float) -> None:
    mean = middle * times
    drawn = LogNormal(mean, middle, maximum=round(mean * 20))
    # Even shares instead of chance: the distribution itself is tested.
    values = [drawn.draw(_Even(place / 2000 + 1 / 4000)) for place in range(2000)]
    assert fmean(values) == pytest.approx(mean, rel=0.02)
    assert median(values) == pytest.approx(middle, rel=0.03)
    assert max(values) <= mean * 20


def test_pairs_stay_together_and_histograms_keep_their_shares() -> None:
    random = Random(1)
    pairs = [(10, 1), (20, 2)]
    assert {Recorded(pairs).draw(random) for _ in range(50)} == set(pairs)
    histogram = Histogram({4: 3.0, 8: 1.0})
    drawn = [histogram.draw(random) for _ in range(8000)]
    assert histogram.mean == 5.0
    assert drawn.count(4) / 8000 == pytest.approx(0.75, abs=0.02)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(2, 5_000))
def test_what_is_fitted_to_a_context_fits_and_keeps_a_token_of_each(prompt: int, output: int, context: int) -> None:
    cut_prompt, cut_output = fitted(prompt, output, context)
    assert 1 <= cut_prompt <= prompt
    assert 1 <= cut_output <= output
    assert cut_prompt + cut_output <= context
    assert (cut_prompt, cut_output) == (prompt, output) or cut_prompt + cut_output == context


class _Even(Random):
    """Says one number."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self._share = share

    def random(self) -> float:
        return self._share


# Prefixes


def _traffic(**changes: Any) -> Traffic:
    given_fields: dict[str, Any] = {
        "gaps": PoissonGaps(),
        "course": steady(20.0, 60.0),
        "lengths": Independent(LogNormal(100, 60), LogNormal(50, 40)),
    }
    return Traffic(**{**given_fields, **changes})


def test_requests_with_one_system_prompt_share_its_full_blocks_and_no_more() -> None:
    traffic = _traffic(system_prompts=SystemPrompts(number=3, tokens=100, zipf=1.0))
    arrivals = list(synthetic("w", "", traffic, 1))
    assert {len(arrival.block_keys) for arrival in arrivals} == {100 // BLOCK_TOKENS}
    assert all(arrival.prompt_tokens > 100 for arrival in arrivals)
    popularity = sorted(sum(a.block_keys == keys for a in arrivals) for keys in {a.block_keys for a in arrivals})
    assert len(popularity) == 3
    assert popularity[-1] / len(arrivals) == pytest.approx(6 / 11, abs=0.06)


def test_a_turns_prompt_begins_with_all_that_its_session_said() -> None:
    traffic = _traffic(sessions=Sessions(turns_mean=4, gap_s_mean=2), system_prompts=SystemPrompts(2, 40))
    arrivals = list(synthetic("w", "", traffic, 1))
    by_session: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        if len(arrival.block_keys) > 2:
            # The first block after the system prompt's two is the session's own.
            by_session.setdefault(arrival.block_keys[2], []).append(arrival)
    long = [turns for turns in by_session.values() if len(turns) > 1]
    assert len(long) > 50
    for turns in long:
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.block_keys[: len(before.block_keys)] == before.block_keys


def test_block_keys_name_exactly_the_full_blocks() -> None:
    traffic = _traffic(sessions=Sessions(3, 2))
    assert all(len(a.block_keys) == a.prompt_tokens // BLOCK_TOKENS for a in synthetic("w", "", traffic, 1))


def test_a_full_context_begins_a_new_conversation() -> None:
    traffic = _traffic(sessions=Sessions(30, 0.5), context_tokens=400)
    arrivals = list(synthetic("w", "", traffic, 1))
    assert all(a.prompt_tokens + a.output_tokens <= 400 for a in arrivals)
    assert max(a.prompt_tokens for a in arrivals) > 250


def test_sessions_reach_the_rate_of_requests() -> None:
    traffic = _traffic(course=steady(20.0, 400.0), sessions=Sessions(5, 3))
    late = [a for a in synthetic("w", "", traffic, 1) if a.at_ns > 100 * NS]
    assert len(late) / 300 == pytest.approx(20.0, rel=0.1)


def test_changing_the_lengths_leaves_arrivals_and_clients_as_they_were() -> None:
    one = list(synthetic("w", "", _traffic(clients=Clients(5)), 9))
    other = list(synthetic("w", "", _traffic(clients=Clients(5), lengths=Independent(Fixed(5), Fixed(6))), 9))
    assert [(a.at_ns, a.client) for a in one] == [(a.at_ns, a.client) for a in other]


def test_mixed_workloads_are_in_order_and_share_no_prefix() -> None:
    part = synthetic("p", "", _traffic(system_prompts=SystemPrompts(1, 64), model="a"), 1)
    both = list(mixed("m", [part, part]))
    assert [a.at_ns for a in both] == sorted(a.at_ns for a in both)
    assert len({a.block_keys for a in both}) == 2


# Determinism


def _golden_workloads() -> dict[str, Workload]:
    lengths = {"dataset": "sharegpt"}
    steady_fields = {"rate_per_s": 20.0, "duration_s": 600.0}
    course = [
        {"duration_s": 100, "rate_per_s": 5},
        {"duration_s": 200, "rate_from_per_s": 5, "rate_to_per_s": 30},
    ]
    bursts = {"rate_on_per_s": 60, "rate_off_per_s": 2, "mean_on_s": 5, "mean_off_s": 15, "duration_s": 600}
    fields: dict[str, dict[str, Any]] = {
        "poisson": {"arrivals": {"process": "poisson", **steady_fields}, "lengths": lengths},
        "gamma": {"arrivals": {"process": "gamma", "cv": 2, **steady_fields}, "lengths": lengths},
        "weibull": {"arrivals": {"process": "weibull", "cv": 2, **steady_fields}, "lengths": lengths},
        "even": {"arrivals": {"process": "even", **steady_fields}, "lengths": {"dataset": "alpaca"}},
        "on-off": {"arrivals": {"process": "on-off", **bursts}, "lengths": {"dataset": "longbench"}},
        "ramp": {"arrivals": {"process": "poisson", "course": course}, "lengths": lengths},
        "sessions": {
            "arrivals": {"process": "poisson", **steady_fields},
            "lengths": lengths,
            "context_tokens": 8192,
            "system_prompts": {"number": 10, "tokens": 500, "zipf": 1.2},
            "sessions": {"turns_mean": 4, "gap_s_mean": 20},
            "clients": {"number": 20},
        },
    }
    return {name: workload_from_fields({"seed": 1, **found}) for name, found in fields.items()}


def test_the_first_thousand_arrivals_at_seed_1_are_what_they_were() -> None:
    digests = {name: workload.digest(1000) for name, workload in _golden_workloads().items()}
    assert digests == json.loads(GOLDEN.read_text()), "workloads changed: every published run changes with them"


def test_another_seed_is_another_workload_and_a_second_reading_the_same() -> None:
    traffic = _traffic()
    assert synthetic("w", "", traffic, 1).digest() != synthetic("w", "", traffic, 2).digest()
    workload = synthetic("w", "", traffic, 1)
    assert list(workload) == list(workload)


# Traces


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)


def _file(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def _arrivals(file: Path, kind: str, **replay: Any) -> list[Arrival]:
    return list(replayed("t", TraceFile(file, TraceFormat(kind)), Replay(**replay), seed=1))


def test_azure_times_are_exact_to_the_digit(tmp_path: Path) -> None:
    found = _arrivals(_file(tmp_path, AZURE), "azure")
    assert found == [Arrival(0, 4808, 10), Arrival(52_000_000, 3180, 8)]


def test_mooncake_hashes_become_keys_of_16_tokens(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 600, "output_length": 6, "hash_ids": [7, 9]},
    ]
    file = _file(tmp_path, "\n".join(map(json.dumps, rows)), "m.jsonl")
    first, second = _arrivals(file, "mooncake")
    assert second.at_ns == 1_500_000_000
    assert (len(first.block_keys), len(second.block_keys)) == (1000 // 16, 600 // 16)
    assert first.block_keys[:32] == second.block_keys[:32]
    assert not set(first.block_keys[32:]) & set(second.block_keys[32:])


def test_llmservingsim_and_columns_and_opentela_are_read(tmp_path: Path) -> None:
    file = _file(tmp_path, '{"input_toks": 12, "output_toks": 3, "arrival_time_ns": 46926808}\n', "l.jsonl")
    assert _arrivals(file, "llmservingsim") == [Arrival(0, 12, 3)]
    file = _file(tmp_path, "timestamp,model,input_tokens,completion_tokens,user\n1.5,m,7,8,ann\n2.25,m,9,1,bob\n")
    assert _arrivals(file, "columns") == [
        Arrival(0, 7, 8, model="m", client="ann"),
        Arrival(750_000_000, 9, 1, model="m", client="bob"),
    ]
    rows = [
        {"created_at": "2025-11-01T10:00:00.5Z", "model": "q", "reported_token_input": 40, "reported_token_output": 2},
        {"created_at": "2025-11-01T10:00:01", "model": "q", "reported_token_input": -1, "reported_token_output": -1},
        {
            "created_at": "2025-11-01T11:00:02+01:00",
            "model": "q",
            "token_count": 40,
            "reported_token_output": 2,
            "bucket_ids": [5, 6, 7],
        },
    ]
    file = _file(tmp_path, "\n".join(map(json.dumps, rows)), "o.jsonl")
    trace = TraceFile(file, TraceFormat.OPENTELA, skip_uncounted=True)
    first, second = replayed("t", trace, Replay(), 1)
    assert (first.at_ns, second.at_ns, second.model, second.prompt_tokens) == (0, 1_500_000_000, "q", 40)
    # 40 tokens fill two of the three buckets; the third is padded.
    assert second.block_keys == chain([5, 6])
    with pytest.raises(
        BadInput, match=r"o.jsonl, line 2, field `reported_token_input`: was not counted.*uncounted: skip"
    ):
        replayed("t", TraceFile(file, TraceFormat.OPENTELA), Replay(), 1)


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(0, 5), max_size=6))
def test_chained_keys_are_equal_exactly_while_prefixes_are(one: list[int], other: list[int]) -> None:
    for place, (a, b) in enumerate(zip(chain(one), chain(other), strict=False), start=1):
        assert (a == b) == (one[:place] == other[:place])


def test_copies_of_a_request_share_no_prefix_with_it() -> None:
    assert not set(block_keys((1, 2), 512, 1024, 0)) & set(block_keys((1, 2), 512, 1024, 1))


def _even_trace(tmp_path: Path, requests: int = 400) -> Path:
    lines = "".join(f"{place / 10},{place + 1},5\n" for place in range(requests))
    return _file(tmp_path, "timestamp,prompt_tokens,output_tokens\n" + lines)


def test_a_replay_is_cut_and_stretched(tmp_path: Path) -> None:
    file = _even_trace(tmp_path)
    found = _arrivals(file, "columns", start_s=10, duration_s=5, time_scale=2)
    assert [a.prompt_tokens for a in found] == list(range(101, 151))
    assert [a.at_ns for a in found] == [place * 200_000_000 for place in range(50)]


@pytest.mark.parametrize("scale", [0.25, 1.5, 3.0])
def test_a_rate_is_scaled_within_the_same_time(tmp_path: Path, scale: float) -> None:
    found = _arrivals(_even_trace(tmp_path), "columns", rate_scale=scale)
    assert len(found) == pytest.approx(400 * scale, rel=0.15)
    assert [a.at_ns for a in found] == sorted(a.at_ns for a in found)
    assert found[-1].at_ns <= 41 * NS


def test_a_context_cuts_a_traces_prompts_and_keys(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5000, "output_length": 100, "hash_ids": list(range(10))}
    (found,) = _arrivals(_file(tmp_path, json.dumps(row), "m.jsonl"), "mooncake", context_tokens=2048)
    assert (found.prompt_tokens, found.output_tokens, len(found.block_keys)) == (1948, 100, 1948 // 16)


BAD = [
    ("azure", "", r"line 1: the file is empty"),
    ("azure", "TIMESTAMP,ContextTokens\n1,2\n", r"line 1, field `GeneratedTokens`: is not among the columns"),
    (
        "azure",
        AZURE + "2023-11-16 18:17:04.0319599,3,8\n",
        r"line 4, field `TIMESTAMP`: is earlier than the line before; sort",
    ),
    ("azure", AZURE + "2023-11-16 18:17:05,0,8\n", r"line 4, field `ContextTokens`: is 0; a length is a whole number"),
    ("azure", AZURE + "2023-11-16 18:17:05,3,-8\n", r"line 4, field `GeneratedTokens`: is -8;"),
    ("azure", AZURE + "2023-11-16 18:17:05,nan,8\n", r"line 4, field `ContextTokens`: is \"nan\"; write a number"),
    ("azure", AZURE + "2023-11-16 18:17:05,many,8\n", r"line 4, field `ContextTokens`: is \"many\"; write a number"),
    ("azure", AZURE + "2023-11-16 18:17:05,3.5,8\n", r"line 4, field `ContextTokens`: is 3.5;"),
    ("azure", AZURE + "2023-11-16 18:17:05,3\n", r"line 4, field `GeneratedTokens`: is missing"),
    ("azure", AZURE + "2023-11-16 18:17:05,3,8,9\n", r"line 4: has more values than columns"),
    (
        "azure",
        AZURE + "2023-11-16 25:17:05,3,8\n",
        r"line 4, field `TIMESTAMP`: is `2023-11-16 25:17:05`; write seconds, or a time",
    ),
    ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", r"has no requests"),
    ("vidur", "num_prefill_tokens,num_decode_tokens\n3,4\n", r"has lengths but no times; use it under `lengths`"),
    (
        "columns",
        "timestamp,prompt_tokens\n1,2\n",
        r"line 2, field `output_tokens`: no column `output_tokens` or `compl",
    ),
    (
        "columns",
        "timestamp,prompt_tokens,output_tokens\n-1,2,3\n",
        r"line 2, field `timestamp`: is -1; a time is 0 or more",
    ),
    ("columns", "timestamp,prompt_tokens,output_tokens\ninf,2,3\n", r"line 2, field `timestamp`: is \"inf\""),
    ("mooncake", '{"timestamp": 0}\n', r"line 1, field `input_length`: is missing; there are: timestamp"),
    ("mooncake", "{}\n[]\n", r"line 1, field `timestamp`: is missing"),
    ("mooncake", "[1]\n", r"line 1: is no JSON object"),
    ("mooncake", "{\n", r"line 1: is no JSON"),
    (
        "mooncake",
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
        r"line 1, field `hash_ids`: has 1 ids for 600 tokens; give one for each 512 tokens",
    ),
    (
        "llmservingsim",
        '{"input_toks": NaN, "output_toks": 3, "arrival_time_ns": 1}\n',
        r"line 1, field `input_toks`: is NaN; write a number",
    ),
    (
        "llmservingsim",
        '{"input_toks": true, "output_toks": 3, "arrival_time_ns": 1}\n',
        r"line 1, field `input_toks`: is true; write a number",
    ),
]


@pytest.mark.parametrize(("kind", "text", "said"), BAD)
def test_a_bad_trace_is_refused_with_file_line_and_field(tmp_path: Path, kind: str, text: str, said: str) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(BadInput, match=said) as caught:
        _arrivals(file, kind)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_part_without_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere.csv: cannot be read \(No such file or directory\)"):
        _arrivals(tmp_path / "nowhere.csv", "azure")
    with pytest.raises(BadInput, match="no requests in the chosen part; change start_s"):
        _arrivals(_file(tmp_path, AZURE), "azure", start_s=60)
    with pytest.raises(BadInput, match="rate_scale: is -1"):
        Replay(rate_scale=-1)


def _servegen_folder(tmp_path: Path, trace: str, lengths: dict[str, Any]) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "chunk-3-trace.csv").write_text(trace)
    (folder / "chunk-3-dataset.json").write_text(json.dumps(lengths))
    return folder


def test_servegen_windows_have_their_rates_and_lengths(tmp_path: Path) -> None:
    lengths = {
        "0": {"input_tokens": "{}", "output_tokens": "{}"},
        "600": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{0: 0.5, 4: 0.5}"},
        "1200": {"input_tokens": "{99: 1.0}", "output_tokens": "{1: 1.0}"},
    }
    trace = "0,2.0,1.0,Gamma,1,1\n600,4.0,1.5,Weibull,1,1\n1200,0,0,,0,0\n"
    folder = _servegen_folder(tmp_path, trace, lengths)
    found = list(servegen("s", folder, Replay(), 1))
    early = [a for a in found if a.at_ns < 600 * NS]
    assert len(early) / 600 == pytest.approx(2.0, rel=0.15)
    assert (len(found) - len(early)) / 600 == pytest.approx(4.0, rel=0.15)
    # The silent first window takes the lengths of the first that has any.
    assert {a.prompt_tokens for a in found} == {10, 30}
    assert {a.output_tokens for a in found} == {4}
    assert {a.client for a in found} == {"client-3"}
    assert found[-1].at_ns < 1200 * NS


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("0,1\n", r"chunk-3-trace.csv, line 1: has 2 values"),
        ("0,-1,1,Gamma,1,1\n", r"line 1, field `rate`: is `-1`"),
        ("0,1,nan,Gamma,1,1\n", r"line 1, field `cv`: is `nan`"),
        ("0,1,1,Pareto,1,1\n", r"line 1, field `family`: is `Pareto`"),
        ("600,1,1,,1,1\n0,1,1,,1,1\n", r"line 2, field `begin`: is not after the line before"),
        ("", r"line 1: the file is empty"),
    ],
)
def test_a_bad_servegen_file_is_refused(tmp_path: Path, trace: str, said: str) -> None:
    lengths = {"0": {"input_tokens": "{1: 1.0}", "output_tokens": "{1: 1.0}"}}
    with pytest.raises(BadInput, match=said):
        read_clients(_servegen_folder(tmp_path, trace, lengths))


# Recorded data, where it is


@needs_data
@pytest.mark.parametrize(
    ("file", "rate", "prompt", "output"),
    [("code", 2.57, 2048, 28), ("conv", 5.53, 1155, 211)],
)
def test_azure_recordings_have_their_published_figures(file: str, rate: float, prompt: float, output: float) -> None:
    found = _arrivals(TRACES / "azure2023" / f"AzureLLMInferenceTrace_{file}.csv", "azure")
    assert len(found) / (found[-1].at_ns / NS) == pytest.approx(rate, rel=0.01)
    assert fmean(a.prompt_tokens for a in found) == pytest.approx(prompt, rel=0.01)
    assert fmean(a.output_tokens for a in found) == pytest.approx(output, rel=0.01)


@needs_data
def test_mooncakes_hits_are_those_of_its_hashes() -> None:
    file = TRACES / "mooncake" / "conversation_trace.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    ids: set[int] = set()
    hits = blocks = tokens_hit = 0
    for place, row in enumerate(rows):
        full = row["input_length"] // BLOCK_TOKENS
        for number, block in enumerate(row["hash_ids"]):
            hits += block in ids
            if place < 1000 and block in ids:
                tokens_hit += min(full - 32 * number, 32)
        blocks += len(row["hash_ids"])
        ids.update(row["hash_ids"])
    assert hits / blocks == pytest.approx(0.366, abs=0.001)
    seen: set[int] = set()
    found = 0
    for arrival in _arrivals(file, "mooncake")[:1000]:
        found += sum(key in seen for key in arrival.block_keys)
        seen.update(arrival.block_keys)
    assert found == tokens_hit


@needs_data
def test_vidurs_lengths_are_drawn_in_pairs() -> None:
    trace = TraceFile(TRACES / "vidur" / "arxiv_summarization_stats.csv", TraceFormat.VIDUR)
    assert length_pairs(trace)[:2] == [(3772, 54), (2015, 156)]


# Fields of a scenario


ARRIVALS = {"process": "gamma", "cv": 2, "rate_per_s": 20, "duration_s": 10}
LENGTHS = {"dataset": "sharegpt"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"arrivals": {**ARRIVALS, "cvv": 1}, "lengths": LENGTHS},
            "workload.arrivals.cvv: is not known; take it out; did you mean `cv`?",
        ),
        (
            {"arival": ARRIVALS, "lengths": LENGTHS},
            "workload.arival: is not known; take it out; did you mean `arrivals`?",
        ),
        ({"arrivals": ARRIVALS, "lenghts": LENGTHS}, "workload.lengths: is missing; write it (there is `lenghts`)"),
        (
            {"arrivals": ARRIVALS, "lengths": LENGTHS, "sead": 1},
            "workload.sead: is not known; take it out; did you mean `seed`?",
        ),
        (
            {"arrivals": {**ARRIVALS, "process": "gama"}, "lengths": LENGTHS},
            "workload.arrivals.process: `gama` is not known; choose one of",
        ),
        ({"arrivals": {**ARRIVALS, "cv": 0}, "lengths": LENGTHS}, "workload.arrivals: cv: is 0.0; give 0.02 to 50.0"),
        (
            {"arrivals": {**ARRIVALS, "rate_per_s": math.nan}, "lengths": LENGTHS},
            "workload.arrivals.rate_per_s: is nan; write a number",
        ),
        (
            {"arrivals": {**ARRIVALS, "rate_per_s": 0}, "lengths": LENGTHS},
            "workload.arrivals.rate_per_s: is 0; write a number above 0",
        ),
        (
            {"arrivals": {**ARRIVALS, "rate_per_s": "20"}, "lengths": LENGTHS},
            "workload.arrivals.rate_per_s: is '20'; write a number",
        ),
        (
            {"arrivals": ARRIVALS, "lengths": {"dataset": "shareGPT"}},
            "workload.lengths.dataset: `shareGPT` is not known",
        ),
        (
            {"arrivals": ARRIVALS, "lengths": {"prompt": {"fixed": 0}, "output": {"fixed": 1}}},
            "workload.lengths.prompt: tokens: is 0;",
        ),
        (
            {"arrivals": ARRIVALS, "lengths": LENGTHS, "context_tokens": 1},
            "workload: context_tokens: is 1; give at least 2",
        ),
        (
            {"arrivals": ARRIVALS, "trace": {}, "lengths": LENGTHS},
            "workload: has arrivals and trace of arrivals, trace, mix",
        ),
        ({"arrivals": [], "lengths": LENGTHS}, "workload.arrivals: is []; write a mapping"),
        ({"mix": [{"arrivals": ARRIVALS}]}, "workload.mix[0].lengths: is missing"),
        (
            {"trace": {"format": "azure", "file": "x", "strat_s": 3}},
            "workload.trace.strat_s: is not known; take it out; did you mean `start_s`?",
        ),
        (
            {"arrivals": ARRIVALS, "lengths": LENGTHS, "sessions": {"turns_mean": 0.5, "gap_s_mean": 1}},
            "workload.sessions: ",
        ),
    ],
)
def test_a_scenarios_mistake_is_named_with_what_to_do(found: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        workload_from_fields(found)


def test_a_file_is_sought_from_the_data_folder(tmp_path: Path) -> None:
    _file(tmp_path, AZURE)
    workload = workload_from_fields({"trace": {"format": "azure", "file": "trace.csv"}, "model": "m"}, data=tmp_path)
    assert [(a.prompt_tokens, a.model) for a in workload] == [(4808, "m"), (3180, "m")]
    lengths = {"trace": {"format": "azure", "file": "trace.csv"}}
    drawn = workload_from_fields({"arrivals": ARRIVALS, "lengths": lengths}, data=tmp_path)
    assert {(a.prompt_tokens, a.output_tokens) for a in drawn} == {(4808, 10), (3180, 8)}


def test_parts_of_a_mix_do_not_arrive_at_the_same_moments() -> None:
    part = {"arrivals": ARRIVALS, "lengths": LENGTHS}
    found = list(workload_from_fields({"mix": [{**part, "model": "a"}, {**part, "model": "b"}]}))
    a, b = ([x.at_ns for x in found if x.model == name] for name in "ab")
    assert a != b
    assert not set(a) & set(b)
