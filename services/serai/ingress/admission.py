"""Whether a call may go to a session now: its caller's limits, then its turn in the queue of its model.

docs/queueing-and-limits.md tells the rules. A call that has neither limits nor anybody before it is through at once.
"""

from __future__ import annotations

import itertools
import time
from types import TracebackType

from serai.ingress import metrics
from serai.ingress.call import Call, Outcome
from serai.ingress.choosing import Chooser
from serai.ingress.cold_models import ColdModels
from serai.ingress.configuration import Configuration, Period
from serai.ingress.limits import Limiter, Limits, Need, Price, Refused, Reservation
from serai.ingress.openai_format import ApiError
from serai.ingress.patterns import ByPattern
from serai.ingress.queueing import RETRY_AFTER_MAX_S, Arrived, Ended, Refusal, Refuse
from serai.ingress.shared_limits import BudgetUnknown, SharedLimits
from serai.ingress.token_counts import told
from serai.ingress.turns import ModelTurns, NotServed, Turns
from serai.runtime.bus import Bus
from serai.runtime.registry_copy import RegistryCopy

QUEUE_HEADER = "x-serai-queue-ms"
OUTPUT_TOKENS_ASSUMED = 1024
"""Of a request that does not say how many it wants, against limits of tokens per minute: what it did not use goes back,
what it uses beyond is charged at its end."""
OUTPUT_TOKENS_UNKNOWN = 4096
"""The same against budgets, of a model whose context limit is not known."""
_NO_PRICE = Price()


