"""Hop 2 where a macro-scheduler decides: what it is asked for a call, and what follows from its word."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

import orjson
import structlog
from msgspec.structs import replace
from opentelemetry.trace import SpanKind

from serai.contracts.admission import AdmissionAnswer, AdmissionAsk, Decision
from serai.contracts.session_record import SessionRecord
from serai.ingress import metrics
from serai.ingress.call import Call
from serai.ingress.choosing import Chooser
from serai.ingress.endpoints import Body
from serai.ingress.macro_scheduled import AdmissionClient, Ask, Outcome, count, outcome_name
from serai.ingress.openai_format import ApiError
from serai.ingress.routing import prompt_head
from serai.runtime.telemetry import Tracing, context_of

log = structlog.get_logger()

LEASES_REFUSED_MAX = 2
"""Sessions that may refuse the lease of one request. Then it goes without: it has lost time enough."""
RETRY_AFTER_S = 5.0


class LeasedPick:
    """One per ingress. `wait_max_s` is how long a request that names no time of its own waits for its place."""

    def __init__(
        self, chooser: Chooser, client: AdmissionClient, tracing: Tracing, wait_max_s: Callable[[], float]
    ) -> None:
        self._chooser = chooser
        self._client = client
        self._tracing = tracing
        self._wait_max_s = wait_max_s

    async def pick(self, call: Call) -> SessionRecord | None:
        """The session that the scheduler names, with `call.lease` filled in; None = it does not say, and another policy
        decides. Raises ApiError when it refuses."""
        call.lease = None
        if not call.endpoint.streams or len(call.lease_refusals) >= LEASES_REFUSED_MAX:
            return None
        now = time.monotonic()
        excluded = self._chooser.excluded(call.wish, call.tried_in_vain, call.leases_refused, now)
        if excluded is None:
            return None
        ask = self._ask(call, excluded, now)
        if not excluded and (record := self._by_grant(call, ask, now)) is not None:
            return record
        until_s = min(call.deadline_s, call.started_s + self._wait_max_s())
        ask = replace(ask, affinity=_affinity(call))
        answer = await self._client.ask(Ask(call.model, ask, until_s))
        ended_s = time.monotonic()
        count(call.model, answer, ended_s - now)
        self._trace(call, answer, now, ended_s)
        if isinstance(answer, Outcome):
            if answer is Outcome.TIMED_OUT:
                raise _timed_out(call, ended_s)
            if answer is Outcome.STOPPED:
                text = "This gateway is stopping."
                raise ApiError(503, text, kind="server_error", code="stopping", retry_after_s=1)
            return None
        if answer.decision is Decision.REFUSE:
            raise _refused(call, answer)
        return self._granted(call, answer, ended_s)

    def _by_grant(self, call: Call, ask: AdmissionAsk, now: float) -> SessionRecord | None:
        """Where a place was given in advance; None: it has to ask."""
        granted = self._client.spend(call.model, ask)
        if granted is None:
            return None
        record = self._granted(call, granted, now)
        if record is None:  # That session has left.
            self._client.forget_grants(call.model, granted.session)
            return None
        metrics.ADMISSIONS.of(call.model, "granted").add()
        self._trace(call, granted, now, now)
        return record

    def refused_by(self, call: Call, session: str) -> None:
        """The session could not keep what was promised."""
        call.lease_refusals += (len(call.tried) - 1,)
        call.leases_refused += (session,)
        if call.lease is not None and not call.lease.sequence:
            self._client.forget_grants(call.model, session)
        metrics.ADMISSIONS.of(call.model, "lease_refused").add()

    def _ask(self, call: Call, excluded: list[str], now: float) -> AdmissionAsk:
        wanted = call.wish.ask
        named = call.named_by_client or not call.tracked
        return AdmissionAsk(
            request_id=self._client.unique(call.request_id if call.tracked else "") if named else call.request_id,
            prompt_tokens=call.prompt_tokens,
            output_tokens_max=call.output_tokens_max * call.outputs,
            slo_ttft_s=wanted.slo_ttft_s,
            slo_tpot_s=wanted.slo_tpot_s,
            waited_s=now - call.started_s,
            project=call.caller.project,
            best_effort=call.best_effort,
            excluded=excluded,
        )

    def _granted(self, call: Call, answer: AdmissionAnswer, now: float) -> SessionRecord | None:
        record = self._chooser.granted(call.wish, answer.session, now)
        if record is None or answer.session in {one.session for one in call.tried_now}:
            self._client.give_back(call.model, answer.request_id)
            log.info("admission.not_used", request_id=call.request_id, session=answer.session)
            return None
        call.lease = answer.lease
        if not call.tried:
            self._chooser.first_try(call.model, now)
        return record

    def _trace(self, call: Call, answer: AdmissionAnswer | Outcome, began_s: float, ended_s: float) -> None:
        if call.span is None:
            return
        start_ns = call.started_ns + round((began_s - call.started_s) * 1e9)
        span = self._tracing.start("admission", context_of(call.span), SpanKind.CLIENT, start_ns)
        span.set_attribute("serai.hop", "admission")
        span.set_attribute("serai.admission.decision", outcome_name(answer))
        if isinstance(answer, AdmissionAnswer):
            span.set_attribute("serai.session", answer.session)
            span.set_attribute("serai.admission.reason", answer.reason)
        span.end(start_ns + round((ended_s - began_s) * 1e9))


def _affinity(call: Call) -> str:
    """What other requests share with it whose prefix is warm where they went: its conversation, or the head of its
    prompt, as the policies `session-sticky` and `prefix-affine` have it; kept apart by project."""
    key = call.wish.ask.session_key.encode("utf-8", "surrogatepass")
    if not key and call.endpoint.body is Body.JSON:
        key = prompt_head(orjson.loads(call.body))
    if not key:
        return ""
    return blake2b(key, digest_size=8, key=call.caller.project.encode()[:64]).hexdigest()


def _refused(call: Call, answer: AdmissionAnswer) -> ApiError:
    reason = (answer.reason or "its targets cannot be met").rstrip(".")
    text = f"No instance of `{call.model[:200]}` takes the request now: {reason}."
    if not call.best_effort:
        text += " It asked for `x-slo-best-effort: no`."
    retry_after_s = answer.retry_after_s or RETRY_AFTER_S
    return ApiError(503, text, kind="overloaded_error", code="target_unreachable", retry_after_s=retry_after_s)


def _timed_out(call: Call, now: float) -> ApiError:
    waited = f"{now - call.started_s:.1f} s"
    if now >= call.deadline_s:
        text = f"The request has waited {waited} for its place, and its time is over (`x-request-timeout`)."
        return ApiError(504, text, kind="timeout_error", code="deadline", retry_after_s=RETRY_AFTER_S)
    text = f"The request has waited {waited} for its place, longer than it may."
    return ApiError(503, text, kind="overloaded_error", code="admission_timeout", retry_after_s=RETRY_AFTER_S)
