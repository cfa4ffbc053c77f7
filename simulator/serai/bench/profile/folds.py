"""Cross-validation over fitted rows alone: what the structure and the spreads of the served fit are chosen by.

Four ways to leave rows out, each like something the held-out rows ask for: sixths of the configurations; the largest TP
of every model under a stack (sizes beyond those seen); a model everywhere; all dense models, or all with experts, of
one stack (what a stack has never shown). No held-out row is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256

from serai.bench.profile.served_fit import Predictor, fit_served
from serai.bench.profile.silicon import ServedRow

SIXTHS = 6
CEILING = 0.5
"""The most that one row counts for: beyond it the label is in doubt, not the model."""
WEIGHTS = {"configurations": 0.31, "largest_tp": 0.31, "model": 0.19, "kind": 0.19}
"""By the make-up of the held-out rows: 62 % are sizes never fitted, 38 % models never fitted."""

Group = Callable[[ServedRow], str | None]
"""Rows of one group are left out together; None is never left out."""


def groups(rows: Sequence[ServedRow]) -> Mapping[str, Group]:
    """How each way groups `rows`, by the names of WEIGHTS."""
    sizes: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        sizes[row.stack, row.model].add(row.tensor)

    def largest(row: ServedRow) -> str | None:
        known = sizes[row.stack, row.model]
        return row.stack if len(known) > 1 and row.tensor == max(known) else None

    return {"configurations": _sixth, "largest_tp": largest, "model": lambda row: row.model, "kind": _kind}


def _sixth(row: ServedRow) -> str:
    digest = sha256(f"fold|{row.configuration}|{row.stack}".encode()).hexdigest()
    return str(int(digest, 16) % SIXTHS)


def _kind(row: ServedRow) -> str:
    return f"{row.stack}, {'experts' if row.instance.card.experts else 'dense'}"


def folds(rows: Sequence[ServedRow], group: Group) -> Iterator[tuple[list[ServedRow], list[ServedRow]]]:
    """What to fit and what to judge, group by group."""
    for name in sorted({found for row in rows if (found := group(row)) is not None}):
        yield [r for r in rows if group(r) != name], [r for r in rows if group(r) == name]


def left_out_errors(fitted: Sequence[ServedRow], judged: Sequence[ServedRow]) -> list[float]:
    """Relative errors of `judged` by a fit to `fitted`; rows of stacks that it does not know are left out."""
    predict = {key: Predictor(profile) for key, profile in fit_served(fitted).items()}
    known = [row for row in judged if (row.system, row.stack) in predict]
    return [predict[r.system, r.stack].tpot_ms(r) / r.tpot_ms - 1 for r in known]


def criterion(errors: Mapping[str, Sequence[float]]) -> float:
    """The one number that structures are compared by: mean errors, each row's up to CEILING, by WEIGHTS."""
    return sum(
        weight * sum(min(abs(e), CEILING) for e in errors[name]) / len(errors[name]) for name, weight in WEIGHTS.items()
    )
