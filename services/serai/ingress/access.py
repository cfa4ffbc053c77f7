"""API keys: stored as hashes, shown once. A key is 32 random bytes, so a plain SHA-256 cannot be guessed backwards."""

from __future__ import annotations

import math
import os
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from serai.ingress.configuration import DEFAULT_PROJECT
from serai.ingress.requirements import Providers

KEY_PREFIX = "sk-serai-"
VALID_HEADERS_MAX = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key as it lies in the file."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the holder of a key, or a person who signed in."""

    name: str
    """Of the key, or of the person."""
    project: str = DEFAULT_PROJECT
    models: tuple[tuple[str, ...], ...] = ()
    """Lists of patterns; a model must match one of each list. Empty = all models."""
    providers: Providers = Providers()
    """Who may answer it at all; a request can only narrow it."""
    priority: str = "normal"
    """One of `queueing.CLASSES`: the highest class that its requests may have."""
    weight: float = 1.0
    """Its project's share of a queue."""
    scopes: tuple[str, ...] = ()
    """Whose limits it counts against: `key:NAME`, `project:NAME`."""
    may_opt_out: bool = False
    """Whether it may ask not to be in the usage records by name."""
    expires_s: float = math.inf
    """Seconds since the epoch."""


ANONYMOUS = Caller("anonymous", scopes=(f"project:{DEFAULT_PROJECT}",))


class BadKeysFile(ValueError):
    """The text names the file, what is wrong and what to do."""


def new_key() -> str:
    """A key to be shown once."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> list[StoredKey]:
    """Raises BadKeysFile."""
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=list[StoredKey])
    except OSError as error:
        raise BadKeysFile(f"cannot read the keys file {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BadKeysFile(f"{path} is not a keys file: {error}; make one with `serai keys add`") from error
    for key in keys:
        if not _SHA256.fullmatch(key.sha256):
            raise BadKeysFile(f"{path}: the `sha256` of {key.name!r} is not 64 hexadecimal digits")
    return keys


def write_keys(path: Path, keys: list[StoredKey]) -> None:
    """Replaces the file in one step, readable by its owner only."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n")
    fresh.replace(path)


class Access:
    """Who may ask. Without a file: everyone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._callers: dict[bytes, Caller] = {}
        self._valid: dict[str, Caller] = {}
        """Headers that were found valid since the file was read: hashing each again would be work for nothing."""
        self._read_at = (0, 0)
        if path is not None:
            self.refresh()

    def refresh(self) -> bool:
        """Reads the file again when it has changed; True then. Raises BadKeysFile, and keeps the keys it has."""
        if self._path is None:
            return False
        try:
            facts = self._path.stat()
        except OSError as error:
            raise BadKeysFile(f"cannot read the keys file {self._path}: {error.strerror}") from error
        stamp = (facts.st_mtime_ns, facts.st_size)
        if stamp == self._read_at:
            return False
        self._callers = {bytes.fromhex(key.sha256): _holder(key) for key in read_keys(self._path)}
        self._valid.clear()
        self._read_at = stamp
        return True

    def caller(self, authorization: str | None) -> Caller | None:
        """Who holds the key in an `Authorization: Bearer …` header; None when it is not one of ours.

        The lookup is by hash, so its timing tells nothing about the keys.
        """
        if self._path is None:
            return ANONYMOUS
        if not authorization:
            return None
        return self._valid.get(authorization) or self._look_up(authorization)

    def _look_up(self, authorization: str) -> Caller | None:
        if authorization[:7].lower() != "bearer ":
            return None
        caller = self._callers.get(sha256(authorization[7:].strip().encode()).digest())
        if caller is not None and len(self._valid) < VALID_HEADERS_MAX:
            self._valid[authorization] = caller
        return caller


def _holder(key: StoredKey) -> Caller:
    return Caller(key.name, scopes=(f"key:{key.name}", f"project:{DEFAULT_PROJECT}"))
