"""Fixtures of the integration tests; what they hand out is in `integration.system`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.system import System, private_system


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """A private nats-server with an API key made, and nothing else yet."""
    with private_system(tmp_path) as made:
        yield made


@pytest.fixture
def small_system(system: System) -> System:
    """NATS, registry and ingress; agents as the test likes."""
    system.start_registry()
    system.start_ingress()
    return system
