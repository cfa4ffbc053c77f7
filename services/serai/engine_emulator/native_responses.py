"""`/v1/responses` natively: an engine that speaks this dialect itself, as newer vLLM does (`--native responses`).

Nothing is stored: `previous_response_id`, `conversation` and `background` are refused, as by vLLM without its store.
"""

from __future__ import annotations

import time
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
)
from serai.engine_emulator.responses import JSON, named_event, new_id
from serai.engine_emulator.script import Choice, Piece, Say, Script, Tool, Wanted
from serai.engine_emulator.text import answer_to, chat_prompt

_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")


class Asked:
    """A request of this dialect, as far as its answer repeats it."""

    __slots__ = ("completion", "echo")

    def __init__(self, completion: Completion, echo: dict[str, Any]) -> None:
        self.completion = completion
        self.echo = echo


def read_response(reader: CompletionReader, body: bytes) -> Asked:
    """The completion that a request of this dialect asks for. Raises RequestRefused."""
    fields = read_object(body)
    reader.check_model(fields)
    for name in _STATEFUL:
        if fields.get(name):
            raise RequestRefused(400, f"{name} is not supported: this engine stores nothing.", param=name)
    asked = fields.get("max_output_tokens")
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise RequestRefused(400, "max_output_tokens must be an integer of at least 1.", param="max_output_tokens")
    prompt, after_tool = _prompt(fields)
    answer = answer_to(prompt, reader.settings.seed)
    tools, named = _called(fields, after_tool)
    usual = max(1, reader.settings.answer_tokens - answer.first_word)
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    words = usual if asked is None else asked
    wanted = Wanted(words, asked, tools, named, _schema(fields.get("text")), reasons=effort not in (None, "none"))
    reader.check_length(answer, words)
    script = Script((reader.choice(wanted, answer),))
    completion = Completion(
        chat=True,
        stream=fields.get("stream") is True,
        include_usage=True,
        answer=answer,
        tokens=script.tokens,
        finish_reason=script.choices[0].finish_reason,
        block_keys=reader.block_keys(prompt, answer),
        script=script,
    )
    return Asked(completion, _echo(fields))


class ResponsesFormat:
    """The objects of one response."""

    content_type = JSON

    def __init__(self, asked: Asked, script: Script, model: str) -> None:
        self._completion = asked.completion
        self._choice: Choice = script.choices[0]
        self._base = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": model}
        self._base |= asked.echo
        self._items = self._output()
        self._at = -1
        self._in: tuple[Say, int] | None = None
        self._said: list[str] = []
        self._events = 0

    def whole(self) -> bytes:
        return orjson.dumps(self._response(ended=True))

    def opening(self) -> bytes:
        begun = self._response(ended=False)
        return self._event("response.created", {"response": begun}) + self._event(
            "response.in_progress", {"response": begun}
        )

    def token_events(self, first: int, tokens: int) -> list[bytes]:
        return [self._token(piece) for piece in self._choice.pieces[first : first + tokens]]

    def closing(self) -> bytes:
        ended = self._response(ended=True)
        return self._end_item() + self._event(f"response.{ended['status']}", {"response": ended})

    def failure(self, status: int, message: str) -> bytes:
        return self._event("error", {"code": "server_error", "message": message, "param": None})

    def _token(self, piece: Piece) -> bytes:
        within = (Say.ARGUMENTS if piece.say is Say.TOOL else piece.say, piece.call)
        begun = b"" if within == self._in else self._begin_item(within)
        if piece.say is Say.TOOL:
            return begun
        self._said.append(piece.text)
        return begun + self._event(f"response.{_DELTAS[piece.say]}.delta", {**self._place(), "delta": piece.text})

    def _begin_item(self, within: tuple[Say, int]) -> bytes:
        ended = self._end_item()
        self._in, self._said = within, []
        self._at += 1
        item = self._items[self._at]
        empty: dict[str, Any] = {"arguments": ""} if within[0] is Say.ARGUMENTS else {"content": []}
        added = {**item, **empty} | ({"status": "in_progress"} if "status" in item else {})
        begun = self._event("response.output_item.added", {"output_index": self._at, "item": added})
        if within[0] is Say.CONTENT:
            begun += self._event("response.content_part.added", {**self._place(), "part": _text_part("")})
        return ended + begun

    def _end_item(self) -> bytes:
        if self._in is None:
            return b""
        text, item, say = "".join(self._said), self._items[self._at], self._in[0]
        parts = b""
        if say is Say.ARGUMENTS:
            done = {"arguments": text, "name": item["name"]}
        else:
            done = {"text": text} | ({"logprobs": []} if say is Say.CONTENT else {})
        parts += self._event(f"response.{_DELTAS[say]}.done", {**self._place(), **done})
        if say is Say.CONTENT:
            parts += self._event("response.content_part.done", {**self._place(), "part": _text_part(text)})
        return parts + self._event("response.output_item.done", {"output_index": self._at, "item": item})

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._items[self._at]["id"], "output_index": self._at}
        say = self._in[0] if self._in is not None else None
        if say is not Say.ARGUMENTS:
            place["content_index"] = 0
        if say is Say.CONTENT:
            place["logprobs"] = []
        return place

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        number, self._events = self._events, self._events + 1
        return named_event(kind, {"sequence_number": number, **fields})

    def _output(self) -> list[dict[str, Any]]:
        choice, items = self._choice, list[dict[str, Any]]()
        if reasoning := choice.text(Say.REASONING):
            content = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": content})
        if text := choice.text(Say.CONTENT):
            message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "status": "completed"}
            items.append({**message, "content": [_text_part(text)]})
        for number, name in enumerate(choice.calls):
            call = {"id": new_id("fc_"), "type": "function_call", "call_id": new_id("call_"), "name": name}
            items.append({**call, "arguments": choice.text(Say.ARGUMENTS, number), "status": "completed"})
        return items

    def _response(self, *, ended: bool) -> dict[str, Any]:
        cut = self._choice.finish_reason == "length"
        status = "in_progress" if not ended else "incomplete" if cut else "completed"
        usage = None
        if ended:
            prompt, output = self._completion.answer.prompt_tokens, len(self._choice.pieces)
            reasoning = sum([piece.say is Say.REASONING for piece in self._choice.pieces])
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + output,
            }
        return {
            **self._base,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if ended and cut else None,
            "output": self._items if ended else [],
            "usage": usage,
        }


