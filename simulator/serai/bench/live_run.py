"""The same requests to a live Serai, or live engines, and to the fast simulator: what is sent, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass

from serai.simulator.outcomes import LatencyDefinition, Outcomes, SloTarget, attainment
from serai.simulator.summary import Spread, spread, tpots_s, ttfts_s
from serai.simulator.workloads.fields import workload_from_fields
from serai.simulator.workloads.workload import Arrival

ANSWER_TOKENS_MAX = 800
_INDUSTRY = LatencyDefinition.INDUSTRY
"""A client cannot see when decoding began."""


def chat_arrivals(rate_per_s: float, duration_s: float, seed: int) -> list[Arrival]:
    """ShareGPT-like requests at random times; the longest answers are cut, so that a run ends soon after its last
    request."""
    return list(
        workload_from_fields(
            {
                "seed": seed,
                "arrivals": {"process": "poisson", "rate_per_s": rate_per_s, "duration_s": duration_s},
                "lengths": {
                    "prompt": {"log-normal": {"mean": 344, "median": 148, "maximum": 4096}},
                    "output": {"log-normal": {"mean": 200, "median": 150, "maximum": ANSWER_TOKENS_MAX}},
                },
            }
        )
    )


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Both sides of one run."""

    live: Outcomes
    simulated: Outcomes
    late_sends_s_max: float
    """The longest that a request was sent after its time: the client's own fault."""

    def latencies(self) -> dict[str, tuple[Spread, Spread]]:
        """TTFT and TPOT of the live and of the simulated side, by the industry's definition."""
        return {
            side: (spread(ttfts_s(outcomes, _INDUSTRY)), spread(tpots_s(outcomes, _INDUSTRY)))
            for side, outcomes in (("live", self.live), ("simulated", self.simulated))
        }

    def gap_points(self, slo: SloTarget) -> float:
        """Simulated attainment less measured, in percentage points, by the industry's definition."""
        said, known = self.attainments(slo)
        return (said - known) * 100

    def attainments(self, slo: SloTarget) -> tuple[float, float]:
        """Of the simulated and of the live side."""
        return attainment(self.simulated, slo, _INDUSTRY), attainment(self.live, slo, _INDUSTRY)
