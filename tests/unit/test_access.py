"""API keys: only hashes on disk, readable by their owner only, taken over when the file changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serai.cli import main as cli
from serai.ingress import access as access_module
from serai.ingress.access import (
    Access,
    BadKeysFile,
    StoredKey,
    hashed,
    new_key,
    providers_of,
    read_keys,
    write_keys,
)
from serai.ingress.caller import ANONYMOUS, Caller
from serai.ingress.configuration import Configuration, Project
from serai.ingress.limits import Limits
from serai.ingress.oidc import People
from serai.ingress.openai_format import ApiError
from serai.ingress.requirements import Providers


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
    with pytest.raises(BadKeysFile, match="there is no keys file"):
        access.refresh()
    assert found(access, f"Bearer {key}") == holder("a")


def test_a_file_that_comes_back_as_it_was_is_right_again(keys_file: Path) -> None:
    """As `cp -p` or `mv` brings it back. Who watches it must hear of that."""
    write_keys(keys_file, [StoredKey("a", hashed(new_key()))])
    access, before, kept = Access(keys_file), keys_file.stat(), keys_file.with_name("kept")
    keys_file.rename(kept)
    for _ in range(2):
        with pytest.raises(BadKeysFile, match="there is no keys file"):
            access.refresh()
    kept.rename(keys_file)
    assert keys_file.stat().st_mtime_ns == before.st_mtime_ns
    assert access.refresh()
    assert not access.refresh()


def test_a_file_that_is_back_before_it_is_said_to_be_missing_is_read(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(keys_file, [])
    access = Access(keys_file)

    def gone(path: Path) -> os.stat_result:
        raise FileNotFoundError(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", gone)
        assert access.refresh()
    assert access.refresh()


def test_who_is_looked_at_while_something_changes_is_not_remembered_as_before() -> None:
    async def main() -> None:
        class Slow(People):
            def __bool__(self) -> bool:
                return True

            async def caller(self, token: str) -> Caller:
                found = Caller("ann", project)
                await looked.wait()
                return found

        looked, project = asyncio.Event(), "before"
        access = Access(None, people=Slow())
        access.apply(Configuration())
        asking = asyncio.create_task(access.caller("Bearer a.b.c"))
        await asyncio.sleep(0)
        access.apply(Configuration())
        looked.set()
        assert (await asking).project == "before"
        assert access.known("Bearer a.b.c") is None

    asyncio.run(main())


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
    with pytest.raises(BadKeysFile, match=r"there is no keys file .*keys\.json; make one with `serai keys add NAME"):
        Access(keys_file)


def names(capsys: pytest.CaptureFixture[str], file: str) -> list[str]:
    code, shown, complaint = serai(capsys, "keys", "list", file)
    assert (code, complaint) == (0, "")
    return [line.split()[0] for line in shown.splitlines()[1:]]


def test_keys_are_added_listed_and_removed_by_command(capsys: pytest.CaptureFixture[str], keys_file: Path) -> None:
    file = f"--keys-file={keys_file}"
    code, shown, _ = serai(capsys, "keys", "add", "alice", file)
    assert code == 0
    key = shown.strip()
    assert serai(capsys, "keys", "add", "bob", file)[0] == 0
    assert found(Access(keys_file), f"Bearer {key}") == holder("alice")
    assert key not in keys_file.read_text()
    assert names(capsys, file) == ["alice", "bob"]
    assert serai(capsys, "keys", "remove", "alice", file)[0] == 0
    assert names(capsys, file) == ["bob"]
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


# -- what a key may ---------------------------------------------------------------------------------------------------

PHYSICS = Project(
    limits=Limits(requests_per_minute=5),
    weight=2.0,
    priority="normal",
    models=("llama-*", "qwen"),
    providers=Providers(frozenset({"alps", "jsc"}), frozenset({"cloud"})),
    may_opt_out=True,
)


def access_of(keys_file: Path, **fields: Any) -> tuple[Access, str]:
    """Of one key in the project `physics`."""
    key = new_key()
    write_keys(keys_file, [StoredKey("alice", hashed(key), **({"project": "physics"} | fields))])
    access = Access(keys_file)
    access.apply(Configuration(projects={"default": Project(), "physics": PHYSICS}))
    return access, f"Bearer {key}"


def caller_of_key(keys_file: Path, **fields: Any) -> Caller:
    access, header = access_of(keys_file, **fields)
    caller = found(access, header)
    assert isinstance(caller, Caller)
    assert access.known(header) == caller
    return caller


def test_a_holder_may_what_both_key_and_project_may(keys_file: Path) -> None:
    caller = caller_of_key(keys_file, models=("*-70b",), providers=("alps", "cscs", "-jsc"), priority="interactive")
    assert caller == Caller(
        name="alice",
        project="physics",
        models=(("*-70b",), ("llama-*", "qwen")),
        providers=Providers(frozenset({"alps"}), frozenset({"cloud", "jsc"})),
        priority="normal",
        weight=2.0,
        scopes=("key:alice", "project:physics"),
        may_opt_out=True,
    )
    assert [model for model in ("llama-70b", "llama-8b", "qwen", "qwen-70b") if caller.may_use(model)] == ["llama-70b"]


def test_a_key_without_lists_has_those_of_its_project(keys_file: Path) -> None:
    caller = caller_of_key(keys_file)
    assert (caller.models, caller.providers) == ((PHYSICS.models,), PHYSICS.providers)
    assert not caller_of_key(keys_file, models=()).may_use("qwen")


@pytest.mark.parametrize(("own", "holds"), [(None, "normal"), ("interactive", "normal"), ("batch", "batch")])
def test_the_lower_of_two_priorities_holds(keys_file: Path, own: str | None, holds: str) -> None:
    assert caller_of_key(keys_file, priority=own).priority == holds


def test_who_may_use_an_alias_may_use_its_models_by_that_name_only() -> None:
    caller = Caller("a", models=(("gpt-4o",),))
    assert caller.may_use("llama-70b", "gpt-4o")
    assert not caller.may_use("llama-70b")
    assert not caller.may_use("llama-70b", "gpt-5")


def test_limits_of_keys_are_told_by_name(keys_file: Path) -> None:
    access, _ = access_of(keys_file, requests_per_minute=1, budget_micros=5)
    assert access.limits() == {"alice": Limits(requests_per_minute=1, budget_micros=5)}
    assert access_of(keys_file)[0].limits() == {}


def test_a_key_is_taken_until_it_expires_and_then_told_since_when(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = datetime(2027, 1, 31, tzinfo=UTC)
    access, header = access_of(keys_file, expires=over)
    now = [over.timestamp() - 1]
    monkeypatch.setattr(access_module, "time", SimpleNamespace(time=lambda: now[0]))
    assert isinstance(found(access, header), Caller)
    now[0] += 1
    assert access.known(header) is None
    with pytest.raises(ApiError, match=r"The API key `alice` expired on 2027-01-31 at 00:00 UTC\.") as refused:
        asyncio.run(access.caller(header))
    assert (refused.value.status, refused.value.code) == (401, "expired_api_key")


def test_a_key_of_an_unknown_project_is_refused_until_the_project_is_there(keys_file: Path) -> None:
    access, header = access_of(keys_file, project="chemistry")
    assert found(access, header) == "unknown_project"
    assert [key.name for key in access.strays()] == ["alice"]
    access.apply(Configuration(projects={"default": Project(), "chemistry": Project()}))
    assert isinstance(found(access, header), Caller)
    assert access.strays() == []
    access.apply(Configuration())
    assert found(access, header) == "unknown_project"


def test_a_changed_project_holds_for_keys_that_were_known(keys_file: Path) -> None:
    access, header = access_of(keys_file)
    assert isinstance(found(access, header), Caller)
    access.apply(Configuration(projects={"physics": Project(models=("m",))}))
    caller = found(access, header)
    assert isinstance(caller, Caller)
    assert caller.models == (("m",),)


def test_what_is_known_is_kept_within_bounds(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "KNOWN_MAX", 2)
    keys = [new_key() for _ in range(4)]
    write_keys(keys_file, [StoredKey(str(n), hashed(key)) for n, key in enumerate(keys)])
    access = Access(keys_file)
    for key in keys:
        assert isinstance(found(access, f"Bearer {key}"), Caller)
    assert [access.known(f"Bearer {key}") is not None for key in keys] == [False, False, True, True]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ('"expirs": "2027-01-31T00:00:00Z"', "unknown field `expirs`"),
        ('"expires": "2027-01-31T00:00:00"', "`expires` of 'a' has no time zone"),
        ('"priority": "high"', "`priority` of 'a' is 'high'; it must be one of interactive, normal, batch"),
        ('"providers": ["a b!"]', "`providers` of 'a' are wrong"),
        ('"models": "llama"', "Expected `array"),
        ('"requests_per_minute": -1', "`requests_per_minute` of 'a' is below 0"),
        ('"budget_micros": -5', "`budget_micros` of 'a' is below 0"),
    ],
)
def test_a_key_with_a_field_that_is_wrong_is_not_taken_without_it(keys_file: Path, field: str, said: str) -> None:
    keys_file.write_text(f'[{{"name": "a", "sha256": "{"0" * 64}", {field}}}]')
    keys_file.chmod(0o600)
    with pytest.raises(BadKeysFile, match=re.escape(said)):
        Access(keys_file)


def test_a_file_of_keys_that_everyone_may_change_is_not_read(keys_file: Path) -> None:
    write_keys(keys_file, [])
    keys_file.chmod(0o666)
    with pytest.raises(BadKeysFile, match=r"can be changed by everyone on this machine; run `chmod o-w"):
        Access(keys_file)


def test_what_a_key_may_is_said_when_it_is_made_and_shown_in_the_list(
    capsys: pytest.CaptureFixture[str], keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERAI_KEYS_FILE", str(keys_file))
    before = datetime.now(UTC)
    limits = ("--rpm", "60", "--tpm", "2000", "--concurrent", "8", "--budget", "12.5", "--priority", "batch")
    words = ("--project", "physics", "--models", "llama-*", "qwen", "--providers=alps,-cloud", "--expires", "30d")
    code, secret, _ = serai(capsys, "keys", "add", "alice", *words, *limits)
    assert code == 0
    (key,) = read_keys(keys_file)
    assert key.expires is not None
    assert timedelta(days=30) - timedelta(seconds=1) <= key.expires - before <= timedelta(days=30, minutes=1)
    assert key.limits == Limits(60, 2000, 8, 12_500_000)
    assert (key.project, key.models, key.priority) == ("physics", ("llama-*", "qwen"), "batch")
    assert providers_of(key) == Providers(frozenset({"alps"}), frozenset({"cloud"}))
    _, table, _ = serai(capsys, "keys", "list")
    assert table.splitlines()[1].split() == [
        *["alice", "physics", "llama-*,qwen", "alps,-cloud"],
        *f"{key.expires:%Y-%m-%d %H:%M}Z".split(),
        *["rpm=60", "tpm=2000", "concurrent=8", "budget=12.5", "priority=batch"],
    ]
    _, shown, _ = serai(capsys, "keys", "list", "--json")
    for text in (table, shown):
        assert secret.strip() not in text
        assert key.sha256 not in text
    assert json.loads(shown)[0]["models"] == ["llama-*", "qwen"]


@pytest.mark.parametrize(
    "words",
    [
        ("--expires", "soon"),
        ("--expires", "2020-01-01"),
        ("--rpm", "-1"),
        ("--budget", "1e3"),
        ("--priority", "high"),
        ("--providers", "a b!"),
    ],
)
def test_a_key_with_a_wrong_limit_is_not_made(
    capsys: pytest.CaptureFixture[str], keys_file: Path, words: tuple[str, ...]
) -> None:
    try:
        code = cli.main(("keys", "add", "alice", f"--keys-file={keys_file}", *words))
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert words[0] in capsys.readouterr().err
    assert not keys_file.exists()
