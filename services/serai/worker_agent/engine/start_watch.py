"""How far the start of an engine is, and whether it still gets on. Pure.

Judged by what can be seen from outside (bytes read and written, memory, the port, the API), never by
what the engine writes. What moves slowly is slow and not dead: as long as bytes or memory move, a start is never given
up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

QUIET_SHARE = 1 / 3
"""After the last movement a start is left alone for this share of its least time: compilers show nothing else."""
LOAD_PATIENCE = 2.0
"""How often over a start may take what its model's size and the rate of reading explain."""
MOVED_BYTES = 16 << 20
"""Less is what a hung process reads and writes now and then, too."""
_PROGRAM_BYTES = 2 << 30
"""What an engine without a model has in memory, at most."""
_DOWNLOAD_BYTES = 64 << 20
_GPU_BYTES = 1 << 30
_LOADED_SHARE = 0.9


class Phase(StrEnum):
    """Of a start, in their usual order. `session_record.loading_phase` has these words."""

    QUEUED = "queued"
    """It waits for its next try, or for a GPU that others hold."""
    IMPORT = "import"
    DOWNLOAD = "download"
    LOAD = "load"
    COMPILE = "compile"
    """Weights are there and nothing is read any more; also warm-up before the port opens."""
    WARM_UP = "warm-up"
    """Its port is open, and its model not listed yet."""
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class Signs:
    """One look at the processes of an engine; sums over all that live."""

    read_bytes: int = 0
    written_bytes: int = 0
    resident_bytes: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What is told of a start."""

    phase: Phase
    share: float | None = None
    """0 to 1; None = not known."""
    bytes_per_s: float = 0.0
    """Rate of reading while the model is loaded."""


class StartWatch:
    """Of one start. `patience_s`: how long it may take at least, whatever is seen or not."""

    def __init__(self, model_bytes: int, patience_s: float, now: float) -> None:
        """`model_bytes` 0 = not known."""
        self._model_bytes = model_bytes
        self._patience_s = patience_s
        self._began_at_s = now
        self._moved_at_s = now
        self._first: Signs | None = None
        self._last_moved = Signs()
        self._highest = Signs()
        self._read_from: tuple[float, int] | None = None
        self._bytes_per_s = 0.0
        self._phase = Phase.IMPORT

    def look(self, signs: Signs, now: float, *, port_open: bool = False, listed: bool = False) -> Progress:
        """One look. Phases only go forward, but for download, after which the model is loaded."""
        if self._first is None:
            self._first = self._last_moved = self._highest = signs
        before = self._phase
        self._phase = self._phase_now(signs, port_open=port_open, listed=listed)
        if self._phase is not before or self._moved(signs):
            self._moved_at_s = now
            self._last_moved = signs
            self._measure(now)
        return Progress(self._phase, self._share(), self._bytes_per_s)

    def overdue(self, now: float) -> bool:
        """Whether to give up: its time is over, and nothing has moved for long."""
        quiet = now - self._moved_at_s > self._patience_s * QUIET_SHARE
        return quiet and now - self._began_at_s > self.least_s

    @property
    def least_s(self) -> float:
        """How long it may take even when nothing moves."""
        explained_s = self._model_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        return self._patience_s + LOAD_PATIENCE * explained_s

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _read(self) -> int:
        """Bytes of the model that were read so far. A file that is mapped shows as memory, one that is read as reads;
        processes that end take theirs along."""
        assert self._first is not None
        highest = self._highest
        read = highest.read_bytes - self._first.read_bytes
        return max(read, highest.resident_bytes - _PROGRAM_BYTES, highest.gpu_bytes)

    def _moved(self, signs: Signs) -> bool:
        last = self._last_moved
        return (
            signs.read_bytes - last.read_bytes >= MOVED_BYTES
            or signs.written_bytes - last.written_bytes >= MOVED_BYTES
            or abs(signs.resident_bytes - last.resident_bytes) >= MOVED_BYTES * 4
            or abs(signs.gpu_bytes - last.gpu_bytes) >= MOVED_BYTES * 4
        )

    def _phase_now(self, signs: Signs, *, port_open: bool, listed: bool) -> Phase:
        assert self._first is not None
        highest = self._highest = _max(self._highest, signs)
        if listed:
            return Phase.CANARY
        if port_open or self._phase in (Phase.WARM_UP, Phase.CANARY):
            return Phase.WARM_UP
        reading = self._read >= (self._model_bytes or 4 * _GPU_BYTES) * 0.05 or highest.gpu_bytes >= _GPU_BYTES
        loaded = (
            bool(self._model_bytes)
            and self._read >= self._model_bytes * _LOADED_SHARE
            and signs.read_bytes - self._last_moved.read_bytes < MOVED_BYTES
        )
        if self._phase is Phase.COMPILE or (self._phase is Phase.LOAD and loaded):
            return Phase.COMPILE
        downloaded = highest.written_bytes - self._first.written_bytes
        if downloaded >= _DOWNLOAD_BYTES and signs.written_bytes - self._last_moved.written_bytes >= MOVED_BYTES:
            return Phase.DOWNLOAD
        if self._phase is Phase.DOWNLOAD and downloaded > highest.read_bytes:
            return Phase.DOWNLOAD
        return Phase.LOAD if reading or self._phase is Phase.LOAD else Phase.IMPORT

    def _measure(self, now: float) -> None:
        """Only when something has moved: a load that stands still is not a slow one."""
        if self._phase is not Phase.LOAD:
            return
        if self._read_from is None:
            self._read_from = now, self._read
            return
        since_s, read = self._read_from
        if now > since_s and self._read > read:
            self._bytes_per_s = (self._read - read) / (now - since_s)

    def _share(self) -> float | None:
        if not self._model_bytes or self._phase in (Phase.IMPORT, Phase.DOWNLOAD):
            return None
        return round(min(0.99, max(0, self._read) / self._model_bytes), 2) if self._phase is Phase.LOAD else 0.99


def _max(a: Signs, b: Signs) -> Signs:
    return Signs(
        max(a.read_bytes, b.read_bytes),
        max(a.written_bytes, b.written_bytes),
        max(a.resident_bytes, b.resident_bytes),
        max(a.gpu_bytes, b.gpu_bytes),
    )
