"""`/v1/messages/count_tokens` through an engine's `/tokenize`, where that renders a conversation as the engine would:
vLLM's. llama.cpp's and SGLang's take a text only, and what they would count is not the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from serai.ingress.anthropic_messages.request import chat_request
from serai.ingress.chat_answer import Ended, Piece, Usage
from serai.ingress.openai_format import ApiError
from serai.ingress.request_shape import unsupported

_COUNTED = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")


def tokenize_request(fields: dict[str, Any]) -> dict[str, Any]:
    """Raises ApiError (400)."""
    chat = chat_request(fields | {"max_tokens": 1, "stream": False})
    parts = [
        part for message in chat["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    if any(part["type"] == "image_url" for part in parts):
        raise unsupported("messages", "how many tokens an image will be is not known before it is read")
    return {name: chat[name] for name in _COUNTED if name in chat}


def read_count(body: bytes, request_id: str) -> list[Piece]:
    """Raises ApiError (502)."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    count = answer.get("count") if isinstance(answer, dict) else None
    if not isinstance(count, int):
        raise ApiError(502, "The engine did not say how many tokens there are.", kind="server_error", code="no_count")
    return [Ended("stop", None, Usage(count, 0, 0, 0))]


class CountAnswer:
    """One answer to one request."""

    def __init__(self, request: dict[str, Any]) -> None:
        pass

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        ended = pieces[-1]
        return {"input_tokens": ended.usage.prompt if isinstance(ended, Ended) and ended.usage else 0}

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """It never is a stream."""
        return b""
