"""What a placer keeps beyond its own life, and by whom it is kept: one key in KV, which is the lease, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from serai.contracts.placement import ActionKind, KeptPlan, PlanAction, PlanRecord, PlanState
from serai.contracts.subjects import to_token
from serai.runtime.kv_lease import KvLease, StateKeys

HOUR_S = 3600.0
WAIT_DOUBLED_MAX = 6
"""A wait after a failure is doubled so often at most."""


@dataclass(slots=True)
class Memory:
    """What is to be remembered; times by this process's own clock."""

    generation: int = 0
    plan: KeptPlan | None = None
    warm: dict[str, list[str]] = field(default_factory=dict)
    _directions: dict[str, ActionKind] = field(default_factory=dict)
    _turned_at_s: dict[str, list[float]] = field(default_factory=dict)
    _moved_at_s: list[float] = field(default_factory=list)
    _failed_until_s: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)

    def moved(self, count: int, now: float) -> None:
        """Engines were started or stopped."""
        self._moved_at_s += [now] * count

    def moves_last_hour(self, now: float) -> int:
        self._moved_at_s = [at_s for at_s in self._moved_at_s if now - at_s < HOUR_S]
        return len(self._moved_at_s)

    def begins(self, actions: Iterable[PlanAction], now: float) -> None:
        """A plan is about to be carried out: whose engines turn from more to fewer, or back."""
        kinds: dict[str, set[ActionKind]] = {}
        for action in actions:
            if action.kind is not ActionKind.KEEP:
                kinds.setdefault(action.assignment.model, set()).add(action.kind)
        for model, found in kinds.items():
            if len(found) > 1:
                continue  # It only moves.
            (direction,) = found
            if self._directions.get(model, direction) is not direction:
                self._turned_at_s.setdefault(model, []).append(now)
            self._directions[model] = direction

    def turns(self, now: float) -> dict[str, int]:
        """Of each model, within the hour."""
        self._turned_at_s = {
            model: recent
            for model, turned in self._turned_at_s.items()
            if (recent := [at_s for at_s in turned if now - at_s < HOUR_S])
        }
        return {model: len(turned) for model, turned in self._turned_at_s.items()}

    def failed(self, key: str, wait_s: float, now: float) -> float:
        """Notes a failure; how long it is not tried there."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        waits_s: float = wait_s * 2 ** min(count - 1, WAIT_DOUBLED_MAX)
        self._failed_until_s[key] = now + waits_s
        return waits_s

    def worked(self, key: str) -> None:
        """It serves there: earlier failures are forgotten."""
        self._failures.pop(key, None)
        self._failed_until_s.pop(key, None)

    def failed_for_s(self, now: float) -> dict[str, float]:
        """What is not tried now, and for how long still."""
        return {key: until_s - now for key, until_s in self._failed_until_s.items() if until_s > now}

    def kept(self, holder: str, beat: int, now: float) -> PlanRecord:
        """As it lies in KV."""
        self.moves_last_hour(now)
        return PlanRecord(
            holder,
            beat,
            self.generation,
            self.plan,
            [round(now - at_s, 1) for at_s in self._moved_at_s],
            self.warm,
            {key: round(left_s, 1) for key, left_s in self.failed_for_s(now).items()},
        )

    def restore(self, record: PlanRecord, now: float) -> None:
        """From what the one before has kept. A plan that was under way is not gone on with: another is made, from how
        things are now."""
        self.generation = max(self.generation, record.generation)
        self.warm = {model: list(pools) for model, pools in record.warm.items()}
        self._moved_at_s = [now - ago_s for ago_s in record.moved_ago_s]
        self._failed_until_s = {key: now + left_s for key, left_s in record.failed.items()}
        self.plan = record.plan
        if self.plan is not None and self.plan.state is PlanState.APPLYING:
            self.plan = replace(self.plan, state=PlanState.REPLACED)


def lease_of(
    keys: StateKeys,
    site: str,
    owner: str,
    lease_s: float,
    clock: Callable[[], float],
    memory: Memory,
    taken: Callable[[PlanRecord], None],
) -> KvLease[PlanRecord]:
    """The lease on a site's placement."""
    return KvLease(
        keys,
        to_token(site),
        owner,
        lease_s,
        clock,
        lambda beat: memory.kept(owner, beat, clock()),
        taken,
        nobody=PlanRecord(),
        name="placer",
        acts="placer acts for the site",
    )
