"""Which sessions have time for a request: none is sent where its allocation is predicted to end before its answer does
(H07). Pure.

What is predicted is the longest it may take: the tokens it asks for at the pace that the session has shown. Where
nothing can be predicted, because the request sets no limit or no session has shown a pace, it is taken anywhere: a
session that ends hands over what it cannot finish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from serai.contracts.session_record import SessionRecord
from serai.contracts.status import SessionStatus

NEAR_S = 1800.0
"""An end that is further away than this is no concern of any request: none may take so long."""
MARGIN_S = 20.0
"""Of an allocation's last seconds, so many are for stopping the engine and leaving."""


def ends(records: Sequence[SessionRecord], status: Callable[[str], SessionStatus | None]) -> dict[str, float]:
    """How long those of `records` whose end is near may still have requests running, in seconds from now, by session.
    Mostly nobody's is."""
    found = {}
    for record in records:
        said = status(record.session)
        if said is not None and said.allocation_remaining_s is not None and said.allocation_remaining_s < NEAR_S:
            found[record.session] = max(0.0, said.allocation_remaining_s - MARGIN_S)
    return found


def in_time(
    records: Sequence[SessionRecord],
    left_s: Mapping[str, float],
    output_tokens_max: int,
    tokens_per_s: Callable[[str], float],
) -> Sequence[SessionRecord]:
    """Those of `records` that will have finished such a request before their time is up, as far as can be foreseen.
    `tokens_per_s` of a session; 0 = not known, and then the slowest of the others' is taken."""
    if not left_s or not output_tokens_max:
        return records
    known = [speed for record in records if (speed := tokens_per_s(record.session)) > 0]
    if not known:
        return records
    slowest = min(known)

    def has_time(record: SessionRecord) -> bool:
        session_left_s = left_s.get(record.session)
        return session_left_s is None or output_tokens_max <= (tokens_per_s(record.session) or slowest) * session_left_s

    return [record for record in records if has_time(record)]
