"""Scenario files: strictly read, and run as the command line runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from serai.bench.simulate.points import measured
from serai.bench.simulate.scenario import read_scenario
from serai.cli.main import main
from serai.performance.hardware import GPUS
from serai.performance.latency_model import PrefillChunk, Step
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.runtime.fields import BadInput
from serai.simulator.data_folder import data_folder
from serai.simulator.fast.step_times import SlowerSteps, StepEnergy

BASE: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "gpu": "l20",
    "instances": 4,
    "instances_per_node": 2,
    "systems": ["vllm", {"name": "mooncake", "prefill": [1, 2]}],
    "workload": {
        "arrivals": {"process": "poisson", "duration_s": 4},
        "lengths": {"prompt": {"fixed": 300}, "output": {"fixed": 20}},
    },
    "slo": {"ttft_s": 1, "tpot_s": 0.05},
    "rates_per_s": [5, 20],
    "seeds": 2,
}


def scenario_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "case.yaml"
    fields = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    file.write_text(yaml.safe_dump(fields))
    return file


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intsances": 3}, ["case.yaml: intsances: is not known", "did you mean `instances`?"]),
        ({"model": "Qwen/Qwen2.5-0.6B"}, ["model:", "Qwen/Qwen3-0.6B"]),
        ({"gpu": "l21"}, ["gpu:", "l20"]),
        ({"tp": 3}, ["tp:", "num_attention_heads"]),
        ({"systems": ["vlm"]}, ["systems[0].name: `vlm` is not known", "did you mean `vllm`?"]),
        ({"systems": ["vllm", "vllm"]}, ["systems: has two of the name `vllm`", "label"]),
        ({"systems": [{"name": "vllm", "polciy": "round-robin"}]}, ["systems[0].polciy", "did you mean `policy`?"]),
        ({"systems": [{"name": "mooncake", "prefill": 4}]}, ["systems[0].prefill: has 4", "choose from 1, 2, 3"]),
        ({"systems": [{"name": "sarathi", "step_tokens_max": 8}]}, ["systems[0]", "step_tokens_max must be at least"]),
        ({"systems": ["distserve"], "instances_per_node": 1}, ["systems[0]", "change instances_per_node"]),
        ({"rates_per_s": [0]}, ["rates_per_s: has 0", "above 0"]),
        ({"rates_per_s": {"from": 9, "to": 1, "by": 1}}, ["rates_per_s", "1 to 1000"]),
        ({"rates_per_s": None}, ["workload.arrivals.rate_per_s: is missing"]),
        ({"rates_per_s": None, "rate_scales": [1]}, ["rate_scales: needs workload.trace"]),
        ({"slo": {"ttft_s": 1}}, ["slo.tpot_s: is missing"]),
        ({"slo": {"ttft_s": -1, "tpot_s": 1}}, ["slo.ttft_s: is -1", "above 0"]),
        ({"levels": [90]}, ["levels: has 90", "such as 0.9"]),
        ({"seeds": 0}, ["seeds: is 0"]),
        ({"links": {"inside": "pcie9"}}, ["links.inside", "pcie"]),
        ({"links": {"share": 2}}, ["share", "0..1"]),
        ({"definition": "lenient"}, ["definition: `lenient` is not known"]),
        ({"model": "meta-llama/Llama-3.1-70B"}, ["systems[0]", "no room for a KV cache"]),
        ({"workload": {"arrivals": {"process": "poison"}}}, ["arrivals"]),
        ({"workload": [1]}, ["workload: is [1]"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(BadInput) as error:
        read_scenario(scenario_file(tmp_path, **changes))
    text = str(error.value)
    assert text.startswith(str(tmp_path / "case.yaml"))
    assert "\n" not in text
    for part in said:
        assert part in text


def test_a_key_written_twice_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("model: a\nmodel: b\n")
    with pytest.raises(BadInput, match="'model' is written twice"):
        read_scenario(file)


def test_a_scenario_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


def test_run_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(scenario_file(tmp_path, systems=["vllm"], rates_per_s=[5]))
    for words in (["simulate", file], ["simulate", "run", file], ["simulate", "--seeds", "1", file]):
        assert main([*words, "--jobs", "1"]) == 0
        assert "goodput, requests/s" in capsys.readouterr().out
    assert main(["simulate", "valdiate"]) == 2


def test_a_scan_as_json_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    file = scenario_file(tmp_path)
    assert main(["simulate", str(file), "--jobs", "1", "--json", "--seeds", "1", "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["name"] == "simulate case"
    assert said["figures"]["vllm_goodput_p90"] == 20
    assert said["figures"]["runs"] == 6
    assert said["config"]["seeds"] == [1]
    names = {path.name for path in out.iterdir()}
    assert {"points.json", "curves.csv", "attainment.png", "attainment.svg", "ttft.png", "waiting.svg"} <= names
    assert len(json.loads((out / "points.json").read_text())) == 6


def test_a_single_run_tells_latencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = {**BASE["workload"], "arrivals": {"process": "poisson", "rate_per_s": 10, "duration_s": 4}}
    file = scenario_file(tmp_path, rates_per_s=None, workload=workload, seeds=2)
    assert main(["simulate", str(file), "--jobs", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["vllm_attainment_strict"] == 1
    assert 0 < figures["vllm_ttft_industry_p50_s"] < figures["vllm_whole_p50_s"]
    assert figures["vllm_energy_j_per_token"] > 0


def test_a_point_is_the_same_each_time_and_another_with_another_seed(tmp_path: Path) -> None:
    workload = {**BASE["workload"], "arrivals": {"process": "poisson", "rate_per_s": 10, "duration_s": 4}}
    scenario = read_scenario(scenario_file(tmp_path, rates_per_s=None, workload=workload))
    first, again, other = (measured(scenario, (0, None, seed)).sha256 for seed in (1, 1, 2))
    assert first == again != other


SHIPPED = sorted((Path(__file__).parents[2] / "docs" / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_scenarios_can_be_read(file: Path) -> None:
    text = file.read_text()
    if "trace:" in text and not data_folder().is_dir():
        pytest.skip("traces are not part of the project")
    assert read_scenario(file).variants


def test_energy_of_alike_steps_is_asked_once_and_nearly_exact() -> None:
    model = RooflineModel(shipped_card("codellama/CodeLlama-34b-hf"), GPUS["a800-sxm-80"], Parallelism(2))
    asked: list[Step] = []

    def exact(step: Step) -> float:
        asked.append(step)
        return model.energy_j(step)

    energy = StepEnergy(exact)
    steps = [Step((), 40, 20_000 + 40 * number) for number in range(500)]
    assert sum(map(energy, steps)) == pytest.approx(sum(map(model.energy_j, steps)), rel=1e-3)
    assert len(asked) < 25


def test_slower_steps_add_what_they_say() -> None:
    model = RooflineModel(shipped_card("codellama/CodeLlama-34b-hf"), GPUS["a800-sxm-80"], Parallelism(2))
    slower = SlowerSteps(model, step_s=0.018, mixed_s=0.012)
    step = Step((), 4, 2000)
    assert slower.step_s(step) - model.step_s(step) == pytest.approx(0.018)
    mixed = Step([PrefillChunk(100)], 4, 2000)
    assert slower.step_s(mixed) - model.step_s(mixed) == pytest.approx(0.030)
    alone = Step([PrefillChunk(100)])
    assert slower.step_s(alone) - model.step_s(alone) == pytest.approx(0.018)
    assert slower.kv_capacity_tokens() == model.kv_capacity_tokens()
    with pytest.raises(ValueError, match="at least 0"):
        SlowerSteps(model, mixed_s=-1)
