"""Continues a stream that broke off on another session, from the text its client already has. Pure: bytes in, bytes
out. docs/architecture.md says when the continued answer is exactly the one that would have come, and why.

Three parts: a `Transcript` keeps a copy of what was sent; `plan` decides whether it is sound to go on, and what to
ask; a `Splice` edits the events of the other session so that they fit behind those that were sent.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from serai.contracts.inference import FailureCode
from serai.contracts.session_record import SessionRecord

CONTINUATIONS_MAX = 2
"""Per request: an answer that kills its engines must not kill them all."""
REPEATED_EVENTS = 8
"""So many events of text are asked for a second time and compared with what was sent."""
TEXT_CHARACTERS_MAX = 1024 * 1024
"""Longer answers are not kept, and so not continued."""
_RAW_BYTES_MAX = 16 * 1024
"""Kept as it came until there is so much of it: most answers end before anything of them is read."""

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"


class Continuing(StrEnum):
    """Which broken streams are continued."""

    OFF = "off"
    GREEDY = "greedy"
    """Those whose text does not depend on chance: temperature 0."""
    ALWAYS = "always"
    """Sampled ones too: a text that might have come, not the one that would have."""


class Unsound(Exception):
    """The stream cannot be continued; the text says why, for the log."""


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


def can_replace(record: SessionRecord, broken: SessionRecord) -> bool:
    """Whether `record` would have said the same as `broken`."""
    mine, other = record.metadata, broken.metadata
    return is_replaceable(record) and (mine.engine, mine.fingerprint) == (other.engine, other.fingerprint)


def is_worth_keeping(continuing: Continuing, record: SessionRecord, path: str, body: bytes) -> bool:
    """A quick look before the first token whether a copy of the stream may be of use; `plan` looks closely."""
    if continuing is Continuing.OFF or path not in (CHAT_PATH, COMPLETIONS_PATH) or not is_replaceable(record):
        return False
    return continuing is Continuing.ALWAYS or _WAYS[record.metadata.engine].is_deterministic or b"temperature" in body


# -- what was sent ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """What all events of one stream have in common."""

    id: Any
    created: Any
    model: Any
    system_fingerprint: Any


class Transcript:
    """A copy of the events that went to the client. Reading them waits until there are many, or something breaks."""

    __slots__ = (
        "_blocks",
        "_ends",
        "_length",
        "_raw",
        "_raw_bytes",
        "finished",
        "head",
        "problem",
        "role_said",
        "usage",
    )

    def __init__(self) -> None:
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._blocks: list[str] = []
        self._ends = array("L")
        self._length = 0
        self.head: Head | None = None
        self.role_said = False
        self.finished = False
        """A finish reason was sent."""
        self.usage: dict[str, Any] | None = None
        """The last one sent."""
        self.problem = ""
        """Why it cannot be continued, when what was sent says so."""

    def add(self, events: bytes) -> None:
        """Once per token: whole events that are being sent."""
        self._raw.append(events)
        self._raw_bytes += len(events)
        if self._raw_bytes > _RAW_BYTES_MAX:
            self.read()

    def read(self) -> None:
        """Brings all that is known of the stream up to date."""
        data = b"".join(self._raw)
        self._raw.clear()
        self._raw_bytes = 0
        if self.problem:
            return
        try:
            for block in _blocks(data):
                self._read_block(block)
        except Unsound as reason:
            self._give_up(str(reason))
        self._blocks = ["".join(self._blocks)]

    @property
    def pieces(self) -> list[str]:
        """The text of each event that had some, in order. Up to date after `read`."""
        text = "".join(self._blocks)
        begins = [0, *self._ends[:-1]]
        return [text[begin:end] for begin, end in zip(begins, self._ends, strict=True)] if self._ends else []

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        self._blocks.clear()
        self._ends = array("L")

    def _read_block(self, block: bytes) -> None:
        data = _data_of(block)
        if data is None:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise Unsound("an event was sent that cannot be read") from None
        if not isinstance(event, dict) or event.get("error"):
            raise Unsound("an event was sent that is no part of an answer")
        if self.head is None:
            self.head = Head(*[event.get(name) for name in ("id", "created", "model", "system_fingerprint")])
        if "usage" in event and isinstance(event["usage"], dict):
            self.usage = event["usage"]
        for choice in event.get("choices") or ():
            self._read_choice(choice)

    def _read_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0 or choice.get("logprobs") is not None:
            raise Unsound("an event with another choice, or with log probabilities, was sent")
        delta = choice.get("delta")
        if isinstance(delta, dict):
            text = delta.get("content")
            if len(delta) > 1 or text is None:
                self._read_others(delta)
        else:
            text = choice.get("text")
        if choice.get("finish_reason") is not None:
            self.finished = True
        if text:
            self._take_text(text)

    def _read_others(self, delta: Mapping[str, Any]) -> None:
        said = [name for name, value in delta.items() if name != "content" and value not in (None, "", [])]
        if "role" in said:
            self.role_said = True
            said.remove("role")
        if said:
            raise Unsound(f"something other than text was sent: {', '.join(said)}")

    def _take_text(self, text: Any) -> None:
        if not isinstance(text, str):
            raise Unsound("a text was sent that is none")
        self._length += len(text)
        if self._length > TEXT_CHARACTERS_MAX:
            raise Unsound(f"more than {TEXT_CHARACTERS_MAX} characters were sent")
        self._blocks.append(text)
        self._ends.append(self._length)


def usage_so_far(events: bytes) -> bytes:
    """An event with the usage until now, for a stream that ends broken behind `events`. Nothing unless its engine kept
    telling it (`continuous_usage_stats`): a guess would be taken for a count."""
    data = next((data for block in reversed(_blocks(events)) if (data := _data_of(block))), None)
    try:
        event = orjson.loads(data or b"null")
    except orjson.JSONDecodeError:
        return b""
    if not isinstance(event, dict) or not isinstance(event.get("usage"), dict) or not event.get("choices"):
        return b""
    return _event(event | {"choices": []})


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
    stop = _longest_stop(fields)
    if pieces and not exact and stop:
        raise Unsound("a stop string may lie across the break")
    kept = _kept_pieces(pieces, stop) if exact else len(pieces)
    if chat and pieces and pieces[0][:1].isspace() and not way.keeps_leading_space:
        if not exact:
            raise Unsound("its text begins with a space, which the chat template would strip")
        kept = 0
    text, repeated = "".join(pieces[:kept]), "".join(pieces[kept:])
    edited = _continued(fields, way, text, _tokens_in(said, kept, len(pieces)), chat=chat) if kept else fields
    splice = Splice(said, repeated, _tokens_in(said, kept, len(pieces)))
    return Plan(json.dumps(edited).encode(), splice)


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


def _longest_stop(fields: Mapping[str, Any]) -> int:
    """Length of the longest stop string, in characters."""
    stop = fields.get("stop")
    strings = [stop] if isinstance(stop, str) else stop or []
    return max((len(text) for text in strings if isinstance(text, str)), default=0)


def _kept_pieces(pieces: Sequence[str], stop_characters: int) -> int:
    """How many of the pieces become part of the prompt; the others are asked for again and compared.

    The cut is where a tokenizer cuts whatever follows: behind a word, before a single space. At least as much is
    repeated as the longest stop string: its beginning may have been sent, and only generated text is searched for it.
    """
    repeated_characters = 0
    for index in range(len(pieces) - 1, 0, -1):
        repeated_characters += len(pieces[index])
        if len(pieces) - index < REPEATED_EVENTS or repeated_characters < stop_characters:
            continue
        if pieces[index].startswith(" ") and not pieces[index - 1][-1].isspace():
            return index
    return 0


def _tokens_in(said: Transcript, kept: int, pieces: int) -> int:
    """Tokens in the first `kept` of `pieces` events with text: one each, unless the engine said how many there are;
    then those at the end are still counted one each."""
    told = said.usage.get("completion_tokens") if said.usage else None
    return max(kept, told - (pieces - kept)) if isinstance(told, int) and kept else kept


def _continued(fields: Mapping[str, Any], way: _Way, text: str, tokens: int, *, chat: bool) -> dict[str, Any]:
    """The request with `text`, of so many tokens, already said."""
    edited = dict(fields)
    if chat:
        edited |= {**way.chat_fields, "messages": [*fields["messages"], {"role": "assistant", "content": text}]}
    else:
        edited["prompt"] = _prompt(fields) + text
    limits = {name: fields[name] for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None}
    if not limits and not chat and way.completion_tokens_default is not None:
        limits = {"max_tokens": way.completion_tokens_default}
    for name, limit in limits.items():
        if not isinstance(limit, int) or limit <= tokens:
            raise Unsound(f"`{name}` leaves nothing to say")
        edited[name] = limit - tokens
    return edited


# -- the rest of the answer ------------------------------------------------------------------------------------------


class Splice:
    """Edits the events of the session that goes on: they get the head of the first stream, the repeated text and a
    second role are taken out, and usage is told for the whole answer."""

    __slots__ = ("_head", "_prompt_tokens", "_repeated", "_role_said", "_tokens", "mismatch", "usage")

    def __init__(self, said: Transcript, repeated: str, tokens: int) -> None:
        self._head = said.head
        self._role_said = said.role_said
        self._repeated = repeated
        self._tokens = tokens
        told = said.usage.get("prompt_tokens") if said.usage else None
        self._prompt_tokens = told if isinstance(told, int) else None
        self.mismatch = False
        """It does not say what was sent already: nothing of it may reach the client."""
        self.usage: dict[str, Any] | None = None
        """The last one, corrected."""

    def edit(self, events: bytes) -> bytes:
        """Whole events in, whole events out."""
        return b"".join([self._edit_block(block) for block in _blocks(events)])

    def _edit_block(self, block: bytes) -> bytes:
        if self.mismatch:
            return b""
        data = _data_of(block)
        if data is None:
            # `[DONE]`, or a comment. The end must not come before all that was sent has come again.
            self.mismatch = bool(self._repeated) and _is_done(block)
            return b"" if self.mismatch else block + b"\n\n"
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return block + b"\n\n"
        if not isinstance(event, dict) or event.get("error"):
            # Before all that was sent has come again, its client has no use for what ails this session.
            self.mismatch = bool(self._repeated)
            return b"" if self.mismatch else block + b"\n\n"
        choices = [choice for choice in event.get("choices") or () if isinstance(choice, dict)]
        has_news = not choices
        for choice in choices:
            has_news |= self._edit_choice(choice)
        if isinstance(event.get("usage"), dict):
            self._correct(event["usage"])
        # With usage in each event, one without news says nothing that the next one does not say.
        return b"" if self.mismatch or not has_news else self._with_head(event)

    def _edit_choice(self, choice: dict[str, Any]) -> bool:
        """Whether something is left to tell."""
        finished = choice.get("finish_reason") is not None
        delta = choice.get("delta")
        place, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        text = place.get(name)
        left = self._unsaid(text) if isinstance(text, str) else ""
        if text:
            place[name] = left
        self.mismatch |= finished and bool(self._repeated)
        if place is not delta:
            return bool(left) or finished
        if self._role_said:
            place.pop("role", None)
            if not left:
                place.pop(name, None)
        elif "role" in place:
            self._role_said = True
        return finished or any(value not in (None, "") for value in place.values())

    def _unsaid(self, text: str) -> str:
        """What is new of `text`."""
        repeated = self._repeated
        if not repeated:
            return text
        size = min(len(text), len(repeated))
        if text[:size] != repeated[:size]:
            self.mismatch = True
            return ""
        self._repeated = repeated[size:]
        return text[size:]

    def _correct(self, usage: dict[str, Any]) -> None:
        """Tokens that were said and became prompt are no prompt. The total is right as it is."""
        prompt, said = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(said, int):
            own_prompt = prompt - self._tokens if self._prompt_tokens is None else self._prompt_tokens
            usage["prompt_tokens"] = max(0, own_prompt)
            usage["completion_tokens"] = said + self._tokens
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        self.usage = usage

    def _with_head(self, event: dict[str, Any]) -> bytes:
        head = self._head
        if head is not None:
            for name in ("id", "created", "model", "system_fingerprint"):
                if name in event:
                    event[name] = getattr(head, name)
        return _event(event)


# -- SSE -------------------------------------------------------------------------------------------------------------


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def _blocks(events: bytes) -> list[bytes]:
    """The events of `events`, without the empty lines between them."""
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n")
    return [block for block in events.split(b"\n\n") if block and not block.isspace()]


def _data_of(block: bytes) -> bytes | None:
    """The data of one event; None when it has none, or is the end marker."""
    if block.startswith(b"data: {") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].lstrip(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return None if not lines or data == b"[DONE]" else data


def _is_done(block: bytes) -> bool:
    return b"[DONE]" in block
