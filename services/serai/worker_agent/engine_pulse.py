"""What one engine does, step by step, as a phase gate wants to hear it. Pure.

Engines that tell their steps are believed; of others the steps are worked out from their streams (`untold_steps.py`).
Either way the engine's prefill times are learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serai.worker_agent.phase_gate import EngineSays, FirstToken, GateEvent, Stepped
from serai.worker_agent.prefill_rate import PrefillRate
from serai.worker_agent.untold_steps import UntoldSteps

STEP_LOST_S = 1.0
"""An engine that tells its steps has told none for so long: it is at rest, or its word was lost."""

_TYPICAL_TOKENS = 512
_WORTH_SAYING = 0.05
"""Of a prediction, by which it changes."""


class EngineStep(NamedTuple):
    """What a scheduler says of a step that has ended."""

    step_s: float
    prefill_tokens: int
    """Of prompts, worked on in it."""
    decodes: int
    """Requests that it decoded for."""
    backlog_tokens: int
    """Of prompts that are there and not computed yet."""
    context_tokens: int
    """In the cache, of the requests that decode."""
    kv_tokens_free: int
    kv_tokens_total: int
    sequences_max: int = 0
    """Requests that it runs at once; 0: it does not say."""


class EnginePulse:
    """One engine's. Answers are events for its gate, in their order."""

    def __init__(self, rate: PrefillRate, *, told: bool) -> None:
        self._rate = rate
        self._told = told
        self._untold = UntoldSteps(lambda: rate.s_per_token)
        self._step: EngineStep | None = None
        self._step_at_s = 0.0
        self._load: tuple[int, int, int] | None = None
        self._predicted_s = rate.predict_s(_TYPICAL_TOKENS)

    def relearnt(self) -> bool:
        """Whether prefills are predicted otherwise than when this last said so."""
        predicted_s = self._rate.predict_s(_TYPICAL_TOKENS)
        changed = abs(predicted_s - self._predicted_s) > _WORTH_SAYING * self._predicted_s
        if changed:
            self._predicted_s = predicted_s
        return changed

    def released(self, key: str, tokens: int, now_s: float) -> None:
        """The engine was given a request."""
        if not self._told:
            self._rate.released(now_s)
            self._untold.released(key, tokens, now_s)

    def first(self, key: str, tokens: int, now_s: float, *, shows: bool) -> Sequence[GateEvent]:
        """The first token of a request is there. `shows`: it was seen, and further ones will be; else it is predicted,
        as for an answer in one piece."""
        if self._told:
            return (FirstToken(key),)
        if shows:
            self._rate.first_token(tokens, now_s)
        else:
            self._rate.gone()  # It was this rate that said so.
        step = self._untold.first(key, now_s, shows=shows)
        return () if step is None else (step,)

    def ended(self, key: str, *, unanswered: bool) -> Sequence[GateEvent]:
        """A request that the engine had is gone; `unanswered`: before its first token."""
        if self._told:
            return ()
        if unanswered:
            self._rate.gone()
        step = self._untold.ended(key)
        return () if step is None else (step,)

    def look(self, said: Mapping[str, int], now_s: float, *, waits: bool, works: bool) -> Sequence[GateEvent]:
        """Some time has gone by. `said`: tokens of the streams that have said something new. `waits`: there are
        requests for the gate to decide on; `works`: the engine has some."""
        if not self._told:
            return self._untold.look(said, now_s) if said or waits or self._untold.busy else ()
        if self._step is None:
            return ()
        # A gate that waits for a step's end would wait for ever if that word was lost; and after the last one of a
        # window, when nothing follows it, the window is closed.
        lost = waits and now_s - self._step_at_s > STEP_LOST_S
        rests = not works and self._step.prefill_tokens > 0
        if not lost and not rests:
            return ()
        self._step_at_s = now_s
        self._step = self._step._replace(step_s=0.0, prefill_tokens=0, decodes=0)
        return (_stepped(self._step, 0),)

    def stepped(self, step: EngineStep, unseen_tokens: int, now_s: float) -> Sequence[GateEvent]:
        """An engine that tells its steps has ended one. `unseen_tokens`: of prompts that were posted so short a time
        ago that the engine may not have counted them."""
        self._step, self._step_at_s = step, now_s
        if step.prefill_tokens and not step.decodes:
            self._rate.measured(step.prefill_tokens, step.step_s)
        if not self._told:
            return ()
        load = (step.kv_tokens_free, step.kv_tokens_total, step.sequences_max)
        known = self._load is not None and self._load[1:] == load[1:]
        self._load = load
        said = () if known else (EngineSays(*load),)
        return (*said, _stepped(step, unseen_tokens))

    def load(self, kv_tokens_free: int, kv_tokens_total: int, sequences_max: int = 0) -> Sequence[GateEvent]:
        """What the engine says of its KV cache and slots now and then. Steps say it better."""
        load = (kv_tokens_free, kv_tokens_total, sequences_max)
        if self._told or self._load == load:
            return ()
        self._load = load
        self._untold.kv_tokens_free = kv_tokens_free
        return (EngineSays(*load),)


def _stepped(step: EngineStep, unseen_tokens: int) -> Stepped:
    return Stepped(
        step.step_s,
        step.decodes > 0,
        prompt_tokens=step.prefill_tokens,
        backlog_tokens=step.backlog_tokens + unseen_tokens,
        kv_tokens_free=step.kv_tokens_free,
        context_tokens=step.context_tokens,
    )
