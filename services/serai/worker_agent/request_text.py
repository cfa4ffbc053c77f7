"""What a request's body says about how long its answer may stay silent, without parsing it as JSON. Pure.

Only looked at when an engine has been silent for a while: bodies may be large, and most are never asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Rough; what is learnt per token is learnt by the same measure, so that errors cancel out."""
SETUP_S = 10.0

_EDGE_BYTES = 64 * 1024
_OUTPUT_LIMIT = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,9})')
_HELD_BACK = re.compile(rb'"(?:tools|functions|guided_\w+|structured_outputs|response_format)"\s*:')
_SETUP = re.compile(
    rb'"(?:tools|functions|guided_\w+|structured_outputs|response_format|image_url|input_audio|video_url)"\s*:'
)


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What to expect of an answer."""

    output_tokens_max: int
    """0 = the body does not say."""
    held_back: bool
    """The engine may hold tokens back until they make sense together, as with tool calls."""
    setup_s: float
    """Work before the first token that is neither prefill nor decode: fetching images, compiling a grammar."""


def answer_shape(body: Sequence[bytes]) -> AnswerShape:
    """From a request's body, in pieces. Its middle is left out when it is large: that is prompt."""
    whole = b"".join(body)
    edges = whole if len(whole) <= 2 * _EDGE_BYTES else whole[:_EDGE_BYTES] + b" " + whole[-_EDGE_BYTES:]
    limits = [int(found) for found in _OUTPUT_LIMIT.findall(edges)]
    return AnswerShape(
        output_tokens_max=max(limits, default=0),
        held_back=_HELD_BACK.search(edges) is not None,
        setup_s=SETUP_S if _SETUP.search(edges) else 0.0,
    )
