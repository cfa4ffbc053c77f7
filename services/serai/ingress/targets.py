"""What a request says of time and order, in `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-best-effort`, `x-request-timeout`
and `x-priority`; and about how large its prompt is. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from serai.ingress.limits import BYTES_PER_TOKEN
from serai.ingress.openai_format import ApiError
from serai.ingress.queueing import CLASSES

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
BEST_EFFORT_HEADER = "x-slo-best-effort"
TIMEOUT_HEADER = "x-request-timeout"
PRIORITY_HEADER = "x-priority"
INLINE_BYTES = 4096
"""What a picture or a sound within a body counts, instead of its own bytes: about 1,400 tokens."""
_INLINE = re.compile(rb";base64,[A-Za-z0-9+/=_-]+")
_INLINE_MIN_BYTES = 16 * 1024
_MILLISECONDS_MAX = 86_400_000.0


class Targets(NamedTuple):
    """Of one request."""

    timeout_s: float
    """It may take so long in all; what is asked for beyond the setting is cut to the setting."""
    priority: int
    """Place of its class in `queueing.CLASSES`: its caller's, or a lower one if it asks for that."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    best_effort: bool = True
    """When its targets cannot be met: it is served late, or (False) refused at once. Only a macro-scheduler knows."""


def read_targets(headers: Mapping[str, str], timeout_max_s: float, priority_max: str) -> Targets:
    """Raises ApiError (400) naming the header that cannot be understood."""
    highest = _PLACE[priority_max]
    if _NAMES.isdisjoint(headers):
        return Targets(timeout_max_s, highest)
    ttft_ms = _number(headers, TTFT_HEADER, "milliseconds", _MILLISECONDS_MAX)
    tpot_ms = _number(headers, TPOT_HEADER, "milliseconds", _MILLISECONDS_MAX)
    timeout_s = _number(headers, TIMEOUT_HEADER, "seconds", float("inf"))
    return Targets(
        timeout_s=timeout_max_s if timeout_s is None else min(timeout_s, timeout_max_s),
        priority=max(highest, _class(headers)),
        ttft_s=None if ttft_ms is None else ttft_ms / 1000,
        tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        best_effort=_yes(headers, BEST_EFFORT_HEADER),
    )


_NAMES = frozenset({TTFT_HEADER, TPOT_HEADER, BEST_EFFORT_HEADER, TIMEOUT_HEADER, PRIORITY_HEADER})
_PLACE = {name: place for place, name in enumerate(CLASSES)}


def _class(headers: Mapping[str, str]) -> int:
    asked = headers.get(PRIORITY_HEADER)
    if asked is None:
        return 0
    place = _PLACE.get(asked.strip().lower())
    if place is None:
        raise _bad(PRIORITY_HEADER, f"must be one of {', '.join(CLASSES)}")
    return place


def _yes(headers: Mapping[str, str], name: str) -> bool:
    text = headers.get(name, "yes").strip().lower()
    if text not in ("yes", "no"):
        raise _bad(name, "must be yes or no")
    return text == "yes"


def _number(headers: Mapping[str, str], name: str, unit: str, most: float) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        # Not what else Python takes for a number: digits of other scripts, `1_000`, `nan`.
        value = float(text) if text.isascii() and "_" not in text else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or value > most:
        bound = f" up to {most:.0f}" if most < float("inf") else ""
        raise _bad(name, f"must be a number of {unit} above 0{bound}")
    return value


def _bad(name: str, problem: str) -> ApiError:
    return ApiError(400, f"The header `{name}` {problem}.", param=name, code="invalid_header")


def prompt_tokens(body: bytes) -> int:
    """About how many tokens a body's prompt has. Pictures and sounds in it count by their number, not by their size."""
    size = len(body)
    if size >= _INLINE_MIN_BYTES and b";base64," in body:
        inline = [len(found.group()) for found in _INLINE.finditer(body)]
        size += INLINE_BYTES * len(inline) - sum(inline)
    return -(-size // BYTES_PER_TOKEN)
