"""People by OpenID Connect: whoever shows a token that an issuer of the configuration has signed for us.

A token is checked here, with the issuer's public keys; nobody is asked per request. The keys are fetched by discovery,
kept, and fetched again when they are old or a token names one that is not among them, but never more often than every
`FETCH_EVERY_S`, so that made-up names cost nothing. While an issuer is down its last keys are used, for a day at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jwt
import orjson
import structlog

from serai.ingress.caller import Caller, caller_of
from serai.ingress.configuration import Issuer, Project
from serai.ingress.openai_format import ApiError

log = structlog.get_logger()

FETCH_EVERY_S = 10.0
KEYS_FRESH_S = 600.0
KEYS_OLD_S = 86_400.0
"""With keys older than this nobody is let in: the issuer may have withdrawn them for a reason."""
CHECKED_AGAIN_S = 600.0
"""How long a token that was found good is taken without another look: its key may be withdrawn meanwhile."""
KEYS_MAX = 100
GROUPS_MAX = 1000
NAME_CHARACTERS_MAX = 128
EVERYONE = "*"

Fetch = Callable[[str], Awaitable[bytes]]
"""An address in, what it answers out. Raises OSError, TimeoutError, ValueError."""


@dataclass(frozen=True, slots=True)
class _Key:
    """One public key as its issuer shows it."""

    shown: dict[str, Any]
    made: dict[str, jwt.PyJWK] = field(default_factory=dict)
    """By algorithm; making one takes longer than using it."""

    def for_algorithm(self, name: str) -> jwt.PyJWK:
        """A key that says its own algorithm is of that one only. Raises PyJWTError."""
        if self.shown.get("alg", name) != name:
            raise jwt.InvalidKeyError
        if name not in self.made:
            self.made[name] = jwt.PyJWK(self.shown, name)
        return self.made[name]


@dataclass(slots=True)
class _Keys:
    """What is known of one issuer's keys."""

    by_id: dict[str, _Key] = field(default_factory=dict)
    read_s: float = float("-inf")
    tried_s: float = float("-inf")
    reading: asyncio.Task[None] | None = None
    """A task of its own: a client that leaves does not take with it what others wait for."""


