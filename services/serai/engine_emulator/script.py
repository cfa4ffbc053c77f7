"""What an answer is made of when it is more than words: choices, each a row of pieces, one piece per token. Pure.

Reasoning, tool calls, JSON, stop strings, several choices. The plain answer of words, one choice, has no script: it is
what benchmarks send by the hundred thousand, and `responses.CompletionFormat` says it cheaply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from serai.engine_emulator.json_instance import CannotMeetSchema, instance_of
from serai.engine_emulator.text import Answer, word

CHARACTERS_PER_TOKEN = 4
REASONING_TOKENS = 8
_REASONING_KEY = 0x5EED


class Say(StrEnum):
    """What a piece belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"
    """The beginning of a tool call: its text is the tool's name."""
    ARGUMENTS = "arguments"


class Piece(NamedTuple):
    """One token's text."""

    say: Say
    text: str
    call: int = 0
    """Which of the choice's tool calls it belongs to."""


class Choice(NamedTuple):
    """One choice of an answer."""

    pieces: tuple[Piece, ...]
    finish_reason: str
    """In OpenAI's words."""
    stopped_by: str | None = None
    """The stop string that was reached."""
    echoed: str = ""

    def text(self, say: Say, call: int = 0) -> str:
        """All of one kind, joined."""
        return "".join([piece.text for piece in self.pieces if piece.say is say and piece.call == call])

    @property
    def calls(self) -> list[str]:
        """Names of the tools that are called, in order."""
        return [piece.text for piece in self.pieces if piece.say is Say.TOOL]


class Script(NamedTuple):
    """All choices of one answer."""

    choices: tuple[Choice, ...]
    logprobs: int | None = None
    """How many alternatives each token's log probability comes with; None: no log probabilities."""

    @property
    def tokens(self) -> int:
        """Length of the longest choice: so long the engine works."""
        return max(1, *[len(choice.pieces) for choice in self.choices])

    def said(self, tokens: int) -> int:
        """Tokens of all choices when the engine has made `tokens` steps."""
        return sum([min(tokens, len(choice.pieces)) for choice in self.choices])


class Tool(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants, in whatever dialect it was said."""

    words: int
    """Length of an answer that is words, in tokens."""
    tokens_max: int | None = None
    """Nothing is longer than this."""
    tools: tuple[Tool, ...] = ()
    """Those that are to be called."""
    forced: str | None = None
    """The tool that must be called."""
    schema: Any = None
    """The answer is JSON that this schema allows."""
    stops: tuple[str, ...] = ()
    reasons: bool = False


def called(
    tools: Sequence[Tool], mode: str, named: str | None, *, after_tool: bool, parallel: bool
) -> tuple[tuple[Tool, ...], str | None]:
    """The tools that an answer calls, and the one it was forced to call. Raises KeyError for one that is not there.

    `auto` calls a tool when somebody asked something, and speaks when a tool has answered.
    """
    if named is not None:
        return ({tool.name: tool for tool in tools}[named],), named
    if mode == "none" or not tools or (mode == "auto" and after_tool):
        return (), None
    return tuple(tools[: 2 if parallel else 1]), None


def choice_of(wanted: Wanted, answer: Answer, *, echoed: str = "") -> Choice:
    """One choice. Raises CannotMeetSchema."""
    said = list(_reasoning(answer)) if wanted.reasons else []
    if wanted.tools:
        said += _calls(wanted.tools, answer)
        reason = "stop" if wanted.forced is not None else "tool_calls"
    elif wanted.schema is not None:
        said += [Piece(Say.CONTENT, part) for part in _cut(_json(wanted.schema, answer))]
        reason = "stop"
    else:
        said += [Piece(Say.CONTENT, answer.token(position)) for position in range(wanted.words)]
        reason = "stop" if wanted.tokens_max is None else "length"
    said, stopped_by = _until_stop(said, wanted.stops)
    if stopped_by is not None:
        reason = "stop"
    if wanted.tokens_max is not None and len(said) > wanted.tokens_max:
        said, reason, stopped_by = said[: wanted.tokens_max], "length", None
    return Choice(tuple(said), reason, stopped_by, echoed)


def _reasoning(answer: Answer) -> Iterator[Piece]:
    for position in range(REASONING_TOKENS):
        yield Piece(Say.REASONING, " " + word(answer.key ^ _REASONING_KEY, position))


def _calls(tools: Sequence[Tool], answer: Answer) -> Iterator[Piece]:
    for number, tool in enumerate(tools):
        yield Piece(Say.TOOL, tool.name, number)
        try:
            arguments = _json(tool.parameters, answer)
        except CannotMeetSchema as error:
            raise CannotMeetSchema(f"parameters of {tool.name}: {error}") from error
        for part in _cut(arguments):
            yield Piece(Say.ARGUMENTS, part, number)


def _json(schema: Any, answer: Answer) -> str:
    return orjson.dumps(instance_of(schema, lambda index: word(answer.key, index))).decode()


def _cut(text: str) -> list[str]:
    """Text in tokens as the emulated tokenizer counts them."""
    return [text[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(text), CHARACTERS_PER_TOKEN)]


def _until_stop(said: list[Piece], stops: Sequence[str]) -> tuple[list[Piece], str | None]:
    """The pieces before the first stop string in what is content, without it."""
    if not stops:
        return said, None
    content = "".join([piece.text for piece in said if piece.say is Say.CONTENT])
    found = [(at, stop) for stop in stops if (at := content.find(stop)) >= 0]
    if not found:
        return said, None
    left, stop = min(found)
    kept = []
    for piece in said:
        if piece.say is Say.CONTENT:
            if left <= 0:
                break
            piece = piece._replace(text=piece.text[:left])
            left -= len(piece.text)
        kept.append(piece)
    return kept, stop
