"""Bounds that know that instances are whole: GPUs get a price, and then every model can be looked at alone. Pure.

Lagrangian relaxation of the classes' GPUs. With a price y for a GPU of each class, the least that model m pays for a
share s with whole instances is

    C_m(s) = min Σ_c y · gpus_c · x_c   such that   Σ_c share_c · x_c ≥ s,   x whole

found by dynamic programming over parts of a share (each instance's share rounded up, so that the bound stays one). Then
for any y ≥ 0

    worst share   no t is possible with  Σ_m C_m(t) > Σ_k y_k · GPUs_k
    total         no total is above  Σ_k y_k · GPUs_k + Σ_m max over s in [t, 1] of (weight_m · s − C_m(s))

Models of more than `WHOLE_INSTANCES` instances lose little by being divisible, and count as that. The prices are the
duals of the linear relaxation; searching for better ones was tried and brought nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serai.placer.problem import Problem

PARTS = 4096
"""Of a share of 1."""
WHOLE_INSTANCES = 60

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Models:
    """All models that want something, in arrays: one row a model, one column a cell, padded with what nobody takes."""

    parts: NDArray[np.int64]
    shares: Floats
    gpus: Floats
    places: NDArray[np.int64]
    """Class of each cell."""
    pinned: NDArray[np.int64]
    """Parts that pinned sessions serve."""
    weights: Floats


def _arrays(problem: Problem) -> _Models | None:
    by_model = problem.cells_of_model()
    rows = [m for m, d in enumerate(problem.demands) if d.planned_requests_s > 0 and by_model[m]]
    if not rows:
        return None
    width = max(len(by_model[m]) for m in rows)
    shape = (len(rows), width)
    parts, shares, gpus = np.ones(shape, np.int64), np.full(shape, 1e-12), np.full(shape, 1e9)
    places = np.zeros(shape, np.int64)
    for row, number in enumerate(rows):
        for column, place in enumerate(by_model[number]):
            cell = problem.cells[place]
            share = min(1.0, cell.share)
            parts[row, column] = int(np.ceil(share * PARTS - 1e-9))
            shares[row, column], gpus[row, column] = share, cell.option.gpus
            places[row, column] = cell.place
    pinned = np.array([int(np.ceil(min(1.0, problem.pinned_share[m]) * PARTS)) for m in rows])
    weights = np.array([problem.demands[m].priority * problem.demands[m].planned_requests_s for m in rows])
    return _Models(parts, shares, gpus, places, pinned, weights)


def _least_cost(models: _Models, prices: Floats) -> Floats:
    """C_m(s) for every s in parts, one row a model."""
    pays = models.gpus * prices[models.places]
    count = len(pays)
    least = np.zeros((count, PARTS + 1))
    row = np.arange(count)[:, None]
    for part in range(1, PARTS + 1):
        least[:, part] = (pays + least[row, np.maximum(0, part - models.parts)]).min(axis=1)
    many = models.shares.max(axis=1) * WHOLE_INSTANCES < 1
    each = (pays / models.shares).min(axis=1)
    least[many] = each[many, None] * np.arange(PARTS + 1) / PARTS
    # What pinned sessions serve costs nothing.
    for number, pinned in enumerate(models.pinned):
        if pinned:
            least[number] = np.concatenate([np.zeros(pinned), least[number][: PARTS + 1 - pinned]])
    return least


def worst_share_bound(problem: Problem, prices: tuple[float, ...]) -> float:
    """No placement gives every model more than this share."""
    models = _arrays(problem)
    if models is None:
        return 1.0
    paid = _least_cost(models, np.array(prices)).sum(axis=0)
    possible = np.nonzero(paid <= _worth(problem, prices) * (1 + 1e-12))[0]
    # Between two parts the higher is not excluded.
    return float(min(1.0, (possible[-1] + 1) / PARTS))


def total_bound(problem: Problem, prices: tuple[float, ...], worst: float) -> float:
    """No placement with every model at `worst` serves more in all, weighted."""
    models = _arrays(problem)
    if models is None:
        return 0.0
    # A share between two parts costs no less than the lower, and gives no more than the higher.
    gains = np.minimum(1.0, np.arange(1, PARTS + 2) / PARTS) * models.weights[:, None]
    gains -= _least_cost(models, np.array(prices))
    return _worth(problem, prices) + float(gains[:, int(worst * PARTS) :].max(axis=1).sum())


def _worth(problem: Problem, prices: tuple[float, ...]) -> float:
    return sum(price * nodes.gpus for price, nodes in zip(prices, problem.classes, strict=True))
