"""What is written down of every call, once, whatever happened to it: metrics and the end of its span (hop 8)."""

from __future__ import annotations

from opentelemetry.trace import Span

from serai.ingress import metrics
from serai.ingress.call import Call


class Accounting:
    """One per ingress."""

    def ended(self, call: Call, status: int, now: float) -> None:
        """`call` is over; `status` is what its client was answered, 499 when it had left."""
        model = call.model if call.tried else "unknown"
        metrics.REQUESTS.of(model, str(status)).add()
        metrics.DURATION.of(model).observe(now - call.started_s)
        if call.first_byte_s:
            metrics.TTFT.of(model).observe(call.first_byte_s - call.started_s)
        self._count_tokens(call)
        if call.span is not None:
            self._end_span(call, call.span, status, now)

    def _count_tokens(self, call: Call) -> None:
        for kind in ("prompt", "completion"):
            count = (call.usage or {}).get(f"{kind}_tokens")
            if isinstance(count, int) and count > 0:
                metrics.TOKENS.of(call.model, kind).add(count)

    def _end_span(self, call: Call, span: Span, status: int, now: float) -> None:
        span.set_attributes(
            {
                "gen_ai.operation.name": call.endpoint.operation,
                "gen_ai.request.model": call.model,
                "http.response.status_code": status,
                "serai.request_id": call.request_id,
                "serai.tries": len(call.tried),
                "serai.session": call.tried[-1].session if call.tried else "",
            }
        )
        if call.first_byte_s:
            span.add_event("first byte", timestamp=call.started_ns + round((call.first_byte_s - call.started_s) * 1e9))
        span.end(call.started_ns + round((now - call.started_s) * 1e9))
