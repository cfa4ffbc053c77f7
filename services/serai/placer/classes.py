"""Nodes that are alike, taken together: a fleet of thousands of GPUs becomes a few dozen classes. Pure.

What may lie together on the nodes of a class is a bin-packing question with an exact answer in counts. Where every
size divides the next (1, 2, 4, 8 GPUs), filling largest first is optimal, and counts fit exactly when for each size s

    Σ over sizes t ≥ s of items(t) · t/s  ≤  Σ over nodes of ⌊free GPUs / s⌋

so that nodes of different sizes may share a class. For other sizes the fillings of a node are listed, and each node
takes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import log

from serai.placer.fleet import Node

CLASSES_MAX = 64
CELLS_MAX = 6000
"""Classes times options. Distinctions are given up, the least important first, until there are no more."""
ENDS_MAX = 12
"""Different ends of allocations that are told apart; more are rounded down."""
_END_STEP = 1.25
_SETTLED_S = 48 * 3600.0
"""An allocation that lasts longer counts as endless."""


@dataclass(frozen=True)
class NodeClass:
    """Nodes that a plan need not tell apart, except for their size."""

    gpu: str
    nodes: tuple[Node, ...]
    free: Mapping[str, int]
    """GPUs of each node that no pinned session holds."""
    ends_in_s: float | None
    provider: str
    """Empty where providers are not told apart."""
    domains: frozenset[str]

    @cached_property
    def rooms(self) -> dict[int, int]:
        """How many nodes have so many free GPUs."""
        return dict(Counter(self.free.values()))

    @cached_property
    def gpus(self) -> int:
        """Free ones, of all nodes."""
        return sum(self.free.values())

    def slots(self, size: int) -> int:
        """How many items of `size` GPUs find room."""
        return sum(gpus // size * nodes for gpus, nodes in self.rooms.items())


@dataclass(frozen=True, slots=True)
class _Distinctions:
    """What makes two nodes different."""

    provider: bool
    occupied: bool


def classify(
    nodes: Sequence[tuple[Node, int]],
    occupied: Set[str],
    *,
    by_provider: bool,
    options: int = 1,
) -> list[NodeClass]:
    """Classes of `nodes` with their free GPUs. Nodes that are `occupied` stand alone where that is affordable, so that
    a plan knows what it can keep."""
    ends = _rounded_ends([node.ends_in_s for node, _ in nodes])
    found: list[NodeClass] = []
    for alone in (True, False):
        distinctions = _Distinctions(by_provider, alone)
        found = _grouped(nodes, ends, occupied, distinctions)
        if len(found) <= CLASSES_MAX and len(found) * options <= CELLS_MAX:
            break
    return found


def _grouped(
    nodes: Sequence[tuple[Node, int]],
    ends: Mapping[float | None, float | None],
    occupied: Set[str],
    by: _Distinctions,
) -> list[NodeClass]:
    groups: dict[tuple[object, ...], list[tuple[Node, int]]] = {}
    for node, free in nodes:
        if free > 0:
            groups.setdefault(_key(node, ends[node.ends_in_s], occupied, by), []).append((node, free))
    return [
        NodeClass(
            gpu=members[0][0].gpu,
            nodes=tuple(node for node, _ in members),
            free={node.name: free for node, free in members},
            ends_in_s=ends[members[0][0].ends_in_s],
            provider=members[0][0].provider if by.provider else "",
            domains=frozenset(node.domain for node, _ in members),
        )
        for members in groups.values()
    ]


def _key(node: Node, end: float | None, occupied: Set[str], by: _Distinctions) -> tuple[object, ...]:
    alone = node.name if by.occupied and node.name in occupied else ""
    provider = node.provider if by.provider else ""
    return node.gpu, end, provider, alone


def _rounded_ends(ends: Sequence[float | None]) -> dict[float | None, float | None]:
    """Ends as they are told apart: exact when they are few, else down to the next step of a quarter."""
    known = {end for end in ends if end is not None and end < _SETTLED_S}
    found: dict[float | None, float | None] = dict.fromkeys(ends)
    for end in known:
        found[end] = end if len(known) <= ENDS_MAX or end <= 1 else _END_STEP ** int(log(end) / log(_END_STEP))
    return found


# What fits


def is_chain(sizes: Sequence[int]) -> bool:
    """Whether each size divides the next larger."""
    ordered = sorted(set(sizes))
    return all(large % small == 0 for small, large in pairwise(ordered))


@cache
def fillings(gpus: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to fill a node of `gpus` with items of `sizes` so that no further one fits: counts by size."""
    least = min(sizes)

    def rest(place: int, left: int) -> Iterator[tuple[int, ...]]:
        if place == len(sizes):
            if left < least:
                yield ()
            return
        for count in range(left // sizes[place], -1, -1):
            for more in rest(place + 1, left - count * sizes[place]):
                yield (count, *more)

    return tuple(rest(0, gpus))


def packs(rooms: Mapping[int, int], counts: Mapping[int, int]) -> bool:
    """Whether largest-first, tightest-first finds room for `counts` items by size in `rooms`, nodes by free GPUs. Exact
    for chains of sizes; for others a yes is right and a no may be wrong."""
    free = dict(rooms)
    for size in sorted((size for size, count in counts.items() if count), reverse=True):
        left = counts[size]
        while left:
            tight = min((room for room, number in free.items() if number and room >= size), default=None)
            if tight is None:
                return False
            each = tight // size
            full = min(free[tight], left // each)
            taken, held = (full, each) if full else (1, left)
            free[tight] -= taken
            free[tight - held * size] = free.get(tight - held * size, 0) + taken
            left -= taken * held
    return True
