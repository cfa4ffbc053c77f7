"""From counts to nodes: who stands where, keeping what runs where it is. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from serai.placer.classes import NodeClass
from serai.placer.options import Option
from serai.placer.placement import Placed, Running
from serai.placer.problem import Problem


def pack(problem: Problem, counts: Sequence[int]) -> tuple[Placed, ...]:
    """Instances on nodes. Pinned sessions stay; of the others as many stay as their counts allow, unless a larger
    instance finds no room otherwise. What finds none at all (sizes that do not divide each other) is left out."""
    placed = [Placed(session.option, session.nodes, session.session) for session in problem.pinned]
    domains: defaultdict[str, set[str]] = defaultdict(set)
    for demand, held in zip(problem.demands, problem.pinned_domains, strict=True):
        domains[demand.model].update(held)
    spread = {demand.model for demand in problem.demands if demand.min_replicas > 1}
    for place, nodes in enumerate(problem.classes):
        wanted: dict[str, tuple[Option, int]] = {}
        for cell, count in zip(problem.cells, counts, strict=True):
            if cell.place == place and count:
                wanted[cell.option.key] = (cell.option, count)
        placed += _Class(nodes, problem.movable, spread, domains).fill(wanted)
    return tuple(placed)


class _Class:
    """The nodes of one class as they fill up."""

    def __init__(
        self,
        nodes: NodeClass,
        movable: Sequence[Running],
        spread: set[str],
        domains: defaultdict[str, set[str]],
    ) -> None:
        self.nodes = {node.name: node for node in nodes.nodes}
        self.free = dict(nodes.free)
        self.kept: dict[str, list[Running]] = defaultdict(list)
        self.here = [s for s in movable if all(name in self.nodes for name, _ in s.nodes)]
        self.spread = spread
        self.domains = domains

    def fill(self, wanted: dict[str, tuple[Option, int]]) -> list[Placed]:
        """Everything that is wanted of this class."""
        kept, fresh = self._keep(wanted)
        placed = []
        queue = sorted(fresh, key=self._order)
        while queue:
            option = queue.pop(0)
            names = self._room(option)
            if names is None:
                evicted = self._evict(option)
                kept = [session for session in kept if session not in evicted]
                queue = sorted([*queue, *(s.option for s in evicted)], key=self._order)
                names = self._room(option)
            if names is not None:
                placed.append(self._put(option, names))
        return [Placed(session.option, session.nodes, session.session) for session in kept] + placed

    def _order(self, option: Option) -> tuple[int, bool, str]:
        """Largest first; among equals, those that must be spread."""
        return (-option.gpus_per_node, option.model not in self.spread, option.key)

    def _keep(self, wanted: dict[str, tuple[Option, int]]) -> tuple[list[Running], list[Option]]:
        """Which sessions stay, and what is to be started beside them."""
        kept: list[Running] = []
        fresh: list[Option] = []
        emptying = self._emptying(wanted)
        for key, (option, count) in wanted.items():
            sessions = sorted((s for s in self.here if s.option.key == key), key=partial(self._dearness, emptying))
            if option.model in self.spread:
                sessions = self._apart(sessions)
            kept += sessions[:count]
            fresh += [option] * max(0, count - len(sessions))
        for session in kept:
            for name, gpus in session.nodes:
                self.free[name] -= gpus
                self.kept[name].append(session)
                self.domains[session.option.model].add(self.nodes[name].domain)
        return kept, fresh

    def _apart(self, sessions: list[Running]) -> list[Running]:
        """Sessions in failure domains of their own first."""
        seen = set(self.domains[sessions[0].option.model]) if sessions else set()
        first: list[Running] = []
        rest: list[Running] = []
        for session in sessions:
            domain = self.nodes[session.nodes[0][0]].domain
            (rest if domain in seen else first).append(session)
            seen.add(domain)
        return first + rest

    def _emptying(self, wanted: dict[str, tuple[Option, int]]) -> dict[str, int]:
        """GPUs of each node that hold sessions of which not all are wanted: what ends should end together, so that
        whole nodes become free."""
        running: Counter[str] = Counter(session.option.key for session in self.here)
        found: Counter[str] = Counter()
        for session in self.here:
            key = session.option.key
            if running[key] > (wanted[key][1] if key in wanted else 0):
                found.update(dict(session.nodes))
        return found

    def _dearness(self, emptying: dict[str, int], session: Running) -> tuple[int, float, float, str]:
        """Those on nodes where everything stays, then allocations that last, then sessions that have served long."""
        others = sum(emptying.get(name, 0) - gpus for name, gpus in session.nodes)
        ends = [self.nodes[name].ends_in_s for name, _ in session.nodes]
        lasts_s = min(float("inf") if end is None else end for end in ends)
        return (others, -lasts_s, -session.since_s, session.session)

    def _room(self, option: Option) -> list[str] | None:
        """The tightest nodes with room, in failure domains of their own where the model asks for that."""
        used = self.domains[option.model] if option.model in self.spread else set()
        with_room = [name for name, free in self.free.items() if free >= option.gpus_per_node]
        if len(with_room) < option.nodes:
            return None
        if option.nodes == 1:
            return [min(with_room, key=lambda name: (self.nodes[name].domain in used, self.free[name]))]
        return sorted(with_room, key=lambda name: (self.nodes[name].domain in used, self.free[name]))[: option.nodes]

    def _put(self, option: Option, names: Sequence[str]) -> Placed:
        for name in names:
            self.free[name] -= option.gpus_per_node
            self.domains[option.model].add(self.nodes[name].domain)
        return Placed(option, tuple((name, option.gpus_per_node) for name in names))

    def _evict(self, option: Option) -> list[Running]:
        """Sessions smaller than `option` that must give way on the node where that costs least."""
        needed = option.gpus_per_node
        choices = []
        for name, free in self.free.items():
            smaller = [s for s in self.kept[name] if s.option.gpus_per_node < needed and s.option.nodes == 1]
            smaller.sort(key=lambda s: (s.option.gpus, s.since_s))
            room, gone = free, []
            for session in smaller:
                if room >= needed:
                    break
                room += session.option.gpus
                gone.append(session)
            if room >= needed and gone:
                choices.append((sum(s.option.gpus * s.option.load_s for s in gone), name, gone))
        if not choices:
            return []
        _, name, gone = min(choices, key=lambda choice: choice[:2])
        for session in gone:
            self.free[name] += session.option.gpus
            self.kept[name].remove(session)
        return gone
