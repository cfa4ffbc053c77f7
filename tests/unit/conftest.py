"""Hypothesis draws the same examples in each run, so that a red run is red again; more of them: SERAI_TEST_EXAMPLES.
And logs are as they were after each test: one that sets them up, as commands do, writes to an output that closes then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile(
    "serai",
    derandomize=True,
    database=None,
    deadline=None,  # Other tests share the machine: a slow example says nothing of the code.
    max_examples=int(os.environ.get("SERAI_TEST_EXAMPLES", "40")),
)
settings.load_profile("serai")


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()
