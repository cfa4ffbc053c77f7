"""Continues a stream that broke off on another session, from the text its client already has. Pure: bytes in, bytes
out. docs/architecture.md says when the continued answer is exactly the one that would have come, and why.

A `Transcript` keeps a copy of what was sent; `plan` decides whether it is sound to go on, and what to ask; a `Splice`
edits the events of the other session so that they fit behind those that were sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serai.contracts.inference import FailureCode
from serai.contracts.session_record import SessionRecord
from serai.ingress.sent_events import Transcript, Unsound
from serai.ingress.splice import Splice

CONTINUATIONS_MAX = 2
"""Per request: an answer that kills its engines must not kill them all."""
REPEATED_EVENTS = 8
"""So many events of text are asked for a second time and compared with what was sent."""

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"


class Continuing(StrEnum):
    """Which broken streams are continued."""

    OFF = "off"
    GREEDY = "greedy"
    """Those whose text does not depend on chance: temperature 0."""
    ALWAYS = "always"
    """Sampled ones too: a text that might have come, not the one that would have."""


_SURVIVABLE = frozenset(
    {
        FailureCode.NO_RESPONDERS,
        FailureCode.AGENT_SILENT,
        FailureCode.AGENT_LEFT,
        FailureCode.DRAINING,
        FailureCode.FRAME_GAP,
        FailureCode.ENGINE_CUT,
        FailureCode.ENGINE_PROTOCOL,
        FailureCode.ENGINE_SILENT,
        FailureCode.ENGINE_UNREACHABLE,
    }
)


def is_survivable(code: FailureCode) -> bool:
    """Whether a failure says nothing against another session: not lack of time, a slow client or a lost bus."""
    return code in _SURVIVABLE


@dataclass(frozen=True, slots=True)
class _Way:
    """How an engine kind is made to go on with a text instead of answering it."""

    chat_fields: Mapping[str, Any] = field(default_factory=dict)
    """Beside a last message of the assistant."""
    keeps_leading_space: bool = True
    """False: its chat template strips a message's text."""
    completion_tokens_default: int | None = None
    """What `/v1/completions` takes for a missing `max_tokens`; None: whatever has room."""
    is_deterministic: bool = False
    """Says the same at any temperature."""


_ENDS_OPEN = {"continue_final_message": True, "add_generation_prompt": False}
_WAYS = {
    # vLLM renders the chat template and cuts it behind the last message's text.
    "vllm": _Way(_ENDS_OPEN, keeps_leading_space=False, completion_tokens_default=16),
    "sglang": _Way({"continue_final_message": True}, keeps_leading_space=False, completion_tokens_default=16),
    # llama.cpp appends the text to the rendered prompt, as it is. Builds that do not know the fields always do.
    "llamacpp": _Way(_ENDS_OPEN),
    "emulated": _Way(is_deterministic=True),
}


def is_replaceable(record: SessionRecord) -> bool:
    """Whether it is known what is served there, and how to make its like go on."""
    return record.metadata.engine in _WAYS and bool(record.metadata.fingerprint)


def can_replace(record: SessionRecord, broken: SessionRecord, *, any_fingerprint: bool = False) -> bool:
    """Whether `record` would have said the same as `broken`; `any_fingerprint`: the operator says that it would."""
    mine, other = record.metadata, broken.metadata
    same = any_fingerprint or mine.fingerprint == other.fingerprint
    return is_replaceable(record) and mine.engine == other.engine and same


def is_worth_keeping(continuing: Continuing, record: SessionRecord, path: str, body: bytes) -> bool:
    """A quick look before the first token whether a copy of the stream may be of use; `plan` looks closely."""
    if continuing is Continuing.OFF or path not in (CHAT_PATH, COMPLETIONS_PATH) or not is_replaceable(record):
        return False
    return continuing is Continuing.ALWAYS or _WAYS[record.metadata.engine].is_deterministic or b"temperature" in body


# -- whether, and with what request ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask another session of the same kind, and how its events become the rest of the answer."""

    body: bytes
    splice: Splice


def plan(continuing: Continuing, engine: str, path: str, body: bytes, said: Transcript) -> Plan:
    """How to go on at another session. Raises Unsound."""
    said.read()
    if said.problem:
        raise Unsound(said.problem)
    if said.finished:
        raise Unsound("the finish reason was sent already")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise Unsound("the request cannot be read a second time") from None
    way, chat, pieces = _WAYS[engine], path == CHAT_PATH, said.pieces
    _check_request(fields, chat=chat)
    exact = way.is_deterministic or fields.get("temperature") == 0
    if pieces and not exact and continuing is not Continuing.ALWAYS:
        raise Unsound("its text depends on chance (temperature is not 0)")
    begins_with_space = chat and bool(pieces) and pieces[0][:1].isspace() and not way.keeps_leading_space
    if pieces and not exact and (fields.get("stop") or begins_with_space):
        raise Unsound("a stop string may lie across the break, or its first space would be lost")
    limits = _limits(fields, way, chat=chat)
    if not exact:
        kept = len(pieces)
    elif fields.get("stop") or begins_with_space:
        # Engines hold text back that may become a stop string: what was sent is not where they were.
        kept = 0
    else:
        kept = _kept_pieces(pieces, _countable_pieces(said, pieces) if limits else len(pieces))
    tokens = (said.counts[kept - 1] or kept) if kept else 0
    text, repeated = "".join(pieces[:kept]), "".join(pieces[kept:])
    edited = _continued(fields, way, text, chat=chat) | _less(limits, tokens) if kept else fields
    return Plan(json.dumps(edited).encode(), Splice(said, repeated, tokens))


