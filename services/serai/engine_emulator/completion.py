"""Reads a completion request: from the body's bytes to what the engine has to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from serai.engine_emulator.json_instance import CannotMeetSchema
from serai.engine_emulator.script import Choice, Script, Tool, Wanted, called, choice_of
from serai.engine_emulator.settings import EmulatorSettings
from serai.engine_emulator.text import Answer, answer_to, block_keys, chat_prompt

CHOICES_MAX = 128
_ALTERNATIVES_MAX = 20
_SEED_MASK = 0xFFFFFFFF
_ANY_OBJECT = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}


class RequestRefused(Exception):
    """The request cannot be served: an HTTP status and the parts of an OpenAI error object."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class Completion:
    """What is to be said: `tokens` tokens of `answer` or of `script`, as a stream or in one piece."""

    __slots__ = (
        "answer",
        "block_keys",
        "chat",
        "continuous_usage",
        "finish_reason",
        "include_usage",
        "script",
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
        script: Script | None = None,
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
        self.script = script
        """What it says when that is more than one choice of words."""


@dataclass(frozen=True, slots=True)
class CompletionReader:
    """Reads completion requests for one model. Fields it does not know are ignored, as engines do."""

    settings: EmulatorSettings

    def read(self, body: bytes, *, chat: bool) -> Completion:
        """The completion asked for in `body`. Raises RequestRefused."""
        fields = read_object(body)
        self.check_model(fields)
        prompts = [chat_prompt(_turns(fields))] if chat else _plain_prompts(fields)
        n = _integer(fields, "n", 1, CHOICES_MAX) or 1
        asked = _tokens_asked(fields)
        logprobs = _logprobs(fields, chat)
        schema = _schema(fields.get("response_format")) if chat else None
        stops = read_stops(fields.get("stop"), "stop")
        tools, forced = _called(fields) if chat else ((), None)
        echo = not chat and fields.get("echo") is True
        reasons = chat and _reasons(fields)
        options = fields.get("stream_options")
        options = options if isinstance(options, dict) else {}
        include_usage = bool(options.get("include_usage"))
        seed = self.settings.seed + (_integer(fields, "seed") or 0)
        answers = [answer_to(prompt, (seed + k) & _SEED_MASK) for prompt in prompts for k in range(n)]
        answer = answers[0]
        if len(prompts) > 1:
            answer = replace(answer, prompt_tokens=sum([one.prompt_tokens for one in answers[::n]]))

        def wanted(said: Answer) -> Wanted:
            words = asked if asked is not None else max(1, self.settings.answer_tokens - said.first_word)
            return Wanted(words, asked, tools, forced, schema, stops, reasons)

        plain = wanted(answer)
        self.check_length(answer, plain.words)
        script = None
        if len(answers) > 1 or tools or stops or reasons or echo or asked == 0 or (schema, logprobs) != (None, None):
            echoed = [prompt if echo else "" for prompt in prompts for _ in range(n)]
            pairs = zip(answers, echoed, strict=True)
            choices = [self.choice(wanted(one), one, echoed=prompt) for one, prompt in pairs]
            script = Script(tuple(choices), logprobs)
        return Completion(
            chat=chat,
            stream=bool(fields.get("stream")),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
            block_keys=self.block_keys("".join(prompts), answer),
            answer=answer,
            tokens=plain.words if script is None else script.tokens,
            finish_reason=script.choices[0].finish_reason if script else "stop" if asked is None else "length",
            script=script,
        )

    def block_keys(self, prompt: str, answer: Answer) -> tuple[int, ...]:
        """The prompt's full KV blocks; none without a prefix cache."""
        modelled = self.settings.modelled
        if modelled is None or not modelled.batch.prefix_cache or answer.prompt_tokens > modelled.batch.kv_tokens:
            return ()
        return block_keys(prompt[: answer.prompt_characters], modelled.batch.block_tokens)

    def check_model(self, fields: Mapping[str, Any]) -> None:
        """Raises RequestRefused when another model is asked for, or with nonsense that every endpoint refuses."""
        model = fields.get("model")
        if model is not None and model != self.settings.model:
            message = f"The model `{model}` does not exist; this engine serves `{self.settings.model}`."
            raise RequestRefused(404, message, code="model_not_found", param="model")
        # Taken and not used: the emulated engine serves in order of arrival.
        if not isinstance(fields.get("priority"), int | None):
            raise RequestRefused(400, "priority must be an integer.", param="priority")

    def check_length(self, answer: Answer, tokens: int) -> None:
        """Raises RequestRefused when prompt and output are longer than the context."""
        limit = self.settings.context_tokens
        if answer.prompt_tokens + tokens > limit:
            message = (
                f"This model's maximum context length is {limit} tokens, but {answer.prompt_tokens} of prompt and "
                f"{tokens} of output were asked for."
            )
            raise RequestRefused(400, message, code="context_length_exceeded", param="messages")

    def choice(self, wanted: Wanted, answer: Answer, *, echoed: str = "") -> Choice:
        """One choice. Raises RequestRefused where its schema cannot be met."""
        try:
            return choice_of(wanted, answer, echoed=echoed)
        except (CannotMeetSchema, TypeError, ValueError, AttributeError) as error:
            raise RequestRefused(400, f"The JSON schema cannot be followed: {error}.", code="invalid_schema") from error


def read_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestRefused."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestRefused(400, "The request body must be a JSON object.", code="invalid_json")
    return fields


def content_text(content: object) -> str:
    """A message's content as text, whatever it holds."""
    return content if isinstance(content, str) else orjson.dumps(content).decode()


def read_stops(stops: object, name: str) -> tuple[str, ...]:
    """Stop strings: one, or a list. Raises RequestRefused."""
    if stops is None:
        return ()
    listed = [stops] if isinstance(stops, str) else stops
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        raise RequestRefused(400, f"{name} must be a string or a list of strings.", param=name)
    return tuple([stop for stop in listed if stop])


def read_called(
    tools: Sequence[Tool], mode: str, named: str | None, *, after_tool: bool, parallel: bool
) -> tuple[tuple[Tool, ...], str | None]:
    """As `script.called`. Raises RequestRefused."""
    if mode not in ("none", "auto", "required"):
        raise RequestRefused(400, f"tool_choice {mode!r:.80} is none of none, auto, required.", param="tool_choice")
    if not tools and (mode == "required" or named is not None):
        raise RequestRefused(400, "When using tool_choice, tools must be set.", param="tool_choice")
    try:
        return called(tools, mode, named, after_tool=after_tool, parallel=parallel)
    except KeyError as error:
        raise RequestRefused(
            400, f"tool_choice names {named!r}, which is not in tools.", param="tool_choice"
        ) from error


def _turns(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(400, "messages must be a list of at least one message.", param="messages")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestRefused(400, f"messages[{index}] must be an object with a role.", param="messages")
        turns.append((message["role"], content_text(message.get("content"))))
    return turns


def _plain_prompts(fields: Mapping[str, Any]) -> list[str]:
    """One prompt or several: strings, or lists of token ids."""
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    prompts = []
    for one in prompt if isinstance(prompt, list) and several else [prompt]:
        if isinstance(one, list) and one and all(isinstance(token, int) for token in one):
            one = " ".join(map(str, one))
        if not isinstance(one, str):
            message = "prompt must be a string or a list of token ids, or a list of those."
            raise RequestRefused(400, message, param="prompt")
        prompts.append(one)
    if len(prompts) > CHOICES_MAX:
        raise RequestRefused(400, f"prompt holds {len(prompts)} prompts; {CHOICES_MAX} is the limit.", param="prompt")
    return prompts


def _integer(fields: Mapping[str, Any], name: str, least: int | None = None, most: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    wrong_type = not isinstance(value, int) or isinstance(value, bool)
    if wrong_type or (least is not None and value < least) or (most is not None and value > most):
        bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
        raise RequestRefused(400, f"{name} must be an integer{bounds}, not {value!r:.80}.", param=name)
    return int(value)


def _tokens_asked(fields: Mapping[str, Any]) -> int | None:
    """0 is possible, as in llama.cpp: the prompt is read and nothing said."""
    newer = _integer(fields, "max_completion_tokens", 0)
    return newer if newer is not None else _integer(fields, "max_tokens", 0)


def _logprobs(fields: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _integer(fields, "logprobs", 0, _ALTERNATIVES_MAX)
    alternatives = _integer(fields, "top_logprobs", 0, _ALTERNATIVES_MAX)
    if fields.get("logprobs") is not True:
        if alternatives:
            raise RequestRefused(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        return None
    return alternatives or 0


def _reasons(fields: Mapping[str, Any]) -> bool:
    """Whether reasoning is asked for, as with vLLM: by effort, or by a variable of the chat template."""
    template = fields.get("chat_template_kwargs")
    thinks = isinstance(template, dict) and template.get("enable_thinking") is True
    return thinks or fields.get("reasoning_effort") not in (None, "none")


def _schema(form: object) -> Any:
    """The schema that the answer has to follow; None for text."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in ("text", "json_object", "json_schema"):
        message = "response_format.type must be text, json_object or json_schema."
        raise RequestRefused(400, message, param="response_format")
    if kind == "json_schema":
        named = form.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            message = "response_format.json_schema.schema must be an object."
            raise RequestRefused(400, message, param="response_format")
        return schema
    return _ANY_OBJECT if kind == "json_object" else None


def _called(fields: Mapping[str, Any]) -> tuple[tuple[Tool, ...], str | None]:
    tools = [_tool(index, tool) for index, tool in enumerate(_list(fields, "tools"))]
    choice = fields.get("tool_choice")
    named = None
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if not isinstance(named, str):
            raise RequestRefused(400, "tool_choice.function.name must be a string.", param="tool_choice")
        choice = None
    after_tool = fields["messages"][-1]["role"] in ("tool", "function")
    parallel = fields.get("parallel_tool_calls") is True
    return read_called(tools, choice or "auto", named, after_tool=after_tool, parallel=parallel)


def _tool(index: int, tool: object) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        message = f"tools[{index}] must be a function with a name."
        raise RequestRefused(400, message, param="tools")
    return Tool(name, function.get("parameters") or {"type": "object"})


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestRefused(400, f"{name} must be a list.", param=name)
    return value or []
