"""A configured ingress: what its file says holds, may change under running streams, and people may sign in."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from integration.system import System, wait_for
from serai.ingress.access import StoredKey, hashed, new_key, read_keys, write_keys

TOKENS = 400
BEFORE = """
policy: round-robin
projects:
  default: {requests_per_minute: 1000}
aliases: {gpt: one}
"""
AFTER = """
policy: least-loaded
projects:
  default: {requests_per_minute: 0}
  physics: {models: [two]}
aliases: {gpt: [two, one]}
policies: {one: session-sticky}
"""


def ask(client: httpx2.Client, model: str, **more: Any) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return client.post("/v1/chat/completions", json=body, **more)


def code_of(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])


def replace(file: Path, text: str) -> None:
    fresh = file.with_name("fresh.yaml")
    fresh.write_text(text)
    fresh.chmod(0o644)
    fresh.replace(file)


def add_key(system: System, name: str, **fields: Any) -> dict[str, str]:
    key = new_key()
    file = system.folder / "keys.json"
    write_keys(file, [*read_keys(file), StoredKey(name, hashed(key), **fields)])
    return {"Authorization": f"Bearer {key}"}


def test_a_changed_file_holds_for_new_requests_and_streams_go_on(system: System) -> None:
    file = system.folder / "ingress.yaml"
    replace(file, BEFORE)
    physicist = add_key(system, "physicist", project="physics")
    system.start_registry()
    ingress = system.start_ingress("--config", str(file))
    for model in ("one", "two"):
        system.start_agent("--ttft-ms", "1", "--tpot-ms", "20", model=model)
    with system.client(120) as client, system.client(120) as other:
        wait_for(lambda: len(client.get("/v1/models").json()["data"]) == 3, "both models and the alias are listed")
        assert client.get("/v1/models/gpt").json()["alias_of"] == "one"
        assert code_of(ask(client, "one", headers=physicist)) == "unknown_project"
        body = {"model": "gpt", "prompt": "x", "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            heard = [next(lines)]
            assert json.loads(heard[0].removeprefix("data: "))["model"] == "one"
            replace(file, AFTER)
            wait_for(lambda: "configuration.read" in ingress.log, "the ingress has read its file again")
            meant = wait_for(lambda: other.get("/v1/models/gpt").json(), "the alias is there")
            assert meant["alias_of"] == "two"
            refused = ask(other, "gpt")
            assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
            by_physicist = ask(other, "gpt", headers=physicist)
            assert (by_physicist.status_code, by_physicist.json()["model"]) == (200, "two")
            assert code_of(ask(other, "one", headers=physicist)) == "model_not_allowed"
            heard += lines
        assert [line for line in heard if line][-1] == "data: [DONE]"
        assert sum(b'"text"' in line.encode() for line in heard) >= TOKENS

        replace(file, AFTER.replace("[two, one]", "[two, one"))
        ready = wait_for(lambda: other.get("/health/ready").json().get("wrong_files"), "a wrong file is shown")
        assert ready == ["configuration"]
        assert 'serai_ingress_configuration_valid{file="configuration"} 0.0' in other.get("/metrics").text
        assert ask(other, "gpt", headers=physicist).json()["model"] == "two"
        replace(file, BEFORE)
        ingress.popen.send_signal(signal.SIGHUP)
        wait_for(lambda: other.get("/v1/models/gpt").json()["alias_of"] == "one", "the file is right again")
        assert "wrong_files" not in other.get("/health/ready").json()
    assert ingress.terminate() == 0


def test_a_key_shows_and_opens_only_what_it_may(system: System) -> None:
    narrow = add_key(system, "narrow", models=("tw*",))
    elsewhere = add_key(system, "elsewhere", providers=("-local",))
    system.start_registry()
    system.start_ingress()
    for model in ("one", "two"):
        system.start_agent("--ttft-ms", "1", "--tpot-ms", "1", model=model)
    with system.client() as client:
        wait_for(lambda: len(client.get("/v1/models").json()["data"]) == 2, "both models are listed")
        assert [entry["id"] for entry in client.get("/v1/models", headers=narrow).json()["data"]] == ["two"]
        assert client.get("/v1/models/one", headers=narrow).status_code == 404
        assert ask(client, "two", headers=narrow).status_code == 200
        refused = ask(client, "one", headers=narrow)
        assert (refused.status_code, code_of(refused)) == (403, "model_not_allowed")
        assert "Allowed are: tw*." in refused.json()["error"]["message"]
        assert client.get("/v1/models", headers=elsewhere).json()["data"] == []
        for headers in (elsewhere, elsewhere | {"x-serai-providers": "local"}):
            refused = ask(client, "two", headers=headers)
            assert (refused.status_code, code_of(refused)) == (503, "requirements_not_met")


# -- people ------------------------------------------------------------------------------------------------------------

PRIVATE = rsa.generate_private_key(65537, 2048)


@pytest.fixture
def issuer() -> Iterator[str]:
    """An OpenID provider with one key; its address."""
    made: Any = jwt.get_algorithm_by_name("RS256")
    keys = {"keys": [dict(made.to_jwk(PRIVATE.public_key(), as_dict=True)) | {"kid": "k", "use": "sig"}]}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = f"http://127.0.0.1:{self.server.server_address[1]}"
            content = keys if self.path == "/keys" else {"issuer": url, "jwks_uri": f"{url}/keys"}
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


def test_a_person_signs_in_with_a_token_and_has_the_project_of_a_group(system: System, issuer: str) -> None:
    file = system.folder / "ingress.yaml"
    replace(
        file,
        f"projects: {{physics: {{models: [two]}}}}\n"
        f"oidc: [{{issuer: {issuer!r}, audience: serai, projects: {{physicists: physics}}}}]\n",
    )
    system.start_registry()
    system.start_ingress("--config", str(file))
    system.start_agent("--ttft-ms", "1", "--tpot-ms", "1", model="two")

    def person(**claims: Any) -> dict[str, str]:
        said = {"iss": issuer, "aud": "serai", "sub": "u", "groups": ["physicists"], "exp": time.time() + 600} | claims
        return {"Authorization": f"Bearer {jwt.encode(said, PRIVATE, 'RS256', {'kid': 'k'})}"}

    with system.client() as client:
        wait_for(lambda: client.get("/v1/models").json()["data"], "the model is listed")
        assert ask(client, "two").status_code == 200
        for _ in range(2):
            assert ask(client, "two", headers=person()).status_code == 200
        refusals = {
            "model_not_allowed": (403, ask(client, "one", headers=person())),
            "invalid_token": (401, ask(client, "two", headers=person(aud="mail"))),
            "expired_token": (401, ask(client, "two", headers=person(exp=time.time() - 60))),
            "no_project": (403, ask(client, "two", headers=person(groups=["guests"]))),
        }
        assert {code_of(answer): answer.status_code for _, answer in refusals.values()} == {
            code: status for code, (status, _) in refusals.items()
        }
