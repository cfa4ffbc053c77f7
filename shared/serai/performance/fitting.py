"""Fitting factors to measurements: damped least squares with priors and a loss that outliers cannot dominate.

Pure Python on purpose: the largest fit has some seventy parameters and seven hundred rows and takes seconds, and the
result must be the same on every machine that can run the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, log1p, sqrt

Residuals = Callable[[Sequence[float]], list[float]]
"""Parameters (on their unbounded scale) to one number per row: log(predicted / measured)."""


class FitFailed(ValueError):
    """The rows cannot determine a fit; the text says why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number to fit. It moves on an unbounded scale: the logarithm, or the logit below `ceiling`.

    `guess` is where it starts and what it is drawn to; `spread` is how many units of the unbounded scale it may
    stray before that costs as much as one standard error of a row.
    """

    name: str
    guess: float
    spread: float
    ceiling: float | None = None

    def value(self, position: float) -> float:
        """The parameter at `position` on the unbounded scale."""
        if self.ceiling is None:
            return exp(min(position, 50.0))
        return self.ceiling / (1.0 + exp(-max(-50.0, min(50.0, position))))

    @property
    def start(self) -> float:
        """The guess on the unbounded scale."""
        if self.ceiling is None:
            return log(self.guess)
        return log(self.guess / (self.ceiling - self.guess))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that depend on some parameters only: `depends` are their indices, which saves most of the Jacobian."""

    residuals: Residuals
    depends: Sequence[int]
    weight: float = 1.0
    """How much one row counts: less where many rows share their cause of error, such as sizes of one measurement."""


def fit(
    start: Sequence[float],
    spreads: Sequence[float],
    blocks: Sequence[Block],
    *,
    row_errors: Sequence[float] = (0.3, 0.12, 0.06),
    rounds: int = 20,
) -> list[float]:
    """The positions that least disagree with all rows and with `start`, by Levenberg-Marquardt.

    A row that is off by e (relative) costs log(1 + (e/row_error)²), the Cauchy loss: beyond a few `row_error` it
    hardly pulls, so mislabelled measurements do not bend the rest. The loss is tightened in the steps of
    `row_errors`, so that rows far off at first are not taken for mislabelled ones. Each parameter also costs
    ((position − start)/spread)². Raises FitFailed when there are no rows.
    """
    position = list(start)
    for row_error in row_errors:
        position = _descend(position, start, spreads, blocks, row_error, rounds)
    return position


_SETTLED = 3e-4
"""Relative gain of a round below which a descent ends."""


def _descend(
    position: list[float],
    start: Sequence[float],
    spreads: Sequence[float],
    blocks: Sequence[Block],
    row_error: float,
    rounds: int,
) -> list[float]:
    state = _evaluate(position, start, spreads, blocks, row_error)
    if len(state) == len(start):
        raise FitFailed("no rows to fit")
    damping = 1e-2
    for _ in range(rounds):
        normal, gradient = _normal_equations(position, spreads, blocks, row_error, state)
        cost = _square(state)
        for _ in range(8):
            step = _damped_step(normal, gradient, damping)
            moved = [p + s for p, s in zip(position, step, strict=True)]
            tried = _evaluate(moved, start, spreads, blocks, row_error)
            if _square(tried) < cost:
                break
            damping *= 5
        else:
            return position
        damping = max(damping / 5, 1e-6)
        position, state = moved, tried
        if cost - _square(state) < _SETTLED * cost:
            break
    return position


def _cauchy(error: float, row_error: float) -> float:
    scaled = error / row_error
    return (1.0 if scaled >= 0 else -1.0) * sqrt(log1p(scaled * scaled))


def _weighted(block: Block, position: Sequence[float], row_error: float) -> list[float]:
    root = sqrt(block.weight)
    return [root * _cauchy(e, row_error) for e in block.residuals(position)]


def _evaluate(
    position: Sequence[float],
    start: Sequence[float],
    spreads: Sequence[float],
    blocks: Sequence[Block],
    row_error: float,
) -> list[float]:
    rows = [e for block in blocks for e in _weighted(block, position, row_error)]
    return rows + [(p - s) / w for p, s, w in zip(position, start, spreads, strict=True)]


def _square(values: Sequence[float]) -> float:
    return sum(v * v for v in values)


def _normal_equations(
    position: Sequence[float],
    spreads: Sequence[float],
    blocks: Sequence[Block],
    row_error: float,
    state: Sequence[float],
) -> tuple[list[list[float]], list[float]]:
    """JᵀJ and Jᵀr, with the Jacobian taken block by block with forward differences."""
    size, nudge = len(position), 1e-3
    normal = [[0.0] * size for _ in range(size)]
    gradient = [0.0] * size
    offset = 0
    for block in blocks:
        columns: list[list[float]] = []
        rows = 0
        for index in block.depends:
            moved = list(position)
            moved[index] += nudge
            changed = _weighted(block, moved, row_error)
            rows = len(changed)
            columns.append([(c - state[offset + i]) / nudge for i, c in enumerate(changed)])
        for a, index in enumerate(block.depends):
            column = columns[a]
            gradient[index] += sum(c * state[offset + i] for i, c in enumerate(column))
            for b in range(a, len(columns)):
                dot = sum(map(_times, column, columns[b]))
                normal[index][block.depends[b]] += dot
                if b != a:
                    normal[block.depends[b]][index] += dot
        offset += rows if block.depends else len(block.residuals(position))
    for index, spread in enumerate(spreads):
        normal[index][index] += 1 / spread**2
        gradient[index] += state[offset + index] / spread
    return normal, gradient


def _times(a: float, b: float) -> float:
    return a * b


def _damped_step(normal: Sequence[Sequence[float]], gradient: Sequence[float], damping: float) -> list[float]:
    matrix = [
        [value * (1 + damping) if i == j else value for j, value in enumerate(row)] for i, row in enumerate(normal)
    ]
    return solve(matrix, [-g for g in gradient])


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The x with matrix·x = right, by Gaussian elimination with row exchange. Raises FitFailed when singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-300:
            raise FitFailed("the rows do not determine every parameter")
        rows[i], rows[pivot] = rows[pivot], rows[i]
        top = rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / top[i]
            if factor:
                rows[r] = [value - factor * above for value, above in zip(rows[r], top, strict=True)]
    result = [0.0] * size
    for i in reversed(range(size)):
        result[i] = (rows[i][size] - sum(rows[i][j] * result[j] for j in range(i + 1, size))) / rows[i][i]
    return result
