"""Links that carry KV caches between instances: one message at a time, in the order in which they were asked for."""

from __future__ import annotations

from dataclasses import dataclass

from serai.performance.hardware import Link

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Network:
    """How nodes are connected. Bandwidths are a node's, one direction, shared by all its instances.

    `share` is what block-wise KV transfer reaches of the line rate: 0.5 to 0.7 with one KV block a message.
    """

    inside: Link
    """Between instances of one node."""
    between: Link
    share: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"a link's share must be in 0..1, not {self.share}")


@dataclass(slots=True)
class Lane:
    """One direction of one link: free again at `free_ns`."""

    free_ns: int = 0
    busy_ns: int = 0
    bytes_carried: int = 0
    messages: int = 0


class Links:
    """All lanes of a cluster. A message between nodes takes the sender's lane out and the receiver's lane in at the
    same time, so it begins when both are free; inside a node there is one lane."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.lanes: dict[tuple[str, int], Lane] = {}

    def send(self, from_node: int, to_node: int, message_bytes: float, now_ns: int) -> int:
        """When a message that is asked for now will have arrived, in nanoseconds."""
        if from_node == to_node:
            link, keys = self._network.inside, [("inside", from_node)]
        else:
            link, keys = self._network.between, [("out", from_node), ("in", to_node)]
        lanes = [self.lanes.setdefault(key, Lane()) for key in keys]
        rate = link.bandwidth_bytes_s * self._network.share
        duration_ns = round((message_bytes / rate) * NS)
        begin_ns = max(now_ns, *(lane.free_ns for lane in lanes))
        for lane in lanes:
            lane.free_ns = begin_ns + duration_ns
            lane.busy_ns += duration_ns
            lane.bytes_carried += round(message_bytes)
            lane.messages += 1
        # Latency delays the message, but the next one need not wait for it.
        return begin_ns + duration_ns + round(link.latency_s * NS)
