"""Listening sockets, opened before there is an event loop: those that a parent keeps while its workers come and go."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class CannotListen(Exception):
    """The text says where and why."""

    host: str
    port: int
    reason: str
    flag: str

    def __str__(self) -> str:
        where = f"cannot listen on {self.host}:{self.port} ({self.reason})"
        if self.reason == os.strerror(errno.EADDRINUSE):
            return f"{where}; is another server there? choose another {self.flag}"
        if self.reason == os.strerror(errno.EACCES):
            return f"{where}; choose another {self.flag}"
        return f"{where}; is {self.flag.replace('port', 'host')} right?"


def plain_reason(error: OSError) -> str:
    """Why, in one phrase; event loops wrap it in words of their own."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error.strerror or error)


def listen(host: str, port: int, copies: int, *, flag: str) -> list[list[socket.socket]]:
    """`copies` sets of sockets, each on all addresses of `host`; the kernel spreads connections over the sets
    (SO_REUSEPORT). Raises CannotListen, also when another server of this user has such sockets there."""
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in addresses:
            _bound(family, address, shared=False).close()
        with ExitStack() as undo:
            sets = [
                [undo.enter_context(_bound(kind, there, shared=True)) for kind, *_, there in addresses]
                for _ in range(copies)
            ]
            undo.pop_all()
    except OSError as error:
        raise CannotListen(host, port, plain_reason(error), flag) from error
    return sets


def _bound(family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
