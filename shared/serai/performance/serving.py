"""What a request sees of an engine under steady load, from the time of single steps: the closed-loop estimate.

`concurrency` requests are always in the engine; one that ends is replaced at once. Between its own tokens a request
waits for decode steps of the whole batch and for the prompts of those that replace others:

    TPOT = decode(c, context) + share · (c − together) · prompt(c) / output

where `prompt(c)` is what processing one prompt adds to running steps: whole steps of its own, or the surplus of mixed
steps over plain ones. It is an estimate of means; queues and tails need the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from serai.performance.latency_model import LatencyModel, PrefillChunk, Step
from serai.performance.latency_profile import ServingHabits


@dataclass(frozen=True, slots=True)
class Load:
    """A steady closed loop: requests in flight, and tokens in and out of each."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int

    @property
    def mean_context_tokens(self) -> float:
        """Tokens in the cache of a request half-way through its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Means of a closed loop, in seconds."""

    tpot_s: float
    decode_step_s: float
    """The share of TPOT that is the batch's own decode step."""
    prompt_s: float
    """What one prompt adds to the running batch."""


def closed_loop(model: LatencyModel, habits: ServingHabits, load: Load) -> ClosedLoop:
    """Mean time per output token of `load`, and its parts."""
    decode = model.decode_step_s(load.concurrency, load.mean_context_tokens)
    prompt = prompt_s(model, habits, load, decode)
    others = max(0.0, load.concurrency - habits.prompts_together)
    tpot = decode + habits.delay_share * others * prompt / load.output_tokens
    return ClosedLoop(tpot, decode, prompt)


def prompt_s(model: LatencyModel, habits: ServingHabits, load: Load, decode_step_s: float) -> float:
    """Seconds that one prompt adds to an engine that decodes for `load.concurrency` requests."""
    if not habits.mixed_steps:
        return model.prefill_s(load.prompt_tokens)
    context = round(load.concurrency * load.mean_context_tokens)
    added, done = 0.0, 0
    while done < load.prompt_tokens:
        chunk = min(habits.chunk_tokens, load.prompt_tokens - done)
        step = Step([PrefillChunk(chunk, done)], load.concurrency, context)
        added += model.step_s(step) - decode_step_s
        done += chunk
    return added


def least_loop_s(model: LatencyModel, load: Load) -> float:
    """The least time in which the hardware can serve `load.concurrency` requests once, for a model without
    overheads: all prompts in mixed steps, all tokens in full batches. A measured loop that is faster did not do the
    work its label says (prompts from a cache, fewer requests at once)."""
    decode = model.decode_step_s(load.concurrency, load.mean_context_tokens)
    prompt = prompt_s(model, ServingHabits(chunk_tokens=load.prompt_tokens), load, decode)
    return load.output_tokens * decode + load.concurrency * prompt
