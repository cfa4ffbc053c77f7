"""One running Serai for all clients: real NATS, an ingress, agents around emulated engines.

`words` has only what every engine has, so that other dialects are translated for it; `polyglot` speaks them itself. The
other names are those that OpenAI's own tests ask for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.system import System
from serai.cli.embedded_nats import EmbeddedNats
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.worker_agent.engine.process import free_port

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients"
SDK_TESTS_KEY = "My API Key"
"""What OpenAI's tests call themselves with."""
SDK_TESTS_MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small")
TRANSLATED, NATIVE = "words", "polyglot"


@pytest.fixture(scope="session")
def clients() -> Path:
    """Where the clients are installed."""
    if not (CLIENTS / "node" / ".installed").exists():
        if os.environ.get("SERAI_REQUIRE_CLIENTS"):
            pytest.fail("the clients are not installed: make clients")
        pytest.skip("the clients are not installed: make clients")
    return CLIENTS


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Everything is up and every model is served."""
    folder = tmp_path_factory.mktemp("serving")
    port, key = free_port(), new_key()
    nats = EmbeddedNats(folder / "nats")
    nats.prepare(port)
    write_keys(folder / "keys.json", [StoredKey("test", hashed(key)), StoredKey("sdk", hashed(SDK_TESTS_KEY))])
    system = System(folder, port, nats, key)
    try:
        system.start_nats()
        system.start_registry()
        system.start_ingress()
        fast = ("--ttft-ms", "2", "--tpot-ms", "0.5")
        models = (TRANSLATED, NATIVE, *SDK_TESTS_MODELS)
        for model in models:
            native = ("--native", "messages,responses") if model == NATIVE else ()
            system.start_agent(*fast, *native, model=model, wait=False)
        for model in models:
            system.wait_for_sessions(1, model, timeout_s=60)
        yield system
    finally:
        system.stop()
