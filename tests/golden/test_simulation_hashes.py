"""Small runs of every baseline, by the hash of all their outcomes. A change here is a change of what the simulator
says: of the batch scheduler, the dispatch, or the workload. Step times are round numbers of the test's own, so that a
profile fitted anew changes nothing; requests go round robin, so that cleverer routing changes nothing either.

When the change is meant, write the file anew: `python tests/golden/test_simulation_hashes.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serai.performance.latency_model import Step
from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import DISAGGREGATED, SYSTEMS, disaggregated_system, whole_system
from serai.simulator.workloads.fields import workload_from_fields

KNOWN = Path(__file__).parent / "simulation" / "hashes.txt"
WORKLOAD = {
    "seed": 5,
    "arrivals": {"process": "gamma", "cv": 1.5, "rate_per_s": 20, "duration_s": 10},
    "lengths": {"dataset": "sharegpt"},
    "context_tokens": 4000,
    "system_prompts": {"number": 3, "tokens": 300},
}


class RoundNumbers:
    """10 ms a step, 0.1 ms a prompt token, 0.05 ms a decoding sequence."""

    def step_s(self, step: Step) -> float:
        tokens = sum(chunk.new_tokens for chunk in step.chunks)
        return 0.010 + tokens * 0.0001 + step.decode_sequences * 0.00005

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        return 0.010 + batch * (prompt_tokens - cached_tokens) * 0.0001

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        return 0.010 + sequences * 0.00005

    def kv_capacity_tokens(self) -> int:
        return 16_000

    def kv_bytes_per_token(self) -> float:
        return 200_000.0


def hash_of(name: str) -> str:
    model = RoundNumbers()
    if name in DISAGGREGATED:
        system = disaggregated_system(name, model, 2, 2, 2, policy="round-robin")
    else:
        system = whole_system(name, model, 4, policy="round-robin")
    settings = ClusterSettings(network=CLUSTERS["a800"].network)
    return simulate(system.instances, workload_from_fields(WORKLOAD), system.dispatch(), settings).sha256


def known_hashes() -> dict[str, str]:
    found = {}
    for line in KNOWN.read_text().splitlines():
        name, digest = line.split()
        found[name] = digest
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_small_run_is_what_it_was(name: str) -> None:
    assert hash_of(name) == known_hashes()[name], f"{name} behaves otherwise than {KNOWN.name} says"


def test_systems_differ() -> None:
    assert len(set(known_hashes().values())) == len(SYSTEMS)


if __name__ == "__main__":
    KNOWN.write_text("".join(f"{name} {hash_of(name)}\n" for name in SYSTEMS))
