"""What is written down of every call, once, whatever happened to it: its usage record, metrics, and the end of its span
(hop 8)."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from opentelemetry.trace import Span

from serai.contracts.session_record import SessionRecord
from serai.contracts.usage import Outcome, UsageRecord
from serai.ingress import genai, metrics
from serai.ingress.call import Call
from serai.ingress.caller import Caller
from serai.ingress.endpoints import Body
from serai.ingress.gpu_share import GpuShares, Share
from serai.ingress.openai_format import ApiError
from serai.ingress.token_counts import NO_TOKENS, TokenCounts, guessed, told
from serai.ingress.usage_sender import UsageSender
from serai.runtime.registry_replica import RegistryReplica

TRACK_HEADER = "x-serai-track"
_MODEL_CHARACTERS_MAX = 200
_CODE_CHARACTERS_MAX = 100
"""It may be an engine's word."""


def is_tracked(headers: Mapping[str, str], caller: Caller) -> bool:
    """Whether the caller may be named in the record. Raises ApiError: 400, or 403 for who has no say in it."""
    wish = headers.get(TRACK_HEADER)
    if wish is None:
        return True
    if wish.strip().lower() != "none":
        text = f"`{TRACK_HEADER}` can only be `none`, or be left out."
        raise ApiError(400, text, param=TRACK_HEADER, code="invalid_header")
    if not caller.may_opt_out:
        text = f"Project `{caller.project}` does not allow requests without tracking; leave `{TRACK_HEADER}` out."
        raise ApiError(403, text, kind="permission_error", param=TRACK_HEADER, code="tracking_required")
    return False


_WITHOUT_GPUS = nullcontext()


class Working:
    """A request is at a session while its block is entered. (A generator would cost as much as the rest of it.)"""

    __slots__ = ("_clock", "_share", "_shares")

    def __init__(self, shares: GpuShares, share: Share, clock: Callable[[], float]) -> None:
        self._shares = shares
        self._share = share
        self._clock = clock

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self._shares.end(self._share, self._clock())


class _Series:
    """What is counted of requests that end alike."""

    __slots__ = ("duration", "outcomes", "requests")

    def __init__(self, model: str, status: int, outcome: Outcome) -> None:
        self.requests = metrics.REQUESTS.of(model, str(status))
        self.outcomes = metrics.OUTCOMES.of(model, outcome)
        self.duration = metrics.DURATION.of(model)