class Admission:
    """One per ingress."""

    def __init__(
        self,
        bus: Bus,
        copy: RegistryCopy,
        chooser: Chooser,
        limiter: Limiter,
        shared: SharedLimits,
        cold: ColdModels | None = None,
    ) -> None:
        self._bus = bus
        self._cold = cold
        self._chooser = chooser
        self._limiter = limiter
        self._shared = shared
        self.turns = Turns(chooser, lambda: copy.replica.changes)
        self._numbers = itertools.count(1)
        self._prices = ByPattern[Price]({}, _NO_PRICE)
        self._periods: dict[str, Period] = {}
        self._limited: frozenset[str] = frozenset()
        self._scopes: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Of the scopes that callers have, those that have limits."""

    def apply(self, configuration: Configuration, now: float) -> None:
        """From the next request on; what runs keeps its place and what it has reserved."""
        limits = {f"project:{name}": project.limits for name, project in configuration.projects.items()}
        limits |= {f"key:{name}": one for name, one in configuration.keys.items()}
        limits = {name: one for name, one in limits.items() if one != Limits()}
        self._shared.configure(limits, now)
        self._limited = frozenset(limits)
        self._scopes.clear()
        self._prices = ByPattern(configuration.prices, _NO_PRICE)
        self._periods = {name: project.budget_period for name, project in configuration.projects.items()}
        self.turns.apply(configuration.queue)

    def admitted(self, call: Call) -> Turn:
        """The call holds what it reserved, and its place, during the block. Raises ApiError: 429, 503 or 504."""
        return Turn(self, call)

    # -- limits --------------------------------------------------------------------------------------------------

    def scopes(self, call: Call) -> tuple[str, ...]:
        names = call.caller.scopes
        found = self._scopes.get(names)
        if found is None:
            found = self._scopes[names] = tuple([name for name in names if name in self._limited])
        return found

    async def reserve(self, call: Call, scopes: tuple[str, ...]) -> Reservation:
        """Raises ApiError: 429, or 503 when budgets cannot be asked for."""
        period = self._periods.get(call.caller.project, Period.EVER)
        try:
            found = await self._shared.reserve(scopes, self._need(call), period)
        except BudgetUnknown:
            metrics.LIMITED.of("budget unknown").add()
            text = "Whether the budget has something left cannot be found out at this moment."
            raise ApiError(503, text, kind="server_error", code="budget_unknown", retry_after_s=5) from None
        call.answer_headers.update(self._limiter.headers(scopes, time.monotonic()))
        if isinstance(found, Refused):
            metrics.LIMITED.of(found.limit).add()
            raise ApiError(
                429,
                found.message,
                kind="insufficient_quota" if found.code == "insufficient_quota" else "rate_limit_error",
                code=found.code,
                retry_after_s=found.retry_after_s,
            )
        return found

    def _need(self, call: Call) -> Need:
        prompt = call.prompt_tokens
        if not call.endpoint.streams:
            return Need(prompt, self.price(call).cost_micros(prompt, 0))
        asked, outputs = call.output_tokens_max, call.outputs
        context = self._chooser.context_tokens_max(call.model, call.started_s)
        longest = asked or (max(0, context - prompt) if context else OUTPUT_TOKENS_UNKNOWN)
        if context:
            longest = min(longest, context)
        tokens = prompt + outputs * min(longest, asked or OUTPUT_TOKENS_ASSUMED)
        return Need(tokens, self.price(call).cost_micros(prompt, outputs * longest))

    def price(self, call: Call) -> Price:
        return self._prices.of(call.model)

    # -- the queue -----------------------------------------------------------------------------------------------

    def turns_of(self, call: Call) -> ModelTurns | None:
        """Where the call has to wait for its turn; None where waiting is of no use: nobody knows the model, or NATS is
        gone, so that the next step says what is wrong."""
        found = self.turns.get(call.model)
        if found is None and self._chooser.expects(call.model):
            found = self.turns.make(call.model)
        if found is not None and not self._bus.connected:
            return None
        return found

    def arrived(self, call: Call, turns: ModelTurns, now: float) -> Arrived:
        """The call as its queue sees it."""
        caller, ask = call.caller, call.wish.ask
        settings = self.turns.settings
        begin_by_s = min(call.deadline_s, call.started_s + settings.wait_max_s)
        if ask.slo_ttft_s is not None:
            # With room it goes at once, late or not: its target is a reason to be early, and none to be refused.
            begin_by_s = max(now, min(begin_by_s, call.started_s + ask.slo_ttft_s - turns.first_byte_s))
        return Arrived(
            f"{next(self._numbers)}",
            caller.project,
            call.priority,
            len(call.body),
            call.prompt_tokens,
            call.output_tokens_max or OUTPUT_TOKENS_ASSUMED,
            begin_by_s,
            caller.weight,
        )

    def is_gone(self, call: Call, now: float) -> bool:
        """The last session of the model has left: the next step says so."""
        return not self._chooser.serves(call.model, now) and not self._chooser.expects(call.model)

    def wake(self, call: Call, asked: Arrived, now: float) -> None:
        """Has an engine started where nothing serves the model. Raises ApiError when the call cannot wait so long."""
        if self._cold is None or self._chooser.serves(call.model, now):
            return
        self._cold.knock(call.model, 1, now)
        left_s = self._cold.starts_in_s(call.model, now)
        if left_s is not None and now + left_s > asked.begin_by_s:
            raise self._starting(call, left_s)

    def wake_for_those_who_wait(self, now: float) -> None:
        """Says again that they do. To be called every second or so."""
        if self._cold is not None and self.turns.waiting:
            for model, waiting in self.turns.unserved(now).items():
                self._cold.knock(model, waiting, now)

    def _left_of_start_s(self, call: Call, now: float) -> float | None:
        return None if self._cold is None else self._cold.starts_in_s(call.model, now)

    def _starting(self, call: Call, left_s: float) -> ApiError:
        metrics.REFUSALS.of(call.model, Refusal.CLOSED).add()
        text = f"`{call.model[:200]}` is being started, which takes about {left_s:.0f} s more. Ask again then."
        retry_after_s = min(RETRY_AFTER_MAX_S, left_s)
        return ApiError(503, text, kind="overloaded_error", code="model_starting", retry_after_s=retry_after_s)

    def refused(self, call: Call, refuse: Refuse, now: float) -> ApiError:
        """What the client is told."""
        gap = not self._chooser.serves(call.model, now)
        code = Refusal.CLOSED if gap and refuse.why is Refusal.DEADLINE_PASSED else refuse.why
        metrics.REFUSALS.of(call.model, code).add()
        waited = f"{refuse.waited_s:.1f} s"
        if now >= call.deadline_s:
            text = f"The request has waited {waited} for its turn, and its time is over (`x-request-timeout`)."
            return ApiError(504, text, kind="timeout_error", code="deadline", retry_after_s=refuse.retry_after_s)
        match code:
            case Refusal.CLOSED if self.turns.stopped:
                return ApiError(503, "This gateway is stopping.", kind="server_error", code="stopping", retry_after_s=1)
            case Refusal.CLOSED if (left_s := self._left_of_start_s(call, now)) is not None:
                return self._starting(call, left_s)
            case Refusal.CLOSED:
                text = f"No session serves `{call.model[:200]}` at this moment; none came in {waited}."
            case Refusal.TOO_LATE:
                text = f"The request cannot begin in time: {refuse.waiting} wait already."
            case Refusal.DEADLINE_PASSED:
                text = f"The request has waited {waited} for its turn, longer than it may."
            case _ if refuse.own_share:
                text = f"The queue is full, and project {call.caller.project} has more of it than others."
            case _:
                text = f"The queue of `{call.model[:200]}` is full: {refuse.waiting} wait."
        status, kind = (429, "rate_limit_error") if refuse.own_share else (503, "overloaded_error")
        retry_after_s = max(refuse.retry_after_s, 5.0) if code is Refusal.CLOSED else refuse.retry_after_s
        return ApiError(status, text, kind=kind, code=code, retry_after_s=min(RETRY_AFTER_MAX_S, retry_after_s))


class Turn:
    """One call's: `async with`."""

    __slots__ = ("_admission", "_asked", "_began_s", "_call", "_reservation", "_turns")

    def __init__(self, admission: Admission, call: Call) -> None:
        self._admission = admission
        self._call = call
        self._reservation: Reservation | None = None
        self._turns: ModelTurns | None = None
        self._asked: Arrived | None = None
        self._began_s = 0.0

    async def __aenter__(self) -> Turn:
        call, admission = self._call, self._admission
        now = call.started_s
        if scopes := admission.scopes(call):
            self._reservation = await admission.reserve(call, scopes)
            now = time.monotonic()
        try:
            if not self._goes(now):
                await self._wait(now)
        except BaseException:
            if self._reservation is not None:
                self._reservation.release()
            raise
        return self

    def _goes(self, now: float) -> bool:
        """Whether its turn has come without waiting, or waiting is of no use: nearly always."""
        call, admission = self._call, self._admission
        turns = admission.turns_of(call)
        if turns is None:
            return True
        asked = admission.arrived(call, turns, now)
        turns.look(now)
        self._began_s = now
        self._turns, self._asked = turns, asked
        if turns.queue.go(asked, now):
            self._waited(turns, now)
            return True
        return False

    async def _wait(self, now: float) -> None:
        """Behind a `_goes` that said no."""
        call, admission = self._call, self._admission
        turns, asked = self._turns, self._asked
        self._turns = self._asked = None
        assert turns is not None
        assert asked is not None
        if admission.is_gone(call, now):
            return
        admission.wake(call, asked, now)
        try:
            await turns.wait(asked)
        except NotServed as refused:
            now = time.monotonic()
            self._waited(turns, now)
            if admission.is_gone(call, now):
                return
            raise admission.refused(call, refused.refuse, now) from None
        self._began_s = time.monotonic()
        self._turns, self._asked = turns, asked
        self._waited(turns, self._began_s)

    def _waited(self, turns: ModelTurns, now: float) -> None:
        call = self._call
        call.queued_s = now - call.started_s if now > call.started_s else 0.0
        turns.waited.observe(call.queued_s)
        call.answer_headers[QUEUE_HEADER] = f"{call.queued_s * 1000:.0f}" if call.queued_s else "0"

    async def again(self) -> bool:
        """All sessions that could be asked are full, whatever was known of them: the call goes back to its queue.
        False when there is none to wait in. Raises ApiError as the first time."""
        turns = self._turns
        if turns is None or turns.queue.capacity is None:
            return False
        turns.look_now(time.monotonic())  # Before its place is given to the next one, who would find it as full.
        self._leave(0, 0, served=False)
        self._call.tries_of_earlier_turns = len(self._call.tried)
        now = time.monotonic()
        if not self._goes(now):
            await self._wait(now)
        return True

    def _leave(self, prompt_tokens: int | None, output_tokens: int | None, *, served: bool) -> None:
        turns, asked = self._turns, self._asked
        if turns is None or asked is None:
            return
        self._turns = self._asked = None
        call = self._call
        first_byte_s = call.first_byte_s - self._began_s if served and call.stream and call.first_byte_s else None
        turns.end(Ended(asked.request, prompt_tokens, output_tokens, served), time.monotonic(), first_byte_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call = self._call
        prompt, output = _used(call, error)
        # What broke off, or was an engine's error, says nothing of how long answers take.
        self._leave(prompt, output, served=kind is None and call.outcome is Outcome.COMPLETE)
        if self._reservation is not None:
            price = self._admission.price(call)
            self._reservation.settle(Need(prompt + output, price.cost_micros(prompt, output)))


def _used(call: Call, error: BaseException | None) -> tuple[int, int]:
    """Prompt and output tokens that are charged: as told; else, for a stream that was broken off by anybody, as much as
    was sent; and nothing for an error."""
    if call.usage:
        counts = call.tokens or told(call.usage)
        return counts.prompt, counts.output
    if isinstance(error, ApiError):
        return 0, 0
    gone = error is not None
    if not call.tried or call.status >= 400 or not call.endpoint.streams or not (gone or call.stream):
        return 0, 0
    context = call.tried[-1].metadata.context_tokens_max
    return min(call.prompt_tokens, context) if context else call.prompt_tokens, call.events
