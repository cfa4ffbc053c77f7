"""API keys: only hashes on disk, readable by their owner only, taken over when the file changes."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from serai.cli import main as cli
from serai.ingress.access import Access, BadKeysFile, StoredKey, hashed, new_key, read_keys, write_keys
from serai.ingress.caller import ANONYMOUS, Caller
from serai.ingress.openai_format import ApiError


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def serai(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def holder(name: str) -> Caller:
    return Caller(name, scopes=(f"key:{name}", "project:default"))


def found(access: Access, header: str | None) -> Caller | str:
    """Who sent that header, or the code of the refusal."""
    try:
        return asyncio.run(access.caller(header))
    except ApiError as error:
        return error.code or ""


UNKNOWN = "invalid_api_key"


def test_keys_are_long_recognisable_and_never_the_same() -> None:
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(key.startswith("sk-serai-") and len(key) >= 9 + 43 for key in keys)


def test_the_file_holds_hashes_and_no_key_and_is_its_owners_only(keys_file: Path) -> None:
    key = new_key()
    umask = os.umask(0)
    try:
        write_keys(keys_file, [StoredKey("alice", hashed(key))])
    finally:
        os.umask(umask)
    text = keys_file.read_text()
    assert key not in text
    assert key.removeprefix("sk-serai-") not in text
    assert hashed(key) in text
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert os.listdir(keys_file.parent) == [keys_file.name]


def test_writing_replaces_a_file_left_by_a_crash_and_one_that_others_could_read(keys_file: Path) -> None:
    keys_file.write_text("[]")
    keys_file.chmod(0o644)
    keys_file.with_name("keys.json.new").write_text("half a fi")
    write_keys(keys_file, [StoredKey("a", "0" * 64)])
    assert read_keys(keys_file) == [StoredKey("a", "0" * 64)]
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600


def test_a_key_is_known_by_the_bearer_header(keys_file: Path) -> None:
    key = new_key()
    write_keys(keys_file, [StoredKey("alice", hashed(key)), StoredKey("bob", hashed(new_key()))])
    access = Access(keys_file)
    assert found(access, f"Bearer {key}") == holder("alice")
    assert found(access, f"bearer  {key} ") == holder("alice")
    stored_hash = hashed(key)
    for refused in (None, "", key, f"Basic {key}", f"Bearer {key}x", f"Bearer {stored_hash}", "Bearer ", "Bearer"):
        assert found(access, refused) == UNKNOWN


def test_everyone_may_ask_only_where_that_is_said() -> None:
    access = Access(None, anonymous=True)
    assert access.known(None) == found(access, None) == ANONYMOUS
    assert not access.refresh()
    assert found(Access(None), None) == UNKNOWN


def rewrite(path: Path, keys: list[StoredKey]) -> None:
    """As `serai keys` would, at a later time."""
    before_ns = path.stat().st_mtime_ns
    write_keys(path, keys)
    os.utime(path, ns=(before_ns + 1, before_ns + 1))


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(keys_file: Path) -> None:
    first, second = new_key(), new_key()
    write_keys(keys_file, [StoredKey("a", hashed(first))])
    access = Access(keys_file)
    assert not access.refresh()
    rewrite(keys_file, [StoredKey("a", hashed(second))])
    assert found(access, f"Bearer {first}") == holder("a")
    assert access.refresh()
    assert (found(access, f"Bearer {first}"), found(access, f"Bearer {second}")) == (UNKNOWN, holder("a"))
    assert not access.refresh()


def test_the_keys_read_before_stay_valid_when_the_file_breaks(keys_file: Path) -> None:
    key = new_key()
    write_keys(keys_file, [StoredKey("a", hashed(key))])
    access = Access(keys_file)
    keys_file.write_text("[{")
    with pytest.raises(BadKeysFile, match="is not a keys file"):
        access.refresh()
    keys_file.unlink()
    with pytest.raises(BadKeysFile, match="cannot read the keys file"):
        access.refresh()
    assert found(access, f"Bearer {key}") == holder("a")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b'[{"name": "a"}]', b'[{"name": "a", "sha256": 1}]', b'[{"name": "\xff", "sha256": ""}]'],
)
def test_a_malformed_file_is_named_and_the_way_out_is_said(keys_file: Path, content: bytes) -> None:
    keys_file.write_bytes(content)
    with pytest.raises(BadKeysFile, match=r"keys\.json is not a keys file: .*`serai keys add`"):
        Access(keys_file)


@pytest.mark.parametrize("not_a_hash", ["", "xyz", "0" * 63, "g" * 64])
def test_a_hash_that_is_none_is_named_with_its_key(keys_file: Path, not_a_hash: str) -> None:
    write_keys(keys_file, [StoredKey("alice", "0" * 64), StoredKey("bob", not_a_hash)])
    with pytest.raises(BadKeysFile, match=r"keys\.json: .*'bob' is not 64 hexadecimal digits"):
        Access(keys_file)


def test_a_missing_file_is_named(keys_file: Path) -> None:
    with pytest.raises(BadKeysFile, match=r"cannot read the keys file .*keys\.json: No such file"):
        Access(keys_file)


def test_keys_are_added_listed_and_removed_by_command(capsys: pytest.CaptureFixture[str], keys_file: Path) -> None:
    file = f"--keys-file={keys_file}"
    code, shown, _ = serai(capsys, "keys", "add", "alice", file)
    assert code == 0
    key = shown.strip()
    assert serai(capsys, "keys", "add", "bob", file)[0] == 0
    assert found(Access(keys_file), f"Bearer {key}") == holder("alice")
    assert key not in keys_file.read_text()
    assert serai(capsys, "keys", "list", file) == (0, "alice\nbob\n", "")
    assert serai(capsys, "keys", "remove", "alice", file)[0] == 0
    assert serai(capsys, "keys", "list", file) == (0, "bob\n", "")
    assert found(Access(keys_file), f"Bearer {key}") == UNKNOWN


@pytest.mark.parametrize(
    ("command", "said"),
    [(("add", "alice"), "has a key named 'alice'"), (("remove", "bob"), "has no key named 'bob'")],
)
def test_a_name_that_is_taken_or_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], keys_file: Path, command: tuple[str, str], said: str
) -> None:
    write_keys(keys_file, [StoredKey("alice", "0" * 64)])
    code, shown, complaint = serai(capsys, "keys", *command, f"--keys-file={keys_file}")
    assert (code, shown, complaint.count("\n")) == (2, "", 1)
    assert said in complaint
    assert read_keys(keys_file) == [StoredKey("alice", "0" * 64)]


@pytest.mark.parametrize("command", [("add", "x"), ("remove", "x"), ("list",)])
def test_a_command_never_overwrites_a_file_it_cannot_read(
    capsys: pytest.CaptureFixture[str], keys_file: Path, command: tuple[str, ...]
) -> None:
    keys_file.write_text("somebody else's file")
    code, _, complaint = serai(capsys, "keys", *command, f"--keys-file={keys_file}")
    assert (code, complaint.count("\n")) == (2, 1)
    assert keys_file.read_text() == "somebody else's file"
