"""The spans of one recorded request at an agent: all that it did, and within that the engine's part, by OpenTelemetry's
GenAI conventions. Never a word of the request."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind

from serai.contracts.inference import InferenceRequest
from serai.runtime.telemetry import Tracing, context_of


class RequestSpans:
    """Begun when the request comes, if it is one that is recorded."""

    __slots__ = ("_engine", "_inference", "_request", "_tracing")

    def __init__(self, tracing: Tracing, request: InferenceRequest, inference: Span) -> None:
        self._tracing = tracing
        self._request = request
        self._inference = inference
        self._engine: Span | None = None

    @classmethod
    def begin(cls, tracing: Tracing, request: InferenceRequest, received_ns: int) -> RequestSpans | None:
        parent, sampled = tracing.incoming(request.traceparent)
        if not sampled:
            return None
        span = tracing.start("inference", parent, SpanKind.CONSUMER, received_ns)
        span.set_attributes({"serai.hop": "inference", "serai.request_id": request.request_id})
        return cls(tracing, request, span)

    def post(self, about_engine: Mapping[str, str | int], now_ns: int) -> str:
        """The request goes to the engine; the `traceparent` for it."""
        operation, model = self._request.operation, str(about_engine.get("gen_ai.request.model", ""))
        span = self._tracing.start(
            f"{operation} {model}".strip() or "engine", context_of(self._inference), SpanKind.CLIENT, now_ns
        )
        span.set_attributes({"serai.hop": "engine", "http.request.method": self._request.method, **about_engine})
        if operation:
            span.set_attribute("gen_ai.operation.name", operation)
        self._engine = span
        return context_of(span).traceparent

    def end(self, status: int, error: str, first_byte_ns: int, end_ns: int) -> None:
        """`first_byte_ns` is 0 when there was none, `error` empty when there was none."""
        for span in (self._engine, self._inference):
            if span is None:
                continue
            if error or (status >= 400 and span is self._engine):
                span.set_attribute("error.type", error or str(status))
        if self._engine is not None:
            self._engine.set_attribute("http.response.status_code", status)
            if first_byte_ns:
                self._engine.add_event("first byte", timestamp=first_byte_ns)
            self._engine.end(end_ns)
        self._inference.end(end_ns)
