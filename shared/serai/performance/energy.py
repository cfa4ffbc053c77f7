"""Energy of a step, from how long the GPU multiplies, moves memory, and waits.

Power of a GPU = idle + (limit − idle) · (multiplying + 0.85 · moving + 0.17 · waiting), the three being shares of the
step's time. The two weights come from A100 measurements (splitwise-sim `data/perf_model.csv`, Llama-2-70B decoding
at TP 2 and 8: 74 % and 43 % of the limit); at TP 4 and for BLOOM, which they were not taken from, it is within a few
points of the measured 60 and 63 %. Hosts, networks and cooling are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from serai.performance.hardware import Gpu

MOVING = 0.85
WAITING = 0.17


@dataclass(frozen=True, slots=True)
class Activity:
    """How a step's time is spent on each GPU of an instance, in seconds."""

    multiplying_s: float
    moving_s: float
    waiting_s: float
    """Communication, launches, host time."""

    @property
    def total_s(self) -> float:
        """The step's duration."""
        return self.multiplying_s + self.moving_s + self.waiting_s


def power_w(gpu: Gpu, activity: Activity) -> float:
    """Mean power of one GPU over `activity`, in watts; idle power when nothing happens."""
    total = activity.total_s
    if total <= 0:
        return gpu.idle_power_w
    load = (activity.multiplying_s + MOVING * activity.moving_s + WAITING * activity.waiting_s) / total
    return gpu.idle_power_w + (gpu.power_w - gpu.idle_power_w) * load


def energy_j(gpu: Gpu, gpus: int, activity: Activity) -> float:
    """Energy of an instance of `gpus` GPUs over `activity`, in joules."""
    return gpus * power_w(gpu, activity) * activity.total_s
