"""What takes an engine time, by path: how each is read, and in whose words it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from serai.engine_emulator import native_messages, native_responses, pooling
from serai.engine_emulator.completion import Completion, CompletionReader, read_object
from serai.engine_emulator.pooling import Pooled
from serai.engine_emulator.responses import JSON, AnswerForm, CompletionFormat, event
from serai.engine_emulator.script import Script
from serai.engine_emulator.scripted_format import ScriptedFormat
from serai.engine_emulator.settings import EmulatorSettings, Native
from serai.engine_emulator.text import Answer, estimate_tokens
from serai.engine_emulator.transcription import WORDS, form_fields, transcribed


class Work(NamedTuple):
    """What the engine has to do for a request, and how it is said."""

    completion: Completion
    form: AnswerForm


Read = Callable[[bytes, str], Work]
"""From a request's body and content type. Raises RequestRefused."""


class WholeForm:
    """An answer that is ready when the prompt is read, and never streamed."""

    def __init__(self, body: bytes, content_type: str = JSON) -> None:
        self._body = body
        self.content_type = content_type

    def whole(self) -> bytes:
        return self._body

    def opening(self) -> bytes:
        return b""

    def token_events(self, first: int, tokens: int) -> list[bytes]:
        return []

    def closing(self) -> bytes:
        return b""

    def failure(self, status: int, message: str) -> bytes:
        return event({"error": {"message": message}})


def reads(settings: EmulatorSettings) -> dict[str, Read]:
    """All that this engine computes, by path."""
    reader, model = CompletionReader(settings), settings.model
    paths: dict[str, Read] = {
        "/v1/chat/completions": partial(_completion, reader, model, True),
        "/v1/completions": partial(_completion, reader, model, False),
        "/v1/embeddings": partial(_pooled, reader, lambda fields: pooling.embeddings(fields, model)),
        "/v1/audio/transcriptions": partial(_transcription, reader),
    }
    # vLLM has each of these at all of these paths, and classes at one.
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        paths[path] = partial(_pooled, reader, lambda fields: pooling.rerank(fields, model))
    for path in ("/score", "/v1/score"):
        paths[path] = partial(_pooled, reader, lambda fields: pooling.scores(fields, model))
    paths["/classify"] = partial(_pooled, reader, lambda fields: pooling.classes(fields, model))
    if Native.MESSAGES in settings.native:
        paths["/v1/messages"] = partial(_messages, reader, model)
    if Native.RESPONSES in settings.native:
        paths["/v1/responses"] = partial(_response, reader, model)
    return {path: read for path, read in paths.items() if path not in settings.without}


def _completion(reader: CompletionReader, model: str, chat: bool, body: bytes, content_type: str) -> Work:
    completion = reader.read(body, chat=chat)
    if completion.script is None:
        return Work(completion, CompletionFormat(completion, model))
    return Work(completion, ScriptedFormat(completion, completion.script, model))


def _messages(reader: CompletionReader, model: str, body: bytes, content_type: str) -> Work:
    completion = native_messages.read_messages(reader, body)
    return Work(completion, native_messages.MessagesFormat(completion, _script(completion), model))


def _response(reader: CompletionReader, model: str, body: bytes, content_type: str) -> Work:
    asked = native_responses.read_response(reader, body)
    form = native_responses.ResponsesFormat(asked, _script(asked.completion), model)
    return Work(asked.completion, form)


def _pooled(
    reader: CompletionReader, pool: Callable[[Mapping[str, Any]], Pooled], body: bytes, content_type: str
) -> Work:
    fields = read_object(body)
    reader.check_model(fields)
    pooled = pool(fields)
    return _prefill(reader, pooled.tokens, WholeForm(pooled.body))


def _transcription(reader: CompletionReader, body: bytes, content_type: str) -> Work:
    fields = form_fields(body, content_type)
    reader.check_model(fields)
    said, kind = transcribed(fields, reader.settings.seed)
    work = _prefill(reader, estimate_tokens(" " * min(len(body), 4096)), WholeForm(said, kind))
    work.completion.tokens = WORDS
    return work


def _prefill(reader: CompletionReader, tokens: int, form: AnswerForm) -> Work:
    """Reading `tokens` of prompt, and one token to say that it is read."""
    answer = Answer(0, 0, max(1, tokens))
    reader.check_length(answer, 1)
    completion = Completion(
        chat=False, stream=False, include_usage=False, answer=answer, tokens=1, finish_reason="stop"
    )
    return Work(completion, form)


def _script(completion: Completion) -> Script:
    assert completion.script is not None
    return completion.script