_DELTAS = {
    Say.CONTENT: "output_text",
    Say.REASONING: "reasoning_text",
    Say.ARGUMENTS: "function_call_arguments",
    Say.TOOL: "function_call_arguments",
}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _echo(fields: Mapping[str, Any]) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "reasoning": None,
        "truncation": "disabled",
    }
    return {name: value if fields.get(name) is None else fields[name] for name, value in usual.items()}


def _prompt(fields: Mapping[str, Any]) -> tuple[str, bool]:
    """The input as one prompt, and whether it ends with what a tool said."""
    given, instructions = fields.get("input"), fields.get("instructions")
    turns = [] if instructions is None else [("system", content_text(instructions))]
    if isinstance(given, str):
        return chat_prompt([*turns, ("user", given)]), False
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise RequestRefused(400, "input must be a string, or a list of at least one item.", param="input")
    turns += [(str(item.get("role") or item.get("type")), _item_text(item)) for item in given]
    return chat_prompt(turns), given[-1].get("type") == "function_call_output"


def _item_text(item: Mapping[str, Any]) -> str:
    content = item.get("content", item.get("output", item.get("arguments")))
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text", content)
    return content_text(content)


def _schema(text: object) -> Any:
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if isinstance(form, dict) and kind == "json_schema" and isinstance(form.get("schema"), dict):
        return form["schema"]
    if kind == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    raise RequestRefused(400, "text.format must be text, json_object, or json_schema with a schema.", param="text")


def _called(fields: Mapping[str, Any], after_tool: bool) -> tuple[tuple[Tool, ...], str | None]:
    given = fields.get("tools") or []
    if not isinstance(given, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in given):
        raise RequestRefused(400, "tools must be a list of functions.", param="tools")
    if not all(isinstance(tool.get("name"), str) for tool in given):
        raise RequestRefused(400, "Each of tools must have a name.", param="tools")
    tools = [Tool(tool["name"], tool.get("parameters") or {"type": "object"}) for tool in given]
    choice = fields.get("tool_choice") or "auto"
    named = choice.get("name") if isinstance(choice, dict) else None
    mode = choice if isinstance(choice, str) else "auto"
    return read_called(tools, mode, named, after_tool=after_tool, parallel=False)
