"""When a client that lost its NATS server tries again: pure arithmetic on a source of chance.

A lone client should be back at once; five hundred should not be back at the same moment. Nobody tells a client how
many it is one of, but two things are known. Agents are many, ingresses and registries few. And the server numbers its
connections from its start: number 7 has at most six before it, so a small number means a small crowd. (A large one
means nothing: the server may have run for a year.) So the **span** over which a client spreads its first try is a
tenth of a second for each connection number, at least 1 s, at most 12 s for agents and 2 s for the others, which
agents need to find there when they come back.

The first wait is `0.05 s + span x u²`, u uniform: half of all within a quarter of the span, and a long thin tail.
Every wait after a try that failed is 75…100 % of the span, at most 3…4 s: nearly constant, so that a fleet that tried
in vain stays spread, and nobody waits for more than 4 s once the server is back after a long outage.

Figures (`tests/unit/test_reconnect_curve.py` holds them), heal = wait after the server takes connections again:

| clients                        | outage | heal p50 | heal p99 | last   | most accepts in 1 s |
|--------------------------------|--------|----------|----------|--------|---------------------|
| 1, number ≤ 10 (`serai up`)    | 0 s    | 0.3 s    | 1.0 s    | 1.05 s | 1                   |
| 1 agent of an old server       | 0 s    | 3.1 s    | 11.8 s   | 12.1 s | 1                   |
| 1 ingress or registry, same    | 0 s    | 0.6 s    | 2.0 s    | 2.1 s  | 1                   |
| 1 agent, any server            | 30 s   | 1.8 s    | 3.7 s    | 4.0 s  | 1                   |
| 500 agents, numbers 1…500      | 0 s    | 2.4 s    | 11.7 s   | 12 s   | 170                 |
| the same                       | 1 s    | 2.9 s    | 10.7 s   | 11 s   | 140                 |
| the same                       | 30 s   | 1.7 s    | 3.7 s    | 4 s    | 180                 |
"""

from __future__ import annotations

from collections.abc import Callable

SPAN_MANY_S = 12.0
"""For roles with hundreds of processes. Five hundred come back over more than 10 s (case H67)."""
SPAN_FEW_S = 2.0
"""For roles with a handful of processes, which all others need."""

_SPAN_MIN_S = 1.0
_SPAN_PER_CONNECTION_S = 0.1
_SOONEST_S = 0.05
_AGAIN_MAX_S = 4.0
"""With a second for subscriptions and announcements, all is right 5 s after a server's return."""


def span_s(connection_number: int, span_max_s: float) -> float:
    """Over how many seconds this client spreads its first try. `connection_number`: the server's, of the connection
    that was lost; 0 = not known."""
    if connection_number <= 0:
        return span_max_s
    return min(span_max_s, max(_SPAN_MIN_S, connection_number * _SPAN_PER_CONNECTION_S))


def wait_s(tries: int, span_s: float, chance: Callable[[], float]) -> float:
    """Seconds before try number `tries` (0 = the first since the loss). `chance()` is uniform in 0…1."""
    if tries == 0:
        return float(_SOONEST_S + span_s * chance() ** 2)
    return min(_AGAIN_MAX_S, span_s) * (0.75 + 0.25 * chance())
