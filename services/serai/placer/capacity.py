"""What one engine serves within latency targets, from the times of single steps. Pure.

The closed loop of `performance.serving`: `c` requests in flight share an engine; serving all of them once takes

    T(c) = output · decode(c) + c · prompt        requests/s = c / T(c)

With targets, `c` is the mean in flight at which nine requests of ten meet both: the tokens of the busiest tenth of the
time, c90 = c + 1.28 · √c · max(1, cv), are still in time and fit the cache, and the first token comes in time although
prompts queue (Kingman's formula for G/G/1, with an exponential tail). Without targets the engine is full.

A full engine whose memory is the limit admits a prompt as soon as the prompt alone fits. Answers then grow into what is
not there, and the last to come are put back and worked on anew (`RECOMPUTED`).

A pipeline of p stages works on p batches of c / p at a time; a token passes all stages. Batches are uneven and stages
wait for each other, for which `PIPELINE_SHARE` of the ideal is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serai.performance.communication import transfer_s
from serai.performance.hardware import Link
from serai.performance.latency_model import LatencyModel, PrefillChunk, Step
from serai.performance.latency_profile import ServingHabits
from serai.placer.demand import LengthSpread

PIPELINE_SHARE = 0.85
"""Of p times one stage's rate that a pipeline reaches. An assumption between what uneven prompts leave (0.7) and an
even load (0.95)."""
RECOMPUTED = 0.5
"""Prompts a request that a full engine works on anew, in units of output ÷ prompt tokens: an end frees prompt + output,
room for 1 + output / prompt new ones, of which one can stay. In the fast simulator 0.4 to 0.8, for prompts of 200 to
2,700 and answers of 100 to 2,000 tokens; so the rate is within 15 % of its, and else up to 28 % above.
"""
_P90 = 1.2816
_TAIL_P90 = math.log(10)
"""Ninth decile of an exponential distribution, in means."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an instance is to serve, and within what."""

    prompt: LengthSpread
    output: LengthSpread
    cv: float = 1.0
    prefix_reuse: float = 0.0
    slo_ttft_s: float = math.inf
    slo_tpot_s: float = math.inf

    @property
    def saturated(self) -> bool:
        """Whether there is no target, so that only throughput counts."""
        return math.isinf(self.slo_ttft_s) and math.isinf(self.slo_tpot_s)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one instance gives."""

    requests_s: float
    latency_s: float
    """Mean from arrival to the last token."""
    concurrency: int
    """Mean requests in flight."""
    limit: str
    """What keeps it from more."""


@dataclass(frozen=True, slots=True)
class _Point:
    """The engine with some requests in flight."""

    requests_s: float
    ttft_p90_s: float
    tpot_s: float
    latency_s: float


def capacity(
    model: LatencyModel, habits: ServingHabits, traffic: Traffic, concurrency_max: int, stages: int = 1
) -> Capacity | str:
    """What one instance serves within the targets of `traffic`, or why it cannot serve a single request so."""
    kv_tokens = model.kv_capacity_tokens()
    longest = traffic.prompt.p99 + traffic.output.p99
    if longest > kv_tokens:
        return f"holds {kv_tokens} tokens; a long request (p99) needs {longest:.0f}"
    fitting = int(kv_tokens // (traffic.prompt.mean + traffic.output.mean))
    most = max(1, min(concurrency_max * stages, fitting))
    short_of_memory = fitting < concurrency_max * stages
    room = "memory for keys and values" if short_of_memory else f"{concurrency_max} sequences a batch"
    if traffic.saturated:
        anew = RECOMPUTED * traffic.output.mean / traffic.prompt.mean if short_of_memory else 0.0
        return _found(_point(model, habits, traffic, most, most, stages, anew), most, room)
    if refused := _refused(_point(model, habits, traffic, 1, 1, stages), traffic):
        return f"{refused} even for one request at a time"
    low, high, limit = 1, most, room
    while low < high:
        middle = (low + high + 1) // 2
        busy = middle + _P90 * math.sqrt(middle) * max(1.0, traffic.cv)
        refused = room if busy > most else ""
        refused = refused or _refused(_crowded(model, habits, traffic, middle, busy, stages), traffic)
        if refused:
            high, limit = middle - 1, refused
        else:
            low = middle
    return _found(_point(model, habits, traffic, low, low, stages), low, limit)


def _found(point: _Point, concurrency: int, limit: str) -> Capacity:
    return Capacity(point.requests_s, point.latency_s, concurrency, limit)


def _refused(point: _Point, traffic: Traffic) -> str:
    if point.tpot_s > traffic.slo_tpot_s:
        return f"TPOT of {point.tpot_s * 1e3:.0f} ms is above the target of {traffic.slo_tpot_s * 1e3:.0f} ms"
    if point.ttft_p90_s > traffic.slo_ttft_s:
        return f"TTFT of {point.ttft_p90_s:.2f} s (p90) is above the target of {traffic.slo_ttft_s:.2f} s"
    return ""


def _point(
    model: LatencyModel,
    habits: ServingHabits,
    traffic: Traffic,
    mean: float,
    busy: float,
    stages: int,
    anew: float = 0.0,
) -> _Point:
    """The engine with `mean` requests in flight; the time per token when there are `busy`. `anew`: prompts a request
    that are worked on again."""
    batch = max(1.0, mean / stages)
    decode, prompt = _step_times(model, habits, traffic, batch)
    times = decode, prompt * (1 + anew)
    slow = times if busy == mean else _step_times(model, habits, traffic, max(1.0, busy / stages))
    return _told(habits, traffic, mean, busy, stages, times, slow)


def _crowded(
    model: LatencyModel, habits: ServingHabits, traffic: Traffic, mean: float, busy: float, stages: int
) -> _Point:
    """As `_point`, a little on the careful side and in half the time: all steps are those of the busy engine."""
    times = _step_times(model, habits, traffic, max(1.0, busy / stages))
    return _told(habits, traffic, mean, busy, stages, times, times)


def _told(
    habits: ServingHabits,
    traffic: Traffic,
    mean: float,
    busy: float,
    stages: int,
    times: tuple[float, float],
    slow: tuple[float, float],
) -> _Point:
    output, batch, crowd = traffic.output.mean, max(1.0, mean / stages), max(1.0, busy / stages)
    decode, prompt = times
    loop_s = (output * decode + batch * prompt) / (1.0 if stages == 1 else PIPELINE_SHARE)
    requests_s = mean / loop_s
    tpot = slow[0] + habits.delay_share * max(0.0, crowd - habits.prompts_together) * slow[1] / output
    occupied = min(0.999, requests_s / stages * prompt)
    wait = occupied / (1 - occupied) * prompt * (traffic.cv**2 + 1) / 2
    own = prompt * traffic.prompt.p90 / traffic.prompt.mean
    return _Point(requests_s, slow[0] + own + _TAIL_P90 * wait, tpot, loop_s + wait)


def _step_times(model: LatencyModel, habits: ServingHabits, traffic: Traffic, batch: float) -> tuple[float, float]:
    """A decode step of `batch` requests, and what a mean prompt adds to the running batch."""
    sequences = max(1, round(batch))
    context = round(sequences * (traffic.prompt.mean + traffic.output.mean / 2))
    decode = model.step_s(Step((), sequences, context))
    end = max(1, round(traffic.prompt.mean))
    done = min(end - 1, round(end * traffic.prefix_reuse))
    if not habits.mixed_steps:
        return decode, model.step_s(Step((PrefillChunk(end - done, done),)))
    added = 0.0
    while done < end:
        chunk = min(habits.chunk_tokens, end - done)
        added += model.step_s(Step((PrefillChunk(chunk, done),), sequences, context)) - decode
        done += chunk
    return decode, added


class CrossingNodes:
    """`model` whose pipeline stages lie on different nodes: activations travel over `link` between them."""

    def __init__(self, model: LatencyModel, stages: int, token_bytes: float, link: Link) -> None:
        self._model = model
        self._crossings = stages - 1
        self._token_bytes = token_bytes
        self._link = link

    def step_s(self, step: Step) -> float:
        """Duration of one engine step, in seconds."""
        tokens = step.decode_sequences + sum(chunk.new_tokens for chunk in step.chunks)
        return self._model.step_s(step) + self._crossings * transfer_s(tokens * self._token_bytes, self._link)

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, batch: int = 1) -> float:
        """Time to process `batch` prompts in one step."""
        return self.step_s(Step([PrefillChunk(prompt_tokens - cached_tokens, cached_tokens)] * batch))

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Duration of a step that adds one token to each of `sequences`."""
        return self.step_s(Step((), sequences, round(sequences * context_tokens)))

    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        return self._model.kv_capacity_tokens()

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values one token leaves in the whole instance."""
        return self._model.kv_bytes_per_token()
