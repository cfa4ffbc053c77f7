"""Ports for engines: chosen so that no two engines of a host get one, and held until the engine has it."""

from __future__ import annotations

import random
import socket

PORT_RANGE = range(20000, 32000)
"""Below the range that the kernel hands out to clients."""


class HeldPort:
    """A port of loopback that nobody else can get.

    It is bound before either option is set, which succeeds only when nobody has the port; and with both set afterwards,
    an engine that asks for one of them, as HTTP servers do, may bind and listen beside us, since we never listen. So
    another agent cannot be given the port between our choosing it and the engine's taking it.
    """

    def __init__(self) -> None:
        self._socket, self.number = _bound()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)

    def release(self) -> None:
        """The engine has it, or is about to bind it without sharing."""
        self._socket.close()


def free_port() -> int:
    """A port that nobody has now."""
    bound, number = _bound()
    bound.close()
    return number


def _bound() -> tuple[socket.socket, int]:
    for number in random.sample(PORT_RANGE, 200):
        bound = socket.socket()
        try:
            bound.bind(("127.0.0.1", number))
        except OSError:
            bound.close()
            continue
        return bound, number
    raise OSError(f"no free TCP port between {PORT_RANGE.start} and {PORT_RANGE.stop} on 127.0.0.1")
