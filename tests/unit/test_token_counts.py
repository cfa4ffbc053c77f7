"""Tokens in each API's own words; what engines make up in odd types counts for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from serai.ingress.token_counts import TokenCounts, guessed, told


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, TokenCounts(9, 0, 4)),
        (
            {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}},
            TokenCounts(9, 5, 4),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, TokenCounts(9, 0, 0)),
        ({"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 5}}, TokenCounts(9, 5, 4)),
        # Anthropic's `input_tokens` are those that were not in the cache.
        (
            {"input_tokens": 2, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 1, "output_tokens": 4},
            TokenCounts(8, 5, 4),
        ),
        ({"prompt_tokens": -3, "completion_tokens": "4"}, TokenCounts(0, 0, 0)),
        ({"prompt_tokens": True, "completion_tokens": 10**40}, TokenCounts(0, 0, 0)),
        ({}, TokenCounts(0, 0, 0)),
    ],
)
def test_what_engines_tell(usage: dict[str, Any], counts: TokenCounts) -> None:
    assert told(usage) == counts


def test_a_guess_says_that_it_is_one_and_knows_the_context_limit() -> None:
    assert guessed(300, 7) == TokenCounts(100, 0, 7, estimated=True)
    assert guessed(10_000_000, 7, context_tokens_max=4096) == TokenCounts(4096, 0, 7, estimated=True)
