"""The inference endpoints: their paths, what kind of body they take, and what they are called in traces. Pure.

What is not in this table is not proxied. Everything else of a request is between client and engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path that is sent on to engines."""

    path: str
    operation: str
    """`gen_ai.operation.name`, by the GenAI conventions where they have a name for it."""
    streams: bool = False
    """Whether `stream: true` makes it answer with events."""


ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", "chat", streams=True),
        Endpoint("/v1/completions", "text_completion", streams=True),
    )
}
