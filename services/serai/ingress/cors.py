"""Which web pages of other origins a browser lets use the ingress, and what they may see. None by default. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

EVERYONE = "*"
PREFLIGHT_S = 600
"""How long a browser may remember what it was told."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")
EXPOSED = (
    "x-request-id",
    "x-serai-session",
    "x-serai-provider",
    "x-serai-fingerprint",
    "x-serai-attempts",
    "x-serai-queue-ms",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
)


class Cors:
    """The origins that may."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Raises ValueError for what is no origin."""
        self._origins = frozenset(origins)
        for origin in self._origins:
            if origin != EVERYONE and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; write it as in https://chat.example.org, or * for all")

    def headers(self, origin: str | None) -> dict[str, str]:
        """Beside those of any answer. Cookies are never allowed: whoever asks must have a key."""
        if not self._origins:
            return {}
        vary = {} if EVERYONE in self._origins else {"vary": "origin"}  # Caches must not give one origin's to another.
        if not self._allows(origin):
            return vary
        allowed = EVERYONE if EVERYONE in self._origins else origin or ""
        return vary | {"access-control-allow-origin": allowed, "access-control-expose-headers": ", ".join(EXPOSED)}

    def preflight(self, headers: Mapping[str, str], methods: Iterable[str]) -> dict[str, str]:
        """What a browser is told that asks before it sends a request."""
        if "access-control-request-method" not in headers or not self._allows(headers.get("origin")):
            return {}
        asked = headers.get("access-control-request-headers", "")
        told = {"access-control-allow-methods": ", ".join(methods), "access-control-max-age": str(PREFLIGHT_S)}
        return told | ({"access-control-allow-headers": asked} if _HEADER_NAMES.fullmatch(asked) else {})

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and (EVERYONE in self._origins or origin in self._origins)
