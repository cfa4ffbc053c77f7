"""Reads a completion request: from the body's bytes to what the engine has to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serai.engine_emulator.settings import EmulatorSettings
from serai.engine_emulator.text import Answer, answer_to, block_keys, chat_prompt


class RequestRefused(Exception):
    """The request cannot be served: an HTTP status and the parts of an OpenAI error object."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class Completion:
    """What is to be said: `tokens` tokens of `answer`, as a stream or in one piece."""

    __slots__ = (
        "answer",
        "block_keys",
        "chat",
        "continuous_usage",
        "finish_reason",
        "include_usage",
        "stream",
        "tokens",
    )

    def __init__(
        self,
        *,
        chat: bool,
        stream: bool,
        include_usage: bool,
        answer: Answer,
        tokens: int,
        finish_reason: str,
        continuous_usage: bool = False,
        block_keys: tuple[int, ...] = (),
    ) -> None:
        self.chat = chat
        self.stream = stream
        self.include_usage = include_usage
        self.answer = answer
        self.tokens = tokens
        self.finish_reason = finish_reason
        self.continuous_usage = continuous_usage
        """Every chunk of the stream says how many tokens there are."""
        self.block_keys = block_keys
        """The prompt's full KV blocks, for the prefix cache."""


@dataclass(frozen=True, slots=True)
class CompletionReader:
    """Reads completion requests for one model. Fields it does not know are ignored, as engines do."""

    settings: EmulatorSettings

    def read(self, body: bytes, *, chat: bool) -> Completion:
        """The completion asked for in `body`. Raises RequestRefused."""
        fields = _fields(body)
        self._check_model(fields)
        prompt = chat_prompt(_turns(fields)) if chat else _plain_prompt(fields)
        answer = answer_to(prompt, self.settings.seed)
        tokens, finish_reason = self._length(fields, answer)
        options = fields.get("stream_options")
        options = options if isinstance(options, dict) else {}
        include_usage = bool(options.get("include_usage"))
        return Completion(
            chat=chat,
            stream=bool(fields.get("stream")),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
            block_keys=self._block_keys(prompt, answer),
            answer=answer,
            tokens=tokens,
            finish_reason=finish_reason,
        )

    def _block_keys(self, prompt: str, answer: Answer) -> tuple[int, ...]:
        modelled = self.settings.modelled
        if modelled is None or not modelled.batch.prefix_cache or answer.prompt_tokens > modelled.batch.kv_tokens:
            return ()
        return block_keys(prompt[: answer.prompt_characters], modelled.batch.block_tokens)

    def _check_model(self, fields: Mapping[str, Any]) -> None:
        model = fields.get("model")
        if model is not None and model != self.settings.model:
            message = f"The model `{model}` does not exist; this engine serves `{self.settings.model}`."
            raise RequestRefused(404, message, code="model_not_found", param="model")
        if fields.get("n", 1) not in (1, None):
            raise RequestRefused(400, "n must be 1: the emulated engine makes one choice.", param="n")
        # Taken and not used: the emulated engine serves in order of arrival.
        if not isinstance(fields.get("priority"), int | None):
            raise RequestRefused(400, "priority must be an integer.", param="priority")

    def _length(self, fields: Mapping[str, Any], answer: Answer) -> tuple[int, str]:
        asked = fields.get("max_completion_tokens")
        name = "max_completion_tokens" if asked is not None else "max_tokens"
        asked = asked if asked is not None else fields.get("max_tokens")
        if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
            raise RequestRefused(400, f"{name} must be an integer of at least 1, not {asked!r}.", param=name)
        tokens = asked if asked is not None else max(1, self.settings.answer_tokens - answer.first_word)
        limit = self.settings.context_tokens
        if answer.prompt_tokens + tokens > limit:
            message = (
                f"This model's maximum context length is {limit} tokens, but {answer.prompt_tokens} of prompt and "
                f"{tokens} of output were asked for."
            )
            raise RequestRefused(400, message, code="context_length_exceeded", param="messages")
        return tokens, "stop" if asked is None else "length"


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestRefused(400, "The request body must be a JSON object.", code="invalid_json")
    return fields


def _turns(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(400, "messages must be a list of at least one message.", param="messages")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestRefused(400, f"messages[{index}] must be an object with a role.", param="messages")
        content = message.get("content")
        turns.append((message["role"], content if isinstance(content, str) else orjson.dumps(content).decode()))
    return turns


def _plain_prompt(fields: Mapping[str, Any]) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        prompt = " ".join(map(str, prompt))
    if not isinstance(prompt, str):
        raise RequestRefused(400, "prompt must be one string or one list of token ids.", param="prompt")
    return prompt
