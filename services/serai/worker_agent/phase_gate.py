"""The phase gate: when this instance prefills what was promised to it (design §6). Pure; the caller's monotonic clock.

The gate holds requests back and releases them to the engine in windows, so that prefill and decode are apart in time
where that pays. It knows exactly what a scheduler far away knows late: who waits until when, and how far each stream is
ahead of its TPOT target. So it has the last word on every lease. How long a window may be is `window_rule`'s.

In ORDINARY mode everything is released at once: what the papers' instances do, and what an instance without a scheduler
does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import assert_never

from serai.contracts.admission import GateMode, HeldRequest, InstanceReport, InstanceState, Lease, Spread
from serai.worker_agent.first_tokens import FirstTokens
from serai.worker_agent.gate_events import (
    FOREVER_S,
    Ended,
    EngineSays,
    FirstToken,
    GateEffect,
    GateEvent,
    GateSettings,
    Offered,
    Position,
    RefuseLease,
    Release,
    Said,
    Stepped,
    Taken,
    Tick,
    Turn,
    WakeAt,
)
from serai.worker_agent.gate_requests import Cohort, GateRequest, Stage, WaitingLine
from serai.worker_agent.overload import Overload
from serai.worker_agent.slack_book import SlackBook
from serai.worker_agent.step_times import StepTimes
from serai.worker_agent.window_rule import Choice, Situation, WindowSettings, choose

__all__ = [
    "FOREVER_S",
    "Ended",
    "EngineSays",
    "FirstToken",
    "GateEffect",
    "GateEvent",
    "GateSettings",
    "Offered",
    "PhaseGate",
    "Position",
    "RefuseLease",
    "Release",
    "Said",
    "Stepped",
    "Taken",
    "Tick",
    "Turn",
    "WakeAt",
]

_LATE_SHARE = 0.05
"""Of the prompt tokens worked on, what late requests get at least: nobody waits for ever."""
_LOST_TARGETS = 10
"""A stream further behind than so many TPOT targets is not protected: it is lost, or will catch up by itself."""


_LEAST_GAIN = 0.05
_RESTS = (2, 4, 8, 16, 32)
_YOUNG_STEPS = 14
_COHORT_STEPS = 100
_MIXED_TARGETS = 2.0
"""Longest step that mixes in ORDINARY mode, in TPOT targets."""
_SLOTS_UNTOLD = 1_000_000
"""Free ones, where the engine does not say how many it has."""
_NONE = Spread(0)


class PhaseGate:
    """One instance's gate. `predict_prefill_s` has the time of one prefill step over so many prompt tokens."""

    def __init__(self, settings: GateSettings, predict_prefill_s: Callable[[int], float]) -> None:
        self._settings = settings
        self._times = StepTimes(predict_prefill_s)
        self._rule = WindowSettings(
            step_tokens_max=settings.step_tokens_max,
            cuts_prompts=settings.cuts_prompts,
            mixes=settings.without != "mixed-steps",
        )
        self._mode = GateMode.ORDINARY
        self._requests: dict[str, GateRequest] = {}
        self._waiting = WaitingLine(by_deadline=settings.without != "deadlines")
        self._released: dict[str, GateRequest] = {}
        """In the engine, no first token yet."""
        self._released_tokens = 0
        self._backlog_tokens = 0
        """Prompt tokens that the engine has still to work on; exact for an engine that tells its steps."""
        self._entering: dict[str, GateRequest] = {}
        self._fresh = SlackBook()
        """Streams of the scheduler's present window; all of them where it counts none."""
        self._older = SlackBook()
        self._window = 0
        self._steps = 0
        self._numbered = 0
        self._turned = Turn(Position.MIXED, -1)
        self._kv_free = settings.kv_tokens_total
        self._kv_total = settings.kv_tokens_total
        self._slots = settings.sequences_max
        self._context_tokens = 0
        self._owner, self._epoch, self._applied, self._granted = "", 0, 0, 0
        self._low_share = 0.01
        self._heard_s, self._beat_s = -inf, inf
        self._sequence = 0
        self._refused = 0
        self._ttft = FirstTokens()
        self._opened_s = 0.0
        self._prefilling = False
        self._window_s = 0.0
        """For how long nobody has decoded."""
        self._decoded_s = 0.0
        """When the last decode step ended."""
        self._offered_s, self._gap_s = 0.0, 1.0
        """When the last request came, and the running mean of the time between two."""
        self._token_s = 0.0
        """Running mean of the time between two tokens of a stream."""
        self._stall_s = 0.0
        """The longest time between two of them since the last report."""
        self._output_tokens = 128.0
        """Running mean of answers."""
        self._overload = Overload()
        self._young: deque[Cohort] = deque()
        self._late_credit = 0.0
        self._now_s = -inf

    def relearn(self) -> None:
        """What `predict_prefill_s` says has changed."""
        self._times.forget()

    # Events

    def handle(self, event: GateEvent, now_s: float) -> Sequence[GateEffect]:
        """What is to be done now. A clock that goes back is taken to stand still."""
        now_s = self._now_s = max(now_s, self._now_s)
        match event:
            case Stepped():
                self._stepped(event, now_s)
                return self._decide(now_s)
            case Offered(key, prompt_tokens, lease):
                return self._offered(key, prompt_tokens, lease, now_s)
            case FirstToken(key):
                self._first(key, now_s)
            case Said(key, tokens):
                self._said(key, tokens)
            case Ended(key):
                self._ended(key)
            case EngineSays(kv_tokens_free, kv_tokens_total, sequences_max):
                self._kv_free, self._kv_total = kv_tokens_free, kv_tokens_total
                self._slots = sequences_max or self._slots
            case Taken():
                return self._taken(event, now_s)
            case Tick():
                pass
            case _:
                assert_never(event)
        return () if self._settings.tells_steps and self._busy else self._decide(now_s)

    @property
    def _busy(self) -> bool:
        """Whether an engine that tells its steps is in one: it will say when that ends."""
        return bool(self._released or self._entering or self._fresh.count or self._older.count)

    def _offered(self, key: str, prompt_tokens: int, lease: Lease | None, now_s: float) -> Sequence[GateEffect]:
        if key in self._requests:
            return ()
        why = self._refusal(prompt_tokens, lease, now_s)
        if lease is not None and lease.epoch == self._epoch:
            self._applied = max(self._applied, lease.sequence)
            self._granted += lease.sequence == 0
        if why:
            self._refused += 1
            return (RefuseLease(key, why),)
        was_busy = self._busy
        request = self._made(key, prompt_tokens, lease, now_s)
        if self._mode is GateMode.ORDINARY:
            return [*self._ordinary_turn(), self._release(request)]
        if request.displaces and was_busy:
            request.slo_tpot_s = 0.0
        if request.slo_tpot_s:
            self._waiting.add(request)
        else:
            self._waiting.add_late(request)
        return () if self._settings.tells_steps and was_busy else self._decide(now_s)

    def _made(self, key: str, prompt_tokens: int, lease: Lease | None, now_s: float) -> GateRequest:
        settings = self._settings
        ttft_s = lease.slo_ttft_s if lease is not None and lease.slo_ttft_s > 0 else settings.slo_ttft_s
        self._numbered += 1
        self._gap_s += 0.05 * (min(10.0, now_s - self._offered_s) - self._gap_s)
        self._offered_s = now_s
        self._overload.offered.add(prompt_tokens, now_s)
        request = GateRequest(key, self._numbered, max(1, prompt_tokens), lease, now_s, now_s + ttft_s)
        # Who comes while it is prefilled waits for half of it, on average; of these about one in S_TTFT / that misses.
        prefill_s = self._times.prefill_s(request.prompt_tokens)
        request.displaces = prefill_s * prefill_s > 2 * ttft_s * max(self._gap_s, 1e-3)
        request.displaces &= settings.without != "giants"
        if lease is None or not lease.best_effort:
            given_s = lease.slo_tpot_s if lease is not None else 0.0
            request.slo_tpot_s = given_s if given_s > 0 else settings.slo_tpot_s
        if lease is not None:
            if lease.window > self._window:
                self._new_window(lease.window)
            request.window = lease.window
        self._requests[key] = request
        return request

    def _refusal(self, prompt_tokens: int, lease: Lease | None, now_s: float) -> str:
        """Why this request cannot be taken; empty: it can."""
        if len(self._waiting) >= self._settings.waiting_max:
            return f"{len(self._waiting)} requests wait here already; ask another instance"
        if self._kv_total and prompt_tokens >= self._kv_total:
            return f"a prompt of {prompt_tokens} tokens does not fit into a KV cache of {self._kv_total}"
        if lease is None:
            return ""
        if lease.epoch != self._epoch:
            return f"the lease is of epoch {lease.epoch}; this instance obeys epoch {self._epoch}; ask its owner"
        if self._mode is GateMode.ORDINARY or lease.best_effort or lease.slo_ttft_s <= 0:
            return ""
        takes_s = self._times.prefill_s(self._waiting.ahead_of(now_s + lease.slo_ttft_s) + prompt_tokens)
        takes_s += self._times.prefill_s(self._backlog_tokens) + self._times.decode_s
        if takes_s > lease.slo_ttft_s and self._busy:
            return f"its first token would take {takes_s:.2f} s and {lease.slo_ttft_s:.2f} s are left"
        return ""

    def _new_window(self, window: int) -> None:
        self._window = window
        for number, place in self._older.absorb(self._fresh).items():
            request = self._by_number[number]
            request.place, request.older = place, True

    @property
    def _by_number(self) -> dict[int, GateRequest]:
        return {request.number: request for request in self._requests.values()}

    @property
    def obeyed(self) -> tuple[str, int]:
        """Its owner and the epoch; empty and 0 for none."""
        return self._owner, self._epoch

    def obeys(self, owner: str, epoch: int) -> bool:
        """Whether it would: the highest epoch counts, and of one epoch the first owner."""
        return epoch > self._epoch or (epoch == self._epoch and owner == self._owner)

    def _taken(self, event: Taken, now_s: float) -> Sequence[GateEffect]:
        if not self.obeys(event.owner, event.epoch):
            return ()
        if event.epoch > self._epoch:
            self._owner, self._epoch, self._applied, self._granted = event.owner, event.epoch, 0, 0
        self._heard_s, self._beat_s = now_s, event.beat_s
        self._low_share = event.low_share
        return self._into(event.mode, now_s)

    def _into(self, mode: GateMode, now_s: float) -> Sequence[GateEffect]:
        if mode is self._mode:
            return ()
        self._mode = mode
        if mode is GateMode.PADG:
            return () if self._busy else self._decide(now_s)
        effects = self._ordinary_turn()
        while (request := self._waiting.head() or self._waiting.head_late()) is not None:
            self._waiting.remove(request)
            effects.append(self._release(request))
        return effects

    # Through prefill and decode

    def _stepped(self, step: Stepped, now_s: float) -> None:
        self._times.measured(step.duration_s, step.prompt_tokens, step.decoded)
        self._backlog_tokens, self._kv_free = step.backlog_tokens, step.kv_tokens_free
        self._context_tokens = step.context_tokens
        if step.decoded:
            self._steps += 1
            self._fresh.step()
            self._older.step()
            gap_s = now_s - self._decoded_s
            self._stall_s = max(self._stall_s, gap_s)
            self._token_s += 0.05 * (min(gap_s, 20 * step.duration_s) - self._token_s)
            self._decoded_s = now_s
            if self._entering:
                self._entered(now_s - step.duration_s)
        if step.prompt_tokens:
            self._late_credit = min(self._late_credit + _LATE_SHARE * step.prompt_tokens, self._rule.step_tokens_max)
        for key in step.preempted:
            self._preempted(key)
        for key in step.first:
            self._first(key, now_s)
        for key in step.again:
            self._again(key)
        for key in step.ended:
            self._ended(key)
        if step.decoded:
            self._window_s = 0.0
        else:
            self._window_s += step.duration_s
        if self._prefilling is (step.prompt_tokens == 0):
            self._prefilling, self._opened_s = step.prompt_tokens > 0, now_s - step.duration_s

    def _first(self, key: str, now_s: float) -> None:
        request = self._released.pop(key, None)
        if request is None:
            return
        self._released_tokens -= request.prompt_tokens
        self._ttft.said_first(request.lease, now_s - request.offered_s)
        request.first_s, request.said, request.steps = now_s, 1, self._steps
        if not self._settings.tells_steps:
            self._backlog_tokens = self._released_tokens
            self._decodes(request, now_s)
        elif self._settings.slack_from_first_token:
            self._decodes(request, now_s + request.slo_tpot_s)
        else:
            request.stage = Stage.ENTERING
            self._entering[key] = request

    def _entered(self, began_s: float) -> None:
        """Those that waited for their first decode step have made it; it began at `began_s`."""
        cohort = Cohort(began_s, self._steps)
        for request in self._entering.values():
            request.said, request.steps = 2, self._steps
            self._decodes(request, began_s + request.slo_tpot_s)
            if request.slo_tpot_s:
                request.cohort = cohort
                cohort.count += 1
        self._entering.clear()
        young = self._young
        if cohort.count:
            young.append(cohort)
        while young and self._steps - young[0].steps > _COHORT_STEPS:
            young.popleft()

    def _decodes(self, request: GateRequest, zero_s: float) -> None:
        request.stage = Stage.DECODING
        request.older = request.window < self._window
        if request.slo_tpot_s:
            book = self._older if request.older else self._fresh
            request.place = book.add(request.number, request.slo_tpot_s, zero_s)

    def _off_the_books(self, request: GateRequest) -> None:
        if request.cohort is not None:
            request.cohort.count -= 1
            request.cohort = None
        if request.place is not None:
            request.zero_s = (self._older if request.older else self._fresh).remove(request.place)
            request.place = None

    def _said(self, key: str, tokens: int) -> None:
        request = self._requests.get(key)
        if request is None or request.stage is not Stage.DECODING or tokens <= request.said:
            return
        more, request.said = tokens - request.said, tokens
        if request.place is not None:
            self._off_the_books(request)
            self._decodes(request, request.zero_s + more * request.slo_tpot_s)

    def _preempted(self, key: str) -> None:
        request = self._requests.get(key)
        if request is None or request.stage not in (Stage.DECODING, Stage.ENTERING):
            return
        request.said = self.tokens_said(request)
        if request.stage is Stage.ENTERING:
            del self._entering[key]
            request.zero_s = request.first_s + request.slo_tpot_s
        self._off_the_books(request)
        request.stage = Stage.PREEMPTED

    def _again(self, key: str) -> None:
        request = self._requests.get(key)
        if request is not None and request.stage is Stage.PREEMPTED:
            request.said, request.steps = request.said + 1, self._steps
            self._decodes(request, request.zero_s + request.slo_tpot_s)

    def _ended(self, key: str) -> None:
        request = self._requests.pop(key, None)
        if request is None:
            return
        if request.stage in (Stage.WAITING, Stage.LATE):
            self._waiting.remove(request)
        elif self._released.pop(key, None) is not None:
            self._released_tokens -= request.prompt_tokens
            if not self._settings.tells_steps:
                self._backlog_tokens = self._released_tokens
        else:
            self._entering.pop(key, None)
            said = self.tokens_said(request)
            self._output_tokens += 0.02 * (said - self._output_tokens)
            self._overload.lengths.add(said)
            self._off_the_books(request)

    def tokens_said(self, request: GateRequest) -> int:
        """So far."""
        if request.stage is Stage.DECODING:
            return request.said + self._steps - request.steps
        return request.said

    # Windows

    def _decide(self, now_s: float) -> Sequence[GateEffect]:
        if self._mode is GateMode.ORDINARY:
            return ()
        if now_s - self._heard_s > 2 * self._beat_s:
            return self._into(GateMode.ORDINARY, now_s)
        if not self._waiting and not self._backlog_tokens:
            return ()
        if not self._settings.tells_steps and self._released:
            return ()
        self._set_aside(now_s)
        choice = self._chosen(now_s)
        effects: list[GateEffect] = []
        if choice.tokens:
            self._let_out(choice.tokens, effects)
        turn = Turn(choice.position, max(1, choice.tokens) if choice.tokens else None)
        if turn != self._turned and self._settings.tells_steps:
            self._turned = turn
            effects.append(turn)
        return effects

    def _set_aside(self, now_s: float) -> None:
        """Who cannot meet its deadline any more makes room for those who can."""
        line, times = self._waiting, self._times
        while (first := line.first()) is not None:
            if now_s + times.prefill_s(first.prompt_tokens) + times.decode_s <= first.deadline_s:
                break
            line.remove(first)
            first.slo_tpot_s = 0.0
            line.add_late(first)
        if first is not None:
            s_per_token = times.s_per_token / max(0.1, 1.0 - times.decode_s / self._slo_tpot_s)
            line.put_in_order(now_s + times.decode_s + self._backlog_tokens * s_per_token, s_per_token)

    def _chosen(self, now_s: float) -> Choice:
        line, slots = self._waiting, self._slots_free
        head = line.head() if slots else None
        work = self._backlog_tokens + line.tokens_of(slots)
        if slots and (not work or (line.late and self._late_credit >= self._late_head_tokens)):
            work += min(line.late_tokens, self._rule.step_tokens_max)
        if not work:
            return Choice(Position.DECODE, 0, "nothing waits")
        deadline_s, tokens = inf, self._backlog_tokens or work
        for request in self._released.values():
            deadline_s = min(deadline_s, request.deadline_s) if request.slo_tpot_s else deadline_s
        if head is not None:
            deadline_s = min(deadline_s, head.deadline_s)
            tokens = self._backlog_tokens + head.prompt_tokens
        protected = self._settings.without != "in-window-protection"
        entering_s = min([one.deadline_s for one in self._entering.values() if one.slo_tpot_s], default=inf)
        low_s, decoding = self._low(now_s)
        at = Situation(
            now_s=now_s,
            work_tokens=work,
            head_tokens=tokens,
            deadline_s=deadline_s,
            last_deadline_s=line.last_deadline_s(),
            decoding=decoding,
            low_s=low_s,
            slo_tpot_s=self._slo_tpot_s,
            entering=len(self._entering) if protected else 0,
            entering_deadline_s=entering_s if protected else inf,
            harm=self._harm,
            gain=1.0 - max(self._token_s, self._times.decode_s) / self._slo_tpot_s,
            requests=max(1, min(slots, line.in_time) + len(self._released)),
            let_go=bool(decoding) and self._lets_go(now_s),
            rest_pays=self._rest_pays,
            window_s=self._window_s,
        )
        return choose(at, self._times, self._rule)

    def _lets_go(self, now_s: float) -> bool:
        times, settings = self._times, self._settings
        if settings.without == "letting-go":
            return False
        slo_tpot_s = self._slo_tpot_s
        return self._overload.decide(
            times.slope_s, times.decode_s, settings.slo_ttft_s, slo_tpot_s, now_s, self._missing
        )

    def _missing(self) -> float:
        """Of those who are here, the share that is behind or will be late."""
        line, book = self._waiting, self._fresh
        missing = book.behind(self._now_s) + line.late + line.postponed
        return missing / max(1, book.count + len(line) + len(self._entering) + len(self._released))

    @property
    def _slo_tpot_s(self) -> float:
        return self._fresh.strictest_s(self._settings.slo_tpot_s)

    @property
    def _late_head_tokens(self) -> int:
        late = self._waiting.head_late()
        return 0 if late is None else late.prompt_tokens

    def _low(self, now_s: float) -> tuple[float, int]:
        """The low quantile of slack, without those that are lost; how many decode."""
        book = self._fresh
        if self._settings.without == "quantile-slack":
            return (book.spread(now_s, self._low_share).mean_s if book.count else inf), book.count
        lost = book.behind(now_s - _LOST_TARGETS * self._slo_tpot_s)
        zero_s = book.low_zero_s(lost + int(self._low_share * (book.count - lost)))
        return (inf if zero_s is None else zero_s - now_s), book.count

    def _harm(self, stall_s: float, others: int) -> float:
        """Targets lost, expected, by a stall, with `others` who have no slack. Who is left without makes up for it as
        fast as tokens come faster than their target, and misses if it ends before: half by the time between tokens
        lately, prefills included, and half by that of a decode step alone, since the gate decides on the prefills.

        Who is young ends soon or late by what is known of answers; of those who have said more, each token is as likely
        to be the last."""
        if self._settings.without == "expected-misses":
            return inf
        slo_s, now_s = self._slo_tpot_s, self._now_s
        token_s = (max(self._token_s, self._times.decode_s) + self._times.decode_s) / 2
        gain_s = slo_s * max(_LEAST_GAIN, 1.0 - token_s / slo_s)
        recovery_s = gain_s * self._output_tokens
        found = self._fresh.misses(now_s + stall_s, recovery_s) - self._fresh.misses(now_s, recovery_s)
        if self._settings.without == "answer-lengths":
            return found + others * min(1.0, stall_s / recovery_s)
        ends_within = self._overload.lengths.ends_within
        young = self._young
        for cohort in reversed(young):
            more = self._steps - cohort.steps
            if more > _YOUNG_STEPS:
                break
            if cohort.count:
                behind_s = now_s - cohort.began_s - (more + 1) * slo_s
                then_s, behind_s = max(0.0, behind_s + stall_s), max(0.0, behind_s)
                if then_s > 0.0:
                    said = more + 2
                    soon = ends_within(said, then_s / gain_s) - ends_within(said, behind_s / gain_s)
                    found += cohort.count * (soon - min(1.0, then_s / recovery_s) + min(1.0, behind_s / recovery_s))
        return found + others * ends_within(1, stall_s / gain_s)

    def _in_time(self, now_s: float) -> list[tuple[int, int]]:
        """Of those who decode since a short time and are not behind: tokens said, and how many they are."""
        found: list[tuple[int, int]] = []
        for cohort in self._young:
            more = self._steps - cohort.steps
            if cohort.count and now_s - cohort.began_s <= (more + 1) * self._slo_tpot_s:
                found.append((more + 2, cohort.count))
        return found

    def _rest_pays(self, within_s: float) -> bool:
        """Whether it pays to prefill nobody for some time up to `within_s`: more of those who are not behind yet would
        end, expected, than of the requests that come meanwhile would miss for it. That is all of them when the line is
        as long as the TTFT target, and fewer in proportion when it is shorter."""
        told = self._in_time(self._now_s)
        line_s = self._times.prefill_s(self._waiting.tokens + self._backlog_tokens)
        filled = min(1.0, 2 * line_s / self._settings.slo_ttft_s)
        for steps in _RESTS:
            rest_s = steps * self._times.decode_s
            if not told or rest_s > within_s:
                return False
            if self._ending(told, steps) > filled * rest_s / max(self._gap_s, 1e-3):
                return True
        return False

    def _ending(self, told: Sequence[tuple[int, int]], steps: int) -> float:
        """How many of them end within so many steps, expected."""
        return sum([count * self._overload.lengths.ends_within(said, steps) for said, count in told])

    def _let_out(self, tokens: int, effects: list[GateEffect]) -> None:
        """Release requests until the engine has `tokens` to work on."""
        line = self._waiting
        while self._backlog_tokens < tokens:
            request = line.head() or line.head_late()
            if line.late and self._late_credit >= self._late_head_tokens:
                request = line.head_late()
            if request is None or not self._slots_free or not self._kv_room(request):
                return
            if request.stage is Stage.LATE:
                self._late_credit = max(0.0, self._late_credit - request.prompt_tokens)
            line.remove(request)
            effects.append(self._release(request))

    @property
    def _slots_free(self) -> int:
        """How many more requests the engine would run at once. Who is released beyond that waits in the engine, first
        come first served, where nobody can be set aside any more."""
        if not self._slots:
            return _SLOTS_UNTOLD
        return max(0, self._slots - len(self._requests) + len(self._waiting))

    @property
    def _slot_every_s(self) -> float:
        """In which time a slot becomes free, on average, if all are taken."""
        return max(self._token_s, self._times.decode_s) * self._output_tokens / max(1, self._slots)

    def _kv_room(self, request: GateRequest) -> bool:
        """Whether its prompt, and what the others say meanwhile, fit into the KV cache."""
        if not self._kv_total or not self._busy:
            return True
        growth = 16 * (self._fresh.count + len(self._released) + 1)
        return self._kv_free - self._backlog_tokens - request.prompt_tokens - growth >= 0

    def _release(self, request: GateRequest) -> Release:
        request.stage = Stage.RELEASED
        self._released[request.key] = request
        self._released_tokens += request.prompt_tokens
        self._backlog_tokens += request.prompt_tokens
        return Release(request.key)

    def _ordinary_turn(self) -> list[GateEffect]:
        settings = self._settings
        turn = Turn(settings.ordinary_position, settings.ordinary_tokens_max)
        most = settings.ordinary_tokens_max
        # A step that mixes must not last much longer than a token may: then prompts are better done with in one go.
        if most is not None and self._times.mixed_s(most) > _MIXED_TARGETS * settings.slo_tpot_s:
            turn = Turn(Position.PREFILL)
        if turn == self._turned:
            return []
        self._turned = turn
        return [turn]

    # What others are told

    def report(self, now_s: float) -> InstanceReport:
        """What the scheduler is told."""
        lets_go = self._overload.lets_go
        soon = [*self._in_time(now_s), (1, len(self._entering) + len(self._released))] if lets_go else []
        self._sequence += 1
        waiting_s = self._times.prefill_s(self._backlog_tokens + self._waiting.tokens)
        head = self._waiting.head()
        stall, self._stall_s = self._stall_s, 0.0
        older = self._older.spread(now_s, self._low_share) if self._older.count else _NONE
        fresh = self._fresh.spread(now_s, self._low_share) if self._fresh.count else _NONE
        return InstanceReport(
            session=self._settings.session,
            sequence=self._sequence,
            epoch=self._epoch,
            applied=self._applied,
            mode=self._mode,
            prefilling=self._prefilling,
            window_s=now_s - self._opened_s,
            decoding=_together(fresh, older) if older.count else fresh,
            waiting=len(self._waiting) + len(self._released) + len(self._entering),
            waiting_prefill_s=waiting_s,
            laxity_s=FOREVER_S if head is None else head.deadline_s - now_s - waiting_s - self._times.decode_s,
            kv_tokens_free=self._kv_free,
            kv_tokens_total=self._kv_total,
            kv_tokens_promised=self._backlog_tokens + self._waiting.tokens,
            low_share=self._low_share,
            step_s=self._times.decode_s,
            prefill_base_s=self._times.prefill_s(1),
            prefill_s_per_token=self._times.slope_s,
            refused_total=self._refused,
            stalled_ratio_max=stall / self._settings.slo_tpot_s,
            window=self._window,
            older=older,
            context_tokens=self._context_tokens,
            first_tokens_total=self._ttft.count,
            slow_first_tokens_total=self._ttft.slow,
            ttft_s_total=self._ttft.sum_s,
            lets_go=lets_go,
            ending=self._ending(soon, _RESTS[-1]),
            granted_total=self._granted,
            slots_free=self._slots - len(self._requests) if self._slots else None,
            slot_every_s=self._slot_every_s,
        )

    def state(self, now_s: float, accepted: bool) -> InstanceState:
        """Everything, for a new owner."""
        held = [
            HeldRequest(
                request.key,
                request.lease,
                now_s - request.offered_s,
                self.tokens_said(request),
                now_s - request.first_s if request.said else 0.0,
            )
            for request in self._requests.values()
        ]
        return InstanceState(self.report(now_s), held, accepted)


def _together(one: Spread, other: Spread) -> Spread:
    """Of two spreads; the low quantile is the lower of theirs."""
    if not one.count:
        return other
    count = one.count + other.count
    return Spread(
        count,
        (one.mean_s * one.count + other.mean_s * other.count) / count,
        min(one.least_s, other.least_s),
        min(one.low_s, other.low_s),
        max(one.most_s, other.most_s),
    )
