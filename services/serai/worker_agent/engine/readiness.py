"""When an engine really serves: its model is listed, and a canary request has brought a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import orjson
import structlog

from serai.runtime.http1 import HttpFailure, HttpPool, fetch
from serai.worker_agent.engine.base import Engine, EngineMisconfigured, NotServing, ServedModel
from serai.worker_agent.engine.served_paths import served_paths

log = structlog.get_logger()

POLL_FIRST_S = 0.1
POLL_MAX_S = 2.0
CANARY_TIMEOUT_S = 120.0
NOT_IMPLEMENTED = 501


async def wait_until_serving(
    engine: Engine,
    pool: HttpPool,
    wanted: str,
    headers: dict[str, str],
    on_phase: Callable[[str], None],
    *,
    deadline_s: float,
) -> ServedModel:
    """Polls until `wanted` is served. Raises EngineMisconfigured, or TimeoutError with what was still missing."""
    give_up_at_s = time.monotonic() + deadline_s
    pause_s = POLL_FIRST_S
    missing = "the engine does not answer yet"
    while time.monotonic() < give_up_at_s:
        try:
            served = await _listed(engine, pool, wanted, headers)
            on_phase("canary")
            await canary(pool, served.engine_model, headers)
            return replace(served, endpoints=await served_paths(pool, headers))
        except (NotServing, HttpFailure, TimeoutError) as error:
            missing = str(error) or missing
            on_phase("loading" if isinstance(error, NotServing) else "starting")
        await asyncio.sleep(pause_s)
        pause_s = min(POLL_MAX_S, pause_s * 1.3)
    raise TimeoutError(f"the engine did not serve within {deadline_s:g} s: {missing}")


async def _listed(engine: Engine, pool: HttpPool, wanted: str, headers: dict[str, str]) -> ServedModel:
    answer = await fetch(pool, "GET", "/v1/models", headers=headers, timeout_s=10)
    if answer.status in (401, 403):
        raise EngineMisconfigured(f"the engine refuses our key ({answer.status}); set --engine-api-key")
    if answer.status != 200:
        raise NotServing(f"/v1/models answers {answer.status}")
    try:
        models = orjson.loads(answer.body)
    except orjson.JSONDecodeError as error:
        raise EngineMisconfigured("/v1/models does not answer with JSON: is this an OpenAI-compatible API?") from error
    return engine.served(models if isinstance(models, dict) else {}, wanted)


async def canary(pool: HttpPool, model: str, headers: dict[str, str], timeout_s: float = CANARY_TIMEOUT_S) -> None:
    """One token. `/health` says 200 while a model still loads, or when the engine hangs; a token does not. Raises
    NotServing, HttpFailure or TimeoutError."""
    attempts = (
        ("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}),
    )
    status = 0
    for path, body in attempts:
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
    # It understands neither, so it does not generate text (embeddings, reranking): listed is all there is to see.
    log.warning("engine.no_canary", model=model, status=status)


def fingerprint(engine_kind: str, served: ServedModel) -> str:
    """Short digest of what the engine says it serves. Two sessions with one fingerprint are interchangeable."""
    stable = {k: v for k, v in served.details.items() if k not in ("created", "permission", "aliases", "tags")}
    text = orjson.dumps([engine_kind, served.engine_model, stable], option=orjson.OPT_SORT_KEYS, default=str)
    return sha256(text).hexdigest()[:16]
