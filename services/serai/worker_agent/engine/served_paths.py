"""Which endpoints an engine has: from its own description of itself, or by looking at how it refuses nothing."""

from __future__ import annotations

import asyncio

import orjson
import structlog

from serai.contracts.endpoint_paths import ENDPOINT_PATHS
from serai.runtime.http1 import HttpFailure, HttpPool, fetch

log = structlog.get_logger()

LOOK_TIMEOUT_S = 10.0
"""For all of it: on loopback it takes milliseconds."""
_NOT_THERE = (404, 405, 501)
"""What engines answer where they have nothing; 501 also where the model they run cannot do it (llama.cpp)."""


async def served_paths(pool: HttpPool, headers: dict[str, str]) -> list[str]:
    """Those of ENDPOINT_PATHS that the engine has; none when it cannot be found out. Makes the engine compute nothing:
    vLLM and SGLang describe themselves, and the others are sent a request without a body, which none can serve."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            described = await _described(pool, headers)
            if described:
                return described
            return [path for path in ENDPOINT_PATHS if await _refuses_nothing(pool, path, headers)]
    except (HttpFailure, TimeoutError) as error:
        log.warning("engine.endpoints_unknown", error=str(error) or f"no answer within {LOOK_TIMEOUT_S:g} s")
        return []


async def _described(pool: HttpPool, headers: dict[str, str]) -> list[str]:
    answer = await fetch(pool, "GET", "/openapi.json", headers=headers)
    if answer.status != 200:
        return []
    try:
        described = orjson.loads(answer.body)["paths"]
        return [path for path in ENDPOINT_PATHS if "post" in described.get(path, ())]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return []


async def _refuses_nothing(pool: HttpPool, path: str, headers: dict[str, str]) -> bool:
    answer = await fetch(pool, "POST", path, headers={"content-type": "application/json"} | headers)
    return answer.status not in _NOT_THERE
