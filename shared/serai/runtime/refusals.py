"""What is refused, why, and how often: counted by reason, logged at most once a minute per reason, harmless.

A record that is malformed, forged, too large or on another's subject must change nothing, and must not fill the disk
with log lines either: whoever sends one may send thousands.
"""

from __future__ import annotations

import time

import structlog

from serai.contracts.codec import MalformedMessage, decode
from serai.contracts.session_record import RECORD_BYTES_MAX, BadRecord, SessionRecord, checked
from serai.contracts.subjects import SESSION
from serai.runtime.bus import Message
from serai.runtime.metrics import Counts

log = structlog.get_logger()

LOG_EVERY_S = 60.0
"""Per reason; what came between is told as a count."""
TEXT_CHARACTERS_MAX = 300

TOO_LARGE = "too-large"
MALFORMED = "malformed"
BAD_FIELD = "bad-field"
FOREIGN_SUBJECT = "foreign-subject"
FORGED_SITE = "forged-site"

REFUSED = Counts("serai_refused_records", "Records and messages refused, by reason", ["reason"])


class Refusals:
    """One per service: its own sense of when it last said so."""

    def __init__(self) -> None:
        self._logged_at_s: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}

    def note(self, reason: str, text: str, subject: str = "") -> None:
        """Counts one refusal for `reason`, which is one of a few words; `text` says what was wrong."""
        REFUSED.of(reason).add()
        now = time.monotonic()
        logged_at_s = self._logged_at_s.get(reason)
        if logged_at_s is not None and now - logged_at_s < LOG_EVERY_S:
            self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
            return
        self._logged_at_s[reason] = now
        log.warning(
            "record.refused",
            reason=reason,
            error=text[:TEXT_CHARACTERS_MAX],
            subject=subject[:TEXT_CHARACTERS_MAX],
            more_since_last_time=self._unlogged.pop(reason, 0),
        )

    def record_in(self, message: Message) -> SessionRecord | None:
        """The session record that `message` carries on its session's own subject; None when it was refused."""
        record = self.record_of(message.data, message.subject)
        if record is not None and message.subject != SESSION.of(record.session):
            self.note(
                FOREIGN_SUBJECT, f"a record of {record.session} on the subject of another session", message.subject
            )
            return None
        return record

    def record_of(self, data: bytes, source: str) -> SessionRecord | None:
        """The session record in `data`, which came from `source` (a subject, a store's key); None when refused."""
        if len(data) > RECORD_BYTES_MAX:
            self.note(TOO_LARGE, f"{len(data)} bytes; at most {RECORD_BYTES_MAX}", source)
            return None
        try:
            return self.checked(decode(SessionRecord, data), source)
        except MalformedMessage as error:
            self.note(MALFORMED, str(error), source)
            return None

    def checked(self, record: SessionRecord, source: str) -> SessionRecord | None:
        """`record` itself, or None when one of its fields is out of bounds or its site is not its own."""
        try:
            return checked(record)
        except BadRecord as error:
            forged = str(error).startswith("metadata.site")
            self.note(FORGED_SITE if forged else BAD_FIELD, str(error), source)
            return None
