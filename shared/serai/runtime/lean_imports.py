"""Imports a library without those it would load only for the case that they are wanted.

An agent runs on every node beside its engine: what it never uses should not lie in its memory. `rich` (structlog would
draw tracebacks with it) and `aiohttp` (nats-py has it for WebSockets) are a quarter of what it would be otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Whoever imports one of `modules` in this block finds that it is not installed, unless it is loaded already."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
