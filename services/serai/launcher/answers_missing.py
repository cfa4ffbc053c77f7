"""Whether the batch system has said enough lately to act on. Pure: takes `now`."""

from __future__ import annotations

from serai.launcher.job_book import JobBook

STALE_ANSWERS = 3
"""So many answers of the batch system may be missing before what it said last is too old to act on."""
STALE_MARGIN_S = 30.0


def too_little_known(book: JobBook, now: float, query_every_s: float) -> str:
    """Why not; empty = it has."""
    if book.unknown:
        return f"the batch system: {book.unknown}"
    heard_at_s = book.heard_at_s
    if not book.answers or heard_at_s is None:
        return "the batch system has not answered yet"
    if now - heard_at_s > STALE_ANSWERS * query_every_s + STALE_MARGIN_S:
        return f"the batch system has not answered for {now - heard_at_s:.0f} s"
    if book.braked(now):
        return "most jobs are missing from the batch system's answers at once, which is more likely its mistake"
    return ""
