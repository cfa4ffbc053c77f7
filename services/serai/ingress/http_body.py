"""Reading a request's body within the one size limit."""

from __future__ import annotations

from aiohttp import web

from serai.ingress.openai_format import ApiError


async def read_body(request: web.BaseRequest, limit_bytes: int) -> bytes:
    """The whole body, decompressed. Raises ApiError 413 before reading when the length is announced, and as soon as
    the limit is passed when it is not."""
    announced = request.content_length
    if announced is not None and announced > limit_bytes:
        raise _too_large(announced, limit_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue":
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    content = request.content
    chunks: list[bytes] = []
    size = 0
    while True:
        chunk = await content.readany()
        if not chunk:
            break
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(size, limit_bytes)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(size: int, limit_bytes: int) -> ApiError:
    text = f"The request body has {size} bytes or more; this gateway takes at most {limit_bytes}."
    return ApiError(413, text, code="body_too_large")
