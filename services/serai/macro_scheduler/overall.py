"""Which macro-instance gets a request, when a model has several (PaDG's overall scheduler, EcoServe §3). Pure.

The paper says "based on their capabilities" and no more. Here: two are drawn, weighted by what each can still admit,
and the one that can admit more is asked first; the others follow in order of that number, so that a request finds a
place if there is any. Two draws, not the best of all: many requests that come between two reports would all follow the
best (Mitzenmacher 2000). Draws come from the request's id, so that a decision can be made again and explained.

A request that has a place where its prefix is warm (its session, its project) goes there while that place has at least
half as much room as the best: affinity saves a prefill, and loses a target when it is followed for too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

AFFINITY_SHARE_MIN = 0.5
"""Of the best one's free capacity."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """One macro-instance."""

    serial: int
    free_s: float
    """Prefill time that it could admit now: Σ over its instances of min(S_TTFT, slack that it could spend)."""
    instances: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask, first to last, and why in that order."""

    serials: tuple[int, ...]
    why: str


def free_s(slacks_s: Sequence[float], slo_ttft_s: float) -> float:
    """Σ min(S_TTFT, slack) over instances; an instance that is behind its targets has nothing to give."""
    return sum([min(slo_ttft_s, max(0.0, slack_s)) for slack_s in slacks_s])


def order(capacities: Sequence[Capacity], request_id: str, affinity: str = "") -> Choice:
    """All of `capacities` that have instances, in the order in which they are to be asked. `affinity` names what makes
    one place warmer than another; empty: nothing does."""
    usable = [one for one in capacities if one.instances > 0]
    if len(usable) < 2:
        return Choice(tuple([one.serial for one in usable]), "there is no other" if usable else "there is none")
    first, why = _sticky(usable, affinity) or _better_of_two(usable, request_id)
    rest = sorted([one for one in usable if one is not first], key=lambda one: (-one.free_s, one.serial))
    return Choice((first.serial, *[one.serial for one in rest]), why)


def _sticky(usable: Sequence[Capacity], affinity: str) -> tuple[Capacity, str] | None:
    """Rendezvous hashing: when macro-instances come and go, only what was theirs moves."""
    if not affinity:
        return None
    home = max(usable, key=lambda one: _share(f"{affinity}/{one.serial}"))
    best_s = max([one.free_s for one in usable])
    if home.free_s <= 0 or home.free_s < AFFINITY_SHARE_MIN * best_s:
        return None
    return (
        home,
        f"macro-instance {home.serial} is home to {affinity} and has {home.free_s:.2f} s of {best_s:.2f} s free",
    )


def _better_of_two(usable: Sequence[Capacity], request_id: str) -> tuple[Capacity, str]:
    one = _drawn(usable, _share(f"{request_id}/1"))
    other = _drawn([each for each in usable if each is not one], _share(f"{request_id}/2"))
    better = one if one.free_s >= other.free_s else other
    return better, (
        f"of macro-instances {one.serial} ({one.free_s:.2f} s free) and {other.serial} ({other.free_s:.2f} s), "
        f"{better.serial} has no less room"
    )


def _drawn(usable: Sequence[Capacity], share: float) -> Capacity:
    """By weight of free capacity; of instances when nobody has any."""
    weights = [max(0.0, one.free_s) for one in usable]
    if sum(weights) <= 0:
        weights = [float(one.instances) for one in usable]
    left = share * sum(weights)
    for one, weight in zip(usable, weights, strict=True):
        left -= weight
        if left < 0:
            return one
    return usable[-1]


def _share(text: str) -> float:
    """A number in [0, 1) that is the same for the same text everywhere."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest()) / 2**48
