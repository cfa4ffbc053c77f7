"""`serai bench padg-live`: whether a live Serai keeps the targets that the simulator says it keeps.

A whole `serai up` each: four emulated engines at the speed of a 70B model on four A800, ShareGPT-like lengths, requests
at random times over the public API. The same requests go through the fast simulator. Three systems:

| system     | live                                                            | simulated                         |
|------------|-----------------------------------------------------------------|-----------------------------------|
| `serai`    | macro-scheduler with our policy, phase-gated engines            | the same group and gates          |
| `paper`    | macro-scheduler with Algorithm 1, engines that prefill first    | the same group, gates always open |
| `ordinary` | `least-loaded`, engines that mix prefill and decode in a step   | the same policy and engines       |

Attainment is by the client's sight (first token; mean time per token after it), at several targets; requests of the
first seconds are sent and not counted, until instances have measured themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from serai.bench.live_run import ANSWER_TOKENS_MAX, LiveRun, chat_arrivals
from serai.bench.open_client import send_all
from serai.bench.processes import BenchFailed, Processes
from serai.bench.report import Report, add_report_arguments, hand_out, rounded, say
from serai.bench.targets import end_on_sigterm
from serai.engine_emulator.batching.settings import BatchMode
from serai.engine_emulator.modelled import ModelFlags, modelled_engine
from serai.ingress.routing import LeastLoaded
from serai.macro_scheduler.group import GroupSettings
from serai.simulator.fast.cluster import simulate
from serai.simulator.fast.instance import InstanceSpec
from serai.simulator.fast.macro_scheduled import MacroScheduled, MacroSettings, ReportPath
from serai.simulator.fast.routed import Routed
from serai.simulator.fast.run import NS
from serai.simulator.outcomes import Outcomes, SloTarget, Window
from serai.simulator.workloads.workload import Arrival
from serai.worker_agent.engine.process import free_port

MODEL, CARD, GPU, TENSOR, ENGINES = "emulated", "meta-llama/Llama-3.1-70B", "a800", 4, 4
RATE_PER_S = 12.0
SLO = SloTarget(0.6, 0.040)
"""What every request asks for. That of the simulated group, too."""
TARGETS = (SLO, SloTarget(1.0, 0.050), SloTarget(0.4, 0.045))
"""At which the two sides are compared: where nobody fails, everybody agrees."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is."""

    lead_s: float = 6.0
    """Requests of so long at its beginning are not counted."""
    counted_s: float = 60.0
    answer_tokens_max: int = ANSWER_TOKENS_MAX
    """Longer answers are cut, so that a run ends soon after its last request."""

    @property
    def window(self) -> Window:
        """What is counted."""
        return Window(round(self.lead_s * NS), round((self.lead_s + self.counted_s) * NS))


QUICK = Length(3.0, 8.0, 200)
REPORT_DELAY_S = 0.005
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve."""

    name: str
    policy: str
    """Of `serai up`."""
    mode: BatchMode
    step_tokens: int
    admission: str = ""

    @property
    def flags(self) -> ModelFlags:
        """Of each of its engines."""
        return ModelFlags(
            CARD, GPU, tp=TENSOR, mode=self.mode, max_num_batched_tokens=self.step_tokens, prefix_cache=False
        )

    @property
    def engine_args(self) -> list[str]:
        """The same, for the emulated engine's command."""
        pairs = {
            "--gpu": GPU,
            "--card": CARD,
            "--tp": TENSOR,
            "--mode": self.mode,
            "--max-num-batched-tokens": self.step_tokens,
        }
        return [*[str(word) for pair in pairs.items() for word in pair], "--no-prefix-cache"]


