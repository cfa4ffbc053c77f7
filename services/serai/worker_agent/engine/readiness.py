"""When an engine really serves: it is ours, its model is listed, and a canary request has brought a token.

`/health` says 200 while a model still loads, or when the engine hangs; so it is not asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import orjson
import structlog

from serai.runtime.http1 import HttpFailure, HttpPool, Origin, fetch
from serai.worker_agent.engine.base import (
    Engine,
    EngineMisconfigured,
    NotServing,
    ServedModel,
    StrangerListens,
)
from serai.worker_agent.engine.listeners import Listener
from serai.worker_agent.engine.process import RunningEngine
from serai.worker_agent.engine.served_paths import served_paths
from serai.worker_agent.engine.start_watch import Progress, Signs, StartWatch
from serai.worker_agent.engine.traits import Traits

log = structlog.get_logger()

POLL_FIRST_S = 0.1
POLL_MAX_S = 2.0
CANARY_TIMEOUT_S = 120.0
OTHER_PORTS_AFTER_S = 5.0
"""An engine that listens elsewhere and not where it should is looked at after so long."""
NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that is starting."""

    engine: Engine
    pool: HttpPool
    wanted: str
    """Name of the model."""
    headers: dict[str, str]
    running: RunningEngine | None
    """None: it was not started by us, and nothing of it can be seen but its API."""


async def wait_until_serving(
    candidate: Candidate, watch: StartWatch, on_progress: Callable[[Progress], None]
) -> ServedModel:
    """Polls until it serves. Raises EngineMisconfigured, StrangerListens, or TimeoutError with what was still missing
    when nothing moved any more."""
    pause_s = POLL_FIRST_S
    began_s = time.monotonic()
    listed = False
    while True:
        signs = await candidate.running.signs() if candidate.running is not None else Signs()
        port_open, missing = False, "the engine does not listen yet"
        try:
            if await _may_be_asked(candidate):
                missing = "the engine does not answer yet"
                served = await _listed(candidate)
                port_open = listed = True
                on_progress(watch.look(signs, time.monotonic(), port_open=True, listed=True))
                return await _proven(candidate, served)
            if time.monotonic() - began_s > OTHER_PORTS_AFTER_S:
                await _refuse_other_port(candidate)
        except (NotServing, HttpFailure, TimeoutError) as error:
            missing = str(error) or missing
            port_open = port_open or isinstance(error, NotServing)
        now = time.monotonic()
        on_progress(watch.look(signs, now, port_open=port_open, listed=listed))
        if watch.overdue(now):
            raise TimeoutError(f"the engine did not serve within {now - began_s:.0f} s, and nothing moves: {missing}")
        await asyncio.sleep(pause_s)
        pause_s = min(POLL_MAX_S, pause_s * 1.3)


async def _may_be_asked(candidate: Candidate) -> bool:
    """Whether somebody listens who is known for our engine, or cannot be known."""
    if candidate.running is None:
        return True
    found = await candidate.running.listener()
    if found is Listener.STRANGER:
        raise StrangerListens(f"another process listens on {candidate.pool.origin.port}, the port of our engine")
    return found is not Listener.NOBODY


async def _refuse_other_port(candidate: Candidate) -> None:
    """An engine whose command leaves no room for the port that we chose serves at another one, for ever."""
    if candidate.running is None:
        return
    origin = candidate.pool.origin
    for port in await candidate.running.other_ports():
        pool = HttpPool(Origin(origin.host, port))
        try:
            answer = await fetch(pool, "GET", "/v1/models", headers=candidate.headers, timeout_s=2)
            serves = answer.status == 200 and isinstance(_json(answer.body).get("data"), list)
        except (HttpFailure, TimeoutError):
            serves = False
        finally:
            await pool.aclose()
        if serves:
            raise EngineMisconfigured(
                f"the engine serves at port {port}, and not at {origin.port}, which the agent chose for it: leave the "
                f"port out of its command, or write {{port}} where it belongs"
            )


async def _listed(candidate: Candidate) -> ServedModel:
    answer = await fetch(candidate.pool, "GET", "/v1/models", headers=candidate.headers, timeout_s=10)
    if answer.status in (401, 403):
        raise EngineMisconfigured(f"the engine refuses our key ({answer.status}); set --engine-api-key")
    if answer.status != 200:
        raise NotServing(f"/v1/models answers {answer.status}")
    try:
        models = orjson.loads(answer.body)
    except orjson.JSONDecodeError as error:
        raise EngineMisconfigured("/v1/models does not answer with JSON: is this an OpenAI-compatible API?") from error
    return candidate.engine.served(models if isinstance(models, dict) else {}, candidate.wanted)


async def _proven(candidate: Candidate, served: ServedModel) -> ServedModel:
    pool, headers = candidate.pool, candidate.headers
    await canary(pool, served.engine_model, headers)
    endpoints = await served_paths(pool, headers)
    return replace(served, endpoints=endpoints, traits=await told_traits(candidate.engine, pool, headers))


def _canaries(model: str) -> Sequence[tuple[str, dict[str, Any]]]:
    """The least that each kind of engine can be asked for: generators, then those that embed, rerank, score, pool."""
    return (
        ("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}),
        ("/v1/embeddings", {"model": model, "input": "1"}),
        ("/v1/rerank", {"model": model, "query": "1", "documents": ["1"]}),
        ("/v1/score", {"model": model, "text_1": "1", "text_2": "1"}),
        ("/pooling", {"model": model, "input": "1"}),
        ("/classify", {"model": model, "input": "1"}),
    )


async def canary(pool: HttpPool, model: str, headers: dict[str, str], timeout_s: float = CANARY_TIMEOUT_S) -> None:
    """One token, or one vector of an engine that makes no tokens. Raises NotServing, HttpFailure or TimeoutError."""
    status = 0
    for path, body in _canaries(model):
        answer = await fetch(
            pool,
            "POST",
            path,
            body=orjson.dumps(body),
            headers={"content-type": "application/json"} | headers,
            timeout_s=timeout_s,
        )
        status = answer.status
        if status == 200:
            return
        if status >= 500 and status != NOT_IMPLEMENTED:
            raise NotServing(f"the canary request to {path} was answered {status}")
    # It understands none of them (speech, images): listed is all there is to see.
    log.warning("engine.no_canary", model=model, status=status)


async def told_traits(engine: Engine, pool: HttpPool, headers: dict[str, str]) -> Traits:
    """What the engine says of itself; what it does not say is left empty."""
    traits = Traits()
    for path in engine.trait_paths:
        try:
            answer = await fetch(pool, "GET", path, headers=headers, timeout_s=5)
        except (HttpFailure, TimeoutError):
            continue
        if answer.status == 200:
            traits = traits.completed_by(engine.traits_in(_json(answer.body)))
    return traits


def fingerprint(engine_kind: str, served: ServedModel) -> str:
    """Short digest of what the engine says it serves. Two sessions with one fingerprint are interchangeable."""
    stable = {k: v for k, v in served.details.items() if k not in ("created", "permission", "aliases", "tags")}
    text = orjson.dumps([engine_kind, served.engine_model, stable], option=orjson.OPT_SORT_KEYS, default=str)
    return sha256(text).hexdigest()[:16]


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
