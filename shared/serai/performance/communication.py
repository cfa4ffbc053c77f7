"""What moving bytes between GPUs and hosts costs, by message size and link."""

from __future__ import annotations

from math import log2

from serai.performance.hardware import Link

LARGE_MESSAGE_BYTES = 64 * 1024**2
"""From this size on all-reduce ran at a lower rate in the measured stacks (it leaves the buffers of the fast path)."""


def all_reduce_s(
    message_bytes: float, gpus: int, link: Link, bandwidth_share: float = 1.0, latency_s: float = 0.0
) -> float:
    """Time of one all-reduce of `message_bytes` over `gpus`, in seconds; 0 for one GPU.

    Ring bound (Patarasso and Yuan 2009): each GPU sends and receives 2·(n−1)/n of the message. `latency_s` is the
    fitted time of an empty all-reduce over two GPUs and grows with log2(n): the kernels alone hardly slow down with
    n on NVLink (4.3 to 4.7 µs over 2 to 8 H100), but every all-reduce also waits for the slowest of n ranks.
    `bandwidth_share` is the fitted share of the link's rate.
    """
    if gpus <= 1:
        return 0.0
    wire = 2 * (gpus - 1) / gpus * message_bytes / (link.bandwidth_bytes_s * bandwidth_share)
    return latency_s * log2(gpus) + wire


def transfer_s(message_bytes: float, link: Link, bandwidth_share: float = 0.8, messages: int = 1) -> float:
    """Time to send `message_bytes` one way in `messages` pieces, in seconds.

    `bandwidth_share` is what a stream of large blocks reaches of the line rate; small blocks (one KV block a message)
    reach 0.5 to 0.7.
    """
    return link.latency_s * messages + message_bytes / (link.bandwidth_bytes_s * bandwidth_share)
