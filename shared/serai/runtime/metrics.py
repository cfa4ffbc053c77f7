"""Counters and histograms for the hot path, shown by prometheus-client like its own.

prometheus-client takes a lock and several checks for each count, about 2 µs; a request counts five times. All our
counting happens on the event loop, so a plain addition will do: a tenth of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry


class Count:
    """One counter with its labels filled in."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Counts(Collector):
    """A family of counters; `of(…)` gives one, for these label values."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], registry: CollectorRegistry | None = REGISTRY
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._children: dict[tuple[str, ...], Count] = {}
        if registry is not None:
            registry.register(self)

    def of(self, *values: str) -> Count:
        """The counter with these label values, made when it is new."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Count()
        return child

    def retain(self, wanted: Callable[[tuple[str, ...]], bool]) -> None:
        """Forgets the counters whose label values are not wanted."""
        self._children = {values: child for values, child in self._children.items() if wanted(values)}

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Times:
    """One histogram with its labels filled in."""

    __slots__ = ("_bounds", "buckets", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histograms(Collector):
    """A family of histograms with common upper bounds; `of(…)` gives one, for these label values."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry | None = REGISTRY,
    ) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"{name}: bounds must rise")
        self._name, self._help, self._labels, self._bounds = name, help, labels, tuple(bounds)
        self._children: dict[tuple[str, ...], Times] = {}
        if registry is not None:
            registry.register(self)

    def of(self, *values: str) -> Times:
        """The histogram with these label values, made when it is new."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Times(self._bounds)
        return child

    def retain(self, wanted: Callable[[tuple[str, ...]], bool]) -> None:
        """Forgets the histograms whose label values are not wanted."""
        self._children = {values: child for values, child in self._children.items() if wanted(values)}

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, self._cumulative(child.buckets), child.total)
        yield family

    def _cumulative(self, buckets: list[int]) -> list[tuple[str, float]]:
        shown: list[tuple[str, float]] = []
        so_far = 0
        for bound, count in zip([*(str(float(bound)) for bound in self._bounds), "+Inf"], buckets, strict=True):
            so_far += count
            shown.append((bound, so_far))
        return shown
