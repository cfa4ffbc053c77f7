"""Where usage records wait until JetStream has them: in a folder, or in memory. Bounded either way.

In a folder (`--usage-spool`) a record is written before the last bytes of its answer go out, so that a process that is
killed loses none of a request that was answered. Nothing is synced to the disk: the kernel keeps what a dead process
has written, a power cut may take the last seconds. Each process writes files of its own and holds a lock on them; a
file whose lock is free belongs to a process that is gone, and is sent by whoever finds it.

A file is mapped into memory, with all its room taken on the disk when it is made: a record costs a copy, not a call of
the kernel, which was a thirtieth of a request. It is filled with zeros beyond its lines, which have none: so its end is
known to whoever takes it over.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from serai.runtime.service import ServiceFailure

MEMORY_BYTES_MAX = 2 * 1024 * 1024
FOLDER_BYTES_MAX = 1024 * 1024 * 1024
SEGMENT_BYTES = 1024 * 1024
"""Size of a file. A full one is removed when it was sent."""
CLEAR_BYTES = 256 * 1024
"""So much that was sent is kept in the file that is written to, rather than clear it all the time. After a crash it is
sent again, and counts once all the same."""
_SUFFIX = ".usage"


class SpoolFull(Exception):
    """The record was not taken; the text says why."""


class Spool(Protocol):
    """Lines, first in first out. What was read stays until it is `forget`-ten."""

    @property
    def pending_bytes(self) -> int: ...

    def append(self, line: bytes) -> None:
        """Takes one line that ends with a newline. Raises SpoolFull."""

    def read(self, bytes_max: int) -> bytes:
        """The oldest whole lines, as many as fit, at least one; nothing when there are none. The same until
        `forget`."""

    def forget(self, size: int) -> None:
        """The first `size` bytes of what was read are safe elsewhere."""

    def adopt(self) -> int:
        """Takes what dead processes have left; how many bytes."""

    def close(self) -> None: ...


class MemorySpool:
    """Lost with the process."""

    def __init__(self, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes_max = bytes_max
        self.pending_bytes = 0

    def append(self, line: bytes) -> None:
        if self.pending_bytes + len(line) > self._bytes_max:
            raise SpoolFull(f"{self._bytes_max} bytes of records wait in memory already")
        self._lines.append(line)
        self.pending_bytes += len(line)

    def read(self, bytes_max: int) -> bytes:
        taken: list[bytes] = []
        size = 0
        for line in self._lines:
            if taken and size + len(line) > bytes_max:
                break
            taken.append(line)
            size += len(line)
        return b"".join(taken)

    def forget(self, size: int) -> None:
        self.pending_bytes -= size
        while size > 0:
            size -= len(self._lines.popleft())

    def adopt(self) -> int:
        return 0

    def close(self) -> None:
        pass


@contextmanager
def spool_in(folder: Path | None) -> Iterator[Spool]:
    """A spool in `folder`, or in memory. Raises ServiceFailure when the folder cannot be used."""
    try:
        spool: Spool = MemorySpool() if folder is None else FolderSpool(folder)
    except OSError as error:
        text = f"--usage-spool {folder}: {error.strerror}; give a folder that this user may write to"
        raise ServiceFailure(text, exit_code=2) from error
    try:
        yield spool
    finally:
        spool.close()


class _Segment:
    """One locked file of ours."""

    __slots__ = ("_map", "fd", "path", "position", "size")

    def __init__(self, path: Path, fd: int, size: int | None = None) -> None:
        """`size`: what it holds; None = to be found out. Raises OSError when it cannot be mapped."""
        self.path = path
        self.fd = fd
        self._map = mmap.mmap(fd, 0)
        self.size = self._end() if size is None else size
        self.position = 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def has_room(self, size: int) -> bool:
        return self.size + size <= len(self._map)

    def append(self, line: bytes) -> None:
        end = self.size + len(line)
        self._map[self.size : end] = line
        self.size = end

    def whole_lines(self, bytes_max: int) -> bytes:
        end = self._map.rfind(b"\n", self.position, min(self.size, self.position + bytes_max)) + 1
        end = end or self._map.find(b"\n", self.position, self.size) + 1  # One that is longer.
        return self._map[self.position : max(self.position, end)]

    def clear(self) -> None:
        """Nothing of it is needed any more."""
        self._map[: self.size] = bytes(self.size)
        self.size = self.position = 0

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def _end(self) -> int:
        end = self._map.find(b"\x00")
        return len(self._map) if end < 0 else end


class FolderSpool:
    """Files in `folder`, which is made when it is missing; a local disk. Raises OSError when it cannot be used."""

    def __init__(self, folder: Path, bytes_max: int = FOLDER_BYTES_MAX) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._full: deque[_Segment] = deque()
        """To be sent and removed, the oldest first."""
        self._current = self._new_segment()
        self.pending_bytes = 0

    def append(self, line: bytes) -> None:
        if self.pending_bytes + len(line) > self._bytes_max:
            raise SpoolFull(f"{self._bytes_max} bytes of records wait in {self._folder} already")
        if not self._current.has_room(len(line)):
            self._next_segment(len(line))
        self._current.append(line)
        self.pending_bytes += len(line)

    def read(self, bytes_max: int) -> bytes:
        while self._full:
            segment = self._full[0]
            if data := segment.whole_lines(bytes_max):
                return data
            self.pending_bytes -= segment.left  # A line that its writer did not live to finish.
            self._full.popleft().remove()
        return self._current.whole_lines(bytes_max)

    def forget(self, size: int) -> None:
        segment = self._full[0] if self._full else self._current
        segment.position += size
        self.pending_bytes -= size
        if segment is self._current:
            if not segment.left and segment.size >= CLEAR_BYTES:
                segment.clear()
        elif not segment.left:
            self._full.popleft().remove()

    def adopt(self) -> int:
        taken = 0
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path == self._current.path or any(path == segment.path for segment in self._full):
                continue
            if (segment := _taken_over(path)) is not None:
                taken += segment.size
                self._full.append(segment)
        self.pending_bytes += taken
        return taken

    def close(self) -> None:
        """What was not sent stays for the next process."""
        for segment in (*self._full, self._current):
            if segment.left:
                segment.close()
            else:
                segment.remove()

    def _next_segment(self, size: int) -> None:
        """One that has room for so much. Raises SpoolFull."""
        if size > SEGMENT_BYTES:
            raise SpoolFull(f"a record of {size} bytes; at most {SEGMENT_BYTES}")
        try:
            fresh = self._new_segment()
        except OSError as error:
            raise SpoolFull(f"cannot make another file in {self._folder}: {error.strerror}") from error
        self._full.append(self._current)
        self._current = fresh

    def _new_segment(self) -> _Segment:
        while True:
            path = self._folder / f"{time.time_ns():x}-{os.urandom(4).hex()}{_SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _lock(fd):
                try:
                    os.posix_fallocate(fd, 0, SEGMENT_BYTES)
                    return _Segment(path, fd, 0)
                except OSError:
                    path.unlink(missing_ok=True)
                    os.close(fd)
                    raise
            os.close(fd)  # Somebody else found it between these two lines, and removes it as empty.


def _taken_over(path: Path) -> _Segment | None:
    """A file whose owner is gone; an empty one is removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None  # Removed meanwhile, or another user's.
    if not _lock(fd):
        os.close(fd)
        return None
    if not os.fstat(fd).st_size:
        path.unlink(missing_ok=True)
        os.close(fd)
        return None
    segment = _Segment(path, fd)
    if segment.size:
        return segment
    segment.remove()
    return None


def _lock(fd: int) -> bool:
    """Whether the file is ours now, and still has a name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(fd).st_nlink > 0
