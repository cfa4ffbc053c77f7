"""What a run hands out: outcomes in columns, phases per instance, figures, and a hash that names all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.simulator.fast.instance import Phases
from serai.simulator.fast.links import Lane
from serai.simulator.outcomes import Outcomes

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class InstanceFigures:
    """One instance over a whole run."""

    role: str
    gpus: int
    held_s: float
    """How long it had its GPUs: all of the run, unless it was started or retired in it. Shares are of this time."""
    busy_share: float
    prefill_share: float
    """Share of the run in steps that worked on prompts, among others."""
    decode_steps: int
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    energy_j: float
    """0 when energy is not counted."""
    kv_tokens_total: int
    kv_tokens_held: int
    """In use when the run ended: 0 after a run to the end."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a cluster."""

    outcomes: Outcomes
    """One an arrival, in order of arrival."""
    phases: Sequence[Phases]
    """One an instance; empty ones when phases were not kept."""
    instances: Sequence[InstanceFigures]
    lanes: Mapping[tuple[str, int], Lane]
    duration_ns: int
    """From time 0 to the last event."""
    steps: int
    unfinished: int
    """Requests that were neither refused nor finished when the run ended."""

    @property
    def sha256(self) -> str:
        """Hash of every field of every outcome. The same on any machine."""
        return self.outcomes.digest()

    def figures(self) -> dict[str, float]:
        """Totals over all instances, flat, with units."""
        duration_s = self.duration_ns / NS
        finished = sum(1 for ended in self.outcomes.columns["finished_ns"] if ended >= 0)
        queries = sum(i.prefix_queries_tokens for i in self.instances)
        hits = sum(i.prefix_hits_tokens for i in self.instances)
        count = len(self.instances)
        return {
            "requests": len(self.outcomes),
            "finished": finished,
            "refused": sum(self.outcomes.columns["refused"]),
            "unfinished": self.unfinished,
            "simulated_s": duration_s,
            "steps": self.steps,
            "busy_share": sum(i.busy_share for i in self.instances) / count if count else 0.0,
            "prefill_share": sum(i.prefill_share for i in self.instances) / count if count else 0.0,
            "preemptions": sum(i.preemptions for i in self.instances),
            "prefix_hit_share": hits / queries if queries else 0.0,
            "energy_j": sum(i.energy_j for i in self.instances),
            "gpu_s": sum(i.held_s * i.gpus for i in self.instances),
            "busy_gpu_s": sum(i.held_s * i.gpus * i.busy_share for i in self.instances),
            "kv_bytes_moved": sum(lane.bytes_carried for key, lane in self.lanes.items() if key[0] != "in"),
        }
