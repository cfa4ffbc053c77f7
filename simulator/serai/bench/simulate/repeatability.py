"""Whether a run is the same everywhere, and how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from serai.simulator.fast.cluster import ClusterSettings, simulate
from serai.simulator.fast.paper_clusters import CLUSTERS
from serai.simulator.fast.presets import Overheads, System, disaggregated_system, whole_system
from serai.simulator.fast.run import NS, Run
from serai.simulator.outcomes import LatencyDefinition, SloTarget, attainment
from serai.simulator.summary import summary
from serai.simulator.workloads.fields import workload_from_fields
from serai.simulator.workloads.workload import Workload

SLO = SloTarget(5.0, 0.1)
MODEL = "codellama-34b"


def chat(rate_per_s: float, duration_s: float, seed: int) -> Workload:
    """Poisson arrivals with ShareGPT-like lengths."""
    return workload_from_fields(
        {
            "seed": seed,
            "arrivals": {"process": "poisson", "rate_per_s": rate_per_s, "duration_s": duration_s},
            "lengths": {"dataset": "sharegpt"},
            "context_tokens": 16384,
        }
    )


def systems() -> list[System]:
    """One of each kind on the PaDG paper's A800 cluster."""
    cluster = CLUSTERS["a800"]
    model, count, per_node = cluster.latency_model(MODEL), cluster.instances(MODEL), cluster.instances_per_node(MODEL)
    overheads = Overheads(0.018, 0.012)
    return [
        whole_system("vllm", model, count, overheads=overheads),
        whole_system("vllm-v1", model, count, policy="least-loaded"),
        whole_system("sarathi", model, count, overheads=overheads),
        disaggregated_system("distserve-ideal", model, 4, 4, per_node, overheads=overheads),
        disaggregated_system("mooncake-ideal", model, 3, 5, per_node, overheads=overheads),
    ]


def small_run(system: System, seconds: float = 20.0) -> Run:
    """A short run of `system`, the same at each call."""
    return simulate(
        system.instances, chat(30.0, seconds, 7), system.dispatch(), ClusterSettings(network=CLUSTERS["a800"].network)
    )


def hashes() -> dict[str, str]:
    """A hash for each system's small run."""
    return {system.name: small_run(system).sha256 for system in systems()}


def hashes_elsewhere(hash_seed: int) -> dict[str, str]:
    """The same from a process of its own, with another seed for Python's hashes."""
    script = "import json; from serai.bench.simulate.repeatability import hashes; print(json.dumps(hashes()))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a long run took on this machine."""

    simulated_s: float
    """Of arrivals; the run goes on until the last has ended."""
    requests: int
    steps: int
    workload_s: float
    run_s: float
    figures_s: float
    cpu_s: float
    """Processor time of all three: what they take on a machine that does nothing else."""

    @property
    def wall_s_per_sim_hour(self) -> float:
        """Everything together, for an hour of arrivals."""
        return (self.workload_s + self.run_s + self.figures_s) / self.simulated_s * 3600

    @property
    def cpu_s_per_sim_hour(self) -> float:
        """The same in processor time."""
        return self.cpu_s / self.simulated_s * 3600


def speed(duration_s: float, rate_per_s: float = 40.0) -> Speed:
    """Eight instances at 40 requests a second: workload made, run, hashed, judged, summed up; on one core.

    The engines are vLLM V1's, whose steps are the shortest and so the most: V0's take 18 ms longer.
    """
    system = systems()[1]
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    arrivals = list(chat(rate_per_s, duration_s, 1))
    made_s = time.perf_counter()
    run = simulate(system.instances, arrivals, system.dispatch())
    ran_s = time.perf_counter()
    attainment(run.outcomes, SLO, LatencyDefinition.STRICT)
    summary(run.outcomes, SLO)
    assert run.sha256
    ended_s = time.perf_counter()
    assert run.duration_ns >= arrivals[-1].at_ns
    return Speed(
        min(duration_s, run.duration_ns / NS),
        len(arrivals),
        run.steps,
        made_s - began_s,
        ran_s - made_s,
        ended_s - ran_s,
        time.process_time() - cpu_began_s,
    )
