"""How a service fills its copy of the registry at its start, and repairs it later: pages of session records."""

from __future__ import annotations

from dataclasses import dataclass

from serai.contracts.session_record import SessionRecord


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Asks for the page of records whose session ids come after `after`."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Records in the order of their session ids. `more` is true when another page follows the last of them."""

    records: list[SessionRecord]
    more: bool = False
