"""Ports for engines: chosen so that no two engines of a host get one, and held until the engine has it."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

PORT_RANGE = range(20000, 32000)
"""Below the range that the kernel hands out to clients."""

PORTS_VARIABLE = "SERAI_PORTS"
"""An environment variable: other ports than those, as `FIRST-LAST`. Children inherit it."""

_given: deque[int] = deque(maxlen=100)
"""What this process was told of late: it may not have been bound yet."""


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
    """A port that nobody has now, and that was not handed out here just before."""
    bound, number = _bound()
    bound.close()
    _given.append(number)
    return number


def port_range(told: str | None) -> range:
    """What `told` (`FIRST-LAST`, both included) allows; `PORT_RANGE` when it is empty. Raises `ValueError`."""
    if not told:
        return PORT_RANGE
    first, _, last = told.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) < int(last) < 65536):
        raise ValueError(f"{PORTS_VARIABLE}={told}: write FIRST-LAST, between 1024 and 65535, as in 20000-31999")
    return range(int(first), int(last) + 1)


def _bound() -> tuple[socket.socket, int]:
    ports = port_range(os.environ.get(PORTS_VARIABLE))
    for number in random.sample(ports, min(200, len(ports))):
        if number in _given and len(ports) > 2 * len(_given):
            continue
        bound = socket.socket()
        try:
            bound.bind(("127.0.0.1", number))
        except OSError:
            bound.close()
            continue
        return bound, number
    raise OSError(f"no free TCP port between {ports.start} and {ports.stop - 1} on 127.0.0.1")
