"""How far each decoding stream is ahead of its TPOT target, without touching each at each step. Pure.

A stream's slack is `L · S − (now − t0)`: tokens said so far times its target, minus the time that it has had. It falls
with the clock, by the same for all, and rises by S with a token. So what is kept of a stream is the time at which its
slack will be zero, less S for each step that all streams of its target have made together: a key that never changes
while steps are in lock-step. Mean, least and quantiles need no pass over all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import merge
from itertools import islice

from serai.contracts.admission import Spread

_TARGETS_MAX = 16
"""Different targets at once; a further one is kept under the next stricter of these."""

Place = tuple[float, float, int]
"""Where a stream stands: its target, its key, its number."""


class _Target:
    """All streams of one TPOT target."""

    __slots__ = ("credit_s", "keys", "slo_s", "total_s")

    def __init__(self, slo_s: float) -> None:
        self.slo_s = slo_s
        self.credit_s = 0.0
        """S for each step so far."""
        self.keys: list[tuple[float, int]] = []
        self.total_s = 0.0
        """Sum of the keys."""


class SlackBook:
    """Streams by number. `zero_s` is when a stream's slack is zero if it says nothing more."""

    def __init__(self) -> None:
        self._targets: dict[float, _Target] = {}
        self.count = 0

    def add(self, number: int, slo_s: float, zero_s: float) -> Place:
        """A stream decodes. Give the answer back to `remove`."""
        target = self._target(slo_s)
        key = zero_s - target.credit_s
        insort(target.keys, (key, number))
        target.total_s += key
        self.count += 1
        return target.slo_s, key, number

    def remove(self, place: Place) -> float:
        """It does not any more. When its slack is zero."""
        slo_s, key, number = place
        target = self._targets[slo_s]
        del target.keys[bisect_left(target.keys, (key, number))]
        self.count -= 1
        if target.keys:
            target.total_s -= key
        else:
            target.total_s = 0.0  # rounding errors do not add up for ever
        return key + target.credit_s

    def zero_s(self, place: Place) -> float:
        """When that stream's slack is zero."""
        return place[1] + self._targets[place[0]].credit_s

    def strictest_s(self, otherwise_s: float) -> float:
        """The strictest target of any stream; `otherwise_s` when there is none."""
        return min([one.slo_s for one in self._targets.values() if one.keys], default=otherwise_s)

    def step(self) -> None:
        """Every stream has said one more token."""
        for slo_s, target in self._targets.items():
            target.credit_s += slo_s

    def low_zero_s(self, places: int) -> float | None:
        """When the slack is zero of the stream before which `places` others have less. None: there is no such."""
        if places >= self.count:
            return None
        if len(self._targets) == 1:
            target = next(iter(self._targets.values()))
            return target.keys[places][0] + target.credit_s
        ordered = merge(*([key + one.credit_s for key, _ in one.keys[: places + 1]] for one in self._targets.values()))
        return next(islice(ordered, places, None))

    def least_zero_s(self, after_s: float) -> float | None:
        """Of the streams whose slack is zero later than `after_s`, when the first one's is."""
        least: float | None = None
        for target in self._targets.values():
            place = bisect_left(target.keys, (after_s - target.credit_s, -1))
            if place < len(target.keys):
                zero_s = target.keys[place][0] + target.credit_s
                least = zero_s if least is None or zero_s < least else least
        return least

    def behind(self, before_s: float) -> int:
        """How many streams have no slack left at `before_s`."""
        return sum([bisect_left(target.keys, (before_s - target.credit_s, -1)) for target in self._targets.values()])

    def misses(self, at_s: float, recovery_s: float) -> float:
        """How many streams will miss their target, expected, if nobody says anything until `at_s`: one that is behind
        by d then is behind still when it ends with probability d / `recovery_s`, at most 1."""
        found = 0.0
        for target in self._targets.values():
            until_s = at_s - target.credit_s
            lost = bisect_left(target.keys, (until_s - recovery_s, -1))
            behind = target.keys[lost : bisect_left(target.keys, (until_s, -1))]
            found += lost + sum([until_s - key for key, _ in behind]) / recovery_s
        return found

    def spread(self, now_s: float, low_share: float) -> Spread:
        """A few numbers instead of a list."""
        if not self.count:
            return Spread(0)
        totals = [one for one in self._targets.values() if one.keys]
        mean_s = sum([one.total_s + one.credit_s * len(one.keys) for one in totals]) / self.count
        least_s = min([one.keys[0][0] + one.credit_s for one in totals])
        most_s = max([one.keys[-1][0] + one.credit_s for one in totals])
        low_s = self.low_zero_s(int(low_share * self.count))
        assert low_s is not None
        return Spread(self.count, mean_s - now_s, least_s - now_s, low_s - now_s, most_s - now_s)

    def absorb(self, other: SlackBook) -> dict[int, Place]:
        """Take all streams of `other`, which is empty then. Where each stands now, by number."""
        found = {}
        for target in other._targets.values():
            for key, number in target.keys:
                found[number] = self.add(number, target.slo_s, key + target.credit_s)
            target.keys.clear()
            target.total_s = 0.0
        other.count = 0
        return found

    def _target(self, slo_s: float) -> _Target:
        target = self._targets.get(slo_s)
        if target is None:
            for empty in [slo for slo, one in self._targets.items() if not one.keys]:
                del self._targets[empty]
            if len(self._targets) >= _TARGETS_MAX:
                stricter = max([slo for slo in self._targets if slo <= slo_s], default=min(self._targets))
                return self._targets[stricter]
            target = self._targets[slo_s] = _Target(slo_s)
        return target
