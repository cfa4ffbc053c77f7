"""What the launcher counts."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import Counter, Gauge

from serai.launcher.job_book import JobBook
from serai.launcher.picture import Plan
from serai.runtime.metrics import Counts, Histograms

_BOUNDS_S = (10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400)

JOBS = Gauge("serai_launcher_jobs", "Jobs of this site's deployments, by state", ["state"])
SLOTS = Gauge("serai_launcher_slots", "Slots, by what is thought of them", ["verdict"])
ALERTS = Gauge("serai_launcher_alerts", "Slots for which a person has to do something")
BLIND = Gauge("serai_launcher_blind", "1 while the picture is not whole, and nothing is done")
UNKNOWN = Counter("serai_launcher_unknown_answers", "Times the batch system did not tell its jobs")
SUBMISSIONS = Counts(
    "serai_launcher_submissions", "Jobs submitted: taken, quota, invalid, transient, unknown", ["answer"]
)
DRAINS = Counter("serai_launcher_drains", "Sessions that were asked to end")
CANCELS = Counter("serai_launcher_cancels", "Jobs that were cancelled")
ENDS = Counts(
    "serai_launcher_job_ends",
    "Jobs that are over, by the batch system's state, and whether they failed",
    ["state", "how"],
)
WAITS = Histograms("serai_launcher_queue_wait_seconds", "Submission to start", ["deployment"], _BOUNDS_S)
LOADS = Histograms("serai_launcher_load_seconds", "Start of the job to its first token", ["deployment"], _BOUNDS_S)


def show(book: JobBook, made: Plan) -> None:
    """The gauges, from what is there."""
    _fill(JOBS, Tally("unseen" if run.state is None else str(run.state) for run in book.runs))
    _fill(SLOTS, Tally(word.verdict for word in made.says))
    ALERTS.set(sum(word.alert for word in made.says))
    BLIND.set(bool(made.blind))


def _fill(gauge: Gauge, counts: Tally[str]) -> None:
    gauge.clear()
    for label, count in counts.items():
        gauge.labels(label).set(count)
