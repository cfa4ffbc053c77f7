"""Fits the events of the session that goes on with an answer behind those that its client has. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from serai.ingress.sent_events import Transcript, blocks_of, data_of, sse_event


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
        return b"".join([self._edit_block(block) for block in blocks_of(events)])

    def _edit_block(self, block: bytes) -> bytes:
        if self.mismatch:
            return b""
        data = data_of(block)
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
        listed = event.get("choices")
        choices = [choice for choice in listed if isinstance(choice, dict)] if isinstance(listed, list) else []
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
        if isinstance(prompt, int) and isinstance(said, int) and max(prompt, said) < 2**53:
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
        return sse_event(event)


def _is_done(block: bytes) -> bool:
    return b"[DONE]" in block
