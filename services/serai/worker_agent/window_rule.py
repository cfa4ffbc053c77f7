"""How many prompt tokens the engine's next step works on, and whether it decodes beside them. Pure.

Every stream that decodes has slack; a step of duration T costs each of them T, and gives S (its TPOT target) back to
those that it decodes. So with a low quantile of slack `low` (PaDG takes the mean):

    a mixed step may last low + S          (streams decode in it)
    a prefill step may last low            (they do not)

and no longer than until the earliest deadline of whoever waits for its first decode step: those held back, those being
prefilled, and those whose prefill is done but who have not decoded yet (PaDG protects none of the last). A stream that
has not decoded begins with no slack, and its TPOT clock does not run before its first decode step: while such streams
are there, a mixed step may last S, but a prefill step still `low`. That is what makes windows worth while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from serai.worker_agent.gate_events import Position
from serai.worker_agent.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Trade-offs of the rule, in seconds and tokens."""

    margin_s: float = 0.005
    """Of slack that is never spent: what a prediction may be wrong by."""
    harm_free: float = 0.01
    """Expected misses of TPOT targets, for each request that is served by them, that do not matter: the share that may
    miss. A low quantile of slack says whether somebody will be behind; this, whether he is likely to stay so."""
    harm_max: float = 1.0
    """Expected misses of TPOT targets that a met TTFT target is worth, where tokens come at half their target's time or
    less. Where they come as slowly as they may, it is `harm_max_full`, since there who is behind stays behind; and in
    between, in between."""
    harm_max_full: float = 0.1
    harm_max_tight: float = 1.0
    """The same where an instance with a single stream is hardly faster than the TPOT target (`tight_share` of it):
    there slack never comes, and every window is taken from somebody."""
    tight_share: float = 0.8
    mixes: bool = True
    """Whether prompts and decodes may share a step."""
    step_tokens_max: int = 8192
    cuts_prompts: bool = True
    """Whether the engine can be told how much of a prompt a step takes, and to decode beside it. Else slack has to
    allow for the whole prompt, and for no decoding meanwhile."""


class Situation(NamedTuple):
    """One instance between two steps."""

    now_s: float
    work_tokens: int
    """Prompt tokens that wait, in the gate and in the engine."""
    head_tokens: int
    """Of whoever has the earliest deadline among them."""
    deadline_s: float
    """That deadline."""
    last_deadline_s: float
    """The latest of them."""
    decoding: int
    low_s: float
    """The low quantile of the slack of who decodes; infinite when nobody does."""
    slo_tpot_s: float
    """The strictest target among them."""
    entering: int
    """Who has its first token and no decode step."""
    entering_deadline_s: float
    harm: Callable[[float, int], float] = lambda stall_s, others: 0.0
    """How many targets a stall of so many seconds costs, expected: who decodes, and so many others without slack."""
    gain: float = 1.0
    """By which share of its target a token has lately come earlier; 0: tokens come as slowly as they may."""
    requests: int = 1
    """Who waits, and whose deadline can be met."""
    let_go: bool = False
    """Whether more are served if long answers are let go (`overload`)."""
    rest_pays: Callable[[float], bool] = lambda within_s: False
    """Whether more answers end in time, expected, than requests come, if nobody is prefilled for a time."""
    window_s: float = 0.0
    """For how long nobody has decoded."""


class Choice(NamedTuple):
    """What the next step does. 0 tokens: it decodes."""

    position: Position
    tokens: int
    why: str


def choose(at: Situation, times: StepTimes, rule: WindowSettings) -> Choice:
    """The next step. Only asked while there is work."""
    most = min(at.work_tokens, rule.step_tokens_max)
    if not at.decoding and not at.entering:
        return Choice(Position.PREFILL, _until(at, times, most), "nobody decodes")
    mixed = _mixed_tokens(at, times, rule, most) if rule.cuts_prompts and rule.mixes else 0
    alone = _alone_tokens(at, times, rule, most)
    enough = min(most, times.worth_tokens() if rule.cuts_prompts else at.head_tokens)
    if max(mixed, alone) < most and _too_slow(at, times, max(mixed, alone)) and _harmless(at, times, rule, most):
        return Choice(Position.MIXED, most, "the last would miss, and hardly anybody is hurt by it")
    if not at.let_go and max(mixed, alone) < min(at.head_tokens, most) and _pressed(at, times, rule):
        urgent = _urgent_tokens(at, times, rule, most)
        if urgent:
            return urgent
    if mixed >= enough and mixed >= alone:
        return Choice(Position.MIXED, mixed, "slack allows it beside decoding")
    if alone >= enough:
        return Choice(Position.PREFILL, alone, "slack allows a window")
    if mixed >= enough:
        return Choice(Position.MIXED, mixed, "slack allows it beside decoding")
    until_s = min(at.entering_deadline_s, at.deadline_s) - at.now_s - times.decode_s
    for tokens in (most, enough) if most > enough else (most,):
        if _harmless(at, times, rule, tokens):
            return Choice(Position.MIXED, tokens, "hardly anybody is hurt by it")
        if times.prefill_s(tokens) <= until_s and at.harm(times.prefill_s(tokens), 0) <= rule.harm_free * _served(
            at, tokens
        ):
            return Choice(Position.PREFILL, tokens, "hardly anybody is hurt by a window")
    if at.let_go:
        return _let_go(at, times, most)
    urgent = _urgent_tokens(at, times, rule, most)
    if urgent:
        return urgent
    return Choice(Position.DECODE, 0, "slack is too little")


