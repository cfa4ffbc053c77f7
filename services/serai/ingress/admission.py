"""Whether a call may go to a session now: its caller's limits, then its turn in the queue of its model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serai.ingress.call import Call


class Admission:
    """One per ingress."""

    @asynccontextmanager
    async def admitted(self, call: Call) -> AsyncIterator[None]:
        """The call holds what it reserved, and its place, during the block. Raises ApiError: 429 or 503."""
        yield
