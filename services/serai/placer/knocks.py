"""Who has asked for a model that nothing serves. Pure: takes `now_s`.

A knock counts as demand, if only a small one: so the model gets an engine where there is room, or where others can
spare some, and waits where everybody else would have to do without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from serai.contracts.placement import Knock
from serai.placer.observed import NOTHING_SEEN, Observed

HOLDS_S = 120.0
"""Who waits knocks every two seconds; who was sent away comes back when he was told to, and knocks again."""
SPAN_S = 60.0
"""Those who wait count as having come within so long."""
WAITING_MAX = 10_000


class Knocks:
    """Of one site."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[int, float]] = {}

    def hear(self, knock: Knock, models: Collection[str], now_s: float) -> bool:
        """Whether it is news: the first for a while."""
        if knock.model not in models:
            return False
        news = knock.model not in self.waiting(now_s)
        self._heard[knock.model] = (min(max(1, knock.waiting), WAITING_MAX), now_s + HOLDS_S)
        return news

    def waiting(self, now_s: float) -> dict[str, int]:
        """Requests by model, at the ingress that knocked last."""
        self._heard = {model: kept for model, kept in self._heard.items() if kept[1] > now_s}
        return {model: count for model, (count, _) in self._heard.items()}

    def answered(self, models: Collection[str]) -> None:
        """These are served now: who asks is in their usage."""
        for model in models:
            self._heard.pop(model, None)


def with_knocks(usage: Mapping[str, Observed], waiting: Mapping[str, int]) -> dict[str, Observed]:
    """`usage`, and what those ask for who have not been served and so are not in it."""
    found = dict(usage)
    for model, count in waiting.items():
        seen, rate = found.get(model, NOTHING_SEEN), count / SPAN_S
        found[model] = replace(
            seen, requests_s=max(seen.requests_s, rate), high=max(seen.high, rate), low=seen.low, unused_s=0.0
        )
    return found