def _let_go(at: Situation, times: StepTimes, most: int) -> Choice:
    """Who is behind is let go. Prompts go first, but for those who are likely to end in time if they are left alone."""
    tokens = times.tokens_within(at.entering_deadline_s - at.now_s - times.decode_s, most)
    if not tokens:
        return Choice(Position.DECODE, 0, "who enters has to decode")
    if at.window_s:
        return Choice(Position.PREFILL, tokens, "a window is open, and long answers are let go")
    latest_s = at.deadline_s - at.now_s - times.prefill_s(at.head_tokens) - 2 * times.decode_s
    if at.rest_pays(latest_s):
        return Choice(Position.DECODE, 0, "short answers are about to end")
    return Choice(Position.PREFILL, tokens, "long answers are let go")


def _too_slow(at: Situation, times: StepTimes, tokens: int) -> bool:
    """Whether who comes last misses its deadline if steps take no more than `tokens`."""
    return at.now_s + times.mixed_s(tokens) * at.work_tokens / max(1, tokens) > at.last_deadline_s


def _harmless(at: Situation, times: StepTimes, rule: WindowSettings, tokens: int) -> bool:
    return rule.mixes and _harm_beside(at, times, tokens) <= rule.harm_free * _served(at, tokens)


def _tight(at: Situation, times: StepTimes, rule: WindowSettings) -> bool:
    return times.prefill_s(1) > rule.tight_share * at.slo_tpot_s


def _pressed(at: Situation, times: StepTimes, rule: WindowSettings) -> bool:
    """Whether the first in turn misses its deadline at the pace that slack allows. Where no slack ever comes there is
    no such pace, and it is when it must begin at the latest."""
    pace = 1.0 if _tight(at, times, rule) else max(0.2, 1.0 - times.decode_s / at.slo_tpot_s)
    needs_s = times.prefill_s(at.head_tokens) / pace + 2 * times.decode_s
    return min(at.deadline_s, at.entering_deadline_s) - at.now_s < needs_s


def _harm_beside(at: Situation, times: StepTimes, tokens: int) -> float:
    """Misses expected from working on `tokens` beside decoding; who enters has no slack at all."""
    stall_s = times.mixed_s(tokens) - at.slo_tpot_s
    return at.harm(stall_s, at.entering) if stall_s > 0 else 0.0


def _served(at: Situation, tokens: int) -> float:
    """How many deadlines `tokens` of work are for."""
    return at.requests * tokens / at.work_tokens


def _mixed_tokens(at: Situation, times: StepTimes, rule: WindowSettings, most: int) -> int:
    low_s = min(at.low_s, 0.0) if at.entering else at.low_s
    if low_s == inf:
        return most
    allowed_s = low_s + at.slo_tpot_s - rule.margin_s
    return times.tokens_within(allowed_s - times.decode_s + times.saved_s, most)


def _alone_tokens(at: Situation, times: StepTimes, rule: WindowSettings, most: int) -> int:
    until_s = min(at.entering_deadline_s, at.deadline_s) - at.now_s - times.decode_s
    return times.tokens_within(min(at.low_s - rule.margin_s, until_s), most)


def _until(at: Situation, times: StepTimes, most: int) -> int:
    """As much as the earliest deadline leaves time for, and the earliest in any case."""
    within = times.tokens_within(at.deadline_s - at.now_s - times.decode_s, most)
    return max(within, min(at.head_tokens, most))


def _urgent_tokens(at: Situation, times: StepTimes, rule: WindowSettings, most: int) -> Choice | None:
    """What slack does not allow and a deadline asks for, if less is lost by it than by the miss: one long window for as
    many as it can serve, else the first of them beside decoding."""
    until_s = min(at.deadline_s, at.entering_deadline_s) - at.now_s
    harm_max = (
        rule.harm_max_tight
        if _tight(at, times, rule)
        else max(rule.harm_max_full, rule.harm_max * min(1.0, 2 * at.gain))
    )
    window = times.tokens_within(until_s - times.decode_s, most)
    window_s = times.prefill_s(window)
    if window and until_s < window_s + 3 * times.decode_s:
        if rule.mixes and _harm_beside(at, times, window) < harm_max * _served(at, window):
            return Choice(Position.MIXED, window, "deadlines are near")
        if at.harm(window_s, 0) < harm_max * _served(at, window):
            return Choice(Position.PREFILL, window, "deadlines are near")
    head = min(at.head_tokens, most)
    if not _pressed(at, times, rule):
        return None
    if rule.mixes and _harm_beside(at, times, head) < harm_max * _served(at, head):
        return Choice(Position.MIXED, head, "its deadline is near")
    return None
