"""Logs (structlog), traces (OpenTelemetry) and metrics (Prometheus), set up once per process.

Spans are made after the fact, from clock readings taken on the way, so that a request that is not sampled costs
nothing but the readings. Where they go: `OTEL_EXPORTER_OTLP_ENDPOINT` (OTLP over HTTP), `SERAI_TRACE_FILE` (JSON
lines), both or neither. The W3C `traceparent` crosses every hop.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags
from structlog.tracebacks import ExceptionDictTransformer

from serai.runtime.service import ServiceFailure

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def set_up_logs(service: str, level: str = "info", *, json: bool | None = None) -> None:
    """One line per event on standard error: JSON, or coloured text when a person is looking. Tracebacks come without
    the values of variables, among which are keys and what people ask. Raises ValueError."""
    if level not in LOG_LEVELS:
        raise ValueError(f"log level {level!r}: must be one of {', '.join(LOG_LEVELS)}")
    as_json = json if json is not None else not sys.stderr.isatty()
    shown: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        shown += [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=lambda value, **_: orjson.dumps(value, default=str).decode()),
        ]
    else:
        shown.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    structlog.configure(
        processors=shown,
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=max(LOG_LEVELS[level], logging.WARNING), stream=sys.stderr, format="%(message)s")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position in a trace, as the W3C `traceparent` header carries it."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> TraceContext | None:
        """From a `traceparent` header; None when it is not a valid one (the header is then ignored, as W3C says)."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        trace_id, span_id, flags = (int(match[n], 16) for n in (2, 3, 4))
        return cls(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


class Tracing:
    """Makes spans for one service. Off (no exporter): every context is unsampled and nothing is kept."""

    def __init__(self, service: str, provider: TracerProvider | None, sample_ratio: float) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("serai") if provider else None
        self._sample_ratio = sample_ratio if provider else 0.0
        self.service = service

    def incoming(self, traceparent: str | None) -> tuple[TraceContext | None, bool]:
        """The caller's context, if it sent one, and whether this request is recorded here."""
        if not self._tracer:
            return (TraceContext.parse(traceparent) if traceparent else None), False
        parent = TraceContext.parse(traceparent) if traceparent else None
        if parent is not None:
            return parent, parent.sampled
        return None, random.random() < self._sample_ratio

    def start(self, name: str, parent: TraceContext | None, kind: SpanKind, start_ns: int) -> trace.Span:
        """A span that began at `start_ns` (Unix time in nanoseconds); end it with `span.end(end_ns)`."""
        assert self._tracer is not None
        context = None
        if parent is not None:
            remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(1))
            context = trace.set_span_in_context(NonRecordingSpan(remote))
        return self._tracer.start_span(name, context, kind, start_time=start_ns)

    def close(self) -> None:
        """Sends what is still kept."""
        if self._provider is not None:
            self._provider.shutdown()


def context_of(span: trace.Span) -> TraceContext:
    """The position of `span`, to be sent on."""
    context = span.get_span_context()
    return TraceContext(context.trace_id, context.span_id, context.trace_flags.sampled)


def set_up_traces(service: str, environment: Mapping[str, str] = os.environ) -> Tracing:
    """Reads OTEL_EXPORTER_OTLP_ENDPOINT, SERAI_TRACE_FILE and SERAI_TRACE_RATIO (share of requests recorded that
    bring no sampling decision of their own; default 1). Raises ServiceFailure."""
    ratio = _ratio(environment.get("SERAI_TRACE_RATIO") or "1")
    exporters: list[SpanExporter] = []
    if environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporters.append(OTLPSpanExporter())
    if path := environment.get("SERAI_TRACE_FILE"):
        try:
            exporters.append(JsonLinesExporter(Path(path)))
        except OSError as error:
            raise ServiceFailure(f"SERAI_TRACE_FILE: {path}: {error.strerror}", exit_code=2) from error
    if not exporters:
        return Tracing(service, None, 0.0)
    name = environment.get("OTEL_SERVICE_NAME") or f"serai-{service}"
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create({"service.name": name}))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(service, provider, ratio)


def _ratio(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise ServiceFailure(f"SERAI_TRACE_RATIO: {text!r} is not a number from 0 to 1", exit_code=2)


class JsonLinesExporter(SpanExporter):
    """One span a line: name, service, trace_id, span_id, parent_id, start_ns, end_ns, attributes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def export(self, spans: Any) -> SpanExportResult:
        self._file.write(b"".join(self._line(span) for span in spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()

    @staticmethod
    def _line(span: ReadableSpan) -> bytes:
        context = span.get_span_context()
        assert context is not None
        return (
            orjson.dumps(
                {
                    "name": span.name,
                    "service": span.resource.attributes.get("service.name"),
                    "trace_id": f"{context.trace_id:032x}",
                    "span_id": f"{context.span_id:016x}",
                    "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
                    "start_ns": span.start_time,
                    "end_ns": span.end_time,
                    "attributes": dict(span.attributes or {}),
                },
                default=str,
            )
            + b"\n"
        )