def _neutral(*values: Any) -> Callable[[Any], bool]:
    # `True == 1`, but it is not what is meant.
    return lambda value: any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                             for neutral in values)  # fmt: skip


def _any(value: Any) -> bool:
    return True


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop"),
            # What changes each step by itself, wherever the prompt ends.
            *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos", "skip_special_tokens"),
            # What engines do not look at.
            *("user", "metadata", "service_tier", "priority", "parallel_tool_calls", "safety_identifier"),
            *("prompt_cache_key", "cache_prompt", "request_id", "include_stop_str_in_output"),
        ),
        _any,
    ),
    "n": _neutral(1),
    "best_of": _neutral(1),
    "store": _neutral(False),
    "echo": _neutral(False),
    "suffix": _neutral(""),
    "logprobs": _neutral(False),
    "top_logprobs": _neutral(0),
    "tools": _neutral([]),
    "functions": _neutral([]),
    "tool_choice": _neutral("none"),
    "function_call": _neutral("none"),
    "response_format": _is_plain_text,
    "min_tokens": _neutral(0),
    # They count words of the answer: the part that becomes prompt would not be counted, or not alike.
    "presence_penalty": _neutral(0),
    "frequency_penalty": _neutral(0),
    "repetition_penalty": _neutral(1),
    "repeat_penalty": _neutral(1),
}
"""Fields of a request, and when they do not stand in the way. A field that is not here does, unless it is null: what
nobody has thought of may well depend on where the answer began."""


def _check_request(fields: Any, *, chat: bool) -> None:
    """Raises Unsound, naming the field."""
    if not isinstance(fields, dict):
        raise Unsound("the request is no object")
    for name, value in fields.items():
        if value is not None and not (name in _HARMLESS and _HARMLESS[name](value)):
            raise Unsound(f"`{name[:40]}` of the request may depend on where the answer begins")
    if chat:
        messages = fields.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        if not isinstance(last, dict) or last.get("role") == "assistant":
            raise Unsound("`messages` end with one of the assistant already")
    elif not isinstance(_prompt(fields), str):
        raise Unsound("`prompt` is not one text")


def _prompt(fields: Mapping[str, Any]) -> Any:
    prompt = fields.get("prompt")
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt


def _limits(fields: Mapping[str, Any], way: _Way, *, chat: bool) -> dict[str, Any]:
    """What the request, or the engine in its stead, says of the answer's length."""
    limits = {name: fields[name] for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None}
    if not limits and not chat and way.completion_tokens_default is not None:
        return {"max_tokens": way.completion_tokens_default}
    return limits


def _less(limits: Mapping[str, Any], tokens: int) -> dict[str, int]:
    """The limits when so many tokens have been said."""
    for name, limit in limits.items():
        if not isinstance(limit, int) or limit <= tokens:
            raise Unsound(f"`{name}` leaves nothing to say")
    return {name: limit - tokens for name, limit in limits.items()}


def _countable_pieces(said: Transcript, pieces: Sequence[str]) -> int:
    """Of how many pieces, from the first on, it is known how many tokens they are: all, if the engine told; else those
    before the first with a character outside ASCII, which may be several tokens in one event."""
    if all(said.counts):
        return len(pieces)
    return next((index for index, piece in enumerate(pieces) if not piece.isascii()), len(pieces))


def _kept_pieces(pieces: Sequence[str], most: int) -> int:
    """How many of the pieces become part of the prompt, at most `most`; the others are asked for again and compared.

    The cut is where a tokenizer cuts whatever follows: behind a word, before a single space.
    """
    for index in range(min(most, len(pieces) - REPEATED_EVENTS), 0, -1):
        if pieces[index].startswith(" ") and not pieces[index - 1][-1].isspace():
            return index
    return 0


def _continued(fields: Mapping[str, Any], way: _Way, text: str, *, chat: bool) -> dict[str, Any]:
    """The request with `text` already said."""
    edited = dict(fields)
    if chat:
        edited |= {**way.chat_fields, "messages": [*fields["messages"], {"role": "assistant", "content": text}]}
    else:
        edited["prompt"] = _prompt(fields) + text
    return edited
