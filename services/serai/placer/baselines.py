"""How others place models, for comparison. Pure.

| name | idea |
|---|---|
| `exhaustive` | OpenTela's search: every allocation of instances to two kinds of GPU; best worst-drained model |
| `mem_p` | its baseline: GPUs in proportion to rate × parameters, nearest allocation |
| `equal_share` | every model the same number of GPUs of each kind |
| `maximize_replicas` | the fewest GPUs an instance, replicas even over models, weakest GPU first |
| `workload_balanced` | the next instance to the model with the most tokens a second per instance |

All work with one option a model and kind (fixed parallelism, as the code they follow) and count GPUs by kind: nodes are
not looked at, which is part of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from serai.placer.demand import ModelDemand
from serai.placer.options import Option

Allocation = tuple[tuple[int, ...], ...]
"""Instances by model, then by kind of GPU."""


@dataclass(frozen=True)
class Table:
    """Models, kinds, and the one option of each pair; None where there is none."""

    demands: tuple[ModelDemand, ...]
    kinds: tuple[str, ...]
    gpus: tuple[int, ...]
    options: tuple[tuple[Option | None, ...], ...]

    @classmethod
    def smallest(cls, demands: Sequence[ModelDemand], gpus: Mapping[str, int], options: Sequence[Option]) -> Table:
        """With the option of the fewest GPUs for every pair."""
        kinds = tuple(gpus)
        rows = []
        for demand in demands:
            row: list[Option | None] = []
            for kind in kinds:
                own = [o for o in options if o.model == demand.model and o.gpu == kind and o.nodes == 1]
                row.append(min(own, key=lambda o: (o.gpus, -o.requests_s), default=None))
            rows.append(tuple(row))
        return cls(tuple(demands), kinds, tuple(gpus.values()), tuple(rows))

    def rate(self, allocation: Allocation, model: int) -> float:
        """Requests a second that a model is served."""
        pairs = zip(allocation[model], self.options[model], strict=True)
        return sum(count * option.requests_s for count, option in pairs if option is not None)

    def shares(self, allocation: Allocation) -> list[float]:
        """Per model, of its planned demand; may exceed 1."""
        return [self.rate(allocation, m) / d.planned_requests_s for m, d in enumerate(self.demands)]

    def left(self, allocation: Allocation) -> list[int]:
        """GPUs of each kind that nobody has."""
        return [
            total
            - sum(
                row[kind] * option.gpus
                for row, options in zip(allocation, self.options, strict=True)
                if (option := options[kind])
            )
            for kind, total in enumerate(self.gpus)
        ]


def allocations(table: Table) -> Iterator[Allocation]:
    """Every allocation in which all but the first model take any number of instances and the first takes what is left:
    for 24 and 32 GPUs and sizes 1, 2 and 4 these are OpenTela's 3,969 when the last two have an instance of each."""
    by_kind = [list(_splits(table, kind)) for kind in range(len(table.kinds))]
    for split in product(*by_kind):
        yield tuple(zip(*split, strict=True))


def _splits(table: Table, kind: int) -> Iterator[tuple[int, ...]]:
    sizes = [option.gpus if (option := row[kind]) else 0 for row in table.options]

    def rest(model: int, left: int) -> Iterator[tuple[int, ...]]:
        if model == 0:
            yield (left // sizes[0] if sizes[0] else 0,)
            return
        for count in range(left // sizes[model] + 1 if sizes[model] else 1):
            for before in rest(model - 1, left - count * sizes[model]):
                yield (*before, count)

    yield from rest(len(sizes) - 1, table.gpus[kind])


def exhaustive(table: Table) -> Allocation:
    """The allocation whose worst-served model is served best; the first of equals, as in `calculator.py`."""
    return max(allocations(table), key=lambda allocation: min(table.shares(allocation)))


def mem_p(table: Table, parameters: Mapping[str, float]) -> Allocation:
    """GPUs in proportion to rate × parameters, whatever their kind: the allocation with the least sum of deviations
    (`memory_calculator.py`)."""
    weights = [demand.planned_requests_s * parameters[demand.model] for demand in table.demands]
    wanted = [sum(table.gpus) * weight / sum(weights) for weight in weights]

    def deviation(allocation: Allocation) -> float:
        found = 0.0
        for target, row, options in zip(wanted, allocation, table.options, strict=True):
            found += abs(target - sum(c * option.gpus for c, option in zip(row, options, strict=True) if option))
        return found

    return min(allocations(table), key=deviation)


def equal_share(table: Table) -> Allocation:
    """The same number of GPUs of each kind to every model."""
    return tuple(
        tuple(
            total // len(table.demands) // option.gpus if option else 0
            for option, total in zip(options, table.gpus, strict=True)
        )
        for options in table.options
    )


def maximize_replicas(table: Table) -> Allocation:
    """Instances one at a time, to the model with the fewest, on the weakest kind that has room."""
    rows = [[0] * len(table.kinds) for _ in table.demands]
    weakest_first = sorted(range(len(table.kinds)), key=lambda kind: _strength(table, kind))
    while True:
        for model in sorted(range(len(rows)), key=lambda m: (sum(rows[m]), m)):
            if _add_one(table, rows, model, weakest_first):
                break
        else:
            return tuple(map(tuple, rows))


def workload_balanced(table: Table) -> Allocation:
    """Instances one at a time, to the model with the most tokens a second per instance, on the weakest kind that has
    room."""
    rows = [[0] * len(table.kinds) for _ in table.demands]
    weakest_first = sorted(range(len(table.kinds)), key=lambda kind: _strength(table, kind))
    load = [d.planned_requests_s * (d.prompt.mean + d.output.mean) for d in table.demands]
    while True:
        for model in sorted(range(len(rows)), key=lambda m: (-load[m] / max(sum(rows[m]), 1e-3), m)):
            if _add_one(table, rows, model, weakest_first):
                break
        else:
            return tuple(map(tuple, rows))


def _add_one(table: Table, rows: list[list[int]], model: int, kinds: Sequence[int]) -> bool:
    left = table.left(tuple(map(tuple, rows)))
    for kind in kinds:
        option = table.options[model][kind]
        if option is not None and option.gpus <= left[kind]:
            rows[model][kind] += 1
            return True
    return False


def _strength(table: Table, kind: int) -> float:
    return sum(o.requests_s / o.gpus for row in table.options if (o := row[kind]) is not None)
