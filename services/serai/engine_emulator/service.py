"""The emulated engine's shell: listens, serves until it is told to stop, closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from random import Random

from serai.engine_emulator.batched_schedule import BatchedSchedule
from serai.engine_emulator.batching.engine import BatchEngine
from serai.engine_emulator.batching.settings import BatchMode, Phase
from serai.engine_emulator.batching.steps import RunningStep
from serai.engine_emulator.engine import Engine
from serai.engine_emulator.faults import FaultKind
from serai.engine_emulator.fixed_schedule import FixedSchedule
from serai.engine_emulator.http_protocol import HttpConnection
from serai.engine_emulator.measures import Measures
from serai.engine_emulator.model_flags import ModelledEngine
from serai.engine_emulator.phase_channel import VARIABLE, PhaseChannel
from serai.engine_emulator.schedule import Schedule
from serai.engine_emulator.settings import EmulatorSettings
from serai.engine_emulator.state import EmulatorState

_BACKLOG = 4096


class StartFailed(Exception):
    """The engine cannot start; the text says why and what to do."""


async def run(settings: EmulatorSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartFailed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if await _stopped_while_loading(settings, stop):
        return
    channel = _phase_channel(settings)
    state = emulated_engine(settings, loop, channel.told if channel is not None else _untold)
    server = await _listen(settings, state)
    dialling = asyncio.ensure_future(channel.run(state.engine)) if channel is not None else None
    try:
        await stop.wait()
    finally:
        if dialling is not None:
            dialling.cancel()
        server.close()
        for connection in list(state.connections):
            connection.close()


def _phase_channel(settings: EmulatorSettings) -> PhaseChannel | None:
    """To the agent that started us, when it said where it listens and we have phases."""
    name, modelled = os.environ.get(VARIABLE, ""), settings.modelled
    gated = modelled is not None and modelled.batch.mode is BatchMode.PHASE_GATED
    return PhaseChannel(name) if name and gated else None


def _untold(step: RunningStep) -> None:
    """Nobody listens."""


def emulated_engine(
    settings: EmulatorSettings, loop: asyncio.AbstractEventLoop, told: Callable[[RunningStep], None] = _untold
) -> EmulatorState:
    """An engine that runs on `loop` and listens nowhere yet: each of its connections is an `HttpConnection`. `told` is
    told of each step."""
    measures = Measures()
    return EmulatorState(settings, Engine(_schedule(settings, measures, told), loop=loop, measures=measures))


def _schedule(settings: EmulatorSettings, measures: Measures, told: Callable[[RunningStep], None]) -> Schedule:
    modelled = settings.modelled
    if modelled is None:
        return FixedSchedule(settings.timing, step_s=settings.step_ms / 1000, slots=settings.max_concurrency)

    def on_step(running: RunningStep) -> None:
        step = running.step
        measures.step_tokens.observe(step.decode_sequences + sum([chunk.new_tokens for chunk in step.chunks]))
        told(running)

    model = modelled.model
    noise = _step_factor(modelled, settings.seed)
    batch = BatchEngine(model, modelled.batch, step_noise=noise, energy_j=model.energy_j)
    batch.phase = Phase.MIXED  # Until somebody says otherwise.
    return BatchedSchedule(batch, on_step)


def _step_factor(modelled: ModelledEngine, seed: int) -> Callable[[], float]:
    """What each step's predicted duration is multiplied by: noise of mean 1, and the speed of time."""
    share, sigma = 1 / modelled.speed, modelled.step_noise
    if not sigma:
        return lambda: share
    draw = Random(seed).lognormvariate
    return lambda: share * draw(-sigma * sigma / 2, sigma)


async def _stopped_while_loading(settings: EmulatorSettings, stop: asyncio.Event) -> bool:
    """Spend the start delay without listening, as an engine that loads weights does. True when told to stop."""
    if settings.start_delay_s > 0:
        _say(f"loading {settings.model}: {settings.start_delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), settings.start_delay_s)
    if any(fault.kind is FaultKind.REFUSE_START for fault in settings.faults):
        raise StartFailed(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.96 GiB. GPU 0 has a total capacity of "
            "79.11 GiB of which 11.42 GiB is free. (emulated: fault refuse-start)"
        )
    return stop.is_set()


async def _listen(settings: EmulatorSettings, state: EmulatorState) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(lambda: HttpConnection(state), settings.host, settings.port, backlog=_BACKLOG)
    except OSError as error:
        # The event loop wraps the reason in its own words; the errno says it in one phrase.
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        message = f"cannot listen on {settings.host}:{settings.port}: {reason}; choose another with --port"
        raise StartFailed(message) from error
    port = server.sockets[0].getsockname()[1]
    _say(f"serving {settings.model} on http://{settings.host}:{port}")
    return server


def _say(text: str) -> None:
    sys.stderr.write(f"emulated engine: {text}\n")
    sys.stderr.flush()
