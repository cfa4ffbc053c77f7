"""Measures a running OpenAI-compatible engine: prompts of several lengths, decode batches of several sizes.

Everything is streamed and bounded: so many requests, so many tokens, so many seconds. Prompts are unique from their
first word, so that a prefix cache cannot answer; lengths are what the engine's own `usage` says, since no tokenizer
is at hand.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp


class EngineUnusable(Exception):
    """The engine did not answer in a way that can be measured; one line that says what it did."""


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """What to send. All of it together is bounded by `budget_s`: what does not fit is left out, largest last."""

    prompt_words: tuple[int, ...] = (64, 256, 1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (64, 1024)
    """Prompt lengths, in words, at which each batch decodes."""
    output_tokens: int = 48
    repeats: int = 3
    budget_s: float = 120.0
    request_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One prompt, alone in the engine."""

    prompt_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One batch that decoded together."""

    sequences: int
    mean_context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True)
class EngineSamples:
    """All that was measured of one engine."""

    model: str
    prompts: list[PromptSample]
    decodes: list[DecodeSample]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One streamed answer; times on this process's monotonic clock."""

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int


class EngineMeasurer:
    """Sends what a plan says to one engine and keeps what came back."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, plan: MeasuringPlan) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.model = model
        self.plan = plan
        self._serial = 0
        self._ignores_eos = True

    async def measure(self) -> EngineSamples:
        """Prompts first, then batches, smallest first, until done or out of time. Raises EngineUnusable."""
        ends_s = time.monotonic() + self.plan.budget_s
        await self._answer(16, 2)
        prompts: list[PromptSample] = []
        for words in self.plan.prompt_words:
            if time.monotonic() > ends_s - self.plan.budget_s / 2 and prompts:
                break
            prompts.append(await self._prompt(words))
        decodes: list[DecodeSample] = []
        for batch, words in ((b, c) for b in self.plan.batches for c in self.plan.contexts):
            if time.monotonic() > ends_s and decodes:
                break
            sample = await self._batch(batch, words)
            if sample is not None:
                decodes.append(sample)
        if not decodes:
            raise EngineUnusable(f"{self.url}: no answer was longer than one token, so no decode step was seen")
        return EngineSamples(self.model, prompts, decodes)

    async def _prompt(self, words: int) -> PromptSample:
        answers = [await self._answer(words, 1) for _ in range(self.plan.repeats)]
        return PromptSample(answers[0].prompt_tokens, median(a.first_s - a.sent_s for a in answers))

    async def _batch(self, batch: int, words: int) -> DecodeSample | None:
        """Steps of a whole batch: tokens that came between the last stream's first token and the first one's end."""
        answers = await asyncio.gather(*(self._answer(words, self.plan.output_tokens) for _ in range(batch)))
        steps = [
            (a.last_s - a.first_s) / (a.output_tokens - 1)
            for a in answers
            if a.output_tokens > 2 and a.last_s > a.first_s
        ]
        if not steps:
            return None
        context = sum(a.prompt_tokens + a.output_tokens / 2 for a in answers) / len(answers)
        return DecodeSample(batch, context, median(steps))

    def _body(self, words: int, tokens: int) -> dict[str, object]:
        self._serial += 1
        text = " ".join([f"run {self._serial}:", *(f"w{(i * 7919 + self._serial) % 997}" for i in range(words))])
        body: dict[str, object] = {
            "model": self.model,
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"ignore_eos": True} if self._ignores_eos else {})

    async def _answer(self, words: int, tokens: int) -> _Answer:
        """One streamed answer. An engine that refuses `ignore_eos` is asked again without it."""
        try:
            async with asyncio.timeout(self.plan.request_timeout_s):
                sent_s = time.monotonic()
                async with self.session.post(f"{self.url}/v1/completions", json=self._body(words, tokens)) as response:
                    if response.status == 200:
                        return await _read(response, sent_s, self.url)
                    refusal = (await response.text())[:200]
                if response.status in (400, 422) and self._ignores_eos:
                    self._ignores_eos = False
                    return await self._answer(words, tokens)
        except TimeoutError as error:
            limit = self.plan.request_timeout_s
            raise EngineUnusable(f"{self.url}: no whole answer within {limit:g} s to {words} words") from error
        except aiohttp.ClientError as error:
            raise EngineUnusable(f"{self.url}: {error}") from error
        raise EngineUnusable(f"{self.url}: status {response.status}: {' '.join(refusal.split())}")


async def _read(response: aiohttp.ClientResponse, sent_s: float, url: str) -> _Answer:
    first_s = last_s = 0.0
    pieces = prompt_tokens = output_tokens = 0
    async for line in response.content:
        event = _event(line)
        if event is None:
            continue
        now_s = time.monotonic()
        if any(choice.get("text") for choice in event.get("choices") or []):
            first_s = first_s or now_s
            last_s = now_s
            pieces += 1
        usage = event.get("usage") or {}
        prompt_tokens = usage.get("prompt_tokens") or prompt_tokens
        output_tokens = usage.get("completion_tokens") or output_tokens
    if not first_s:
        raise EngineUnusable(f"{url}: the stream ended without a token")
    if not prompt_tokens:
        raise EngineUnusable(f"{url}: the stream carries no usage, so prompt lengths are unknown")
    return _Answer(sent_s, first_s, last_s, prompt_tokens, output_tokens or pieces)


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"data:"):
        return None
    text = line[5:].strip()
    if not text or text == b"[DONE]":
        return None
    try:
        event = json.loads(text)
    except json.JSONDecodeError as error:
        raise EngineUnusable(f"malformed event in the stream: {text[:80]!r}") from error
    return event if isinstance(event, dict) else None


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model the engine lists. Raises EngineUnusable when it lists none."""
    try:
        async with session.get(f"{url.rstrip('/')}/v1/models") as response:
            listed = (await response.json()).get("data") or []
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineUnusable(f"{url}: no list of models: {error}") from error
    names = [entry["id"] for entry in listed if isinstance(entry, dict) and "id" in entry]
    if not names:
        raise EngineUnusable(f"{url}: the list of models is empty")
    return str(names[0])


def batches_up_to(most: int) -> Iterator[int]:
    """1, 2, 4 … up to `most`."""
    batch = 1
    while batch <= most:
        yield batch
        batch *= 2
