"""What the ingress counts. Labels are closed sets or names of models that exist: never text of a client."""

from __future__ import annotations

from collections.abc import Collection

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
TOKENS_LOST = Counts(
    "serai_ingress_tokens_lost",
    "Output tokens of streams that broke off and could not go on, by reason; agent_left: their session ended",
    ["reason"],
)
CANCELLED = Counter("serai_ingress_cancelled_total", "Requests whose client left before the end", ["model"])
OUTCOMES = Counts(
    "serai_ingress_outcomes",
    "How requests ended: complete, refused, failed, truncated, cancelled",
    ["model", "outcome"],
)
ADMISSIONS = Counts(
    "serai_ingress_admissions",
    "Asks for a place at a macro-scheduler's instances, by its word (admit, best_effort, refuse) or why there was none "
    "(absent, silent, unknown, full, bus lost, timed out, stopped), and leases that sessions refused (lease_refused)",
    ["model", "decision"],
)
ADMISSION_TIME = Histograms(
    "serai_ingress_admission_seconds",
    "How long asking took, WAIT included",
    ["model"],
    (0.00025, 0.0005, 0.001, 0.002, *_LATENCY_BUCKETS),
)
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
TPOT = Histograms(
    "serai_ingress_time_per_output_token_seconds",
    "Mean time per output token after the first, of each streamed answer",
    ["model"],
    (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1, 2.5),
)
TOKENS = Counts("serai_ingress_tokens", "Tokens by type: prompt, cached (of prompt), completion", ["model", "type"])
CONFIGURATION_VALID = Gauge(
    "serai_ingress_configuration_valid", "1: the file is in effect as it is now; 0: it is wrong, see the log", ["file"]
)
EVENT_LOOP_LAG = Gauge("serai_ingress_event_loop_lag_seconds", "How late the event loop runs its timers")

QUEUE_WAIT = Histograms(
    "serai_ingress_queue_wait_seconds",
    "How long requests waited for their turn, those that were refused included",
    ["model"],
    (0.001, 0.005, *_LATENCY_BUCKETS[1:]),
)
QUEUE_DEPTH = Gauge("serai_ingress_queue_depth", "Requests that wait for their turn now", ["model"])
REFUSALS = Counts(
    "serai_ingress_queue_refusals",
    "Requests refused for want of room, by reason: queue_full, queue_displaced, deadline_unreachable, queue_timeout, "
    "no_session",
    ["model", "reason"],
)
LIMITED = Counts(
    "serai_ingress_limited",
    "Requests refused by a limit of their key or project, by limit",
    ["limit"],
)
DENIED = Counts(
    "serai_ingress_denied", "Requests of whom nobody knows, or who may not ask at all: in no usage record", ["status"]
)

_BY_MODEL = (ADMISSIONS, ADMISSION_TIME, REQUESTS, OUTCOMES, TTFT, DURATION, TPOT, TOKENS, QUEUE_WAIT, REFUSALS)
_LIBRARY_BY_MODEL = (FAILURES, RETRIES, BROKEN_STREAMS, CONTINUATIONS, CANCELLED, QUEUE_DEPTH)
_NO_MODEL = "unknown"


def retain(models: Collection[str]) -> None:
    """Forgets the series of all models but these: a model that has gone must not be scraped for ever."""
    for family in _BY_MODEL:
        family.retain(lambda labels: labels[0] == _NO_MODEL or labels[0] in models)
    for counter in _LIBRARY_BY_MODEL:
        for model in {sample.labels["model"] for metric in counter.collect() for sample in metric.samples}:
            if model not in models:
                counter.remove_by_labels({"model": model})
