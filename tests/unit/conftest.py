"""Hypothesis draws the same examples in each run, so that a red run is red again; more of them: SERAI_TEST_EXAMPLES."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile(
    "serai",
    derandomize=True,
    database=None,
    deadline=None,  # Other tests share the machine: a slow example says nothing of the code.
    max_examples=int(os.environ.get("SERAI_TEST_EXAMPLES", "40")),
)
settings.load_profile("serai")
