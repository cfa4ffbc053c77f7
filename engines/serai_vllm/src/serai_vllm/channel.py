"""The way between the agent and the scheduler: a Unix socket on which the agent listens, whose name is in
`SERAI_PHASE_SOCKET` (a path, or `@name` in the abstract namespace). One JSON object is one packet.

Agent → engine: `{"phase": "prefill" | "decode" | "mixed", "prompt_tokens_max": null | number}`, at least each 0.5 s.
Engine → agent: what each step did.

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
from collections.abc import Callable, Mapping

VARIABLE = "SERAI_PHASE_SOCKET"
SILENCE_S = 2.0
AGAIN_S = 0.5
_PACKET_BYTES_MAX = 4096


class Channel:
    """One engine core's. `on_phase(phase, prompt_tokens_max)` is called in the channel's thread, with "mixed" whenever
    the agent is silent."""

    def __init__(self, name: str, on_phase: Callable[[str, int | None], None]) -> None:
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._on_phase = on_phase
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="serai-phase", daemon=True)
        self._thread.start()

    def say(self, step: Mapping[str, object]) -> None:
        """What a step did. Never waits."""
        connected = self._socket
        if connected is None:
            return
        try:
            connected.send(json.dumps(step).encode(), socket.MSG_NOSIGNAL)
        except OSError:
            pass  # Full, or gone: the next step is told again.

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
                self._on_phase("mixed", None)
            self._closing.wait(AGAIN_S)

    def _listen(self, connected: socket.socket) -> None:
        """Until it is closed."""
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        while True:
            if not poll.poll(SILENCE_S * 1000):
                self._on_phase("mixed", None)
                continue
            packet = connected.recv(_PACKET_BYTES_MAX)
            if not packet:
                return
            try:
                word = json.loads(packet)
                phase, most = word["phase"], word.get("prompt_tokens_max")
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            self._on_phase(phase, most if isinstance(most, int) and most > 0 else None)


def _uid_of_peer(connected: socket.socket) -> int:
    """Others on this host may have taken the name."""
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
