"""The inference endpoints: their paths, what kind of body they take, how their streams end. Pure.

What is not in this table is not proxied. Everything else of a request is between client and engine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Dialect(StrEnum):
    """Whose words an endpoint speaks: the form of its errors, how its streams end, and what keeps them alive."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"


class Body(StrEnum):
    """What a request carries."""

    JSON = "json"
    MULTIPART = "multipart"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One thing engines are asked for."""

    path: str
    operation: str
    """`gen_ai.operation.name`, by the GenAI conventions where they have a name for it."""
    streams: bool = False
    """Whether `stream: true` makes it answer with events."""
    dialect: Dialect = Dialect.OPENAI
    body: Body = Body.JSON
    also: tuple[str, ...] = ()
    """Other paths of the same thing, here and at engines."""
    through_chat: bool = False
    """Whether an engine without it can answer through its chat completions (`translated.py`)."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.also)

    def path_at(self, served: Collection[str]) -> str | None:
        """What it is called at an engine that serves these paths; None when that has it not. Nothing known of an
        engine (no paths at all): its own name."""
        if not served or self.path in served:
            return self.path
        return next((path for path in self.also if path in served), None)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("/v1/chat/completions", "chat", streams=True),
    Endpoint("/v1/completions", "text_completion", streams=True),
    Endpoint("/v1/embeddings", "embeddings"),
    Endpoint("/v1/responses", "chat", streams=True, dialect=Dialect.RESPONSES, through_chat=True),
    Endpoint("/v1/messages", "chat", streams=True, dialect=Dialect.ANTHROPIC, through_chat=True),
    Endpoint("/v1/messages/count_tokens", "count_tokens", dialect=Dialect.ANTHROPIC),
    Endpoint("/v1/rerank", "rerank", also=("/rerank", "/v2/rerank")),
    Endpoint("/v1/score", "score", also=("/score",)),
    Endpoint("/v1/classify", "classify", also=("/classify",)),
    Endpoint("/tokenize", "tokenize", also=("/v1/tokenize",)),
    Endpoint("/detokenize", "detokenize", also=("/v1/detokenize",)),
    Endpoint("/v1/audio/transcriptions", "transcribe", streams=True, body=Body.MULTIPART),
    Endpoint("/v1/audio/translations", "translate", streams=True, body=Body.MULTIPART),
)

BY_PATH: dict[str, Endpoint] = {path: endpoint for endpoint in ENDPOINTS for path in endpoint.paths}
_CHAT = BY_PATH["/v1/chat/completions"]


def offered(served: Collection[str]) -> list[str]:
    """What clients can ask of an engine that is known to serve these paths."""
    has_chat = _CHAT.path in served
    return [e.path for e in ENDPOINTS if served and (e.path_at(served) or (e.through_chat and has_chat))]
