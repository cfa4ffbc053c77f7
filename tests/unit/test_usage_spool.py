"""Records wait in files or in memory, leave in order when they are safe, and outlive a process that was killed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.ingress import usage_spool
from serai.ingress.usage_spool import FolderSpool, MemorySpool, Spool, SpoolFull, spool_in
from serai.runtime.service import ServiceFailure


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.usage"))


@pytest.fixture(params=["memory", "folder"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Spool:
    return MemorySpool(1_000_000) if request.param == "memory" else FolderSpool(tmp_path / "spool", 1_000_000)


def test_lines_leave_in_order_whole_and_only_when_they_are_safe(spool: Spool) -> None:
    for number in range(5):
        spool.append(b"line %d\n" % number)
    assert spool.read(15) == spool.read(15) == b"line 0\nline 1\n"
    spool.forget(14)
    spool.append(b"line 5\n")
    assert spool.read(1000) == b"line 2\nline 3\nline 4\nline 5\n"
    spool.forget(7)
    assert spool.pending_bytes == 21
    spool.forget(21)
    assert (spool.read(1000), spool.pending_bytes) == (b"", 0)


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=30), st.integers(1, 200)), max_size=60))
def test_whatever_is_taken_and_forgotten_each_line_leaves_once(steps: list[bytes | int]) -> None:
    """Bytes are appended; a number reads so much and forgets what it got."""
    spool, said, left = MemorySpool(), b"", b""
    for step in steps:
        if isinstance(step, bytes):
            line = step.replace(b"\n", b" ") + b"\n"
            spool.append(line)
            said += line
        else:
            batch = spool.read(step)
            spool.forget(len(batch))
            left += batch
    while batch := spool.read(64):
        spool.forget(len(batch))
        left += batch
    assert left == said


def test_a_full_spool_takes_nothing_and_says_so(tmp_path: Path) -> None:
    for spool in (MemorySpool(10), FolderSpool(tmp_path, 10)):
        spool.append(b"12345678\n")
        with pytest.raises(SpoolFull, match="10 bytes"):
            spool.append(b"9\n9\n")
        spool.forget(9)
        spool.append(b"9\n")


def test_what_a_dead_process_left_is_found_but_not_what_a_live_one_has(tmp_path: Path) -> None:
    live, dead = FolderSpool(tmp_path), FolderSpool(tmp_path)
    live.append(b"live\n")
    dead.append(b"dead\n")
    dead.append(b"half a l")
    dead._current.close()  # As SIGKILL does: the lock goes, the file stays.
    heir = FolderSpool(tmp_path)
    assert heir.adopt() == len(b"dead\nhalf a l")
    heir.append(b"new\n")
    assert heir.read(1000) == b"dead\n"
    heir.forget(5)
    assert heir.read(1000) == b"new\n", "a line that its writer did not live to finish is no record"
    assert heir.adopt() == 0
    heir.forget(4)
    assert heir.pending_bytes == 0
    assert set(files(tmp_path)) == {live._current.path, heir._current.path}


def test_files_that_were_sent_are_removed_and_one_that_is_written_to_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_spool, "SEGMENT_BYTES", 40)
    monkeypatch.setattr(usage_spool, "CLEAR_BYTES", 20)
    spool = FolderSpool(tmp_path)
    for number in range(10):
        spool.append(b"line %d\n" % number)
    spool.forget(len(spool.read(20)))
    assert len(files(tmp_path)) == 2, "the full one is not written to any more"
    spool.append(b"line 10\n")
    seen = b""
    while batch := spool.read(20):
        seen += batch
        spool.forget(len(batch))
    assert seen == b"".join(b"line %d\n" % number for number in range(2, 11))
    assert len(files(tmp_path)) == 1
    spool.append(b"x" * 30 + b"\n")
    spool.forget(len(spool.read(100)))
    assert not files(tmp_path)[0].read_bytes().strip(b"\x00")
    with pytest.raises(SpoolFull, match="at most 40"):
        spool.append(b"x" * 41)
    spool.close()
    assert files(tmp_path) == []


def test_a_full_disk_is_told_and_nothing_that_was_taken_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_spool, "SEGMENT_BYTES", 10)
    spool = FolderSpool(tmp_path)
    spool.append(b"12345678\n")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpoolFull, match="No space left"):
        spool.append(b"9\n")
    assert spool.read(100) == b"12345678\n"
    assert len(files(tmp_path)) == 1, "the file for which there was no room is gone"


def test_a_line_whose_end_was_copied_before_its_middle_is_no_record(tmp_path: Path) -> None:
    dead = FolderSpool(tmp_path)
    dead.append(b"whole\n")
    dead.append(b"to\x00\x00rn\n")  # Copies need not go from left to right, and their process may die within one.
    dead._current.close()
    heir = FolderSpool(tmp_path)
    heir.adopt()
    assert heir.read(1000) == b"whole\n"


def test_closing_keeps_what_was_not_sent(tmp_path: Path) -> None:
    spool = FolderSpool(tmp_path)
    spool.append(b"unsent\n")
    spool.close()
    heir = FolderSpool(tmp_path)
    heir.adopt()
    assert heir.read(100) == b"unsent\n"


def test_a_folder_that_cannot_be_used_is_told_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceFailure, match=r"--usage-spool .*file"), spool_in(tmp_path / "file"):
        pass


def test_a_line_longer_than_is_asked_for_leaves_alone(spool: Spool) -> None:
    """Else nothing behind it would ever leave, and whoever sends would turn in a circle."""
    for line in (b"x" * 400 + b"\n", b"short\n"):
        spool.append(line)
    for size in (401, 6):
        batch = spool.read(100)
        assert len(batch) == size
        spool.forget(size)
    assert (spool.read(100), spool.pending_bytes) == (b"", 0)
