"""What `serai up --pool N` has beside the rest: a placement file with two emulated models, the placer, and pool agents
of one said GPU each, among which the placer moves the models' engines as they are asked for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from serai.placer.placement_file import PlacementFile, read_placement
from serai.runtime.fields import BadInput
from serai.runtime.settings import refuse

POOLS_MAX = 32
MODELS = ("model-a", "model-b")
REQUESTS_S = 2.0
"""What an engine is said to serve: few enough for a person with a shell loop to move engines."""
GPU = "H100"
SCALING = {
    "SERAI_SCALING": "1",
    "SERAI_SCALING_BY": "placer",
    "SERAI_SCALING_WINDOW_S": "10",
    "SERAI_INSTANCE_START_S": "5",
}
"""Of a macro-scheduler beside it: quick enough to be watched."""
PLACER_FLAGS = (
    *("--plan-every-s", "2", "--demand-every-s", "1", "--settle-s", "1", "--solve-s", "2", "--lease-s", "6"),
    *("--failed-wait-s", "5", "--start-timeout-s", "120"),
)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How many pool agents, and what they may be asked to run."""

    pools: int
    file: Path
    models: tuple[str, ...]
    """Those that serve from the start."""

    @property
    def placer_flags(self) -> list[str]:
        return ["--placement-file", str(self.file), *PLACER_FLAGS]

    def agent_flags(self, number: int) -> list[str]:
        """Of the pool agent with that number."""
        pool = ["--pool", "--pool-gpus", f"{GPU}:1", "--pool-name", f"pool-{number}", "--pool-report-s", "1"]
        return [*pool, "--allocation", f"up-pool-{number}", "--drain-s", "5", "--engine-stop-s", "2"]


def pool_plan(pools: int, given: Path | None, state: Path, engine_args: str) -> PoolPlan:
    """With the placement file that is given, or one of its own in the state folder. Exits when that is no use."""
    if not 1 <= pools <= POOLS_MAX:
        refuse(f"--pool {pools}: must be between 1 and {POOLS_MAX}")
    file = given or state / "placement.yaml"
    try:
        if given is None:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_text(placement_text(shlex.split(engine_args), pools))
        read = read_placement(file.read_text(), str(file))
    except OSError as error:
        refuse(f"--placement-file: {file}: {error.strerror}")
    except UnicodeDecodeError:
        refuse(f"--placement-file: {file} is not UTF-8 text")
    except BadInput as error:
        refuse(str(error))
    return PoolPlan(pools, file.absolute(), _from_the_start(read))


def pool_scaling(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the macro-scheduler, where nobody has set them."""
    return {name: value for name, value in SCALING.items() if name not in environment}


def _from_the_start(read: PlacementFile) -> tuple[str, ...]:
    return tuple([name for name, model in read.models.items() if model.demand.min_replicas])


def placement_text(engine_args: Sequence[str], pools: int) -> str:
    """Two models that share the pools; with one pool only the first has a minimum."""
    models = {
        name: {
            "engine": "emulated",
            "min_replicas": 1 if number < pools else 0,
            "demand": {"prompt_tokens": 100, "output_tokens": 32},
            "instances": [{"gpu": GPU, "requests_s": REQUESTS_S, "load_s": 2}],
            **({"arguments": list(engine_args)} if engine_args else {}),
        }
        for number, name in enumerate(MODELS)
    }
    rules = {
        "mode": "automatic",
        "horizon_s": 120,
        "cool_down_s": 10,
        "cold_after_s": "never",
        "drain_s": 20,
        "demand_window_s": 10,
        "moves_per_hour": 600,
        "gpu_share_per_change": 1.0,
    }
    head = "# Written by `serai up --pool` at each start; copy it and give --placement-file to change it.\n"
    return head + str(yaml.safe_dump({"models": models, "rules": rules}, sort_keys=False))
