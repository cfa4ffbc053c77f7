"""Which handler answers a path: a table, a few patterns, and honest words for the rest. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from serai.ingress.http_server import HttpRequest
from serai.ingress.openai_format import ApiError

Handler = Callable[[HttpRequest], Coroutine[Any, Any, None]]
Route = tuple[str, str]
"""A method and a path."""


class Routes:
    """`fixed` paths, and `patterns` of paths (regular expressions). A slash at the end changes nothing, HEAD is
    answered wherever GET is, and OPTIONS wherever there is anything, by `options`."""

    def __init__(self, fixed: Mapping[Route, Handler], patterns: Mapping[Route, Handler], options: Handler) -> None:
        self._fixed = dict(fixed)
        self._patterns = [(method, re.compile(path), handler) for (method, path), handler in patterns.items()]
        self._options = options

    def find(self, method: str, path: str) -> Handler:
        """Raises ApiError: 404 when there is nothing, 405 naming the methods that there are."""
        found = self._fixed.get((method, path)) or self._find("GET" if method == "HEAD" else method, path.rstrip("/"))
        if found is not None:
            return found
        methods = self.methods(path)
        if method == "OPTIONS" and methods:
            return self._options
        if methods:
            text = f"{path[:200]} takes {' and '.join(methods)}, not {method}."
            raise ApiError(405, text, code="method_not_allowed", headers={"allow": ", ".join(methods)})
        raise ApiError(404, f"There is no {path[:200]} here.", kind="not_found_error", code="unknown_path")

    def methods(self, path: str) -> list[str]:
        """What may be done with `path` (`*`: with any); nothing when there is no such path."""
        path = path.rstrip("/")
        found = {method for method, fixed in self._fixed if path in (fixed, "*")}
        found |= {method for method, pattern, _ in self._patterns if pattern.fullmatch(path)}
        if "GET" in found:
            found.add("HEAD")
        return sorted(found | {"OPTIONS"}) if found else []

    def _find(self, method: str, path: str) -> Handler | None:
        if found := self._fixed.get((method, path)):
            return found
        matching = (
            handler for known, pattern, handler in self._patterns if known == method and pattern.fullmatch(path)
        )
        return next(matching, None)
