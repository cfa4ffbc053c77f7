"""Paths of engines' HTTP APIs that Serai passes requests to: what an agent looks for, and an ingress has rows for."""

from __future__ import annotations

ENDPOINT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Those most asked for come first: a session's list is looked through once per request."""
