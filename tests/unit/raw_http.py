"""A client that writes bytes to an HTTP server and reads what comes back."""

from __future__ import annotations

import asyncio

from serai.ingress.http_server import HttpServer

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(server: HttpServer) -> Client:
    """A client of `server`, which has been started on any port."""
    return await asyncio.open_connection("127.0.0.1", server._servers[0].sockets[0].getsockname()[1])


def post(body: bytes, *headers: str, path: str = "/x") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def answer_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {line.split(": ", 1)[0]: line.split(": ", 1)[1] for line in head[1:] if line}
    return int(head[0].split()[1]), headers


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    status, headers = await answer_head(reader)
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while chunk := await answer_chunk(reader):
            body += chunk
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return status, headers, body


async def answer_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked answer; the last one is empty."""
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]