class Accounting:
    """One per ingress. Without a sender nothing is recorded, only measured."""

    def __init__(self, replica: RegistryReplica, sender: UsageSender | None = None) -> None:
        self._replica = replica
        self._sender = sender
        self._shares = GpuShares()
        self._id_prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._series: dict[tuple[str, int, Outcome], _Series] = {}

    def attempt(self, call: Call, record: SessionRecord, clock: Callable[[], float]) -> AbstractContextManager[None]:
        """The call has its part of the time of a session's GPUs, where that has some, during the block."""
        if not (gpus := len(record.metadata.gpus)):
            return _WITHOUT_GPUS
        share = self._shares.begin(record.session, clock())
        call.shares.append((gpus, share))
        return Working(self._shares, share, clock)

    def look(self, now: float) -> None:
        """Takes note of what sessions say of themselves. To be called several times a second."""
        for session in self._shares.sessions:
            if status := self._replica.status(session):
                self._shares.report(session, status.sequence, status.in_flight, now, status.gpu_power_w)

    def retain(self, sessions: Collection[str], models: Collection[str]) -> None:
        """Forgets all other sessions, and the series of all other models. To be called now and then."""
        self._shares.retain(sessions)
        self._series.clear()
        metrics.retain(models)

    # -- records -------------------------------------------------------------------------------------------------

    def answering(self, call: Call, status: int, now: float) -> None:
        """The last bytes of the answer are about to go out: from here on its record is safe."""
        if call.tokens is not None:
            return
        call.tokens = tokens_of(call, status)
        if self._sender is None:
            return
        self._sender.add(self._record(call, status, now))

    def unreadable(
        self, headers: Mapping[str, str], asked_path: str, caller: Caller, error: ApiError, started_ns: int
    ) -> None:
        """A request of which not even the model could be read."""
        metrics.REQUESTS.of("unknown", str(error.status)).add()
        metrics.OUTCOMES.of("unknown", Outcome.REFUSED).add()
        if self._sender is None:
            return
        tracked = not (caller.may_opt_out and TRACK_HEADER in headers)
        self._sender.add(
            UsageRecord(
                id=self._new_id() if tracked else _anonymous_id(),
                started=_moment(started_ns) if tracked else _hour(started_ns),
                outcome=Outcome.REFUSED,
                status=error.status,
                endpoint=asked_path,
                project=caller.project if tracked else "",
                key=caller.name if tracked else "",
                tracked=tracked,
                error_code=(error.code or "")[:_CODE_CHARACTERS_MAX],
            )
        )

    def _record(self, call: Call, status: int, now: float) -> UsageRecord:
        tokens = call.tokens or NO_TOKENS
        tracked, tried = call.tracked, call.tried
        last = tried[-1].metadata if tried else None
        gpus = last.gpus if last else []
        gpu_seconds, energy_j = self._of_gpus(call, now) if call.shares else (0.0, 0.0)
        return UsageRecord(
            id=self._new_id() if tracked else secrets.token_hex(13),
            started=_moment(call.started_ns) if tracked else _hour(call.started_ns),
            outcome=call.outcome,
            status=status,
            endpoint=call.asked_path,
            model=call.model if tried else "",
            model_asked=call.asked_model[:_MODEL_CHARACTERS_MAX] if call.asked_model != call.model or not tried else "",
            request_id=call.request_id if tracked else "",
            project=call.caller.project if tracked else "",
            key=call.caller.name if tracked else "",
            tracked=tracked,
            error_code=call.error_code[:_CODE_CHARACTERS_MAX],
            stream=call.stream,
            queued_s=call.queued_s,
            ttft_s=call.first_byte_s - call.started_s if call.first_byte_s else None,
            duration_s=now - call.started_s,
            attempts=len(tried),
            resumed=call.resumed,
            sessions=[record.session for record in tried],
            provider=last.provider if last else "",
            site=last.site if last else "",
            engine=last.engine if last else "",
            gpu=gpus[0].name if gpus else "",
            gpus=len(gpus),
            gpu_seconds=gpu_seconds,
            energy_j=energy_j,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            output_tokens=tokens.output,
            tokens_estimated=tokens.estimated,
        )

    def _of_gpus(self, call: Call, now: float) -> tuple[float, float]:
        """GPU-seconds, and joules."""
        seconds = sum([gpus * self._shares.seconds(share, now) for gpus, share in call.shares])
        return seconds, sum([self._shares.joules(share, now) for _, share in call.shares])

    def _new_id(self) -> str:
        return f"{self._id_prefix}{next(self._numbers):010x}"

    # -- metrics and spans ---------------------------------------------------------------------------------------

    def ended(self, call: Call, status: int, now: float) -> None:
        """`call` is over; `status` is what its client was answered, 499 when it had left."""
        self.answering(call, status, now)
        alike = (call.model if call.tried else "unknown", status, call.outcome)
        series = self._series.get(alike)
        if series is None:
            series = self._series[alike] = _Series(*alike)
        series.requests.add()
        series.outcomes.add()
        series.duration.observe(now - call.started_s)
        if call.first_byte_s:
            metrics.TTFT.of(call.model).observe(call.first_byte_s - call.started_s)
        if call.tried:
            self._count_tokens(call, call.tokens or NO_TOKENS, now)
        if call.span is not None:
            self._end_span(call, call.span, status, now)

    def _count_tokens(self, call: Call, tokens: TokenCounts, now: float) -> None:
        for kind, count in (("prompt", tokens.prompt), ("cached", tokens.cached), ("completion", tokens.output)):
            if count:
                metrics.TOKENS.of(call.model, kind).add(count)
        if call.stream and tokens.output > 1 and call.first_byte_s:
            metrics.TPOT.of(call.model).observe((now - call.first_byte_s) / (tokens.output - 1))

    def _end_span(self, call: Call, span: Span, status: int, now: float) -> None:
        tokens = call.tokens or NO_TOKENS
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": call.endpoint.operation,
            "gen_ai.request.model": call.model[:_MODEL_CHARACTERS_MAX],
            "http.response.status_code": status,
            "serai.hop": "ingress",
            "serai.outcome": str(call.outcome),
            "serai.tries": len(call.tried),
            "serai.session": call.tried[-1].session if call.tried else "",
        }
        if call.tracked:
            attributes["serai.request_id"] = call.request_id
        if call.tried:
            attributes["gen_ai.provider.name"] = call.tried[-1].metadata.engine
        if call.error_code or status >= 400:
            attributes["error.type"] = call.error_code[:_CODE_CHARACTERS_MAX] or str(status)
        if tokens != NO_TOKENS:
            attributes["gen_ai.usage.input_tokens"] = tokens.prompt
            attributes["gen_ai.usage.output_tokens"] = tokens.output
            attributes["gen_ai.usage.cache_read.input_tokens"] = tokens.cached
        span.set_attributes(attributes | genai.asked(call.body, stream=call.stream) | genai.answered(call.last_answer))
        if call.first_byte_s:
            span.add_event("first byte", timestamp=call.started_ns + round((call.first_byte_s - call.started_s) * 1e9))
        span.end(call.started_ns + round((now - call.started_s) * 1e9))


def span_name(call: Call) -> str:
    """By the GenAI conventions."""
    return f"{call.endpoint.operation} {call.model[:_MODEL_CHARACTERS_MAX]}"


def tokens_of(call: Call, status: int) -> TokenCounts:
    """In the engine's words; else guessed, for an answer that must have had some."""
    if call.usage:
        return told(call.usage)
    if not call.tried or not call.endpoint.streams or status in range(400, 499) or status >= 500:
        return NO_TOKENS
    if call.outcome is Outcome.COMPLETE and not call.stream:
        return NO_TOKENS
    text_bytes = len(call.body) if call.endpoint.body is Body.JSON else 0  # A file is no text.
    return guessed(text_bytes, call.events, call.tried[-1].metadata.context_tokens_max)


def _anonymous_id() -> str:
    return secrets.token_hex(13)


def _moment(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{_second(seconds)}.{rest // 1_000_000:03}Z"


@lru_cache(maxsize=64)  # Requests come many a second, and this is the dearest part of their records.
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:-6]


def _hour(nanoseconds: int) -> str:
    hour_ns = 3_600_000_000_000
    return _moment(nanoseconds - nanoseconds % hour_ns)
