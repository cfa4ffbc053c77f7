"""Who acts for a site: one launcher, by a key in KV that holds its state too (`runtime/kv_lease.py`)."""

from __future__ import annotations

from collections.abc import Callable

from serai.contracts.launcher import LauncherState
from serai.contracts.subjects import to_token
from serai.runtime.kv_lease import KvLease, StateKeys


def lease_of(
    keys: StateKeys,
    site: str,
    owner: str,
    lease_s: float,
    clock: Callable[[], float],
    state: Callable[[int], LauncherState],
    taken: Callable[[LauncherState], None],
) -> KvLease[LauncherState]:
    """`state(beat)` says what is to be kept; `taken(state)` is told what the holder before knew."""
    return KvLease(
        keys,
        to_token(site),
        owner,
        lease_s,
        clock,
        state,
        taken,
        nobody=LauncherState(),
        name="launcher",
        acts="launcher acts for the site",
    )
