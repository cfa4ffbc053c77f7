"""deploy/slurm/leaf.conf: agents of a cluster whose only way out is an HTTP proxy serve through a leaf node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nkeys
import pytest

from integration.nats_parts import certificate
from integration.system import System, port_answers, wait_for
from serai.cli.embedded_nats import EmbeddedNats, server_binary
from serai.ingress.access import StoredKey, hashed, new_key, write_keys
from serai.worker_agent.engine.process import free_port

LEAF = Path(__file__).parents[2] / "deploy" / "slurm" / "leaf.conf"


# An HTTP proxy that allows CONNECT and nothing else; it prints what it is asked for.
PROXY = """
import asyncio, contextlib, sys

async def carry(reader, writer):
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()

async def on_connection(reader, writer):
    method, target, _ = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().split(" ", 2)
    print(method, target, flush=True)
    there = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
    writer.write(b"HTTP/1.1 200 Connection established\\r\\n\\r\\n")
    await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

async def main():
    async with await asyncio.start_server(on_connection, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()

asyncio.run(main())
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[System]:
    """A site that takes leaf nodes, with TLS."""
    port, leaf_port = free_port(), free_port()
    nats = EmbeddedNats(tmp_path / "nats", leaf_port=leaf_port)
    nats.prepare(port)
    cert_file, key_file = certificate(tmp_path)
    tls = f'no_advertise: true\n  tls {{ cert_file: "{cert_file}", key_file: "{key_file}" }}'
    nats.config_file.write_text(nats.config_file.read_text().replace("no_advertise: true", tls))
    key = new_key()
    write_keys(tmp_path / "keys.json", [StoredKey("test", hashed(key))])
    made = System(tmp_path, port, nats, key)
    made.start_nats()
    try:
        made.start_registry()
        made.start_ingress()
        yield made
    finally:
        made.stop()


def public_key(file: Path) -> str:
    return str(nkeys.from_seed(bytearray(file.read_bytes().strip())).public_key.decode())


def test_an_agent_serves_through_leaf_and_proxy(hub: System) -> None:
    binary = server_binary()
    assert binary
    proxy_port, leaf_port = free_port(), free_port()
    proxy = hub.start("proxy", [sys.executable, "-c", PROXY, str(proxy_port)])
    wait_for(lambda: port_answers(proxy_port), "the proxy listens")
    hub.start(
        "leaf",
        [binary, "-c", str(LEAF)],
        {
            "LEAF_LISTEN": f"127.0.0.1:{leaf_port}",
            "LEAF_REMOTE": f"tls://localhost:{hub.nats.leaf_port}",
            "LEAF_PROXY": f"http://127.0.0.1:{proxy_port}",
            "LEAF_SEED": hub.nats.key_file("leaf").read_text().strip(),
            "LEAF_AGENT": public_key(hub.nats.key_file("agent")),
            "LEAF_TOOLS": public_key(hub.nats.key_file("tools")),
            "SSL_CERT_FILE": str(hub.folder / "cert.pem"),
        },
    )
    wait_for(lambda: port_answers(leaf_port), "the leaf listens")
    url = f"nats://127.0.0.1:{leaf_port}"
    engine = [sys.executable, "-m", "serai.engine_emulator", "--model", "m"]
    flags = ["--nats-url", url, "--nats-nkey-file", str(hub.nats.key_file("agent")), "--model", "m"]
    hub.start("agent", [sys.executable, "-m", "serai.cli.main", "agent", *flags, "--", *engine])
    hub.wait_for_sessions(1)
    assert f"CONNECT localhost:{hub.nats.leaf_port}" in proxy.log
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}
    with hub.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert '"error"' not in answer.text
    tools = ["--nats-url", url, "--nats-nkey-file", str(hub.nats.key_file("tools"))]
    command = [sys.executable, "-m", "serai.cli.main", "registry", "ls", *tools]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "serving" in listed.stdout, listed.stderr


def test_who_dials_the_leaf_may_do_what_he_may_at_the_other_server(tmp_path: Path) -> None:
    nats = EmbeddedNats(tmp_path)
    nats.prepare(4222)
    written = " ".join(LEAF.read_text().split())
    for role in ("agent", "tools"):
        public = public_key(nats.key_file(role))
        line = next(line for line in nats.config_file.read_text().splitlines() if public in line)
        allowed = " ".join(line.strip().replace(public, f"$LEAF_{role.upper()}").split())
        assert allowed in written, f"the permissions of {role} have changed; leaf.conf should say: {allowed}"
