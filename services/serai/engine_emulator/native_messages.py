"""`/v1/messages` natively: an engine that speaks Anthropic's dialect itself, as newer vLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from serai.engine_emulator.completion import (
    Completion,
    CompletionReader,
    RequestRefused,
    content_text,
    read_called,
    read_object,
    read_stops,
)
from serai.engine_emulator.responses import JSON, named_event, new_id
from serai.engine_emulator.script import Choice, Piece, Say, Script, Tool, Wanted
from serai.engine_emulator.text import answer_to, chat_prompt, estimate_tokens

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_MODES = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def read_messages(reader: CompletionReader, body: bytes) -> Completion:
    """The completion that a request of this dialect asks for. Raises RequestRefused."""
    fields = read_object(body)
    reader.check_model(fields)
    asked = fields.get("max_tokens")
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise RequestRefused(400, f"max_tokens must be an integer of at least 1, not {asked!r:.80}.")
    prompt = _prompt(fields)
    answer = answer_to(prompt, reader.settings.seed)
    tools, named = _called(fields)
    thinking = fields.get("thinking")
    words = min(asked, max(1, reader.settings.answer_tokens - answer.first_word))
    wanted = Wanted(
        words,
        asked,
        tools,
        named,
        stops=read_stops(fields.get("stop_sequences"), "stop_sequences"),
        reasons=isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"),
    )
    reader.check_length(answer, asked)
    choice = reader.choice(wanted, answer)
    if choice.calls and choice.finish_reason == "stop":
        choice = choice._replace(finish_reason="tool_calls")
    elif not choice.calls and choice.finish_reason == "length" and words < asked:
        choice = choice._replace(finish_reason="stop")  # max_tokens is only a limit here, and the answer shorter.
    script = Script((choice,))
    return Completion(
        chat=True,
        stream=fields.get("stream") is True,
        include_usage=True,
        answer=answer,
        tokens=script.tokens,
        finish_reason=choice.finish_reason,
        block_keys=reader.block_keys(prompt, answer),
        script=script,
    )


def count_tokens(reader: CompletionReader, body: bytes) -> bytes:
    """`/v1/messages/count_tokens`. Raises RequestRefused."""
    fields = read_object(body)
    reader.check_model(fields)
    return orjson.dumps({"input_tokens": estimate_tokens(_prompt(fields))})


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in this dialect."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesFormat:
    """The objects of one message."""

    content_type = JSON

    def __init__(self, completion: Completion, script: Script, model: str) -> None:
        self._completion = completion
        self._choice: Choice = script.choices[0]
        self._model = model
        self._id = new_id("msg_")
        self._call_ids = [new_id("toolu_") for _ in self._choice.calls]
        self._block = -1
        self._in: tuple[Say, int] | None = None

    def whole(self) -> bytes:
        choice, blocks = self._choice, list[dict[str, Any]]()
        if reasoning := choice.text(Say.REASONING):
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if text := choice.text(Say.CONTENT):
            blocks.append({"type": "text", "text": text})
        for number, name in enumerate(choice.calls):
            arguments = choice.text(Say.ARGUMENTS, number)
            given = orjson.loads(arguments) if choice.finish_reason != "length" else {}
            blocks.append({"type": "tool_use", "id": self._call_ids[number], "name": name, "input": given})
        return orjson.dumps(self._message(blocks, len(choice.pieces), ended=True))

    def opening(self) -> bytes:
        return named_event("message_start", {"message": self._message([], 0, ended=False)})

    def token_events(self, first: int, tokens: int) -> list[bytes]:
        return [self._token(piece) for piece in self._choice.pieces[first : first + tokens]]

    def closing(self) -> bytes:
        stopped = {"stop_reason": self._stop_reason(), "stop_sequence": self._choice.stopped_by}
        usage = {"output_tokens": len(self._choice.pieces)}
        last = named_event("message_delta", {"delta": stopped, "usage": usage})
        return self._end_block() + last + named_event("message_stop", {})

    def failure(self, status: int, message: str) -> bytes:
        return named_event("error", error_body(status, message))

    def _token(self, piece: Piece) -> bytes:
        within = (Say.ARGUMENTS if piece.say is Say.TOOL else piece.say, piece.call)
        begun = b"" if within == self._in else self._begin_block(within, piece)
        match piece.say:
            case Say.TOOL:
                return begun
            case Say.CONTENT:
                delta = {"type": "text_delta", "text": piece.text}
            case Say.REASONING:
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case Say.ARGUMENTS:
                delta = {"type": "input_json_delta", "partial_json": piece.text}
        return begun + named_event("content_block_delta", {"index": self._block, "delta": delta})

    def _begin_block(self, within: tuple[Say, int], piece: Piece) -> bytes:
        ended = self._end_block()
        self._in = within
        self._block += 1
        match piece.say:
            case Say.TOOL:
                block = {"type": "tool_use", "id": self._call_ids[piece.call], "name": piece.text, "input": {}}
            case Say.REASONING:
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "text", "text": ""}
        return ended + named_event("content_block_start", {"index": self._block, "content_block": block})

    def _end_block(self) -> bytes:
        return b"" if self._in is None else named_event("content_block_stop", {"index": self._block})

    def _message(self, blocks: list[dict[str, Any]], tokens: int, *, ended: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self._stop_reason() if ended else None,
            "stop_sequence": self._choice.stopped_by if ended else None,
            "usage": {"input_tokens": self._completion.answer.prompt_tokens, "output_tokens": tokens},
        }

    def _stop_reason(self) -> str:
        return "stop_sequence" if self._choice.stopped_by else _STOP_REASONS[self._choice.finish_reason]


def _prompt(fields: Mapping[str, Any]) -> str:
    messages, system = fields.get("messages"), fields.get("system")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(400, "messages must be a list of at least one message.")
    turns = [] if system is None else [("system", _content(system))]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise RequestRefused(400, f"messages[{index}] must have the role user or assistant.")
        turns.append((message["role"], _content(message.get("content"))))
    return chat_prompt(turns)


def _content(content: object) -> str:
    """One block of text is the same as a string."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text", content)
    return content_text(content)


def _called(fields: Mapping[str, Any]) -> tuple[tuple[Tool, ...], str | None]:
    given = fields.get("tools") or []
    if not isinstance(given, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in given):
        raise RequestRefused(400, "tools must be a list of objects with a name.")
    tools = [Tool(tool["name"], tool.get("input_schema") or {"type": "object"}) for tool in given]
    choice = fields.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in _MODES:
        raise RequestRefused(400, f"tool_choice.type must be one of {', '.join(_MODES)}.")
    named = choice.get("name") if kind == "tool" else None
    last = fields["messages"][-1].get("content")
    after_tool = isinstance(last, list) and any(isinstance(b, dict) and b.get("type") == "tool_result" for b in last)
    return read_called(tools, _MODES[kind], named, after_tool=after_tool, parallel=False)
