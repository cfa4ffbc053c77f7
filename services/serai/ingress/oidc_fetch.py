"""Reads what an issuer of tokens shows, over HTTP."""

from __future__ import annotations

import aiohttp

FETCH_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 512 * 1024


async def fetched(address: str) -> bytes:
    """What it answers. Raises OSError, TimeoutError, and ValueError for an answer that is none."""
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.get(address, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"{address} answers {answer.status}")
            content = await answer.content.read(ANSWER_BYTES_MAX + 1)
            while not answer.content.at_eof() and len(content) <= ANSWER_BYTES_MAX:
                content += await answer.content.read(ANSWER_BYTES_MAX + 1 - len(content))
    except aiohttp.ClientError as error:
        raise OSError(str(error) or type(error).__name__) from error
    if len(content) > ANSWER_BYTES_MAX:
        raise ValueError(f"{address} answers more than {ANSWER_BYTES_MAX} bytes")
    return content
