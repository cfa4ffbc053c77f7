"""Traffic of many models over hours: requests of each in each minute, with what is known of their lengths.

`published_marginals`: 142 models, Zipf-distributed, that come in bursts; the worst has a peak of 80 times its mean, the
fifteen burstiest at least 13 times (OpenTela's trace, of which only such figures are published). `servegen_models`:
recorded clients (ServeGen), each taken for the users of one model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from serai.placer.demand import LengthSpread
from serai.simulator.workloads.servegen import RateWindow, ServeGenClient, read_clients

STEP_S = 60.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TracedModel:
    """One model of a trace."""

    name: str
    card: str
    """A shipped model that it is as large as."""
    prompt: LengthSpread
    output: LengthSpread


@dataclass(frozen=True)
class RateTrace:
    """Requests by model and step."""

    name: str
    models: tuple[TracedModel, ...]
    counts: tuple[tuple[int, ...], ...]
    """One row a model, one number a step of STEP_S."""

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.counts[0])

    def mean_s(self, model: int) -> float:
        """Requests a second over the whole trace."""
        return sum(self.counts[model]) / (self.steps * STEP_S)

    def quantile_s(self, model: int, share: float) -> float:
        """Requests a second that `share` of all steps stay within."""
        ordered = sorted(self.counts[model])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / STEP_S

    def peak_over_mean(self, model: int, window: int = 10) -> float:
        """The busiest `window` steps over the mean."""
        row = self.counts[model]
        peak = max(sum(row[place : place + window]) for place in range(0, max(1, len(row) - window + 1), window))
        return peak / window / STEP_S / max(self.mean_s(model), 1e-12)

    def cut(self, first: int, steps: int) -> RateTrace:
        """A part of it."""
        return RateTrace(self.name, self.models, tuple(row[first : first + steps] for row in self.counts))


CARDS = (
    *("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-7B-Instruct"),
    *("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-2-13b-hf", "Qwen/Qwen3-32B"),
    *("meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-30B-A3B"),
)
"""Sizes as public catalogues have them: many small ones, a few large."""


def published_marginals(seed: int, *, models: int = 142, hours: float = 24.0, mean_s: float = 60.0) -> RateTrace:
    """The synthetic trace: `mean_s` requests a second of all models together, `hours` long."""
    random = Random(f"{seed}/marginals")
    steps = round(hours * 3600 / STEP_S)
    weights = [1 / (rank + 1) for rank in range(models)]
    # The burstiest are not the most popular: who is asked all the time cannot be silent most of it.
    ratios = sorted((_peak_ratio(place, models, random) for place in range(models)), reverse=True)
    ranks = list(range(models))
    random.shuffle(ranks)
    ranks.sort(key=lambda rank: rank < 12)
    rows, found = [], []
    for ratio, rank in zip(ratios, ranks, strict=True):
        rate = mean_s * weights[rank] / sum(weights)
        shape = _bursts(ratio, steps, random)
        rows.append(_counts(rate, shape, random))
        found.append(_model(f"model-{rank:03d}", random))
    return RateTrace(f"{models} models, published marginals", tuple(found), tuple(rows))


def _peak_ratio(place: int, models: int, random: Random) -> float:
    """Peak over mean: 80 at most, 13 and more for fifteen models, 1.5 to 13 for the others."""
    if place < 15:
        return float(80.0 * (13 / 80) ** (place / 14))
    return float(1.5 * (13 / 1.5) ** random.random())


def _bursts(ratio: float, steps: int, random: Random) -> list[float]:
    """A course with mean 1 whose peak is about `ratio`: a quiet floor, and bursts of half an hour to two hours that
    together hold what the floor does not."""
    floor = max(0.02, min(0.8, 1.2 / ratio))
    shape = [floor * (1 + 0.5 * math.sin(2 * math.pi * (step * STEP_S / DAY_S - 0.3))) for step in range(steps)]
    left = (1 - sum(shape) / steps) * steps
    while left > 0:
        height = ratio * (1.0 if left * 1.0 >= ratio else left / ratio) * (0.6 + 0.4 * random.random())
        length = max(5, min(steps, round(random.uniform(30, 120)), math.ceil(left / height)))
        begin = random.randrange(max(1, steps - length + 1))
        for step in range(begin, begin + length):
            # Up over a tenth of the burst, then down slowly.
            into = (step - begin + 0.5) / length
            added = height * min(1.0, 10 * into) * (1 - 0.5 * into)
            room = max(0.0, ratio - shape[step])
            shape[step] += min(added, room)
            left -= min(added, room)
        left -= 1e-3
    mean = sum(shape) / steps
    return [value / mean for value in shape]


def _counts(rate: float, shape: Sequence[float], random: Random) -> tuple[int, ...]:
    """Requests a step: Poisson, its mean scattered by a Gamma of 30 % from step to step."""
    return tuple(_poisson(rate * value * STEP_S * random.gammavariate(11.1, 1 / 11.1), random) for value in shape)


def _poisson(mean: float, random: Random) -> int:
    if mean > 50:
        return max(0, round(random.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, random.random()
    while product > limit:
        count += 1
        product *= random.random()
    return count


def _model(name: str, random: Random) -> TracedModel:
    prompt, output = random.choice([300, 700, 1200]), random.choice([80, 150, 300])
    return TracedModel(name, random.choice(CARDS), LengthSpread.about(prompt), LengthSpread.about(output))


def servegen_models(folders: Sequence[Path], seed: int, *, hours: float, mean_s: float, start_s: float) -> RateTrace:
    """Recorded clients as models: each client's rate by the recording, scaled so that all together are `mean_s`."""
    random = Random(f"{seed}/servegen")
    clients = [client for folder in folders for client in read_clients(folder)]
    steps = round(hours * 3600 / STEP_S)
    rates = [[_rate(client, start_s + step * STEP_S) for step in range(steps)] for client in clients]
    total = sum(map(sum, rates)) / steps
    found, rows = [], []
    for number, (client, row) in enumerate(zip(clients, rates, strict=True)):
        if not any(row):
            continue
        lengths = client.lengths_at(start_s)
        card = CARDS[number % len(CARDS)]
        prompt, output = (min(8000.0, max(8.0, spread.mean)) for spread in (lengths.prompt, lengths.output))
        found.append(
            TracedModel(f"{client.name}-{number}", card, LengthSpread.about(prompt), LengthSpread.about(output))
        )
        rows.append(_counts(mean_s / total, row, random))
    return RateTrace(f"ServeGen, {len(found)} clients", tuple(found), tuple(rows))


def _rate(client: ServeGenClient, at_s: float) -> float:
    window = _window(client.rates, at_s)
    return 0.0 if window is None else window.rate_per_s


def _window(windows: Sequence[RateWindow], at_s: float) -> RateWindow | None:
    return next((window for window in windows if window.begin_s <= at_s < window.end_s), None)