class People:
    """Who shows which token, by the issuers of the configuration."""

    def __init__(self, fetch: Fetch | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch or _fetched
        self._clock = clock
        self._issuers: dict[str, Issuer] = {}
        self._projects: Mapping[str, Project] = {}
        self._keys: dict[str, _Keys] = {}

    def apply(self, issuers: Sequence[Issuer], projects: Mapping[str, Project]) -> None:
        """From now on; keys of issuers that stay are kept."""
        self._issuers = {issuer.issuer: issuer for issuer in issuers}
        self._projects = projects
        self._keys = {name: self._keys.get(name) or _Keys() for name in self._issuers}

    def __bool__(self) -> bool:
        """Whether there is any issuer."""
        return bool(self._issuers)

    async def caller(self, token: str) -> Caller:
        """Who shows `token`. Raises ApiError: 401 for a token that is not good, 403 for a person whom nobody has given
        a project, 503 when the issuer's keys cannot be had."""
        issuer, header = self._addressed(token)
        key = await self._key(issuer, header)
        claims = _verified(token, key, header["alg"], issuer)
        return self._person(issuer, claims)

    def _addressed(self, token: str) -> tuple[Issuer, dict[str, Any]]:
        """The issuer that the token names, and its head; nothing of it is believed before its signature is checked."""
        try:
            header = jwt.get_unverified_header(token)
            claims = jwt.decode(token, options={"verify_signature": False})
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _refused("is no token that can be read") from None
        name = claims.get("iss")
        issuer = self._issuers.get(name) if isinstance(name, str) else None
        if issuer is None:
            raise _refused("is from an issuer that is not known here")
        if header.get("alg") not in issuer.algorithms:
            taken = ", ".join(issuer.algorithms)
            raise _refused(f"is signed by {str(header.get('alg'))[:20]}; taken are {taken}")
        return issuer, header

    async def _key(self, issuer: Issuer, header: Mapping[str, Any]) -> _Key:
        keys = self._keys[issuer.issuer]
        name = header.get("kid")
        if not isinstance(name, str):
            name = ""
        now = self._clock()
        if _key_of(keys, name) is None or now - keys.read_s > KEYS_FRESH_S:
            await self._fresh(issuer, keys)
        if self._clock() - keys.read_s > KEYS_OLD_S:
            text = "The issuer of this token does not answer, so that the token cannot be checked."
            raise ApiError(503, text, kind="server_error", code="issuer_unavailable", retry_after_s=FETCH_EVERY_S)
        key = _key_of(keys, name)
        if key is None:
            raise _refused("is signed with a key that its issuer does not have")
        return key

    async def _fresh(self, issuer: Issuer, keys: _Keys) -> None:
        """Reads them, once for all that wait for it; those known before stay when it fails."""
        if keys.reading is None:
            if self._clock() - keys.tried_s < FETCH_EVERY_S:
                return
            keys.tried_s = self._clock()
            keys.reading = asyncio.create_task(self._read_keys(issuer, keys))
        await asyncio.shield(keys.reading)

    async def _read_keys(self, issuer: Issuer, keys: _Keys) -> None:
        try:
            keys.by_id = await self._discovered(issuer)
            keys.read_s = self._clock()
            log.info("oidc.keys_read", issuer=issuer.issuer, keys=len(keys.by_id))
        except (OSError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            effect = "those read before are used" if keys.by_id else "nobody of it can sign in"
            log.warning("oidc.keys_not_read", issuer=issuer.issuer, error=reason[:300], effect=effect)
        finally:
            keys.reading = None

    async def _discovered(self, issuer: Issuer) -> dict[str, _Key]:
        """Raises ValueError, and what `Fetch` raises."""
        about = _object(await self._fetch(issuer.issuer.rstrip("/") + "/.well-known/openid-configuration"))
        if about.get("issuer") != issuer.issuer:
            raise ValueError(f"it calls itself {str(about.get('issuer'))[:100]!r}")
        address = about.get("jwks_uri")
        secure = issuer.issuer.startswith("https:")
        if not isinstance(address, str) or not address.startswith("https:" if secure else "http"):
            raise ValueError(f"its jwks_uri is {str(address)[:100]!r}")
        listed = _object(await self._fetch(address)).get("keys")
        if not isinstance(listed, list):
            raise ValueError("its key set has no `keys`")
        found: dict[str, _Key] = {}
        for one in listed[:KEYS_MAX]:
            if isinstance(one, dict) and one.get("use", "sig") == "sig" and one.get("kty") in ("RSA", "EC", "OKP"):
                found[str(one.get("kid", ""))] = _Key(one)
        if not found:
            raise ValueError("its key set has no key for signatures")
        return found

    def _person(self, issuer: Issuer, claims: Mapping[str, Any]) -> Caller:
        name = claims.get(issuer.name_claim)
        if not isinstance(name, str) or not name:
            raise _refused(f"has no `{issuer.name_claim}`, which says who somebody is")
        groups = _claim(claims, issuer.groups_claim)
        names = {groups} if isinstance(groups, str) else {group for group in groups[:GROUPS_MAX] if _is_text(group)}
        for group, project in issuer.projects.items():
            # One that is gone: the configuration has changed while its keys were waited for.
            if (group in names or group == EVERYONE) and project in self._projects:
                until_s = min(float(claims["exp"]) + issuer.leeway_s, time.time() + CHECKED_AGAIN_S)
                return caller_of(
                    name[:NAME_CHARACTERS_MAX],
                    project,
                    self._projects[project],
                    models=issuer.models,
                    providers=issuer.providers,
                    expires_s=until_s,
                )
        text = (
            f"You are signed in, but none of your groups (`{issuer.groups_claim}`) has a project here. "
            "Ask the operator of this gateway for one."
        )
        raise ApiError(403, text, kind="permission_error", code="no_project")


def _key_of(keys: _Keys, name: str) -> _Key | None:
    """A token without a key's name is of the only key, when there is only one."""
    if not name and len(keys.by_id) == 1:
        return next(iter(keys.by_id.values()))
    return keys.by_id.get(name)


def _verified(token: str, key: _Key, algorithm: str, issuer: Issuer) -> dict[str, Any]:
    """The token's claims. Raises ApiError."""
    try:
        return jwt.decode(
            token,
            key.for_algorithm(algorithm),
            algorithms=[algorithm],
            audience=list(issuer.audience),
            issuer=issuer.issuer,
            leeway=issuer.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )
    except jwt.ExpiredSignatureError:
        raise ApiError(401, "The token has expired.", kind="authentication_error", code="expired_token") from None
    except jwt.ImmatureSignatureError:
        raise _refused("is not valid yet") from None
    except jwt.InvalidAudienceError:
        raise _refused(f"is for others; its `aud` must be {' or '.join(issuer.audience)}") from None
    except jwt.MissingRequiredClaimError as error:
        raise _refused(f"has no `{error.claim}`") from None
    except jwt.InvalidSignatureError:
        raise _refused("has a signature that is wrong") from None
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
        raise _refused("is not valid") from None


def _refused(problem: str) -> ApiError:
    return ApiError(401, f"The token {problem}.", kind="authentication_error", code="invalid_token")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """By name, or by a way of names with dots (`realm_access.roles`); nobody has no groups."""
    value: Any = claims.get(name)
    if value is None and "." in name:
        value = claims
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str | list) else []


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _object(answer: bytes) -> dict[str, Any]:
    found = orjson.loads(answer)
    if not isinstance(found, dict):
        raise ValueError("it answers something other than a JSON object")
    return found


async def _fetched(address: str) -> bytes:
    # With it comes an HTTP client: 15 MB and a fifth of a second that only sites whose people sign in need.
    from serai.ingress.oidc_fetch import fetched

    return await fetched(address)
