"""Why nothing is submitted for a slot now, and until when: failed births back off, and harm nobody else. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from serai.launcher.jobs import RefusalKind, Refused

FAILED = "failed"
"""A job came of it and ended before it was of use."""
BACK_OFF_S, BACK_OFF_MAX_S = 60.0, 1800.0
QUOTA_RETRY_S = 900.0
"""Jobs end after hours; the batch system need not be asked each minute whether there is room now."""
ALERT_FROM_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Trouble:
    """Of one slot."""

    kind: str
    """`failed`, or a `RefusalKind`."""
    text: str
    count: int
    """In a row."""
    until_s: float | None
    """None: trying again changes nothing, until a person has changed something."""
    specification: str = ""

    @property
    def alert(self) -> bool:
        """A person should look at it."""
        return self.kind in (RefusalKind.INVALID, RefusalKind.QUOTA) or self.count >= ALERT_FROM_FAILURES

    def wait_s(self, now: float) -> float | None:
        return None if self.until_s is None else max(0.0, self.until_s - now)

    def stops(self, now: float) -> bool:
        return self.until_s is None or now < self.until_s


def after_failure(before: Trouble | None, kind: str, text: str, now: float) -> Trouble:
    """One more of the same doubles the time until the next try."""
    count = before.count + 1 if before and before.kind == kind else 1
    return Trouble(kind, text, count, now + min(BACK_OFF_MAX_S, BACK_OFF_S * 2 ** min(count - 1, 10)))


def after_refusal(before: Trouble | None, refused: Refused, now: float) -> Trouble:
    text = f"{refused.text}; {refused.remedy}" if refused.remedy else refused.text
    trouble = after_failure(before, str(refused.kind), text, now)
    match refused.kind:
        case RefusalKind.INVALID:
            return Trouble(trouble.kind, text, trouble.count, None)
        case RefusalKind.QUOTA:
            return Trouble(trouble.kind, text, trouble.count, now + QUOTA_RETRY_S)
        case RefusalKind.TRANSIENT:
            return trouble
