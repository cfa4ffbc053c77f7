"""How many tokens a request took: in the engine's words, whichever API it speaks, or guessed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from serai.ingress.limits import BYTES_PER_TOKEN


class TokenCounts(NamedTuple):
    prompt: int = 0
    cached: int = 0
    """Of `prompt`, those that were in the engine's cache."""
    output: int = 0
    estimated: bool = False


NO_TOKENS = TokenCounts()


def told(usage: Mapping[str, Any]) -> TokenCounts:
    """What a `usage` object says: OpenAI's names of chat and of responses, and Anthropic's, whose `input_tokens` are
    those that were not in the cache."""
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        cached = _cached(usage.get("prompt_tokens_details"))
        return TokenCounts(_count(usage.get("prompt_tokens")), cached, _count(usage.get("completion_tokens")))
    prompt, output = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    if "input_tokens_details" in usage:
        return TokenCounts(prompt, _cached(usage["input_tokens_details"]), output)
    cached = _count(usage.get("cache_read_input_tokens"))
    return TokenCounts(prompt + cached + _count(usage.get("cache_creation_input_tokens")), cached, output)


def guessed(body_bytes: int, events: int, context_tokens_max: int = 0) -> TokenCounts:
    """Of an answer whose engine told nothing: its request has a token in so many bytes, each event is one token.
    Pictures have more bytes than tokens, hence the context limit, where it is known."""
    prompt = -(-body_bytes // BYTES_PER_TOKEN)
    return TokenCounts(min(prompt, context_tokens_max) if context_tokens_max else prompt, 0, events, estimated=True)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**53 else 0


def _cached(details: Any) -> int:
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
