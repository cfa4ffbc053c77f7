"""The metrics of several worker processes as one: counters and histograms are added up, gauges say whose they are.

Each worker answers for itself on a Unix socket in a folder that only they share; the one that is scraped asks the rest.
A counter must never fall, or Prometheus takes all of it for new: so what a worker has last told, and what it had
counted when it ended, stays in the folder, and is added to the sums of those that live.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import structlog
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import REGISTRY, CollectorRegistry

log = structlog.get_logger()

ANSWER_TIMEOUT_S = 1.0
_ADDED = ("counter", "histogram", "summary")
_MADE_AT = "_created"
_ENDED = "ended"


class Family(msgspec.Struct, frozen=True):
    """One metric with all its label values: sample name, sorted labels, value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Family])


def snapshot(registry: CollectorRegistry = REGISTRY) -> list[Family]:
    """What this process counts now."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(one.name, tuple(sorted(one.labels.items())), one.value) for one in metric.samples],
        )
        for metric in registry.collect()
    ]


def combined(live: Mapping[str, list[Family]], past: Iterable[list[Family]] = ()) -> list[Family]:
    """One list of families: sums over `live` and `past`, and the gauges of `live` under the label `worker`."""
    found: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for worker, families in [*live.items(), *[("", families) for families in past]]:
        for family in families:
            if family.kind not in _ADDED and not worker:
                continue
            known = found.setdefault(family.name, Family(family.name, family.kind, family.help, []))
            if family.kind not in _ADDED:
                known.samples.extend((name, (*labels, ("worker", worker)), v) for name, labels, v in family.samples)
                continue
            totals = sums.setdefault(family.name, {})
            for name, labels, value in family.samples:
                before = totals.get((name, labels))
                if before is not None:
                    value = min(before, value) if name.endswith(_MADE_AT) else before + value
                totals[name, labels] = value
    for name, totals in sums.items():
        found[name].samples.extend((sample, labels, value) for (sample, labels), value in totals.items())
    return list(found.values())


def counts(families: list[Family]) -> list[Family]:
    """What outlives a worker."""
    return [family for family in families if family.kind in _ADDED]


def rendered(families: list[Family]) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Shown(families))
    return generate_latest(registry)


class _Shown:
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


class SharedMetrics:
    """One worker's part. `slot` and `worker` as its parent numbers them; `folder` is the parent's, and private."""

    def __init__(self, folder: Path, slot: int, worker: int, parent: int) -> None:
        self._folder = folder
        self._own = f"{slot}.{worker}"
        self._parent = parent
        self._is_over = False
        self.is_orphaned = False
        """The parent is gone; told when its end of the control socket closes, which is before we get another parent."""

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answers the other workers during the block; at its end leaves them what this one has counted."""
        path = self._socket(self._own)
        server = await asyncio.start_unix_server(self._answer, path)
        try:
            yield
        finally:
            with _locked(self._folder):  # Nobody may find it gone before its last counts are there.
                server.close()
                self._keep(self._own_counts())
                self._is_over = True
                path.unlink(missing_ok=True)
            orphaned = self.is_orphaned or os.getppid() != self._parent
            if orphaned and not any(self._folder.glob("*.sock")):
                shutil.rmtree(self._folder, ignore_errors=True)  # The parent was killed; this was the last.

    async def scraped(self) -> bytes:
        """The whole, in Prometheus' text format."""
        names = [path.stem for path in self._folder.glob("*.sock") if path.stem != self._own]
        answers = await asyncio.gather(*[self._ask(name) for name in names])
        own = self._own_counts()
        self._keep(own)
        live = {self._own: own, **{name: said for name, said in zip(names, answers, strict=True) if said is not None}}
        return rendered(combined(_named(live), self._past(set(live))))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        families = self._own_counts()
        self._keep(families)
        writer.write(_encoder.encode(families))
        try:
            await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def _ask(self, name: str) -> list[Family] | None:
        """What a worker counts; None when it has ended, or is too slow to say."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(name))
                try:
                    return _decoder.decode(await reader.read())
                finally:
                    writer.close()
        except ConnectionRefusedError:
            self._socket(name).unlink(missing_ok=True)  # Killed: nobody will ever answer there.
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("metrics.worker_silent", worker=name, error=repr(error))
        return None

    def _past(self, live: set[str]) -> list[list[Family]]:
        """What those that did not answer had told last. Those that have ended are joined into one file."""
        with _locked(self._folder):
            ended = _read(self._counts(_ENDED))
            silent: list[list[Family]] = []
            for path in sorted(self._folder.glob("*.counts")):
                if path.stem in live or path.stem == _ENDED:
                    continue
                if self._socket(path.stem).exists():
                    silent.append(_read(path))
                    continue
                ended = combined({}, [ended, _read(path)])
                _write(self._counts(_ENDED), ended)
                path.unlink()
        return [ended, *silent]

    def _own_counts(self) -> list[Family]:
        return snapshot()

    def _keep(self, families: list[Family]) -> None:
        if not self._is_over:
            _write(self._counts(self._own), counts(families))

    def _socket(self, name: str) -> Path:
        return self._folder / f"{name}.sock"

    def _counts(self, name: str) -> Path:
        return self._folder / f"{name}.counts"


def _named(live: Mapping[str, list[Family]]) -> dict[str, list[Family]]:
    """By the value of the label `worker`: the slot, and for one that is being replaced its own number, too."""
    named: dict[str, list[Family]] = {}
    for name in sorted(live, key=lambda name: -int(name.partition(".")[2])):
        slot, _, worker = name.partition(".")
        named[f"{slot}-{worker}" if slot in named else slot] = live[name]
    return named


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> list[Family]:
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return []


def _write(path: Path, families: list[Family]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_encoder.encode(families))
    fresh.replace(path)
