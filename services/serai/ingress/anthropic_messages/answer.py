"""A chat answer as an Anthropic message: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import orjson

from serai.ingress.anthropic_messages.errors import error_event
from serai.ingress.chat_answer import Arguments, Begun, Broke, Called, Commented, Ended, Piece, Said, Thought, Usage
from serai.ingress.openai_format import ApiError

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageAnswer:
    """One answer to one request."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._model = request["model"]
        self._open = ""
        """The type of the content block that is being written."""
        self._blocks = 0
        self._calls_tools = False

    # -- whole ---------------------------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Raises ApiError (502) when a tool call's arguments are no JSON object in an answer that was not cut."""
        message: dict[str, Any] = {}
        content: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Begun():
                    message = self._message(piece, content)
                case Said():
                    content.append({"type": "text", "text": piece.text})
                case Thought():
                    content.append({"type": "thinking", "thinking": piece.text, "signature": ""})
                case Called():
                    self._calls_tools = True
                    content.append({"type": "tool_use", "id": piece.id, "name": piece.name, "input": ""})
                case Arguments():
                    content[-1]["input"] += piece.text
                case Ended():
                    message |= self._stop_reason(piece) | {"usage": _usage(piece.usage)}
                    for block in content:
                        if block["type"] == "tool_use":
                            block["input"] = _input(block["input"], cut=piece.finish_reason == "length")
                case Commented() | Broke():
                    pass  # Only of streams.
                case _:
                    assert_never(piece)
        return message

    def _message(self, begun: Begun, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{begun.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }

    # -- events --------------------------------------------------------------------------------------------------

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """The events that say the same."""
        return b"".join([self._event(piece) for piece in pieces])

    def _event(self, piece: Piece) -> bytes:
        match piece:
            case Said():
                return self._begin("text", text="") + self._delta("text_delta", "text", piece.text)
            case Thought():
                begin = self._begin("thinking", thinking="", signature="")
                return begin + self._delta("thinking_delta", "thinking", piece.text)
            case Called():
                self._calls_tools = True
                return self._stop() + self._begin("tool_use", id=piece.id, name=piece.name, input={})
            case Arguments():
                return self._delta("input_json_delta", "partial_json", piece.text)
            case Begun():
                return _sse("message_start", message=self._message(piece, []))
            case Ended():
                delta = _sse("message_delta", delta=self._stop_reason(piece), usage=_usage(piece.usage))
                return self._stop() + delta + _sse("message_stop")
            case Broke():
                return error_event(ApiError(_status_of(piece), piece.message, kind=piece.kind))
            case Commented():
                return piece.lines + _PING
            case _:
                assert_never(piece)

    def _begin(self, kind: str, **fields: Any) -> bytes:
        if self._open == kind:
            return b""
        stop = self._stop()
        self._open = kind
        self._blocks += 1
        return stop + _sse("content_block_start", index=self._blocks - 1, content_block={"type": kind} | fields)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _sse("content_block_delta", index=self._blocks - 1, delta={"type": kind, name: text})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _sse("content_block_stop", index=self._blocks - 1)

    def _stop_reason(self, ended: Ended) -> dict[str, Any]:
        if ended.finish_reason == "stop" and ended.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_string}
        reason = _STOP_REASONS.get(ended.finish_reason, "end_turn")
        if self._calls_tools and reason == "end_turn":
            reason = "tool_use"  # A call that the request demanded ends with `stop`, in OpenAI's API.
        return {"stop_reason": reason, "stop_sequence": None}


def _sse(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind} | fields))


def _status_of(broke: Broke) -> int:
    """What the status would have been: Anthropic's error types follow from it."""
    return {"overloaded_error": 503, "timeout_error": 504, "rate_limit_error": 429, "invalid_request_error": 400}.get(
        broke.kind, 502
    )


def _usage(usage: Usage | None) -> dict[str, int]:
    """Anthropic counts what was read from a cache apart."""
    if usage is None:
        usage = Usage(0, 0, 0, 0)
    cached = min(usage.cached, usage.prompt)
    return {
        "input_tokens": usage.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    }


def _input(arguments: str, *, cut: bool) -> dict[str, Any]:
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    if cut:
        return {}  # `max_tokens` is told: the call is not to be made.
    text = "The engine sent a tool call whose arguments are no JSON object."
    raise ApiError(502, text, kind="server_error", code="engine_protocol")
