"""API keys: stored as hashes, shown once. A key is 32 random bytes, so a plain SHA-256 cannot be guessed backwards."""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import msgspec

from serai.ingress.caller import ANONYMOUS, Caller, caller_of
from serai.ingress.configuration import DEFAULT_PROJECT, Configuration, Project
from serai.ingress.limits import Limits
from serai.ingress.oidc import People
from serai.ingress.openai_format import ApiError
from serai.ingress.queueing import CLASSES
from serai.ingress.requirements import BadHeader, Providers, read_providers

KEY_PREFIX = "sk-serai-"
KNOWN_MAX = 10_000
_NEVER = (-1, -1, -1)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoredKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key as it lies in the file. A field that is not known would be a limit that is not kept, so it is refused."""

    name: str
    sha256: str
    project: str = DEFAULT_PROJECT
    models: tuple[str, ...] | None = None
    """Patterns; None = all that its project may use."""
    providers: tuple[str, ...] = ()
    """As in `x-serai-providers`: `alps`, `-cloud`."""
    priority: str | None = None
    """None = its project's."""
    expires: datetime | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None
    budget_micros: int | None = None
    """For a period of its project's budget."""

    @property
    def limits(self) -> Limits:
        """Its own; its project's count as well."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_max, self.budget_micros)


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
        with path.open("rb") as file:
            others_may_write = bool(os.fstat(file.fileno()).st_mode & 0o002)
            keys = msgspec.json.decode(file.read(), type=list[StoredKey])
    except FileNotFoundError as error:
        raise BadKeysFile(
            f"there is no keys file {path}; make one with `serai keys add NAME --keys-file {path}`"
        ) from error
    except OSError as error:
        raise BadKeysFile(f"cannot read the keys file {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BadKeysFile(
            f"{path} is not a keys file: {error}; name another, or put it away and make one with `serai keys add`"
        ) from error
    if others_may_write:
        raise BadKeysFile(f"{path} can be changed by everyone on this machine; run `chmod o-w {path}`")
    for key in keys:
        if problem := _problem(key):
            raise BadKeysFile(f"{path}: the {problem}")
    return keys


def _problem(key: StoredKey) -> str | None:
    if not _SHA256.fullmatch(key.sha256):
        return f"`sha256` of {key.name!r} is not 64 hexadecimal digits"
    if key.priority is not None and key.priority not in CLASSES:
        return f"`priority` of {key.name!r} is {key.priority!r}; it must be one of {', '.join(CLASSES)}"
    for limit in ("requests_per_minute", "tokens_per_minute", "concurrent_max", "budget_micros"):
        if (getattr(key, limit) or 0) < 0:  # A bucket that holds less than nothing would never be found empty.
            return f"`{limit}` of {key.name!r} is below 0"
    if key.expires is not None and key.expires.tzinfo is None:
        return f"`expires` of {key.name!r} has no time zone; write it like 2027-01-31T00:00:00Z"
    try:
        providers_of(key)
    except BadHeader as error:
        return f"`providers` of {key.name!r} are wrong: {error}"
    return None


def providers_of(key: StoredKey) -> Providers:
    """Who may answer its holder. Raises BadHeader."""
    return read_providers(", ".join(key.providers)) if key.providers else Providers()


def write_keys(path: Path, keys: list[StoredKey]) -> None:
    """Replaces the file in one step, readable by its owner only."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n")
    fresh.replace(path)


