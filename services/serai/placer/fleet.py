"""What GPUs there are: nodes of all allocations, checked once. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from serai.performance.hardware import UnknownHardware, find_gpu
from serai.runtime.fields import BadInput

GPUS_PER_NODE_MAX = 1024
NODES_MAX = 100_000


class BadFleet(BadInput):
    """A fleet that cannot be: which node and field, what is wrong, what to do."""


@dataclass(frozen=True, slots=True)
class Node:
    """One host of an allocation, with GPUs of one kind."""

    name: str
    """Unique in the fleet."""
    gpu: str
    """As in `performance.hardware`; `Fleet` writes the catalogue's name in its place."""
    gpus: int
    site: str = ""
    provider: str = ""
    failure_domain: str = ""
    """What fails together with others of the same name (a rack, a switch); empty: the node alone."""
    ends_in_s: float | None = None
    """Until the allocation ends; None: not known to end."""
    storage_bytes_s: float = 2e9
    """At which an engine here reads weights."""
    host_agent: str = ""
    """The pool agent that would carry out what is placed here."""

    @property
    def domain(self) -> str:
        """The failure domain, which is the node itself where none is given."""
        return self.failure_domain or self.name


@dataclass(frozen=True)
class Fleet:
    """All nodes. Raises BadFleet for a node that appears twice, an unknown GPU, or a number that cannot be."""

    nodes: Sequence[Node]
    by_name: Mapping[str, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.nodes) > NODES_MAX:
            raise BadFleet("nodes", f"there are {len(self.nodes)}", f"give at most {NODES_MAX}")
        nodes = tuple(_checked(place, node) for place, node in enumerate(self.nodes))
        twice = [name for name, times in Counter(node.name for node in nodes).items() if times > 1]
        if twice:
            raise BadFleet(f"node `{twice[0]}`", "appears twice", "give every node a name of its own")
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "by_name", {node.name: node for node in nodes})

    @property
    def gpus(self) -> int:
        """All of them."""
        return sum(node.gpus for node in self.nodes)

    def gpus_by_kind(self) -> dict[str, int]:
        """GPUs of each kind, by catalogue name, in alphabetical order."""
        counted: Counter[str] = Counter()
        for node in self.nodes:
            counted[node.gpu] += node.gpus
        return dict(sorted(counted.items()))


def _checked(place: int, node: Node) -> Node:
    if not node.name:
        raise BadFleet(f"nodes[{place}].name", "is empty", "name the node")
    at = f"node `{node.name}`"
    try:
        gpu = find_gpu(node.gpu).name
    except UnknownHardware as error:
        raise BadFleet(f"{at}, gpu", str(error), "write a name of the catalogue") from error
    if not 1 <= node.gpus <= GPUS_PER_NODE_MAX:
        raise BadFleet(f"{at}, gpus", f"is {node.gpus}", f"give 1 to {GPUS_PER_NODE_MAX}")
    if not 0 < node.storage_bytes_s < math.inf:
        raise BadFleet(f"{at}, storage_bytes_s", f"is {node.storage_bytes_s}", "give bytes per second above 0")
    if node.ends_in_s is not None and not node.ends_in_s >= 0:
        raise BadFleet(f"{at}, ends_in_s", f"is {node.ends_in_s}", "give seconds of 0 or more, or leave it out")
    return node if gpu == node.gpu else replace(node, gpu=gpu)
