"""Who listens on a port of this host: an engine must be known for ours before anything is said to it.

Two engines that both ask for SO_REUSEPORT can listen on one port, and the kernel deals connections out between them.
So it is not enough that ours listens: nobody else may.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from serai.worker_agent.engine import process_table

_LISTEN = " 0A "


class Listener(StrEnum):
    """Who answers at the engine's port."""

    NOBODY = "nobody"
    OURS = "ours"
    STRANGER = "stranger"
    """A process that we see, and that is not the engine's."""
    UNSEEN = "unseen"
    """A process that we may not look at: an engine in a container, or another user's."""


def listening_on(port: int, tables: Sequence[str] | None = None) -> dict[int, int]:
    """Sockets of this network namespace that take connections to `port` on 127.0.0.1, by inode, with their users.
    `tables`: the text of /proc/net/tcp and tcp6."""
    return {
        inode: uid for address, at, uid, inode in _listening(tables) if at == port and _reached_by_loopback(address)
    }


def ports_of(inodes: Collection[int], tables: Sequence[str] | None = None) -> list[int]:
    """Ports on which these sockets listen."""
    return sorted({at for _, at, _, inode in _listening(tables) if inode in inodes})


def whose(listening: Mapping[int, int], ours: Collection[int], others: Collection[int], uid: int) -> Listener:
    """From the sockets that listen on the port and their users, those of the engine's processes, those of all others
    that we see, and our own user. What we do not see is no engine of ours unless it is our user's or root's."""
    if not listening:
        return Listener.NOBODY
    foreign = [owner for inode, owner in listening.items() if inode not in ours]
    if any(inode in others for inode in listening) or any(owner not in (uid, 0) for owner in foreign):
        return Listener.STRANGER
    return Listener.UNSEEN if foreign else Listener.OURS


def listener_on(port: int, engine_pids: Collection[int]) -> Listener:
    """Who listens on `port` now; `engine_pids` are the engine's processes. Takes milliseconds."""
    listening = listening_on(port)
    ours = inodes_of(engine_pids)
    if not listening.keys() - ours:
        return whose(listening, ours, (), os.getuid())
    others = inodes_of(pid for pid in process_table.pids() if pid not in engine_pids)
    return whose(listening, ours, others - ours, os.getuid())


def inodes_of(pids: Iterable[int]) -> set[int]:
    """Of all sockets that these processes hold, as far as we may look."""
    found: set[int] = set()
    for pid in pids:
        found |= process_table.socket_inodes(pid) or set()
    return found


def _listening(tables: Sequence[str] | None) -> Iterator[tuple[str, int, int, int]]:
    """Address, port, user and inode of each listening socket."""
    for table in _tables() if tables is None else tables:
        for line in table.splitlines()[1:]:
            if _LISTEN not in line:
                continue  # Most are connections, of which a host may have thousands.
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN.strip():
                address, _, port = fields[1].rpartition(":")
                yield address, int(port, 16), int(fields[7]), int(fields[9])


def _reached_by_loopback(address: str) -> bool:
    """`address` as /proc writes it: words of four bytes in the host's order."""
    packed = b"".join(int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8))
    if len(packed) == 4:
        return packed[0] in (0, 127)
    text = socket.inet_ntop(socket.AF_INET6, packed)
    return text == "::" or text.startswith("::ffff:127.") or text == "::ffff:0.0.0.0"


def _tables() -> list[str]:
    tables = []
    for name in ("tcp", "tcp6"):
        try:
            tables.append(Path("/proc/self/net", name).read_text())
        except OSError:
            continue
    return tables
