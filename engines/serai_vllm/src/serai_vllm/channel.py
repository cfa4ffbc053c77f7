"""The way between the agent and the scheduler: a Unix socket on which the agent listens, whose name is in
`SERAI_PHASE_SOCKET` (a path, or `@name` in the abstract namespace). One JSON object is one packet.

Agent → engine: `{"phase": "prefill" | "decode" | "mixed"}`, at least twice a second.
Engine → agent: what the last step did, at most each `SAY_EVERY_S`.

All that waits is in a thread of its own; the scheduler writes without waiting, and drops what does not fit. Silence of
the agent for `SILENCE_S` means MIXED: an engine whose agent has gone serves as vLLM does by itself.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

VARIABLE = "SERAI_PHASE_SOCKET"
SILENCE_S = 2.0
AGAIN_S = 0.5
SAY_EVERY_S = 0.02
_PACKET_BYTES_MAX = 4096


class Channel:
    """One engine core's. `on_phase` is called in the channel's thread, with "mixed" whenever the agent is silent."""

    def __init__(self, name: str, on_phase: Callable[[str], None]) -> None:
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._on_phase = on_phase
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._said_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="serai-phase", daemon=True)
        self._thread.start()

    def say(self, step: Mapping[str, object], *, last: bool) -> None:
        """What a step did. Never waits. `last`: nothing follows soon, so this one must not be left out."""
        now = time.monotonic()
        connected = self._socket
        if connected is None or (not last and now - self._said_at_s < SAY_EVERY_S):
            return
        self._said_at_s = now
        try:
            connected.send(json.dumps(step).encode(), socket.MSG_NOSIGNAL)
        except OSError:
            pass  # Full, or gone: the totals in the next one make up for it.

    def close(self) -> None:
        """Ends the thread; the phase stays as it is."""
        self._closing.set()
        if (connected := self._socket) is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
                    connected.connect(self._address)
                    # Not a timeout: Python would make `send` wait for as long, whatever its flags say.
                    connected.setblocking(False)
                    if _uid_of_peer(connected) == os.getuid():
                        self._socket = connected
                        self._listen(connected)
            except OSError:
                pass
            finally:
                self._socket = None
                self._on_phase("mixed")
            self._closing.wait(AGAIN_S)

    def _listen(self, connected: socket.socket) -> None:
        """Until it is closed."""
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        while True:
            if not poll.poll(SILENCE_S * 1000):
                self._on_phase("mixed")
                continue
            packet = connected.recv(_PACKET_BYTES_MAX)
            if not packet:
                return
            try:
                phase = json.loads(packet).get("phase")
            except (ValueError, AttributeError):
                continue
            self._on_phase(phase)


def _uid_of_peer(connected: socket.socket) -> int:
    """Others on this host may have taken the name."""
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
