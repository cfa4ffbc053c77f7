"""What `serai_vllm` is to vLLM, for the emulated engine: it dials the agent on the Unix socket named in
`SERAI_PHASE_SOCKET`, hears which phase is wanted, and tells of its steps. Without the variable nothing is dialled, and
`POST /emulator/phase` does the first half by hand.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import orjson

from serai.engine_emulator.batching.settings import Phase
from serai.engine_emulator.batching.steps import RunningStep
from serai.engine_emulator.engine import Engine

VARIABLE = "SERAI_PHASE_SOCKET"
AGAIN_S = 0.5
SILENCE_S = 2.0
_PACKET_BYTES_MAX = 4096


class PhaseChannel:
    """One engine's, whose batch scheduler is phase-gated. `run` until it is cancelled."""

    def __init__(self, name: str) -> None:
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._engine: Engine | None = None
        self._socket: socket.socket | None = None
        self._closed = asyncio.Event()
        self._heard_at_s = 0.0

    async def run(self, engine: Engine) -> None:
        """Dials until somebody is there, and again when it has gone."""
        self._engine = engine
        while True:
            if self._dial():
                await self._until_closed()
                set_phase(engine, Phase.MIXED, None)
            await asyncio.sleep(AGAIN_S)

    def told(self, step: RunningStep) -> None:
        """A step has ended."""
        if self._socket is None or self._engine is None or self._engine.batch is None:
            return
        batch = self._engine.batch
        fields = {
            "step_s": step.ends_at_s - step.began_at_s,
            "prefill_tokens": sum([tokens for _, tokens in step.prefilled]),
            "decodes": step.step.decode_sequences,
            "backlog_tokens": batch.prefill_backlog_tokens,
            "context_tokens": batch.context_tokens,
            "kv_tokens_free": batch.kv_tokens_free,
            "kv_tokens_total": batch.kv_tokens_total,
            "sequences_max": batch.settings.sequences_max,
        }
        try:
            self._socket.send(orjson.dumps(fields))
        except OSError:
            pass  # Full, or gone: the next step is told again.

    # -- inside --------------------------------------------------------------------------------------------------

    def _dial(self) -> bool:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connected.connect(self._address)
            if _uid_of(connected) != os.getuid():
                raise PermissionError
        except OSError:
            connected.close()
            return False
        connected.setblocking(False)
        self._socket = connected
        return True

    async def _until_closed(self) -> None:
        assert self._socket is not None
        loop, number = asyncio.get_running_loop(), self._socket.fileno()
        self._closed.clear()
        self._heard_at_s = loop.time()
        loop.add_reader(number, self._read)
        try:
            while not self._closed.is_set():
                try:
                    async with asyncio.timeout(SILENCE_S / 2):
                        await self._closed.wait()
                except TimeoutError:
                    if loop.time() - self._heard_at_s > SILENCE_S and self._engine is not None:
                        set_phase(self._engine, Phase.MIXED, None)
        finally:
            loop.remove_reader(number)
            self._socket.close()
            self._socket = None

    def _read(self) -> None:
        assert self._socket is not None
        assert self._engine is not None
        try:
            while packet := self._socket.recv(_PACKET_BYTES_MAX):
                self._heard_at_s = asyncio.get_running_loop().time()
                try:
                    word = orjson.loads(packet)
                    set_phase(self._engine, Phase(word["phase"]), word.get("prompt_tokens_max"))
                except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
                    continue
        except BlockingIOError:
            return
        except OSError:
            pass
        self._closed.set()


def set_phase(engine: Engine, phase: Phase, prompt_tokens_max: int | None) -> None:
    """From the next step on. An engine that stood still because of its phase goes on."""
    batch = engine.batch
    assert batch is not None
    if (phase, prompt_tokens_max) != (batch.phase, batch.prompt_tokens_max):
        batch.phase, batch.prompt_tokens_max = phase, prompt_tokens_max
        engine.wake()


def _uid_of(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
