"""The same requests to real emulated engines, over HTTP, and to the fast simulator.

Both run the same batch scheduler with the same step times; what is judged is everything else: that a step in real time
takes what it should, that requests get in and tokens out when they should, that nothing is lost on the way. The client
sends each request at its time to the engines in turn, directly, over loopback, with a connection of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from serai.bench.live_run import LiveRun
from serai.bench.open_client import send_all
from serai.bench.processes import Processes
from serai.bench.stand import get
from serai.engine_emulator.modelled import ModelFlags, modelled_engine
from serai.ingress.routing import RoundRobin
from serai.performance.roofline import RooflineModel
from serai.simulator.fast.cluster import simulate
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.routed import Routed
from serai.simulator.outcomes import Outcomes, SloTarget
from serai.simulator.workloads.workload import Arrival
from serai.worker_agent.engine.process import free_port

MODEL = "meta-llama/Llama-3.1-70B"
GPU, TENSOR, ENGINES = "a800", 4, 4
RATE_PER_S = 10.0
FLAGS = ModelFlags(MODEL, GPU, tp=TENSOR, max_num_batched_tokens=2048, prefix_cache=False)
TARGETS = (SloTarget(0.15, 0.045), SloTarget(0.5, 0.035), SloTarget(0.2, 0.040))
"""Targets that about half to nine tenths of the requests meet: where nobody fails, everybody agrees. One is tight in
TTFT, one in TPOT, one is moderate in both."""
_START_S = 60.0


def simulated(arrivals: Sequence[Arrival]) -> Outcomes:
    """What the fast simulator says of them."""
    engine = modelled_engine(FLAGS)
    assert isinstance(engine.model, RooflineModel)
    spec = InstanceSpec(engine.model, engine.batch)
    return simulate([spec] * ENGINES, arrivals, Routed(RoundRobin, range(ENGINES))).outcomes


class LiveEngines:
    """Emulated engines as processes, at real speed. Leaving the context ends them."""

    def __init__(self, log_folder: Path) -> None:
        self._processes = Processes(log_folder)
        self.ports: list[int] = []

    def __enter__(self) -> LiveEngines:
        try:
            children = []
            for number in range(ENGINES):
                port, name = free_port(), f"engine-{number}"
                children.append((name, port, self._processes.start(name, _command(port))))
                self.ports.append(port)
            for name, port, child in children:
                self._processes.wait_until(name, child, partial(_answers, port), _START_S)
        except BaseException:
            self._processes.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.stop()

    def run(self, arrivals: Sequence[Arrival]) -> LiveRun:
        """Send `arrivals` at their times. Raises BenchFailed when an answer is not whole."""
        live, late_s = asyncio.run(send_all(self.ports, MODEL, {}, arrivals))
        return LiveRun(live, simulated(arrivals), late_s)


def _answers(port: int) -> bool:
    try:
        return bool(get(port, "/v1/models"))
    except OSError:
        return False


def _command(port: int) -> list[str]:
    flags = {
        "--model": MODEL,
        "--gpu": GPU,
        "--tp": str(TENSOR),
        "--max-num-batched-tokens": str(FLAGS.max_num_batched_tokens),
        "--max-num-seqs": str(FLAGS.max_num_seqs),
        "--port": str(port),
    }
    pairs = [word for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "serai.cli.main", "engine", "emulate", *pairs, "--no-prefix-cache"]
