"""What judges the simulator, judged on logs whose truth is known: those of the simulator itself."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from random import Random

import pytest

from serai.bench.simulate import drain_test, logged_runs, repeatability
from serai.performance.hardware import GPUS
from serai.performance.latency_model import PrefillChunk, Step
from serai.performance.latency_profile import profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.placer.capacity import Capacity, Traffic, capacity
from serai.placer.demand import LengthSpread
from serai.simulator.fast.run import NS
from serai.simulator.workloads.workload import Arrival

GPU, MODEL = "rtx-pro-6000", "meta-llama/Llama-3.1-8B"


def model() -> RooflineModel:
    return RooflineModel(shipped_card(MODEL), GPUS[GPU], Parallelism(1), profile=profile_for(GPU, "vllm"))


def a_log(folder: Path, *, steps_take: float = 1.0) -> logged_runs.LoggedRun:
    """A log as vLLM would have left it if it were our simulator, with steps `steps_take` times as long as the profile
    says."""
    random = Random(4)
    lengths = [(random.randint(100, 2000), random.randint(20, 300)) for _ in range(40)]
    arrivals = [Arrival(number * 100_000_000, *pair) for number, pair in enumerate(lengths)]
    vllm = folder / "vllm"
    vllm.mkdir()
    engine = {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    (vllm / "meta.json").write_text(json.dumps({"engine_kwargs": engine, "kv_cache": {"num_kv_tokens": 200_000}}))
    with (vllm / "timeseries.csv").open("w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(["t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct"])
        writer.writerow([1, 0, 0, 0, 0, 0])
    lines = [{"input_toks": p, "output_toks": o, "arrival_time": 1e6 + n / 10} for n, (p, o) in enumerate(lengths)]
    times = {"queued_ts": 0.0, "first_token_ts": 0.0, "last_token_ts": 0.0}
    (vllm / "requests.jsonl").write_text("\n".join(json.dumps({**line, **times}) for line in lines))
    blank = logged_runs._load(vllm, "case", GPU, MODEL)
    factors = logged_runs.StepFactors(steps_take, steps_take)
    truth, _ = logged_runs.replayed(blank, logged_runs.OwnSteps(blank.model, factors))
    for line, ttft_s, whole_s in zip(lines, truth.ttft_s, truth.whole_s, strict=True):
        at_s = line["arrival_time"] - 1e6
        line |= {"queued_ts": at_s, "first_token_ts": at_s + ttft_s, "last_token_ts": at_s + whole_s}
    (vllm / "requests.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    found = logged_runs._load(vllm, "case", GPU, MODEL)
    assert [a.at_ns // 1000 for a in found.arrivals] == [a.at_ns // 1000 for a in arrivals]
    return found


def test_a_log_of_the_simulator_itself_is_replayed_without_error(tmp_path: Path) -> None:
    run = a_log(tmp_path)
    replay, _ = logged_runs.replayed(run)
    assert all(abs(error) < 1e-3 for error in logged_runs.errors(run.measured, replay).values())


def test_slower_steps_show_as_an_error_and_own_steps_take_it_away(tmp_path: Path) -> None:
    run = a_log(tmp_path, steps_take=1.3)
    replay, _ = logged_runs.replayed(run)
    assert logged_runs.errors(run.measured, replay)["tpot", "mean"] < -0.15
    own, _ = logged_runs.replayed(run, logged_runs.OwnSteps(run.model, logged_runs.StepFactors(1.3, 1.3)))
    assert all(abs(error) < 1e-3 for error in logged_runs.errors(run.measured, own).values())


def seconds_of(run: logged_runs.LoggedRun, filled: float) -> list[dict[str, float]]:
    """Seconds of an engine whose decode steps take 1.2 and whose prompts 0.7 of what the model says."""
    running, context, length = 32, 1000, 1040
    step_s = run.model.decode_step_s(running, context) * 1.2
    plain = Step((), 64, 64_000)
    token_s = (run.model.step_s(Step([PrefillChunk(length)], 64, 64_000)) - run.model.step_s(plain)) / length * 0.7
    seconds = []
    for number in range(40):
        prompts = 3000.0 * (number % 4)
        said = (1 - prompts * token_s) * running / step_s
        seconds.append(
            {
                "t": number + 1.0,
                "prompt_throughput": prompts,
                "gen_throughput": said,
                "running": running,
                "waiting": 0.0,
                "kv_cache_pct": filled * running * context / run.settings.kv_tokens * 100,
            }
        )
    return seconds


def test_step_factors_are_found_in_what_an_engine_says_each_second(tmp_path: Path) -> None:
    run = a_log(tmp_path)
    run.seconds[:] = seconds_of(run, filled=1.0)
    factors = logged_runs.step_factors(run)
    assert factors is not None
    assert factors.decode == pytest.approx(1.2, rel=0.02)
    assert factors.prompt == pytest.approx(0.7, rel=0.05)


def test_too_few_seconds_give_no_factors(tmp_path: Path) -> None:
    run = a_log(tmp_path)
    assert logged_runs.step_factors(run) is None
    run.seconds[:] = seconds_of(run, filled=1.0)[:5]
    assert logged_runs.step_factors(run) is None


def test_what_the_cache_holds_is_counted_where_it_was_not_logged(tmp_path: Path) -> None:
    run = a_log(tmp_path)
    answered = run.arrivals[0].at_ns / NS + run.measured.ttft_s[0]
    second = {**seconds_of(run, filled=0.0)[0], "t": answered + 0.5 + 1e-6}
    assert logged_runs._context_tokens(run, second) >= run.arrivals[0].prompt_tokens


def test_a_shorter_drain_scales_to_the_whole() -> None:
    drain = drain_test.DRAINS[1]
    short, longer = (drain_test.drained_s(drain, share) for share in (0.01, 0.02))
    assert short == pytest.approx(longer, rel=0.1)
    assert 1000 < longer < 10_000


def test_speed_counts_everything() -> None:
    speed = repeatability.speed(5.0)
    assert speed.requests > 100
    assert speed.wall_s_per_sim_hour == pytest.approx(
        (speed.workload_s + speed.run_s + speed.figures_s) * 3600 / speed.simulated_s
    )


@pytest.mark.parametrize("drain", [d for d in drain_test.DRAINS if d.workload.name != "70b"], ids=lambda d: d.name)
def test_a_full_engine_short_of_memory_serves_what_the_placer_says(drain: drain_test.Drain) -> None:
    """Without the prompts that are worked on anew the formula is 12 to 17 % above."""
    work = drain.workload
    instance = RooflineModel(
        shipped_card(work.model), GPUS[drain.gpu], Parallelism(work.tensor), profile=profile_for(drain.gpu, "vllm")
    )
    lengths = list(drain_test.queue(work, 0.05))
    prompts, outputs = [a.prompt_tokens for a in lengths], [a.output_tokens for a in lengths]
    traffic = Traffic(LengthSpread.about(sum(prompts) / len(prompts)), LengthSpread.about(sum(outputs) / len(outputs)))
    told = capacity(instance, profile_for(drain.gpu, "vllm").serving, traffic, drain.sequences_max)
    assert isinstance(told, Capacity)
    simulated = len(lengths) / (drain_test.drained_s(drain, 0.05) * 0.05)
    assert told.requests_s == pytest.approx(simulated, rel=0.15)
