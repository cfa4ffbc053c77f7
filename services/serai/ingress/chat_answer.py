"""What an engine's chat answer says, piece by piece, whether it comes as a stream of events, cut anywhere, or in one
piece. Pure. Read by the endpoints that are translated; chat completions themselves pass as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serai.ingress.openai_format import ApiError
from serai.ingress.sent_events import blocks_of, data_of

_HELD_BYTES_MAX = 8 * 1024 * 1024
_ENGINE_GAVE_UP = ("abort", "error")
"""Finish reasons of answers that are not finished."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The first piece."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call begins; its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Some of the last call's arguments: a part of a JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class Commented:
    """Lines that are no event: they keep a silent connection alive."""

    lines: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """In tokens."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


@dataclass(frozen=True, slots=True)
class Broke:
    """The last piece of an answer that is not whole."""

    message: str
    kind: str
    code: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last piece of a whole answer."""

    finish_reason: str
    stop_string: str | None
    """Which of the request's stop strings ended it, where the engine tells."""
    usage: Usage | None


Piece = Begun | Said | Thought | Called | Arguments | Commented | Broke | Ended


class _Malformed(Exception):
    """The text says what cannot be read."""


class ChatReader:
    """Reads one answer. Nothing follows a `Broke` or an `Ended`."""

    def __init__(self, fallback_id: str) -> None:
        self._fallback_id = fallback_id
        """For engines that give their answers none."""
        self._held = b""
        self._begun = False
        self._done = False
        self._over = False
        self._call: int | None = None
        self._calls: set[int] = set()
        self._finish_reason = ""
        self._stop_string: str | None = None
        self._usage: Usage | None = None

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that are whole now."""
        pieces: list[Piece] = []
        if self._over:
            return pieces
        data = (self._held + data).replace(b"\r\n", b"\n")
        whole, separator, self._held = data.rpartition(b"\n\n")
        try:
            if len(self._held) > _HELD_BYTES_MAX:
                raise _Malformed("an event without an end")
            for block in blocks_of(whole) if separator else ():
                self._read_block(block, pieces)
                if pieces and isinstance(pieces[-1], Broke):
                    break
        except _Malformed as problem:
            self._break(pieces, f"The engine sent {problem}.")
        return pieces

    def end(self) -> list[Piece]:
        """The last piece, when nothing more comes."""
        pieces: list[Piece] = []
        if self._over:
            return pieces
        if self._done and self._begun:
            self._over = True
            return [Ended(self._finish_reason or "stop", self._stop_string, self._usage)]
        missing = "without an answer in it" if self._done else "without saying that it is done"
        self._break(pieces, f"The engine ended the stream {missing}.", "stream_unfinished")
        return pieces

    def _break(self, pieces: list[Piece], message: str, code: str = "engine_protocol", kind: str = "") -> None:
        self._over = True
        pieces.append(Broke(message, kind or "server_error", code))

    def _read_block(self, block: bytes, pieces: list[Piece]) -> None:
        data = data_of(block)
        if data is None:
            lines = block.split(b"\n")
            if comments := [line for line in lines if line.startswith(b":")]:
                pieces.append(Commented(b"\n".join(comments) + b"\n"))
            self._done = self._done or b"data: [DONE]" in lines or b"data:[DONE]" in lines
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise _Malformed("an event that cannot be read") from None
        if not isinstance(event, dict):
            raise _Malformed("an event that is no object")
        if event.get("error") or event.get("object") == "error":
            error = read_error(event, 502)
            self._break(pieces, error.message, error.code or "engine_error", error.kind)
            return
        self.read_chunk(event, pieces)

    def read_chunk(self, chunk: Mapping[str, Any], pieces: list[Piece]) -> None:
        """One `chat.completion.chunk`. Raises _Malformed."""
        if not self._begun:
            self._begun = True
            pieces.append(self._head(chunk))
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = read_usage_object(usage)
        for choice in _list_of_objects(chunk, "choices"):
            if choice.get("index", 0) == 0:
                self._read_choice(choice, pieces)

    def _head(self, chunk: Mapping[str, Any]) -> Begun:
        identity, created, model = chunk.get("id"), chunk.get("created"), chunk.get("model")
        return Begun(
            identity.removeprefix("chatcmpl-") if isinstance(identity, str) and identity else self._fallback_id,
            created if isinstance(created, int) else 0,
            model if isinstance(model, str) else "",
        )

    def _read_choice(self, choice: Mapping[str, Any], pieces: list[Piece]) -> None:
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise _Malformed("a `delta` that is no object")
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            self._call = None
            pieces.append(Thought(_text(thought, "reasoning_content")))
        if content := delta.get("content"):
            self._call = None
            pieces.append(Said(_text(content, "content")))
        if delta.get("tool_calls"):
            for position, call in enumerate(_list_of_objects(delta, "tool_calls")):
                self._read_call(call, position, pieces)
        reason = choice.get("finish_reason")
        if reason is None:
            return
        self._finish_reason = _text(reason, "finish_reason")
        stop = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's and SGLang's name for it.
        self._stop_string = stop if isinstance(stop, str) else None
        if reason in _ENGINE_GAVE_UP:
            self._break(pieces, "The engine gave the answer up.", "engine_aborted")

    def _read_call(self, call: Mapping[str, Any], position: int, pieces: list[Piece]) -> None:
        index, function = call.get("index", position), call.get("function") or {}
        if not isinstance(function, dict) or not isinstance(index, int):
            raise _Malformed("a tool call that is none")
        if index != self._call:
            if index in self._calls:
                raise _Malformed("parts of a tool call after something else")
            if not (name := function.get("name")):
                raise _Malformed("a tool call without a name")
            self._calls.add(index)
            self._call = index
            identity = call.get("id") or f"call_{self._fallback_id}_{index}"
            pieces.append(Called(_text(identity, "id"), _text(name, "name")))
        if arguments := function.get("arguments"):
            if not isinstance(arguments, str):  # Some engines send them parsed.
                arguments = orjson.dumps(arguments).decode()
            pieces.append(Arguments(arguments))


def read_answer(body: bytes, fallback_id: str) -> list[Piece]:
    """The pieces of an answer that came in one piece. Raises ApiError (502)."""
    reader = ChatReader(fallback_id)
    pieces: list[Piece] = []
    try:
        answer = orjson.loads(body)
        if not isinstance(answer, dict) or not _list_of_objects(answer, "choices"):
            raise _Malformed("an answer without `choices`")
        choices = [choice | {"delta": choice.get("message")} for choice in _list_of_objects(answer, "choices")]
        reader.read_chunk(answer | {"choices": choices}, pieces)
    except orjson.JSONDecodeError:
        raise _unreadable("an answer that is no JSON") from None
    except _Malformed as problem:
        raise _unreadable(str(problem)) from None
    if isinstance(pieces[-1], Broke):
        raise ApiError(502, pieces[-1].message, kind="server_error", code=pieces[-1].code)
    reader._done = True
    return pieces + reader.end()


def _unreadable(what: str) -> ApiError:
    return ApiError(502, f"The engine sent {what}.", kind="server_error", code="engine_protocol")


def _list_of_objects(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items = fields.get(name) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _Malformed(f"`{name}` that are no list of objects")
    return items


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"a `{name}` that is no text")
    return value


def read_usage_object(usage: Mapping[str, Any]) -> Usage:
    """Counts that are not told, or are no counts, are 0."""
    return Usage(
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        _count(usage.get("prompt_tokens_details"), "cached_tokens"),
        _count(usage.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _count(fields: object, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) and 0 < value < 2**53 else 0  # Sums of them must fit into JSON, too.


# -- errors ----------------------------------------------------------------------------------------------------------


def read_error_body(body: bytes, status: int) -> ApiError:
    """What an engine's error body says, in whichever of the usual forms it is."""
    try:
        return read_error(orjson.loads(body), status)
    except orjson.JSONDecodeError:
        return read_error(body.decode(errors="replace")[:1000], status)


def read_error(body: object, status: int) -> ApiError:
    """OpenAI's `error` object, vLLM's older flat one, FastAPI's `detail`, or a text."""
    told = (body.get("error") or body.get("detail") or body) if isinstance(body, dict) else body
    text = told if isinstance(told, str) else orjson.dumps(told).decode()[:1000]
    fields: dict[str, Any] = told if isinstance(told, dict) else {"message": text}
    message, kind, code, param = (fields.get(name) for name in ("message", "type", "code", "param"))
    return ApiError(
        status,
        str(message or f"The engine answered with status {status}."),
        kind=kind if isinstance(kind, str) and kind else _kind_of(status),
        code=str(code) if code is not None else None,
        param=param if isinstance(param, str) else None,
    )


def _kind_of(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"
