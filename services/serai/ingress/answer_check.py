"""Whether what an engine answers with 200 can be an answer at all. Pure, and no more than a look at both ends: the body
belongs to the client.

Engines are sometimes behind proxies that answer with a page of their own, and some ignore `stream`. A client's library
would make of that an exception of its own, or, of a stream without events, an empty answer that looks whole.
"""

from __future__ import annotations

_PAGE = "text/html"
_SPACE = b" \t\r\n"


def what_is_wrong(content_type: str, body: bytes, *, stream_wanted: bool) -> str:
    """In words, of an answer that is no stream of events; empty when nothing is."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _PAGE:
        return "the engine answered with a page of HTML; is a proxy in between?"
    if stream_wanted:
        return f"the engine answered {kind[:60] or 'without a content type'} instead of a stream of events"
    if kind == "application/json" and not _looks_whole(body):
        return "the engine's answer is no whole JSON"
    return ""


def _looks_whole(body: bytes) -> bool:
    """Cut answers end elsewhere than in the closing bracket; parsing 64 MiB to know it would hold up others."""
    text = body.strip(_SPACE)
    return text[:1] + text[-1:] in (b"{}", b"[]")
