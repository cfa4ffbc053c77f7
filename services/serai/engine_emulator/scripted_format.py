"""A scripted answer in OpenAI's words: with tools, JSON, reasoning, log probabilities, several choices."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import orjson

from serai.engine_emulator.completion import Completion
from serai.engine_emulator.responses import DONE_EVENT, JSON, error_object, event, new_id
from serai.engine_emulator.script import Choice, Piece, Say, Script


class ScriptedFormat:
    """The objects of one scripted answer."""

    content_type = JSON

    def __init__(self, completion: Completion, script: Script, model: str) -> None:
        self._completion = completion
        self._script = script
        prefix = "chatcmpl" if completion.chat else "cmpl"
        self._common = {"id": new_id(f"{prefix}-"), "created": int(time.time()), "model": model}
        self._offsets = [len(choice.echoed) for choice in script.choices]
        self._call_ids = [[new_id("call_") for _ in choice.calls] for choice in script.choices]

    def whole(self) -> bytes:
        kind = "chat.completion" if self._completion.chat else "text_completion"
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._script.choices)]
        return orjson.dumps({**self._common, "object": kind, "choices": choices, "usage": self._usage()})

    def opening(self) -> bytes:
        parts = []
        for index, choice in enumerate(self._script.choices):
            if self._completion.chat:
                parts.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, 0))
            elif choice.echoed:
                parts.append(self._chunk(index, {"text": choice.echoed}, 0))
        return b"".join(parts)

    def token_events(self, first: int, tokens: int) -> list[bytes]:
        return [
            self._token(index, choice.pieces[place], place + 1)
            for place in range(first, first + tokens)
            for index, choice in enumerate(self._script.choices)
            if place < len(choice.pieces)
        ]

    def closing(self) -> bytes:
        last: dict[str, Any] = {"delta": {}} if self._completion.chat else {"text": ""}
        parts = [
            self._chunk(index, last, self._script.tokens, choice.finish_reason, choice.stopped_by)
            for index, choice in enumerate(self._script.choices)
        ]
        if self._completion.include_usage:
            parts.append(event(self._fields([], self._usage())))
        return b"".join(parts) + DONE_EVENT

    def failure(self, status: int, message: str) -> bytes:
        return event(error_object(status, message, code="engine_error")) + DONE_EVENT

    def _token(self, index: int, piece: Piece, count: int) -> bytes:
        if not self._completion.chat:
            said: dict[str, Any] = {"text": piece.text}
        else:
            said = {"delta": self._delta(index, piece)}
        if self._script.logprobs is not None and piece.say is Say.CONTENT:
            said["logprobs"] = self._logprobs([piece], self._offsets[index])
            self._offsets[index] += len(piece.text)
        return self._chunk(index, said, count)

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        match piece.say:
            case Say.CONTENT:
                return {"content": piece.text}
            case Say.REASONING:
                return {"reasoning_content": piece.text}
            case Say.TOOL:
                call: dict[str, Any] = {"id": self._call_ids[index][piece.call], "type": "function"}
                function = {"name": piece.text, "arguments": ""}
            case Say.ARGUMENTS:
                call, function = {}, {"arguments": piece.text}
        return {"tool_calls": [{"index": piece.call, **call, "function": function}]}

    def _chunk(
        self, index: int, said: dict[str, Any], count: int, finish_reason: str | None = None, stop: str | None = None
    ) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": finish_reason, **said}
        if stop is not None:
            choice["stop_reason"] = stop
        return event(self._fields([choice], self._usage(count) if self._completion.continuous_usage else None))

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        content = choice.text(Say.CONTENT)
        fields = {"index": index, "finish_reason": choice.finish_reason, "stop_reason": choice.stopped_by}
        content_pieces = [piece for piece in choice.pieces if piece.say is Say.CONTENT]
        wanted = self._script.logprobs is not None
        fields["logprobs"] = self._logprobs(content_pieces, self._offsets[index]) if wanted else None
        if not self._completion.chat:
            return {**fields, "text": choice.echoed + content}
        calls = choice.calls
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else content, "refusal": None}
        if reasoning := choice.text(Say.REASONING):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._call_ids[index][number],
                    "type": "function",
                    "function": {"name": name, "arguments": choice.text(Say.ARGUMENTS, number)},
                }
                for number, name in enumerate(calls)
            ]
        return {**fields, "message": message}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        """Of `pieces`, the first of which begins at `offset` characters. The numbers come from the text alone."""
        if self._completion.chat:
            return {"content": [self._token_logprob(piece.text) for piece in pieces], "refusal": None}
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.text)
        tokens = [piece.text for piece in pieces]
        count = self._script.logprobs or 0
        return {
            "text_offset": offsets,
            "tokens": tokens,
            "token_logprobs": [_logprob(token, 0) for token in tokens],
            "top_logprobs": [dict(_alternatives(token, max(1, count))) for token in tokens],
        }

    def _token_logprob(self, token: str) -> dict[str, Any]:
        def entry(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        others = [entry(*one) for one in _alternatives(token, self._script.logprobs or 0)]
        return {**entry(token, _logprob(token, 0)), "top_logprobs": others}

    def _fields(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._completion.chat else "text_completion"
        fields = {**self._common, "object": kind, "choices": choices}
        return fields if usage is None else {**fields, "usage": usage}

    def _usage(self, count: int | None = None) -> dict[str, int]:
        prompt = self._completion.answer.prompt_tokens
        output = self._script.said(self._script.tokens if count is None else count)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _logprob(token: str, rank: int) -> float:
    """Between 0 and -1 for what is said, one lower for each rank behind it."""
    return -(zlib.crc32(token.encode()) % 1000) / 1000 - rank


def _alternatives(token: str, count: int) -> list[tuple[str, float]]:
    """The token itself, and others that were less likely."""
    return [(token if rank == 0 else f"{token}~{rank}", _logprob(token, rank)) for rank in range(count)]
