"""The placement file: what it says, and what it is told when it says something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from serai.placer.placement_file import Mode, read_placement
from serai.runtime.fields import BadInput
from serai.worker_agent.pool_templates import read_templates

WHOLE = """
models:
  chat:
    engine: vllm
    path: /models/llama-8b
    card: llama-3.1-8b
    slo: {ttft_s: 1.0, tpot_s: 0.05}
    priority: 2
    min_replicas: 1
    max_replicas: 4
    providers: [cscs]
    gpus: [h100]
    project: climate
    arguments: [--max-num-seqs, "64"]
    demand: {requests_s: 3, requests_s_high: 5, prompt_tokens: 800, output_tokens: 200}
  small:
    engine: emulated
    instances: [{gpu: H100, tensor: 2, requests_s: 4.5, load_s: 30}]
rules:
  mode: automatic
  horizon_s: 1200
  cold_after_s: never
  quotas: {climate: 8}
  pinned: [s1]
launch:
  - {slurm: pool-h100, gpu: h100, gpus: 4, most: 3}
  - {kubernetes: deployment/pool, namespace: serai, gpu: a100, gpus: 1, most: 8, least: 1}
"""


def test_all_of_it() -> None:
    read = read_placement(WHOLE, "placement.yaml")
    chat, small = read.models["chat"], read.models["small"]
    assert (chat.path, chat.arguments, chat.demand.slo_tpot_s) == ("/models/llama-8b", ("--max-num-seqs", "64"), 0.05)
    assert (chat.demand.requests_s, chat.demand.planned_requests_s, chat.demand.gpus_allowed) == (
        3,
        5,
        ("h100-sxm-80",),
    )
    assert (small.instances[0].gpus, small.instances[0].requests_s, small.instances[0].gpu) == (2, 4.5, "h100-sxm-80")
    assert (read.mode, read.rules.horizon_s, read.rules.cold_after_s) == (Mode.AUTOMATIC, 1200, None)
    assert [(one.launcher, one.name, one.most) for one in read.launchables] == [
        ("slurm", "pool-h100", 3),
        ("kubernetes", "deployment/pool", 8),
    ]


def changed(path: str, value: object) -> str:
    """`WHOLE` with one part of it another."""
    content = yaml.safe_load(WHOLE)
    part = content
    *parents, last = path.split(".")
    for name in parents:
        part = part.setdefault(name, {})
    if value is None:
        del part[last]
    else:
        part[last] = value
    return yaml.safe_dump(content)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("models.chat.demand.requests_s", -1, "models.chat.demand: demand of `chat`, requests_s: is -1"),
        ("models.chat.demand.requests_s", 1e9, "give 0 to 1e+06"),
        ("models.chat.demand.requests_s", "many", "models.chat.demand.requests_s: is 'many'; write a number"),
        ("models.chat.demand.requests_s", float("nan"), "models.chat.demand.requests_s: is nan; write a number"),
        ("models.chat.demand.requests_s", 6, "is not between requests_s_low"),
        ("models.chat.demand.prompt_tokens", 0, "prompt.mean: is 0"),
        ("models.chat.slo.tpot_s", 0, "slo_tpot_s: is 0"),
        ("models.chat.card", "llama-99", "models.chat.card: no card for model 'llama-99'"),
        ("models.chat.gpus", ["h900"], "models.chat.gpus: unknown GPU 'h900': nearest are"),
        ("models.small.instances", [{"gpu": "x1", "requests_s": 1}], "models.small.instances[0].gpu: unknown GPU 'x1'"),
        ("models.small.instances", [{"gpu": "h100"}], "models.small.instances[0].requests_s: is missing"),
        ("models.small.gpus", ["a100"], "allows a100-sxm-80, and `instances` are of h100-sxm-80"),
        ("models.chat.max_replicas", 0, "min_replicas: 1 contradicts max_replicas 0"),
        (
            "models.chat.min_replica",
            2,
            "models.chat.min_replica: is not known; take it out; did you mean `min_replicas`?",
        ),
        ("models.unknown", {"engine": "vllm"}, "models.unknown.card: no card for model 'unknown'"),
        ("models", {}, "models: there are 0; name 1 to"),
        ("rules.mode", "magic", "rules.mode: `magic` is not known; choose one of by-hand, automatic"),
        ("rules.gpu_share_per_change", 0, "write a share above 0, at most 1"),
        ("rules.horizon_s", -5, "rules.horizon_s: is -5; write 0 or more"),
        ("rules.margin", 0.5, "rules.margin: is 0.5; write 1 or more"),
        ("rules.quotas", {"ocean": 4}, "rules.quotas.ocean: no model has `project: ocean`"),
        ("rules.quotas", {"climate": 0}, "is 0 GPUs, and min_replicas of chat need 1; raise the quota or lower"),
        ("rules.cold_after_s", 10, "rules.cold_after_s: 10 s is less than cool_down_s, 300 s"),
        ("rules.horizon", 5, "rules.horizon: is not known; take it out; did you mean `horizon_s`?"),
        ("launch", [{"gpu": "h100", "most": 1}], "has none of slurm, kubernetes; write one of them"),
        ("launch", [{"slurm": "p", "gpu": "h100", "most": 1, "least": 2}], "2 is more than `most`, 1"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(path: str, value: object, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_placement(changed(path, value), "placement.yaml")
    assert re.match(r"placement\.yaml:\d+: ", str(refused.value)), "the line, too"
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_that_is_written_twice() -> None:
    with pytest.raises(BadInput, match="key 'a' is written twice"):
        read_placement("models:\n  a: {}\n  a: {}\n", "placement.yaml")


def test_the_file_in_the_document_is_one() -> None:
    document = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    (example,) = re.findall(r"```yaml\n(# placement.yaml.*?)```", document, re.DOTALL)
    read = read_placement(example, "placement.yaml")
    assert set(read.models) == {"chat", "own-engine"}
    assert len(read.launchables) == 2


def test_the_templates_in_the_document_are_some() -> None:
    document = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    (example,) = re.findall(r"```yaml\n(engines:.*?)```", document, re.DOTALL)
    assert "vllm-apptainer" in read_templates(example, "templates.yaml")