SYSTEMS = {
    "serai": System("serai", "macro-scheduled", BatchMode.PHASE_GATED, 8192, "serai"),
    "paper": System("paper", "macro-scheduled", BatchMode.PREFILL_FIRST, 8192, "paper"),
    "ordinary": System("ordinary", "least-loaded", BatchMode.MIXED, 2048),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench padg-live`."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_report_arguments(parser)
    parser.add_argument("--system", choices=list(SYSTEMS), action="append", help="only this one; may be given again")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, help="counted in each run (60; quick: 8)")
    parser.add_argument("--seeds", type=int, help="runs of each system (3; quick: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when a stand does not come up or an answer is not whole."""
    end_on_sigterm()
    length = QUICK if arguments.quick else Length()
    length = replace(length, counted_s=arguments.seconds or length.counted_s)
    seeds = arguments.seeds or (1 if arguments.quick else 3)
    if not (0 < arguments.rate <= 100 and 0 < length.counted_s <= 3600 and 0 < seeds <= 100):
        sys.exit("serai bench padg-live: --rate must be above 0 and at most 100, --seconds at most 3600, --seeds 100")
    found: list[Compared] = []
    try:
        for name in arguments.system or SYSTEMS:
            found += _compared(SYSTEMS[name], arguments.rate, length, seeds)
    except BenchFailed as failure:
        say(f"serai bench padg-live: {failure}")
        return 1
    config = {
        "engines": f"{ENGINES} × {CARD} on {TENSOR} {GPU}",
        "rate_per_s": arguments.rate,
        "seconds": length.counted_s,
        "seeds": seeds,
        "slo": _name(SLO),
    }
    notes = [f"requests were sent up to {max(one.run.late_sends_s_max for one in found) * 1000:.0f} ms late"]
    raw = [one.raw() for one in found]
    hand_out(Report("bench padg-live", config, figures_of(found), _table(found), notes, raw), arguments)
    return 0


# -- both sides --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """The same requests on both sides."""

    system: str
    seed: int
    run: LiveRun

    def raw(self) -> dict[str, Any]:
        """For the file of results."""
        return {
            "system": self.system,
            "seed": self.seed,
            "requests": len(self.run.live),
            "attainment": {_name(slo): [rounded(one) for one in self.run.attainments(slo)] for slo in TARGETS},
            **{
                f"{side}_{quantity}": {part: rounded(getattr(spread, part)) for part in ("p50_s", "p90_s", "p99_s")}
                for side, spreads in self.run.latencies().items()
                for quantity, spread in zip(("ttft", "tpot"), spreads, strict=True)
            },
        }


def arrivals(rate_per_s: float, length: Length, seed: int) -> list[Arrival]:
    """ShareGPT-like requests."""
    made = chat_arrivals(rate_per_s, length.lead_s + length.counted_s, seed)
    return [replace(one, output_tokens=min(one.output_tokens, length.answer_tokens_max)) for one in made]


def simulated(system: System, requests: Sequence[Arrival]) -> Outcomes:
    """What the fast simulator says of them."""
    engine = modelled_engine(system.flags)
    specs = [InstanceSpec(engine.model, engine.batch)] * ENGINES
    if not system.admission:
        return simulate(specs, requests, Routed(LeastLoaded, range(ENGINES))).outcomes
    # The papers' engine prefills first while its gate is open: in the simulator, a gated one whose gate says so.
    gated = modelled_engine(SYSTEMS["serai"].flags)
    specs = [InstanceSpec(gated.model, gated.batch)] * ENGINES
    group = GroupSettings(policy=system.admission, slo_ttft_s=SLO.ttft_s, slo_tpot_s=SLO.tpot_s)
    settings = MacroSettings(group, ReportPath(delay_s=REPORT_DELAY_S, interval_s=0.03))
    return simulate(specs, requests, MacroScheduled(specs, settings)).outcomes


def _compared(system: System, rate: float, length: Length, seeds: int) -> list[Compared]:
    counted = length.window
    with TemporaryDirectory(prefix="serai-bench-") as work, Processes(Path(work)) as processes:
        facts = _start(system, processes, Path(work))
        port, headers = int(facts["url"].rpartition(":")[2]), {"Authorization": f"Bearer {facts['key']}"}
        found = []
        for seed in range(1, seeds + 1):
            requests = arrivals(rate, length, seed)
            say(f"{system.name}, seed {seed}: {len(requests)} requests in {length.lead_s + length.counted_s:g} s")
            live, late_s = uvloop.run(send_all([port], MODEL, headers, requests))
            said = simulated(system, requests).arriving_in(counted)
            found.append(Compared(system.name, seed, LiveRun(live.arriving_in(counted), said, late_s)))
            gaps = ", ".join([f"{found[-1].run.gap_points(slo):+.1f}" for slo in TARGETS])
            say(f"{system.name}, seed {seed}: simulated less live {gaps} points")
    return found


def _start(system: System, processes: Processes, work: Path) -> dict[str, Any]:
    port, ready_file = free_port(), work / "ready.json"
    command = [
        *(sys.executable, "-m", "serai.cli.main", "up", "--emulated", "--agents", str(ENGINES), "--model", MODEL),
        *("--policy", system.policy, "--port", str(port), "--state", str(work / "state")),
        *("--ready-file", str(ready_file), f"--engine-args={' '.join(system.engine_args)}"),
    ]
    environment = {
        "SERAI_ADMISSION": system.admission or "serai",
        "SERAI_SLO_TTFT_S": str(SLO.ttft_s),
        "SERAI_SLO_TPOT_S": str(SLO.tpot_s),
    }
    child = processes.start("up", command, environment=environment, stop_s=30)
    processes.wait_until("up", child, ready_file.exists, _START_S)
    if system.admission:
        log = work / "state" / "logs" / "macro-scheduler.log"
        processes.wait_until("up", child, lambda: '"macro.leads"' in log.read_text(), _START_S)
    return dict(json.loads(ready_file.read_bytes()))


# -- figures -----------------------------------------------------------------------------------------------------------


def figures_of(found: Sequence[Compared]) -> dict[str, float]:
    """Mean attainments over the runs, at each target, and how far the two sides are apart."""
    figures: dict[str, float] = {}
    worst: list[float] = []
    for name in dict.fromkeys(one.system for one in found):
        runs = [one.run for one in found if one.system == name]
        gaps = []
        for slo in TARGETS:
            said, known = (sum(one.attainments(slo)[side] for one in runs) / len(runs) for side in (0, 1))
            figures[f"{name}_simulated_{_key(slo)}"], figures[f"{name}_live_{_key(slo)}"] = said, known
            gaps.append(abs(said - known) * 100)
        figures[f"{name}_gap_points"] = max(gaps)
        figures[f"{name}_gap_points_worst_run"] = max(abs(one.gap_points(slo)) for one in runs for slo in TARGETS)
        worst.append(max(gaps))
    figures["attainment_gap_points"] = max(worst)
    return figures


def _key(slo: SloTarget) -> str:
    return f"{slo.ttft_s * 1000:.0f}ms_{slo.tpot_s * 1000:.0f}ms"


def _name(slo: SloTarget) -> str:
    return f"{slo.ttft_s * 1000:.0f} ms, {slo.tpot_s * 1000:.0f} ms"


def _table(found: Sequence[Compared]) -> list[list[str]]:
    rows = [["system, seed", "target", "simulated", "live", "difference"]]
    for one in found:
        for slo in TARGETS:
            said, known = one.run.attainments(slo)
            name = f"{one.system}, {one.seed}"
            rows.append([name, _name(slo), f"{said:.1%}", f"{known:.1%}", f"{(said - known) * 100:+.1f} pt"])
    return rows