class Access:
    """Who may ask: the holders of keys, and people whom an issuer of tokens vouches for; or everyone."""

    def __init__(self, path: Path | None, *, anonymous: bool = False, people: People | None = None) -> None:
        """Raises BadKeysFile."""
        self._path = path
        self._anonymous = anonymous
        self._people = People() if people is None else people  # Without issuers it is false.
        self._projects: Mapping[str, Project] = Configuration().projects
        self._keys: dict[bytes, StoredKey] = {}
        self._known: dict[str, Caller] = {}
        """By header, found good since something changed: looking at each again would be work for nothing."""
        self._read_at = _NEVER
        if path is not None:
            self.refresh()

    def refresh(self) -> bool:
        """Reads the file again when it has changed; True then. Raises BadKeysFile, and keeps the keys it has."""
        if self._path is None:
            return False
        try:
            facts = self._path.stat()
            stamp = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        except OSError:
            stamp = (0, 0, 0)  # Reading it says why.
        if stamp == self._read_at:
            return False
        self._read_at = _NEVER  # What was wrong is not so for ever: the file may come back as it was.
        self._keys = {bytes.fromhex(key.sha256): key for key in read_keys(self._path)}
        self._known = {}
        self._read_at = stamp
        return True

    def apply(self, configuration: Configuration) -> None:
        """Projects and issuers, from now on."""
        self._projects = configuration.projects
        self._people.apply(configuration.oidc, configuration.projects)
        self._known = {}  # Another one: who is being looked at now is not remembered as what they were before.

    def limits(self) -> dict[str, Limits]:
        """Of single keys, by name."""
        return {key.name: key.limits for key in self._keys.values() if key.limits != Limits()}

    def strays(self) -> list[StoredKey]:
        """Keys whose project is not configured; their holders are refused."""
        return [key for key in self._keys.values() if key.project not in self._projects]

    def known(self, authorization: str | None) -> Caller | None:
        """Who sent this `Authorization` header, when that is known already: once per request. `caller` tells of all."""
        if self._anonymous:
            return ANONYMOUS
        caller = self._known.get(authorization or "")
        return caller if caller is not None and caller.expires_s > time.time() else None

    async def caller(self, authorization: str | None) -> Caller:
        """Who sent this `Authorization: Bearer …` header. Raises ApiError: 401 when it is nobody we know, 403 when it
        is somebody without a project.

        The lookup is by hash, so its timing tells nothing about the keys.
        """
        if caller := self.known(authorization):
            return caller
        known = self._known
        kind, _, secret = (authorization or "").partition(" ")
        secret = secret.strip()
        if kind.lower() != "bearer" or not secret:
            raise _unknown("is missing" if not authorization else "is not where it should be")
        key = self._keys.get(sha256(secret.encode()).digest())
        if key is not None:
            caller = self._holder(key)
        elif self._people and secret.count(".") == 2:
            caller = await self._people.caller(secret)
        else:
            raise _unknown("is not known here")
        _remember(known, authorization or "", caller)
        return caller

    def _holder(self, key: StoredKey) -> Caller:
        """Raises ApiError."""
        if key.expires is not None and key.expires.timestamp() <= time.time():
            text = f"The API key `{key.name}` expired on {key.expires:%Y-%m-%d at %H:%M %Z}."
            raise ApiError(401, text, kind="authentication_error", code="expired_api_key")
        project = self._projects.get(key.project)
        if project is None:
            text = (
                f"The API key `{key.name}` belongs to the project `{key.project}`, which this gateway does not have. "
                "Its operator can add it to the configuration."
            )
            raise ApiError(403, text, kind="permission_error", code="unknown_project")
        return caller_of(
            key.name,
            key.project,
            project,
            models=key.models,
            providers=providers_of(key),
            priority=key.priority,
            scopes=(f"key:{key.name}",),
            expires_s=key.expires.timestamp() if key.expires is not None else math.inf,
        )


def _remember(known: dict[str, Caller], authorization: str, caller: Caller) -> None:
    if len(known) >= KNOWN_MAX:
        del known[next(iter(known))]
    known[authorization] = caller


def _unknown(problem: str) -> ApiError:
    text = f"The API key {problem}. Send it as `Authorization: Bearer sk-serai-…`, or as `x-api-key: sk-serai-…`."
    return ApiError(401, text, kind="authentication_error", code="invalid_api_key")
