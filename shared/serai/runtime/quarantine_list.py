"""Which hosts should get no new jobs, and why: judged from the faults in session records, which are kept for a day
after a session has left. Pure: nothing is stored, so whoever has a copy of the registry comes to the same list.

A host is in quarantine when engines that served died on it twice within some hours, or when one of its GPUs is broken.
What is more likely the model's fault, or everybody's, is not held against hosts: a model whose engines die on three
hosts, and deaths on more than a quarter of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from serai.contracts.session_record import ENGINE_DIED, Fault, SessionRecord

DEATHS = 2
DEATHS_WITHIN_S = 6 * 3600.0
DEATHS_HELD_S = 6 * 3600.0
"""After the last one: an accident of the host passes, or it happens again."""
GPU_HELD_S = 24 * 3600.0
"""As long as records are kept. A GPU that was mended comes back by `serai registry quarantine clear`."""
MODEL_HOSTS = 3
"""A model whose engines died on so many hosts is to blame itself."""
SHARE_MAX = 0.25


@dataclass(frozen=True, slots=True)
class Quarantine:
    """One host's."""

    host: str
    reason: str
    until_s: float
    """Seconds since 1970."""
    gpus: tuple[str, ...] = ()
    """UUIDs of those that are broken; empty = the host as a whole."""

    @property
    def node(self) -> str:
        """As a batch system usually calls the host: without its domain."""
        return self.host.partition(".")[0]

    @property
    def until(self) -> str:
        """ISO 8601 in UTC."""
        return datetime.fromtimestamp(self.until_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class _Seen:
    host: str
    model: str
    fault: Fault
    at_s: float


def quarantined(records: Iterable[SessionRecord], site: str, now_s: float) -> list[Quarantine]:
    """The site's hosts that are in quarantine at `now_s` (seconds since 1970), by name."""
    own = [record for record in records if record.metadata.site == site and record.metadata.host]
    seen = [
        _Seen(record.metadata.host, record.metadata.model, fault, at_s)
        for record in own
        for fault in record.metadata.faults
        if (at_s := _at_s(fault.at, now_s)) is not None
    ]
    by_gpu = _by_gpu([one for one in seen if one.fault.what != ENGINE_DIED], now_s)
    hosts = {record.metadata.host for record in own}
    by_death = _by_death([one for one in seen if one.fault.what == ENGINE_DIED], len(hosts), now_s)
    return [found for _, found in sorted((by_death | by_gpu).items())]


def _by_gpu(seen: list[_Seen], now_s: float) -> dict[str, Quarantine]:
    found: dict[str, list[_Seen]] = {}
    for one in seen:
        if now_s - one.at_s < GPU_HELD_S:
            found.setdefault(one.host, []).append(one)
    return {host: _of_gpus(host, faults) for host, faults in found.items()}


def _of_gpus(host: str, faults: list[_Seen]) -> Quarantine:
    words = dict.fromkeys(f"{one.fault.gpu or 'a GPU'}: {one.fault.what}" for one in faults)
    gpus = dict.fromkeys(one.fault.gpu for one in faults if one.fault.gpu)
    return Quarantine(host, "; ".join(words), max(one.at_s for one in faults) + GPU_HELD_S, tuple(gpus))


def _by_death(seen: list[_Seen], hosts: int, now_s: float) -> dict[str, Quarantine]:
    recent = [one for one in seen if now_s - one.at_s < DEATHS_WITHIN_S + DEATHS_HELD_S]
    hosts_of_model: dict[str, set[str]] = {}
    for one in recent:
        hosts_of_model.setdefault(one.model, set()).add(one.host)
    times: dict[str, list[float]] = {}
    for one in recent:
        if len(hosts_of_model[one.model]) < MODEL_HOSTS:
            times.setdefault(one.host, []).append(one.at_s)
    found = {host: held for host, died in times.items() if (held := _of_deaths(host, sorted(died), now_s))}
    return found if len(found) <= max(1, hosts * SHARE_MAX) else {}


def _of_deaths(host: str, died: list[float], now_s: float) -> Quarantine | None:
    """By the last DEATHS that lie close enough together."""
    for end in range(len(died) - 1, DEATHS - 2, -1):
        first_s, last_s = died[end - DEATHS + 1], died[end]
        if last_s - first_s <= DEATHS_WITHIN_S:
            until_s = last_s + DEATHS_HELD_S
            reason = f"{len(died)} engines died here while they served"
            return Quarantine(host, reason, until_s) if now_s < until_s else None
    return None


def _at_s(text: str, now_s: float) -> float | None:
    """None = no time. A clock that is ahead of ours says now."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return min(now_s, at.timestamp()) if at.tzinfo is not None else None
