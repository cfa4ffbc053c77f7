"""When a copy asks its registry for what it has missed: from beats, digests and the clock. Pure.

Copies and registry hear the same messages, so their digests are equal but for a few milliseconds. A difference that
lasts is something missed. After a loss (a new epoch, a missed beat, a reconnect) nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serai.contracts.registry import RegistryBeat

DIFFERS_FOR_S = 0.5
"""A digest that differs for no longer is a message still on its way to one of the two."""
MISSED_AFTER_INTERVALS = 1.75
"""A beat that comes later than this has had one before it that did not come."""
SILENT_AFTER_INTERVALS = 3.0
ASK_AGAIN_AFTER_S = 10.0
"""A difference that asking did not settle (records the registry does not have) is asked about again so late, unless
either side changes."""

RootOf = Callable[[str], int]
"""Site → the digest root of this copy's records of it."""


class Comparison:
    """One copy beside one registry."""

    def __init__(self) -> None:
        self.beat: RegistryBeat | None = None
        self.heard_at_s: float | None = None
        self._differs_since: dict[str, float] = {}
        self._asked: dict[str, tuple[int, int, float]] = {}
        """Per site: the registry's root and ours when last asked, and when."""
        self._at_once = False

    def hear(self, beat: RegistryBeat, own: RootOf, sites: Iterable[str], now: float) -> None:
        """Takes a beat of the registry; `sites` are those this copy has records of."""
        known = self.beat
        if known is not None and beat.epoch == known.epoch and beat.sequence < known.sequence:
            return
        if known is None or beat.epoch != known.epoch or self.silent_s(now) > MISSED_AFTER_INTERVALS * beat.interval_s:
            self.distrust()
        self.beat, self.heard_at_s = beat, now
        for site in sorted({*beat.roots, *sites}):
            if own(site) == self._root(site):
                self._differs_since.pop(site, None)
            else:
                self._differs_since.setdefault(site, now)

    def distrust(self) -> None:
        """Something was lost: whatever differs is asked about now, whatever was asked before."""
        self._at_once = True
        self._asked.clear()

    @property
    def distrusted(self) -> bool:
        """Whether whatever differs should be asked about without waiting."""
        return self._at_once

    def silent_s(self, now: float) -> float:
        """Seconds since the registry's last beat; infinite when none came yet."""
        return float("inf") if self.heard_at_s is None else now - self.heard_at_s

    def silent(self, now: float) -> bool:
        """Whether beats are missing for so long that the registry has to be asked without one."""
        interval_s = self.beat.interval_s if self.beat is not None else 0.0
        return self.silent_s(now) > SILENT_AFTER_INTERVALS * interval_s

    def due(self, own: RootOf, now: float) -> list[str]:
        """Sites to ask about now."""
        for site in [site for site in self._differs_since if own(site) == self._root(site)]:
            del self._differs_since[site]
        at_once, self._at_once = self._at_once, False
        return [
            site
            for site, since_s in sorted(self._differs_since.items())
            if (at_once or now - since_s > DIFFERS_FOR_S) and not self._settled(site, own(site), now)
        ]

    def asked(self, site: str, own: RootOf, now: float) -> None:
        """`site` has been asked about, with or without success, and what came of it is in `own`."""
        self._asked[site] = (self._root(site), own(site), now)

    def _settled(self, site: str, own_root: int, now: float) -> bool:
        asked = self._asked.get(site)
        return asked is not None and asked[:2] == (self._root(site), own_root) and now - asked[2] < ASK_AGAIN_AFTER_S

    def _root(self, site: str) -> int:
        return self.beat.roots.get(site, 0) if self.beat is not None else 0
