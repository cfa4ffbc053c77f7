"""What a set of engines is worth: whom it serves in time, and how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from serai.placer.options import Option
from serai.placer.picture import ModelFacts


class Worth:
    """Of engines of these models."""

    def __init__(self, facts: Mapping[str, ModelFacts]) -> None:
        self._facts = facts

    def shares(self, options: Sequence[Option]) -> dict[str, float]:
        """Of each model's planned demand what is served; 1 where nothing is asked."""
        there: dict[str, float] = {}
        for option in options:
            there[option.model] = there.get(option.model, 0.0) + option.requests_s
        return {name: _share(facts, there.get(name, 0.0)) for name, facts in self._facts.items()}

    def worst(self, options: Sequence[Option], among: AbstractSet[str]) -> float:
        """The smallest of some models' shares."""
        return min((share for model, share in self.shares(options).items() if model in among), default=1.0)

    def total(self, options: Sequence[Option]) -> float:
        """Requests a second that are served, weighted by priority."""
        shares = self.shares(options)
        return sum(
            facts.demand.priority * facts.demand.planned_requests_s * shares[name]
            for name, facts in self._facts.items()
        )


def _share(facts: ModelFacts, capacity: float) -> float:
    wanted = facts.demand.planned_requests_s
    return 1.0 if wanted <= 0 else min(1.0, (capacity + facts.others_requests_s) / wanted)
