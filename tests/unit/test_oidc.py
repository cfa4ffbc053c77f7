"""People by their tokens: who is let in, who is told why not, and when an issuer is asked for its keys. The issuer is a
real HTTP server on this machine; only the clock is ours."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from serai.ingress.access import Access
from serai.ingress.caller import Caller
from serai.ingress.configuration import Configuration, Issuer, Project
from serai.ingress.oidc import CHECKED_AGAIN_S, EVERYONE, FETCH_EVERY_S, KEYS_FRESH_S, KEYS_OLD_S, People
from serai.ingress.openai_format import ApiError
from serai.ingress.requirements import Providers
from unit.fakes import Clock

RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
PROJECTS = {"default": Project(), "physics": Project(models=("llama-*",), weight=2.0), "teaching": Project()}


def shown(private: Any, name: str, algorithm: str, **more: Any) -> dict[str, Any]:
    """A public key as issuers show it."""
    made: Any = jwt.get_algorithm_by_name(algorithm)
    fields = made.to_jwk(private.public_key(), as_dict=True)
    return dict(fields) | {"kid": name, "use": "sig"} | more


@dataclass
class FakeIssuer:
    """An OpenID provider: its address, its keys, what it was asked, and how it behaves."""

    url: str = ""
    keys: list[dict[str, Any]] = field(default_factory=lambda: [shown(RSA, "one", "RS256", alg="RS256")])
    asked: list[str] = field(default_factory=list)
    status: int = 200
    about: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    delay: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.delay is not None:
            await self.delay.wait()
        if self.status == 302 and request.path.startswith("/.well-known"):
            return web.Response(status=302, headers={"location": "/elsewhere"})  # Where the same is said.
        if self.status >= 500:
            return web.Response(status=self.status)
        if self.body is not None:
            return web.Response(body=self.body)
        if request.path == "/keys":
            return web.json_response({"keys": self.keys})
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"} | self.about)

    def token(self, private: Any = RSA, kid: str | None = "one", algorithm: str = "RS256", **claims: Any) -> str:
        usual = {"iss": self.url, "aud": "serai", "sub": "u1", "groups": ["physicists"], "exp": time.time() + 3600}
        said = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode(said, private, algorithm, headers={"kid": kid} if kid is not None else None)


@dataclass
class Stage:
    issuer: FakeIssuer
    people: People
    clock: Clock

    def configure(self, **fields: Any) -> None:
        usual = {"audience": ("serai",), "projects": {"physicists": "physics", "staff": "teaching"}}
        self.people.apply([Issuer(self.issuer.url, **(usual | fields))], PROJECTS)

    async def refused(self, token: str) -> str:
        """Status and code."""
        try:
            await self.people.caller(token)
        except ApiError as error:
            return f"{error.status} {error.code}: {error.message}"
        raise AssertionError("was let in")


def staged(talk: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        issuer, clock = FakeIssuer(), Clock()
        app = web.Application()
        app.router.add_get("/{tail:.*}", issuer.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        stage = Stage(issuer, People(clock=lambda: clock.now_s), clock)
        stage.configure()
        try:
            async with asyncio.timeout(30):
                await talk(stage)
        finally:
            await runner.cleanup()

    asyncio.run(main())


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_a_person_is_of_the_project_of_the_first_group_that_fits() -> None:
    async def talk(stage: Stage) -> None:
        stage.configure(models=("*-70b",), providers=Providers(denied=frozenset({"cloud"})))
        caller = await stage.people.caller(stage.issuer.token(groups=["staff", "physicists"]))
        assert caller == Caller(
            "u1",
            "physics",
            models=(("*-70b",), ("llama-*",)),
            providers=Providers(denied=frozenset({"cloud"})),
            weight=2.0,
            scopes=("project:physics",),
            expires_s=caller.expires_s,
        )
        assert caller.expires_s == pytest.approx(time.time() + CHECKED_AGAIN_S, abs=5)
        assert (await stage.people.caller(stage.issuer.token(groups="staff"))).project == "teaching"
        assert stage.issuer.asked == ["/.well-known/openid-configuration", "/keys"]

    staged(talk)


def test_everyone_may_have_a_project_and_groups_may_lie_deep_in_a_token() -> None:
    async def talk(stage: Stage) -> None:
        stage.configure(projects={"physicists": "physics", "*": "teaching"}, groups_claim="realm_access.roles")
        deep = stage.issuer.token(groups=None, realm_access={"roles": ["physicists"]})
        assert (await stage.people.caller(deep)).project == "physics"
        for groups in (None, [], [1, {}], 3):
            token = stage.issuer.token(groups=None, realm_access={"roles": groups})
            assert (await stage.people.caller(token)).project == "teaching"

    staged(talk)


@pytest.mark.parametrize(("private", "algorithm"), [(RSA, "RS256"), (RSA, "PS256"), (EC, "ES256"), (ED, "EdDSA")])
def test_all_usual_algorithms_are_understood(private: Any, algorithm: str) -> None:
    async def talk(stage: Stage) -> None:
        stage.issuer.keys = [{"kty": "unknown", "kid": "x"}, shown(private, "k", algorithm)]
        assert (await stage.people.caller(stage.issuer.token(private, "k", algorithm))).name == "u1"

    staged(talk)


def test_a_token_that_names_no_key_is_of_the_only_one() -> None:
    async def talk(stage: Stage) -> None:
        assert (await stage.people.caller(stage.issuer.token(kid=None))).name == "u1"
        stage.issuer.keys.append(shown(OTHER_RSA, "two", "RS256"))
        stage.clock.advance(KEYS_FRESH_S + 1)
        assert "key that its issuer does not have" in await stage.refused(stage.issuer.token(kid=None))

    staged(talk)


def test_clocks_may_differ_by_the_leeway_and_a_token_is_not_taken_beyond_its_end() -> None:
    async def talk(stage: Stage) -> None:
        now = time.time()
        caller = await stage.people.caller(stage.issuer.token(exp=now - 20, nbf=now + 20))
        assert caller.expires_s == pytest.approx(now + 10, abs=1)

    staged(talk)


# -- who is not --------------------------------------------------------------------------------------------------------


def unsigned(issuer: FakeIssuer) -> str:
    return issuer.token(None, "one", "none")


def by_public_key(issuer: FakeIssuer) -> str:
    """The old trick: the public key, which everybody has, as the secret of an HMAC."""
    return issuer.token(issuer.keys[0]["n"], "one", "HS256")


def odd(**claims: Any) -> str:
    """Signed as it should be, with claims that no library would write."""
    return jwt.api_jws.encode(json.dumps(claims).encode(), RSA, "RS256", {"kid": "one"})


REFUSED: dict[str, tuple[Callable[[FakeIssuer], str], str]] = {
    "unsigned": (unsigned, "401 invalid_token: The token is signed by none; taken are RS256, ES256, PS256, EdDSA."),
    "public key as secret": (by_public_key, "401 invalid_token: The token is signed by HS256; taken are RS256"),
    "other key": (lambda i: i.token(OTHER_RSA), "401 invalid_token: The token has a signature that is wrong."),
    "other algorithm of the key": (lambda i: i.token(algorithm="PS256"), "401 invalid_token: The token is not valid."),
    "unknown key": (lambda i: i.token(kid="two"), "401 invalid_token: The token is signed with a key that its issuer"),
    "wrong audience": (
        lambda i: i.token(aud="mail"),
        "401 invalid_token: The token is for others; its `aud` must be",
    ),
    "no audience": (lambda i: i.token(aud=None), "401 invalid_token: The token has no `aud`."),
    "no end": (lambda i: i.token(exp=None), "401 invalid_token: The token has no `exp`."),
    "end is text": (lambda i: odd(iss=i.url, aud="serai", sub="u", exp="soon"), "401 invalid_token: The token is not"),
    "end is huge": (lambda i: odd(iss=i.url, aud="serai", sub="u", exp=1e308), "403 no_project"),
    "over": (lambda i: i.token(exp=time.time() - 31), "401 expired_token: The token has expired."),
    "not yet": (lambda i: i.token(nbf=time.time() + 60), "401 invalid_token: The token is not valid yet."),
    "other issuer": (
        lambda i: i.token(iss="https://evil"),
        "401 invalid_token: The token is from an issuer that",
    ),
    "no issuer": (
        lambda i: i.token(iss=None),
        "401 invalid_token: The token is from an issuer that is",
    ),
    "issuer is a list": (lambda i: odd(iss=[i.url]), "401 invalid_token: The token is from an issuer"),
    "nameless": (lambda i: i.token(sub=None), "401 invalid_token: The token has no `sub`, which says who somebody is."),
    "no group": (lambda i: i.token(groups=["guests"]), "403 no_project: You are signed in, but none of your groups"),
    "groups are odd": (lambda i: i.token(groups={"a": 1}), "403 no_project"),
    "changed": (lambda i: i.token()[:-8] + "AAAAAAAA", "401 invalid_token: The token has a signature that is wrong."),
    "no token": (lambda i: "a.b.c", "401 invalid_token: The token is no token that can be read."),
    "deep": (lambda i: jwt.utils.base64url_encode(b"[" * 5000).decode() + ".e30.x", "401 invalid_token"),
    "empty": (lambda i: "..", "401 invalid_token: The token is no token that can be read."),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_who_is_not_let_in_is_told_why(make: Callable[[FakeIssuer], str], said: str) -> None:
    async def talk(stage: Stage) -> None:
        assert (await stage.refused(make(stage.issuer))).startswith(said)

    staged(talk)


# -- the issuer's keys -------------------------------------------------------------------------------------------------


def test_a_new_key_is_found_and_one_that_was_withdrawn_is_forgotten() -> None:
    async def talk(stage: Stage) -> None:
        old = stage.issuer.token()
        await stage.people.caller(old)
        stage.issuer.keys = [shown(OTHER_RSA, "two", "RS256")]
        stage.clock.advance(FETCH_EVERY_S)
        new = stage.issuer.token(OTHER_RSA, "two")
        assert (await stage.people.caller(new)).name == "u1"
        assert len(stage.issuer.asked) == 4
        stage.clock.advance(FETCH_EVERY_S)
        assert "a key that its issuer does not have" in await stage.refused(old)

    staged(talk)


def test_keys_are_looked_at_again_when_they_are_old() -> None:
    async def talk(stage: Stage) -> None:
        token = stage.issuer.token()
        for _ in range(3):
            await stage.people.caller(token)
        stage.clock.advance(KEYS_FRESH_S - 1)
        await stage.people.caller(token)
        assert len(stage.issuer.asked) == 2
        stage.clock.advance(2)
        await stage.people.caller(token)
        assert len(stage.issuer.asked) == 4

    staged(talk)


def test_names_of_keys_that_are_made_up_cost_one_question_in_ten_seconds() -> None:
    async def talk(stage: Stage) -> None:
        await stage.people.caller(stage.issuer.token())
        for number in range(50):
            await stage.refused(stage.issuer.token(kid=f"made-up-{number}"))
        assert len(stage.issuer.asked) == 2
        stage.clock.advance(FETCH_EVERY_S)
        await asyncio.gather(*[stage.refused(stage.issuer.token(kid=f"made-up-{number}")) for number in range(50)])
        assert len(stage.issuer.asked) == 4

    staged(talk)


def test_many_that_come_at_once_wait_for_one_answer() -> None:
    async def talk(stage: Stage) -> None:
        stage.issuer.delay = asyncio.Event()
        token = stage.issuer.token()
        waiting = [asyncio.create_task(stage.people.caller(token)) for _ in range(20)]
        while not stage.issuer.asked:
            await asyncio.sleep(0.005)
        waiting[0].cancel()  # Its client has left; the others still get their answer.
        stage.issuer.delay.set()
        found = await asyncio.gather(*waiting[1:])
        assert {caller.name for caller in found} == {"u1"}
        assert len(stage.issuer.asked) <= 4

    staged(talk)


def test_while_an_issuer_is_down_its_last_keys_are_used_for_a_day() -> None:
    async def talk(stage: Stage) -> None:
        token = stage.issuer.token(exp=time.time() + 10 * KEYS_OLD_S)
        await stage.people.caller(token)
        stage.issuer.status = 503
        stage.clock.advance(KEYS_OLD_S - 1)
        assert (await stage.people.caller(token)).name == "u1"
        stage.clock.advance(2 + FETCH_EVERY_S)
        assert (await stage.refused(token)).startswith("503 issuer_unavailable")
        stage.issuer.status = 200
        stage.clock.advance(FETCH_EVERY_S)
        assert (await stage.people.caller(token)).name == "u1"

    staged(talk)


BROKEN: dict[str, dict[str, Any]] = {
    "down": {"status": 500},
    "elsewhere": {"status": 302},
    "no JSON": {"body": b"<html>"},
    "a list": {"body": b"[]"},
    "too long": {"body": b'{"a":"' + b"x" * 600_000 + b'"}'},
    "calls itself otherwise": {"about": {"issuer": "https://evil"}},
    "keys nowhere": {"about": {"jwks_uri": None}},
    "keys in a file": {"about": {"jwks_uri": "file:///etc/passwd"}},
    "no keys": {"keys": []},
    "only keys for secrets": {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "one"}]},
    "only keys for sealing": {"keys": [shown(RSA, "one", "RS256") | {"use": "enc"}]},
}


@pytest.mark.parametrize("fields", BROKEN.values(), ids=BROKEN)
def test_an_issuer_whose_keys_cannot_be_had_lets_nobody_in(fields: dict[str, Any]) -> None:
    async def talk(stage: Stage) -> None:
        for name, value in fields.items():
            setattr(stage.issuer, name, value)
        assert (await stage.refused(stage.issuer.token())).startswith("503 issuer_unavailable")

    staged(talk)


def test_a_key_of_another_kind_than_the_algorithm_is_no_key_for_it() -> None:
    async def talk(stage: Stage) -> None:
        stage.issuer.keys = [shown(EC, "one", "ES256")]
        assert (await stage.refused(stage.issuer.token())).startswith("401 invalid_token")

    staged(talk)


# -- beside keys -------------------------------------------------------------------------------------------------------


def test_a_token_that_was_good_is_known_until_something_changes() -> None:
    async def talk(stage: Stage) -> None:
        access = Access(None, people=stage.people)
        issuer = Issuer(stage.issuer.url, ("serai",), {"physicists": "physics"})
        access.apply(Configuration(projects=PROJECTS, oidc=(issuer,)))
        header = f"Bearer {stage.issuer.token()}"
        assert access.known(header) is None
        caller = await access.caller(header)
        assert access.known(header) == caller
        access.apply(Configuration(projects=PROJECTS))
        assert access.known(header) is None
        with pytest.raises(ApiError) as refused:
            await access.caller(header)
        assert refused.value.code == "invalid_api_key"

    staged(talk)


def test_an_ingress_without_issuers_has_no_http_client_in_its_memory() -> None:
    asked = "import sys; import serai.ingress.__main__; print('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_project_that_went_while_a_token_was_looked_at_is_nobodys() -> None:
    people, issuer = People(), Issuer("https://login.example.org", ("serai",), {EVERYONE: "gone"})
    people.apply([issuer], {})
    with pytest.raises(ApiError) as refused:
        people._person(issuer, {"sub": "ann", issuer.name_claim: "ann", "exp": 2e9})
    assert refused.value.status == 403
