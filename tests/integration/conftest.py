"""Fixtures of the integration tests; what they hand out is in `integration.system`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.system import System
from serai.cli.embedded_nats import EmbeddedNats
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.worker_agent.engine.process import free_port


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """A private nats-server with an API key made, and nothing else yet."""
    port = free_port()
    nats = EmbeddedNats(tmp_path / "nats")
    nats.prepare(port)
    key = new_key()
    write_keys(tmp_path / "keys.json", [StoredKey("test", hashed(key))])
    made = System(tmp_path, port, nats, key)
    made.start_nats()
    yield made
    made.stop()


@pytest.fixture
def small_system(system: System) -> System:
    """NATS, registry and ingress; agents as the test likes."""
    system.start_registry()
    system.start_ingress()
    return system
