"""What the ingress counts. Labels are closed sets or names of models that exist: never text of a client."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

_LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

REQUESTS = Counter("serai_ingress_requests_total", "Inference requests answered", ["model", "status"])
FAILURES = Counter(
    "serai_ingress_failures_total", "Tries that failed, by reason; a later try may have succeeded", ["model", "code"]
)
RETRIES = Counter("serai_ingress_retries_total", "Second tries", ["model"])
BROKEN_STREAMS = Counter(
    "serai_ingress_broken_streams_total", "Streams that were ended with an error event", ["model", "code"]
)
CANCELLED = Counter("serai_ingress_cancelled_total", "Requests whose client left before the end", ["model"])
IN_FLIGHT = Gauge("serai_ingress_requests_in_flight", "Streams open to agents now")
TTFT = Histogram(
    "serai_ingress_time_to_first_byte_seconds",
    "Arrival of a request until the first bytes of its answer's body (a streamed answer's TTFT)",
    ["model"],
    buckets=_LATENCY_BUCKETS,
)
DURATION = Histogram(
    "serai_ingress_request_duration_seconds",
    "Arrival of a request until the end of its answer",
    ["model"],
    buckets=_LATENCY_BUCKETS,
)
TOKENS = Counter("serai_ingress_tokens_total", "Tokens, as engines report them in `usage`", ["model", "type"])
EVENT_LOOP_LAG = Gauge("serai_ingress_event_loop_lag_seconds", "How late the event loop runs its timers")


@cache
def requests(model: str, status: int) -> Counter:
    """`REQUESTS` for these labels. Cached: looking a child up by labels costs more than counting."""
    return REQUESTS.labels(model, str(status))


@cache
def duration(model: str) -> Histogram:
    """`DURATION` for this model."""
    return DURATION.labels(model)


@cache
def ttft(model: str) -> Histogram:
    """`TTFT` for this model."""
    return TTFT.labels(model)


@cache
def tokens(model: str, kind: str) -> Counter:
    """`TOKENS` for these labels."""
    return TOKENS.labels(model, kind)
