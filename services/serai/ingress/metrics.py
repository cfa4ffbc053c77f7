"""What the ingress counts. Labels are closed sets or names of models that exist: never text of a client."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from serai.runtime.metrics import Counts, Histograms

_LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

REQUESTS = Counts("serai_ingress_requests", "Inference requests answered", ["model", "status"])
FAILURES = Counter(
    "serai_ingress_failures_total", "Tries that failed, by reason; a later try may have succeeded", ["model", "code"]
)
RETRIES = Counter("serai_ingress_retries_total", "Second tries", ["model"])
BROKEN_STREAMS = Counter(
    "serai_ingress_broken_streams_total", "Streams that were ended with an error event", ["model", "code"]
)
CONTINUATIONS = Counter(
    "serai_ingress_continuations_total",
    "Streams that broke off and might have gone on: resumed, or why not (mismatch, lost, unsound, nobody)",
    ["model", "outcome"],
)
CANCELLED = Counter("serai_ingress_cancelled_total", "Requests whose client left before the end", ["model"])
IN_FLIGHT = Gauge("serai_ingress_requests_in_flight", "Streams open to agents now")
TTFT = Histograms(
    "serai_ingress_time_to_first_byte_seconds",
    "Arrival of a request until the first bytes of its answer's body (a streamed answer's TTFT)",
    ["model"],
    _LATENCY_BUCKETS,
)
DURATION = Histograms(
    "serai_ingress_request_duration_seconds",
    "Arrival of a request until the end of its answer",
    ["model"],
    _LATENCY_BUCKETS,
)
TOKENS = Counts("serai_ingress_tokens", "Tokens, as engines report them in `usage`", ["model", "type"])
CONFIGURATION_VALID = Gauge(
    "serai_ingress_configuration_valid", "1: the file is in effect as it is now; 0: it is wrong, see the log", ["file"]
)
EVENT_LOOP_LAG = Gauge("serai_ingress_event_loop_lag_seconds", "How late the event loop runs its timers")
