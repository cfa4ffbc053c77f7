"""Who acts for a site: one launcher, by a key in KV that holds its state too (`runtime/kv_lease.py`)."""

from __future__ import annotations

from collections.abc import Callable

from serai.contracts.launcher import LauncherState
from serai.runtime.kv_lease import KvLease
from serai.runtime.kv_lease import StateKeys as StateKeys


class Lease(KvLease[LauncherState]):
    """`state(beat)` says what is to be kept; `taken(state)` is told what the holder before knew."""

    def __init__(
        self,
        keys: StateKeys,
        key: str,
        owner: str,
        lease_s: float,
        clock: Callable[[], float],
        state: Callable[[int], LauncherState],
        taken: Callable[[LauncherState], None],
    ) -> None:
        nobody, acts = LauncherState(), "launcher acts for the site"
        super().__init__(keys, key, owner, lease_s, clock, state, taken, nobody=nobody, name="launcher", acts=acts)
