"""Tells an engine whether to prefill or to decode, and hears of its steps, where the engine can do that: vLLM with
`engines/serai_vllm`, and the emulated engine.

We listen on a Unix socket whose name the engine finds in its environment, and its schedulers dial it, one per
data-parallel rank. A packet is one JSON object. The name is in the abstract namespace, which ends where the network's
does, as the engine's own loopback port.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

import orjson
import structlog

from serai.worker_agent.engine_pulse import EngineStep

log = structlog.get_logger()

VARIABLE = "SERAI_PHASE_SOCKET"
"""Tells an engine the name."""
MIXED = "mixed"
REPEAT_S = 0.5
"""An engine that hears nothing for two seconds serves as it does by itself."""
PEERS_MAX = 64
_PACKET_BYTES_MAX = 4096
_PACKETS_AT_ONCE = 64


def socket_name(port: int) -> str:
    """For the engine that serves HTTP on `port`."""
    return f"@serai-phase-{port}"


class PhaseSocket:
    """Listens once it is open. Never waits: what an engine does not take is said again soon."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._listening: socket.socket | None = None
        self._peers: dict[int, socket.socket] = {}
        self._word: tuple[str, int | None] = (MIXED, None)
        self._repeating: asyncio.TimerHandle | None = None
        self._on_step: Callable[[EngineStep], None] = lambda step: None
        self.dialled = asyncio.Event()
        """Set when a scheduler has come."""

    @property
    def peers(self) -> int:
        """Schedulers that are connected."""
        return len(self._peers)

    def open(self, on_step: Callable[[EngineStep], None]) -> None:
        """`on_step` is called for each packet. Without the name, which somebody else may have, the engine is not told,
        and serves as it does by itself."""
        self._on_step = on_step
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listening.bind("\0" + self._name[1:])
            listening.listen(PEERS_MAX)
        except OSError as error:
            log.warning("engine.no_phase_socket", name=self._name, error=error.strerror)
            listening.close()
            return
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening.fileno(), self._accept)
        self._repeat()

    def say(self, phase: str, prompt_tokens_max: int | None = None) -> None:
        """To all, now, and again until something else is said. `prompt_tokens_max`: of prompts, in one step; None: as
        many as the engine's settings allow."""
        if (word := (phase, prompt_tokens_max)) != self._word:
            self._word = word
            self._tell_all()

    def close(self) -> None:
        """Engines that were told serve by themselves from now on."""
        loop = asyncio.get_running_loop()
        if self._repeating is not None:
            self._repeating.cancel()
        if self._listening is not None:
            loop.remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None
        for peer in tuple(self._peers.values()):
            self._drop(peer)

    # -- inside --------------------------------------------------------------------------------------------------

    def _repeat(self) -> None:
        self._tell_all()
        self._repeating = asyncio.get_running_loop().call_later(REPEAT_S, self._repeat)

    def _tell_all(self) -> None:
        phase, prompt_tokens_max = self._word
        packet = orjson.dumps({"phase": phase, "prompt_tokens_max": prompt_tokens_max})
        for peer in tuple(self._peers.values()):
            try:
                peer.send(packet)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(peer)

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            peer, _ = self._listening.accept()
        except OSError:
            return
        if len(self._peers) >= PEERS_MAX or _uid_of(peer) != os.getuid():
            peer.close()
            return
        peer.setblocking(False)
        self._peers[peer.fileno()] = peer
        self.dialled.set()
        log.info("engine.phases", schedulers=len(self._peers))
        asyncio.get_running_loop().add_reader(peer.fileno(), self._read, peer)
        self._tell_all()

    def _read(self, peer: socket.socket) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = peer.recv(_PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._drop(peer)
                return
            if (step := step_in(packet)) is not None:
                self._on_step(step)

    def _drop(self, peer: socket.socket) -> None:
        if self._peers.pop(peer.fileno(), None) is not None:
            asyncio.get_running_loop().remove_reader(peer.fileno())
            peer.close()


def step_in(packet: bytes) -> EngineStep | None:
    """None when it is not what a scheduler says."""
    try:
        fields = orjson.loads(packet)
        fields.setdefault("sequences_max", 0)  # An engine's part that was made for an older agent does not say it.
        step = EngineStep(float(fields["step_s"]), *[fields[name] for name in EngineStep._fields[1:]])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        return None
    counts = step[1:]
    return step if all(isinstance(count, int) and count >= 0 for count in counts) and 0 <= step.step_s < 1e6 else None


def _uid_of(peer: socket.socket) -> int:
    """The kernel's word on whose process it is."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
