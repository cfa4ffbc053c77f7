"""A Messages request as a chat completions request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import orjson

from serai.ingress.request_shape import others, refuse, shaped, unsupported


class Text(msgspec.Struct, tag="text"):
    text: str


class Base64Source(msgspec.Struct, tag="base64"):
    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag="url"):
    url: str


class Image(msgspec.Struct, tag="image"):
    source: Base64Source | UrlSource


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image] | None = None


class Thinking(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    """Only Anthropic can read it."""


Block = Text | Image | ToolUse | ToolResult | Thinking | RedactedThinking


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """Of any type: those that Anthropic runs itself have no schema."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class JsonFormat(msgspec.Struct, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: JsonFormat | None = None


class ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]


class Metadata(msgspec.Struct):
    user_id: str | None = None


class MessagesRequest(msgspec.Struct):
    """What is translated; everything else passes, is refused or dropped."""

    messages: list[Message]
    max_tokens: int
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None


_REFUSED = {
    "container": "containers exist only at Anthropic",
    "mcp_servers": "this gateway calls no tools itself",
    "n": "Anthropic's API has one answer to a request",
}
_DROPPED = frozenset(
    {
        *("service_tier", "context_management", "cache_control", "inference_geo", "speed", "diagnostics", "betas"),
        *("stream_options", "user_profile_id", "workspace_id"),
    }
)
"""They say how Anthropic should work, not what it should answer."""
_BILLING_PREFIX = "x-anthropic-billing-header"
"""A client puts a text that changes each time before its system prompt: it would make every prompt new to caches."""


def chat_request(fields: dict[str, Any]) -> dict[str, Any]:
    """Raises ApiError (400) naming the place that is wrong or cannot be translated."""
    refuse(fields, _REFUSED)
    asked = shaped({name: value for name, value in fields.items() if value is not None}, MessagesRequest)
    chat = others(fields, {*MessagesRequest.__struct_fields__, *_REFUSED, *_DROPPED})
    chat |= {"messages": _messages(asked), "max_tokens": asked.max_tokens}
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if asked.tools:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(asked.tools)]
    if asked.tool_choice is not None:
        chat |= _tool_choice(asked.tool_choice)
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    if asked.metadata is not None and asked.metadata.user_id:
        chat["user"] = asked.metadata.user_id
    if asked.thinking is not None and asked.thinking.type != "adaptive":
        wanted = {"enable_thinking": asked.thinking.type == "enabled"}
        given = chat.get("chat_template_kwargs")
        chat["chat_template_kwargs"] = wanted | (given if isinstance(given, dict) else {})
    if asked.output_config is not None:
        chat |= _output(asked.output_config)
    if asked.messages and asked.messages[-1].role == "assistant":
        # The answer goes on with it. llama.cpp does so anyway, others must be told.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _output(config: OutputConfig) -> dict[str, Any]:
    output: dict[str, Any] = {}
    if config.effort is not None:
        output["reasoning_effort"] = "high" if config.effort in ("xhigh", "max") else config.effort
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema, "strict": True}
        output["response_format"] = {"type": "json_schema", "json_schema": schema}
    return output


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(f"tools[{index}].type", f"{tool.type[:100]!r} is no tool that this model's engine knows")
    if not tool.name or tool.input_schema is None:
        raise unsupported(f"tools[{index}].{'input_schema' if tool.name else 'name'}", "is missing")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    simple = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type == "tool" and not choice.name:
        raise unsupported("tool_choice.name", "names no tool")
    chosen: Any = simple.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


# -- messages --------------------------------------------------------------------------------------------------------


def _messages(asked: MessagesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if system := _system_text(asked.system):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(asked.messages):
        blocks = [Text(message.content)] if isinstance(message.content, str) else message.content
        where = f"messages[{index}].content"
        if message.role == "assistant":
            messages.append(_assistant(blocks, where))
        elif message.role == "system":
            messages.append({"role": "system", "content": _plain(blocks, where)})
        else:
            messages += _user(blocks, where)
    return messages


def _system_text(system: str | Sequence[Text] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(block.text for block in system if not block.text.startswith(_BILLING_PREFIX))


def _plain(blocks: Sequence[Block], where: str) -> str:
    for index, block in enumerate(blocks):
        if not isinstance(block, Text):
            raise _misplaced(block, f"{where}[{index}]", "system")
    return "\n\n".join(block.text for block in blocks if isinstance(block, Text))


def _assistant(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case Text():
                texts.append(block.text)
            case Thinking():
                thoughts.append(block.thinking)
            case ToolUse():
                function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedThinking():
                pass
            case _:
                raise _misplaced(block, f"{where}[{index}]", "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        # vLLM's name for it, and everyone else's; chat templates decide what becomes of it.
        message |= dict.fromkeys(("reasoning", "reasoning_content"), "\n".join(thoughts))
    return message | ({"tool_calls": calls} if calls else {})


def _user(blocks: Sequence[Block], where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, and come before what the user says beside them."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case Text():
                parts.append({"type": "text", "text": block.text})
            case Image():
                parts.append(_image(block))
            case ToolResult():
                inner = [Text(block.content)] if isinstance(block.content, str) else block.content or []
                text = "\n".join(part.text for part in inner if isinstance(part, Text))
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
                # A tool's message takes text only: its images are shown by the user, next.
                parts += [_image(part) for part in inner if isinstance(part, Image)]
            case _:
                raise _misplaced(block, f"{where}[{index}]", "user")
    if len(parts) == 1 and parts[0]["type"] == "text":
        return [*results, {"role": "user", "content": parts[0]["text"]}]
    if parts or not results:
        return [*results, {"role": "user", "content": parts or ""}]
    return results


def _image(image: Image) -> dict[str, Any]:
    source = image.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _misplaced(block: Block, where: str, role: str) -> Exception:
    return unsupported(f"{where}.type", f"{block.__struct_config__.tag!r} has no place in a message of the {role}")
