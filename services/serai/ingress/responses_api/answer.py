"""A chat answer as a response of the Responses API: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import orjson

from serai.ingress.chat_answer import Arguments, Begun, Broke, Called, Commented, Ended, Piece, Said, Thought, Usage
from serai.ingress.openai_format import ApiError
from serai.ingress.responses_api.errors import error_fields, event_bytes

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_CHARACTERS_MAX = 32 * 1024 * 1024
"""Of one answer: a stream's last event repeats all of it."""
_TOO_LONG = f"The answer has more than {_CHARACTERS_MAX} characters."
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
"""Fields of the request that a response repeats, and what stands there when the request did not have them. `user` is
repeated, too, but only if it was given: OpenAI's document does not let it be null."""


@dataclass(slots=True)
class Item:
    """One item of the output while it is being written."""

    fields: dict[str, Any]
    texts: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.fields["type"])

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    def part(self) -> dict[str, Any]:
        """Its only content part, as far as it has been written."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def snapshot(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        if self.kind == "function_call":
            return self.fields | {"status": status, "arguments": "".join(self.texts)}
        return self.fields | {"status": status, "content": [self.part()] if self.texts else []}


class ResponseAnswer:
    """One answer to one request."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._echo = {
            name: default if request.get(name) is None else request[name] for name, default in _ECHOED.items()
        }
        if request.get("user") is not None:
            self._echo["user"] = request["user"]
        orjson.dumps(self._echo)  # What cannot be repeated is refused now, not in the middle of an answer.
        self._model = request["model"]
        self._begun: Begun | None = None
        self._output: list[dict[str, Any]] = []
        self._item: Item | None = None
        self._characters = 0
        self._number = 0
        self._over = False

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What the last event of a stream would have told."""
        self.events(pieces)
        ended = pieces[-1]
        if self._over or not isinstance(ended, Ended):
            raise ApiError(502, _TOO_LONG, kind="server_error", code="answer_too_large")
        return self._finished(ended)

    # -- events --------------------------------------------------------------------------------------------------

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """The events that say the same."""
        return b"".join([self._event(piece) for piece in pieces if not self._over])

    def _event(self, piece: Piece) -> bytes:
        match piece:
            case Said():
                return self._begin("message", role="assistant") + self._text(piece.text)
            case Thought():
                return self._begin("reasoning", summary=[]) + self._text(piece.text)
            case Called():
                return self._end("completed") + self._begin("function_call", call_id=piece.id, name=piece.name)
            case Arguments():
                return self._text(piece.text)
            case Begun():
                self._begun = piece
                response = self._response("in_progress")
                created = self._sse("response.created", response=response)
                return created + self._sse("response.in_progress", response=response)
            case Ended():
                cut = piece.finish_reason in _INCOMPLETE
                ended = self._end("incomplete" if cut else "completed")
                return ended + self._sse(
                    f"response.{'incomplete' if cut else 'completed'}", response=self._finished(piece)
                )
            case Broke():
                return self._broken(piece)
            case Commented():
                return piece.lines + b"\n"
            case _:
                assert_never(piece)

    def _begin(self, kind: str, **fields: Any) -> bytes:
        """A new item, unless one of its kind is being written."""
        if self._item is not None and self._item.kind == kind:
            return b""
        ended = self._end("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        identity = f"{prefix}_{self._begun.id if self._begun else ''}_{len(self._output)}"
        item = self._item = Item({"type": kind, "id": identity} | fields)
        added = self._sse("response.output_item.added", **self._place(), item=item.snapshot("in_progress"))
        if kind == "function_call":
            return ended + added
        part = self._sse("response.content_part.added", **self._where(item), part=item.part())
        return ended + added + part

    def _text(self, text: str) -> bytes:
        item = self._item
        assert item is not None
        self._characters += len(text)
        if self._characters > _CHARACTERS_MAX:
            self._over = True
            return self._broken(Broke(_TOO_LONG, "server_error", "answer_too_large"))
        item.texts.append(text)
        match item.kind:
            case "function_call":
                where = self._place() | {"item_id": item.id}
                return self._sse("response.function_call_arguments.delta", **where, delta=text)
            case "reasoning":
                return self._sse("response.reasoning_text.delta", **self._where(item), delta=text)
            case _:
                return self._sse("response.output_text.delta", **self._where(item), delta=text, logprobs=[])

    def _end(self, status: str) -> bytes:
        """The end of the item that is being written, if one is."""
        item, self._item = self._item, None
        if item is None:
            return b""
        text, snapshot = "".join(item.texts), item.snapshot(status)
        if item.kind == "function_call":
            where = self._place() | {"item_id": item.id}
            name = item.fields["name"]
            done = self._sse("response.function_call_arguments.done", **where, name=name, arguments=text)
        else:
            where = self._where(item)
            if item.kind == "reasoning":
                done = self._sse("response.reasoning_text.done", **where, text=text)
            else:
                done = self._sse("response.output_text.done", **where, text=text, logprobs=[])
            done += self._sse("response.content_part.done", **where, part=item.part())
        done += self._sse("response.output_item.done", **self._place(), item=snapshot)
        self._output.append(snapshot)
        return done

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    def _where(self, item: Item) -> dict[str, Any]:
        return self._place() | {"item_id": item.id, "content_index": 0}

    def _sse(self, kind: str, **fields: Any) -> bytes:
        event = event_bytes(kind, self._number, fields)
        self._number += 1
        return event

    def _broken(self, broke: Broke) -> bytes:
        if self._begun is None:
            return self._sse("error", **error_fields(broke.message, broke.kind, broke.code))
        output = self._output + ([] if self._item is None else [self._item.snapshot("incomplete")])
        error = {"code": "server_error", "message": f"{broke.message} ({broke.code})"}
        return self._sse("response.failed", response=self._response("failed") | {"error": error, "output": output})

    # -- the response --------------------------------------------------------------------------------------------

    def _finished(self, ended: Ended) -> dict[str, Any]:
        reason = _INCOMPLETE.get(ended.finish_reason)
        response = self._response("incomplete" if reason else "completed")
        details = {"reason": reason} if reason else None
        return response | {"incomplete_details": details, "usage": _usage(ended.usage)}

    def _response(self, status: str) -> dict[str, Any]:
        begun = self._begun or Begun("", 0, "")
        return {
            "id": f"resp_{begun.id}",
            "object": "response",
            "created_at": begun.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": self._output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
        } | self._echo


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
