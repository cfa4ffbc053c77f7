"""Two sites, their NATS servers linked as leaf nodes: together, cut apart, together again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.nats_parts import Cable
from integration.system import System, wait_for
from serai.cli.embedded_nats import EmbeddedNats, LeafRemote
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.worker_agent.engine.process import free_port

FAST = ("--ttft-ms", "1", "--tpot-ms", "1")
SEEN_WITHIN_S = 6.0
"""Heartbeats alone: 3.5 s, and some for a machine that others use."""


class Link:
    """A cable between the two servers, in a loop and thread of its own."""

    def __init__(self, port: int, target_port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._cable = Cable(port, target_port)
        self.heal()

    def heal(self) -> None:
        self._do(self._cable.connect())

    def cut(self) -> None:
        self._do(self._cable.cut())

    def freeze(self) -> None:
        self._loop.call_soon_threadsafe(self._cable.freeze)

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._cable.thaw)

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class Site(System):
    name = ""

    def start_all(self) -> None:
        self.start_nats()
        self.start_registry("--site", self.name)
        self.start_ingress("--site", self.name)

    def agent(self, model: str) -> Any:
        return self.start_agent(*FAST, model=model, agent_flags=("--site", self.name))

    def models(self) -> dict[str, str]:
        """State by model."""
        with self.client() as client:
            data = client.get("/v1/models").json()["data"]
        return {entry["id"]: entry["state"] for entry in data}

    def chat(self, model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        with self.client() as client:
            return client.post("/v1/chat/completions", json=body).status_code


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site, Link]]:
    """Both sites with their services, linked; agents as the test likes."""
    key, wire_port, leaf_port = new_key(), free_port(), free_port()
    hub = EmbeddedNats(tmp_path / "hub" / "nats", "hub", domain="hub", leaf_port=leaf_port)
    ports = free_port(), free_port()
    hub.prepare(ports[0])
    remote = LeafRemote(f"nats-leaf://127.0.0.1:{wire_port}", hub.key_file("leaf"))
    far = EmbeddedNats(tmp_path / "far" / "nats", "far", domain="far", leaf_remotes=(remote,))
    far.prepare(ports[1])
    made: list[Site] = []
    link = Link(wire_port, leaf_port)
    try:
        for name, port, nats in (("hub", ports[0], hub), ("far", ports[1], far)):
            site = Site(tmp_path / name, port, nats, key)
            site.name = name
            write_keys(site.folder / "keys.json", [StoredKey("test", hashed(key))])
            made.append(site)
            site.start_all()
        yield made[0], made[1], link
    finally:
        for site in made:
            site.stop()
        link.close()


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_each_site_serves_what_it_sees_and_after_healing_both_see_all(sites: tuple[Site, Site, Link], how: str) -> None:
    hub, far, link = sites
    hub.agent("both")
    far.agent("both")
    leaver = far.agent("far")
    for site in (hub, far):
        site.wait_for_sessions(2, "both")
        site.wait_for_sessions(1, "far")
        assert site.models() == {"both": "serving", "far": "serving"}
    assert hub.chat("far") == 200

    link.cut() if how == "cut" else link.freeze()
    cut_at_s = time.monotonic()
    answers = []
    while time.monotonic() - cut_at_s < SEEN_WITHIN_S:
        answers += [site.chat("both") for site in (hub, far)]
    assert set(answers) == {200}, "no request fails on either side for what both serve"
    assert far.chat("far") == 200
    assert hub.chat("far") == 503
    assert hub.models() == {"both": "serving", "far": "offline"}
    assert far.models() == {"both": "serving", "far": "serving"}
    assert (hub.sessions("both"), far.sessions("both")) == (1, 1)

    # Meanwhile one leaves and one comes; neither can be heard on the other side.
    assert leaver.terminate() == 0
    hub.agent("new")
    assert "new" not in far.models()

    link.heal() if how == "cut" else link.thaw()
    healed_at_s = time.monotonic()
    for site in (hub, far):
        wait_for(lambda: site.sessions("both") == 2, f"{site.name} sees both again", 10)  # noqa: B023
        wait_for(lambda: site.models() == {"both": "serving", "new": "serving"}, f"{site.name}'s models", 10)  # noqa: B023
    print(f"{how}: views equal {time.monotonic() - healed_at_s:.2f} s after healing")
    time.sleep(3)
    assert hub.models() == far.models() == {"both": "serving", "new": "serving"}, "nothing comes back"
