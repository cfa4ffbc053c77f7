"""A Responses request as a chat completions request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from serai.ingress.request_body import refuse_stateful
from serai.ingress.request_shape import others, refuse, shaped, unsupported


class InputText(msgspec.Struct, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    text: str


class Refusal(msgspec.Struct, tag="refusal"):
    refusal: str


class InputImage(msgspec.Struct, tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


Part = InputText | OutputText | Refusal | InputImage


class Message(msgspec.Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCall(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(msgspec.Struct, tag="function_call_output"):
    call_id: str
    output: str | list[InputText | InputImage]


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class Reasoning(msgspec.Struct, tag="reasoning"):
    content: list[ReasoningText] | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning


class Function(msgspec.Struct, tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ChosenFunction(msgspec.Struct, tag="function"):
    name: str


class PlainFormat(msgspec.Struct, tag="text"):
    pass


class ObjectFormat(msgspec.Struct, tag="json_object"):
    pass


class SchemaFormat(msgspec.Struct, tag="json_schema"):
    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    format: PlainFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    effort: str | None = None


class ResponsesRequest(msgspec.Struct):
    """What is translated; everything else passes, is refused or dropped."""

    input: str | list[Item]
    instructions: str | None = None
    tools: list[Function] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None


_STATE = frozenset({"previous_response_id", "conversation", "background", "store"})
_REFUSED = {
    "prompt": "prompts are not stored here",
    "context_management": "conversations are not shortened here",
    "max_tool_calls": "this gateway calls no tools itself",
    "top_logprobs": "log probabilities are told by /v1/chat/completions only",
    "moderation": "answers are not moderated here",
    "n": "this API has one answer to a request",
}
_DROPPED = frozenset({"metadata", "service_tier", "stream_options", "prompt_cache_retention", "prompt_cache_options"})
"""They say how OpenAI should work, not what it should answer."""
_LOG_PROBABILITIES = "message.output_text.logprobs"


def chat_request(fields: dict[str, Any]) -> dict[str, Any]:
    """Raises ApiError (400) naming the place that is wrong or cannot be translated."""
    refuse_stateful(fields)
    refuse(fields, _REFUSED)
    asked = shaped(_with_types(fields), ResponsesRequest)
    if asked.include and _LOG_PROBABILITIES in asked.include:
        raise unsupported("include", f"{_LOG_PROBABILITIES} are told by /v1/chat/completions only")
    chat = others(fields, {*ResponsesRequest.__struct_fields__, *_STATE, *_REFUSED, *_DROPPED})
    chat["messages"] = _messages(asked)
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if asked.max_output_tokens is not None:
        chat["max_tokens"] = asked.max_output_tokens
    if asked.tools:
        chat["tools"] = [{"type": "function", "function": _without_nulls(tool)} for tool in asked.tools]
    if isinstance(asked.tool_choice, ChosenFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": asked.tool_choice.name}}
    elif asked.tool_choice is not None:
        chat["tool_choice"] = asked.tool_choice
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        chat["reasoning_effort"] = asked.reasoning.effort
    if asked.text is not None:
        chat |= _text(asked.text)
    return chat


def _with_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are said; a message may leave its `type` out."""
    given = {name: value for name, value in fields.items() if value is not None}
    if isinstance(items := given.get("input"), list):
        given["input"] = [
            {"type": "message"} | item if isinstance(item, dict) and "role" in item else item for item in items
        ]
    return given


def _without_nulls(struct: Function | SchemaFormat) -> dict[str, Any]:
    return {name: value for name in struct.__struct_fields__ if (value := getattr(struct, name)) is not None}


def _text(config: TextConfig) -> dict[str, Any]:
    chat: dict[str, Any] = {} if config.verbosity is None else {"verbosity": config.verbosity}
    if isinstance(config.format, SchemaFormat):
        chat["response_format"] = {"type": "json_schema", "json_schema": _without_nulls(config.format)}
    elif isinstance(config.format, ObjectFormat):
        chat["response_format"] = {"type": "json_object"}
    return chat


# -- messages --------------------------------------------------------------------------------------------------------


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for index, item in enumerate(asked.input):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    match item:
        case Message(role="assistant"):
            _said_by_assistant(messages, "content")["content"] = _plain(item.content, f"{where}.content")
        case Message(role="user"):
            messages.append({"role": "user", "content": _content(item.content, f"{where}.content")})
        case Message():
            _add_system(messages, _plain(item.content, f"{where}.content"))
        case Reasoning():
            if thought := "\n".join(part.text for part in item.content or ()):
                message = _said_by_assistant(messages, "content", "tool_calls", "reasoning")
                # vLLM's name for it, and everyone else's; chat templates decide what becomes of it.
                message |= dict.fromkeys(("reasoning", "reasoning_content"), thought)
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _said_by_assistant(messages).setdefault("tool_calls", []).append(call)
        case FunctionCallOutput():
            output = _plain(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})


def _said_by_assistant(messages: list[dict[str, Any]], *not_yet: str) -> dict[str, Any]:
    """The message of the assistant that an item belongs to: the last one, if it does not have `not_yet` already."""
    if messages and messages[-1]["role"] == "assistant" and not any(messages[-1].get(name) for name in not_yet):
        return messages[-1]
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_system(messages: list[dict[str, Any]], text: str) -> None:
    """Chat templates know one message of the system, the first; what developers say is the same to them."""
    if len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": "system", "content": text})


def _plain(content: str | Sequence[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if isinstance(part, InputImage):
            raise unsupported(f"{where}[{index}].type", "'input_image' has its place in messages of the user only")
    return "".join(part.refusal if isinstance(part, Refusal) else part.text
                   for part in content if not isinstance(part, InputImage))  # fmt: skip


def _content(content: str | Sequence[Part], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _plain(content, where)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, InputImage):
            parts.append(_image(part, f"{where}[{index}]"))
        else:
            parts.append({"type": "text", "text": _plain([part], where)})
    return parts


def _image(image: InputImage, where: str) -> dict[str, Any]:
    if image.file_id is not None:
        raise unsupported(f"{where}.file_id", "files are not stored here; send the image as `image_url`")
    if not image.image_url:
        raise unsupported(f"{where}.image_url", "is missing")
    detail = {} if image.detail is None else {"detail": image.detail}
    return {"type": "image_url", "image_url": {"url": image.image_url} | detail}
