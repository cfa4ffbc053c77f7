"""A first placement in milliseconds: the worst-served model takes the next instance, until nothing fits. Pure.

It is the solver's warm start, and the answer where there is no solver or no time. Counts only; nodes come with
`packing`.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from serai.placer.chains import Chains
from serai.placer.counts import Counts, weight
from serai.placer.problem import Cell, Problem

_EQUAL = 1e-9
_SWAPS_MAX = 2000
_POOR_TRIED = 8


def greedy(problem: Problem, late: Callable[[], bool] = lambda: False) -> Counts:
    """A whole placement: minimum replicas, then what runs and is of use, then the worst-served fill up. `late` ends the
    search for improvements."""
    counts = Counts(problem)
    values = _values(problem)
    for number in range(len(problem.demands)):
        counts.order(number, lambda place: -values[place])
    _minimums(counts)
    _keep(counts)
    _fill(counts)
    _take_from_the_rich(counts, late)
    _raise_total(counts, late)
    _trim(counts)
    return counts


def rounded(problem: Problem, fractions: Sequence[float], distance: Sequence[float]) -> Counts:
    """A placement from fractional counts: whole instances first, then as `greedy`, by how far each cell is from being
    worth it."""
    counts = Counts(problem)
    for number in range(len(problem.demands)):
        counts.order(number, lambda place: distance[place] / problem.cells[place].option.gpus)
    for place, fraction in enumerate(fractions):
        for _ in range(int(fraction + 1e-6)):
            if counts.fits(place):
                counts.add(place)
    _minimums(counts)
    _fill(counts)
    _take_from_the_rich(counts, lambda: False)
    _raise_total(counts, lambda: False)
    _trim(counts)
    return counts


def raised(problem: Problem, start: Sequence[int]) -> list[int]:
    """`start` with a larger total, and nobody who was worst-served or better off left worse than that."""
    counts = Counts(problem)
    for place, count in enumerate(start):
        if count:
            counts.add(place, count)
    values = _values(problem)
    for number in range(len(problem.demands)):
        counts.order(number, lambda place: -values[place])
    _raise_total(counts, lambda: False)
    return counts.of


def _values(problem: Problem) -> list[float]:
    """What a cell's GPU-hours give, against what other models would get from the same GPUs: its share per GPU over the
    model's best, divided by the kind's mean of that."""
    best: defaultdict[int, float] = defaultdict(float)
    by_kind: dict[tuple[int, str], float] = {}
    for cell in problem.cells:
        each = _each(cell)
        best[cell.model] = max(best[cell.model], each)
        key = (cell.model, cell.option.gpu)
        by_kind[key] = max(by_kind.get(key, 0.0), each)
    means: defaultdict[str, list[float]] = defaultdict(list)
    for (model, gpu), each in by_kind.items():
        if best[model] > 0:
            means[gpu].append(each / best[model])
    price = {gpu: sum(shares) / len(shares) for gpu, shares in means.items()}
    return [
        _each(cell) / best[cell.model] / max(price[cell.option.gpu], 1e-9) if best[cell.model] > 0 else 1.0
        for cell in problem.cells
    ]


def _each(cell: Cell) -> float:
    return cell.share / cell.option.gpus


def _keep(counts: Counts) -> None:
    """What runs stays while its model needs it; the worst-served of them first, so that room is shared."""
    problem = counts.problem
    for place, cell in enumerate(problem.cells):
        for _ in range(cell.running - counts.of[place]):
            if counts.shares[cell.model] < 1 - _EQUAL and counts.fits(place):
                counts.add(place)


def _minimums(counts: Counts) -> None:
    """Minimum replicas, where they run already, then each in another failure domain as far as classes tell."""
    problem = counts.problem
    order = sorted(range(len(problem.demands)), key=lambda m: -problem.demands[m].priority)
    for number in order:
        domains: set[str] = set(problem.pinned_domains[number])
        while counts.below_minimum(number) and counts.replicas[number] < problem.demands[number].min_replicas:
            open_cells = [place for place in counts.cells(number) if counts.fits(place)]
            if not open_cells:
                break

            def rank(place: int, seen: set[str] = domains, number: int = number) -> tuple[bool, bool, int]:
                cell = problem.cells[place]
                fresh = len(problem.classes[cell.place].domains - seen) > 0
                return (not fresh, cell.running <= counts.of[place], counts.cells(number).index(place))

            chosen = min(open_cells, key=rank)
            fresh = sorted(problem.classes[problem.cells[chosen].place].domains - domains)
            domains.update(fresh[:1])
            counts.add(chosen)


def _fill(counts: Counts) -> None:
    """The worst-served first, until it has enough or finds no room."""
    problem = counts.problem
    hungry = [
        (counts.shares[number], -_worth_per_gpu(counts, number), number)
        for number, demand in enumerate(problem.demands)
        if demand.planned_requests_s > 0 and counts.shares[number] < 1 - _EQUAL
    ]
    heapq.heapify(hungry)
    while hungry:
        share, worth, number = heapq.heappop(hungry)
        place = _best_open(counts, number, 1 - share)
        if place is None:
            continue
        counts.add(place)
        if counts.shares[number] < 1 - _EQUAL:
            heapq.heappush(hungry, (counts.shares[number], worth, number))


def _worth_per_gpu(counts: Counts, number: int) -> float:
    """What the first GPU given to a model adds to the total, at best: who comes first among equally served ones, when
    there is not an engine for everyone."""
    cells = counts.problem.cells
    best = max((min(1.0, cells[place].share) / cells[place].option.gpus for place in counts.cells(number)), default=0.0)
    return best * weight(counts.problem, number)


def _best_open(counts: Counts, number: int, lacking: float) -> int | None:
    """The cell with the best value for what is still lacking: an instance of which half is idle is worth half."""
    best, found = 0.0, None
    values = counts.problem.cells
    for rank, place in enumerate(counts.cells(number)):
        cell = values[place]
        if cell.share <= 0:
            continue
        # Cells come in the order of their value; a rank is enough to compare, what is lacking decides.
        value = min(cell.share, lacking) / cell.share / (1 + rank)
        if value > best and counts.fits(place):
            best, found = value, place
    return found


def _take_from_the_rich(counts: Counts, late: Callable[[], bool]) -> None:
    """While it helps: the worst-served model takes the room of instances whose models stay better off than it was."""
    problem, chains = counts.problem, Chains(counts)
    for _ in range(_SWAPS_MAX):
        poor = sorted(
            (counts.shares[number], number)
            for number, demand in enumerate(problem.demands)
            if demand.planned_requests_s > 0 and counts.cells(number) and counts.shares[number] < 1 - _EQUAL
        )
        # The worst-served may be beyond help while the next is not.
        if late() or not any(_helped(counts, chains, number, share) for share, number in poor[:_POOR_TRIED]):
            return


def _helped(counts: Counts, chains: Chains, number: int, share: float) -> bool:
    """One instance more for a model that is served `share`: where others can spare the room, or by a chain."""
    cells = counts.cells(number)
    if any(_swap(counts, place, share) for place in cells):
        return True
    useful = (place for place in cells if counts.problem.cells[place].share > 0)
    return any(chains.seat(place, share + 2 * _EQUAL, math.inf) for place in useful)


def _swap(counts: Counts, wanted: int, share: float) -> bool:
    """Make room for one more of `wanted`, if everybody who gives stays above `share`."""
    cell = counts.problem.cells[wanted]
    if cell.share <= 0 or counts.of[wanted] >= cell.most:
        return False
    taken: list[int] = []
    while not counts.fits(wanted):
        rich = max(
            (
                (counts.shares[other.model] - other.share, place)
                for place in counts.filled(cell.place)
                if (other := counts.problem.cells[place]).model != cell.model and not counts.below_minimum(other.model)
            ),
            default=None,
        )
        if rich is None or rich[0] <= share + _EQUAL or len(taken) > cell.option.gpus:
            for place in taken:
                counts.add(place)
            return False
        counts.add(rich[1], -1)
        taken.append(rich[1])
    counts.add(wanted)
    return True


def _raise_total(counts: Counts, late: Callable[[], bool]) -> None:
    """While it helps: who lacks most in all takes the room of those who lose less; nobody falls below the worst, or
    what the rules allow below it."""
    problem = counts.problem
    slack = problem.rules.worst_share_slack
    floor, chains = 0.0, Chains(counts)
    for _ in range(_SWAPS_MAX):
        # A little above what must be held, since the programme rounds shares down.
        floor = max(floor, counts.worst() * (1 - slack))
        worst = floor * (1 if slack else 1 + 1e-6)
        lacking = sorted(
            (
                (-weight(problem, number) * (1 - counts.shares[number]), number)
                for number, demand in enumerate(problem.demands)
                if demand.planned_requests_s > 0 and counts.cells(number) and counts.shares[number] < 1 - _EQUAL
            )
        )
        tried = [place for _, number in lacking[:_POOR_TRIED] for place in counts.cells(number)]
        if late() or not any(_pays(counts, place, worst) or _chained(counts, chains, place, worst) for place in tried):
            return


def _chained(counts: Counts, chains: Chains, wanted: int, worst: float) -> bool:
    """One more of `wanted` by a chain that loses less than it gives."""
    cell = counts.problem.cells[wanted]
    if cell.share <= 0 or counts.of[wanted] >= cell.most:
        return False
    gain = weight(counts.problem, cell.model) * min(cell.share, 1 - counts.shares[cell.model])
    return chains.seat(wanted, worst, gain * (1 - 1e-6))


def _pays(counts: Counts, wanted: int, worst: float) -> bool:
    """Make room for one more of `wanted` if that adds more to the total than it takes."""
    cell = counts.problem.cells[wanted]
    if cell.share <= 0 or counts.of[wanted] >= cell.most:
        return False
    gain = weight(counts.problem, cell.model) * min(cell.share, 1 - counts.shares[cell.model])
    taken: list[int] = []
    lost = 0.0
    while lost < gain and not counts.fits(wanted) and len(taken) <= cell.option.gpus:
        found = min(_losses(counts, cell, worst), default=None)
        if found is None:
            break
        lost += found[1]
        counts.add(found[2], -1)
        taken.append(found[2])
    if lost < gain * (1 - 1e-6) and counts.fits(wanted):
        counts.add(wanted)
        return True
    for place in taken:
        counts.add(place)
    return False


def _losses(counts: Counts, cell: Cell, worst: float) -> Iterator[tuple[float, float, int]]:
    """What giving up one instance in the class loses: per GPU, in all, and which."""
    for place in counts.filled(cell.place):
        other = counts.problem.cells[place]
        left = counts.shares[other.model] - other.share
        if other.model == cell.model or counts.below_minimum(other.model) or left < worst - _EQUAL:
            continue
        lost = weight(counts.problem, other.model) * (min(1.0, counts.shares[other.model]) - min(1.0, left))
        yield lost / other.option.gpus, lost, place


def _trim(counts: Counts) -> None:
    """Give up what nobody needs, the dearest first."""
    cells = counts.problem.cells
    for place in sorted(range(len(cells)), key=lambda p: -cells[p].run_price):
        cell = cells[place]
        while (
            counts.of[place]
            and not counts.below_minimum(cell.model)
            and counts.shares[cell.model] - cell.share >= 1 - _EQUAL
        ):
            counts.add(place, -1)
