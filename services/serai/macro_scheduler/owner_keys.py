"""Whose an instance is, in KV: claims by compare-and-set."""

from __future__ import annotations

import structlog

from serai.contracts.admission import InstanceOwner
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.macro_scheduler import metrics
from serai.macro_scheduler.group import NotOwned, Owned
from serai.macro_scheduler.ownership import claim
from serai.runtime.bus import BusError
from serai.runtime.kv_lease import StateKeys

log = structlog.get_logger()


class OwnerKeys:
    """The bucket of owners."""

    def __init__(self, keys: StateKeys) -> None:
        self._keys = keys

    async def claim(self, session: str, owner: str, leader_epoch: int, heard: int) -> Owned | NotOwned:
        """One try. `heard`: the highest epoch that the instance has told. Raises `ownership.Deposed`."""
        try:
            found = await self._keys.get(session)
            known, revision = (None, 0) if found is None else (_read(found[0]), found[1])
            wanted = claim(known, session, owner, leader_epoch, heard)
            if await self._keys.update(session, encode(wanted), revision):
                metrics.CLAIMS.of("won").add()
                return Owned(session, wanted.epoch, owner)
        except BusError as error:
            metrics.CLAIMS.of("no answer").add()
            log.warning("take.not_claimed", session=session, error=str(error), effect="tried again")
            return NotOwned(session, 0)
        metrics.CLAIMS.of("lost").add()
        return NotOwned(session, 0 if known is None else known.epoch)


def _read(value: bytes) -> InstanceOwner | None:
    try:
        return decode(InstanceOwner, value)
    except MalformedMessage as error:
        log.error("take.owner_unreadable", error=str(error), effect="taken for none; the instance knows its epoch")
        return None
