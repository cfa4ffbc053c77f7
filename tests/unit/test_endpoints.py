"""Endpoints: what agents look for is what the ingress has rows for; who has one, and what is refused honestly."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from serai.contracts.endpoint_paths import ENDPOINT_PATHS
from serai.ingress.endpoints import BY_PATH, ENDPOINTS, Body, offered
from serai.ingress.openai_format import ApiError
from serai.ingress.request_body import read_body
from serai.ingress.translated import _TRANSLATED, CHAT
from serai.runtime.http1 import HttpPool, Origin
from serai.worker_agent.engine import served_paths as served_paths_module
from serai.worker_agent.engine.base import NotServing
from serai.worker_agent.engine.readiness import canary
from serai.worker_agent.engine.served_paths import served_paths

RERANK = BY_PATH["/v2/rerank"]


def test_agents_look_for_what_the_ingress_has() -> None:
    assert list(BY_PATH) == list(ENDPOINT_PATHS)
    assert len(BY_PATH) == sum(len(endpoint.paths) for endpoint in ENDPOINTS), "no path twice"


def test_what_an_endpoint_is_called_at_an_engine() -> None:
    assert RERANK.path == "/v1/rerank"
    assert RERANK.path_at([]) == "/v1/rerank", "not known: tried"
    assert RERANK.path_at(["/v2/rerank", "/rerank"]) == "/rerank"
    assert RERANK.path_at(["/v1/embeddings"]) is None


def test_what_clients_can_ask_of_an_engine() -> None:
    assert offered([]) == [], "not known"
    assert offered(["/rerank", "/score", "/tokenize"]) == ["/v1/rerank", "/v1/score", "/tokenize"]
    assert offered(["/v1/chat/completions"]) == ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
    by_chat = {path for path, translation in _TRANSLATED.items() if translation.through is CHAT}
    assert {endpoint.path for endpoint in ENDPOINTS if endpoint.through_chat} == by_chat


@pytest.mark.parametrize(
    "fields", [{"store": True}, {"background": True}, {"previous_response_id": "r"}, {"conversation": {"id": "c"}}]
)
def test_what_needs_kept_responses_is_refused(fields: dict[str, object]) -> None:
    body = json.dumps({"model": "m", "input": "x", **fields}).encode()
    with pytest.raises(ApiError, match="keeps none") as caught:
        read_body(BY_PATH["/v1/responses"], "application/json", body)
    (name,) = fields
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "responses_not_kept")
    assert read_body(BY_PATH["/v1/chat/completions"], "application/json", body).model == "m"


def test_a_stateless_response_is_asked_for() -> None:
    body = b'{"model":"m","store":false,"previous_response_id":null,"background":false,"stream":true}'
    assert read_body(BY_PATH["/v1/responses"], "application/json", body).stream


def test_forms_are_taken_only_where_they_belong() -> None:
    assert [endpoint.path for endpoint in ENDPOINTS if endpoint.body is Body.MULTIPART] == [
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    ]


# -- an agent that looks ---------------------------------------------------------------------------------------------

Answers = Callable[[str, str], tuple[int, bytes] | None]
T = TypeVar("T")


def look(answers: Answers) -> tuple[list[str], Counter[str]]:
    """What is found at an engine that answers (method, path) so, and how often it was asked what; None: never."""
    return at_engine(answers, lambda pool: served_paths(pool, {}), empty=True)


def at_engine(
    answers: Answers, ask: Callable[[HttpPool], Awaitable[T]], *, empty: bool = False
) -> tuple[T, Counter[str]]:
    """What `ask` finds there; `empty`: no request may have a body."""
    asked = Counter[str]()
    served = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            method, path = head.split(b" ")[:2]
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert not (empty and length), "nothing to compute"
            await reader.readexactly(length)
            asked[f"{method.decode()} {path.decode()}"] += 1
            answer = answers(method.decode(), path.decode())
            if answer is not None:
                status, body = answer
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.ensure_future(serve(reader, writer)))

    async def main() -> T:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        pool = HttpPool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]))
        try:
            return await ask(pool)
        finally:
            await pool.aclose()
            await asyncio.gather(*served)
            server.close()

    return asyncio.run(main()), asked


def described(*paths: str) -> bytes:
    return json.dumps({"paths": {path: {"post": {}} for path in paths} | {"/tokenize": {"get": {}}}}).encode()


def test_an_engine_that_describes_itself_is_asked_nothing_else() -> None:
    found, asked = look(lambda method, path: (200, described("/v1/embeddings", "/v1/score", "/strange")))
    assert found == ["/v1/embeddings", "/v1/score"]
    assert asked == {"GET /openapi.json": 1}


@pytest.mark.parametrize("description", [b"[]", b"no json", b'{"paths": null}', b'{"paths": {}}', b"{}"])
def test_any_other_engine_is_seen_to_refuse_empty_requests(description: bytes) -> None:
    status = {"/v1/chat/completions": 400, "/v1/completions": 422, "/v1/embeddings": 501, "/tokenize": 200}

    def answers(method: str, path: str) -> tuple[int, bytes]:
        return (200, description) if method == "GET" else (status.get(path, 404), b"")

    found, asked = look(answers)
    assert found == ["/v1/chat/completions", "/v1/completions", "/tokenize"]
    assert max(asked.values()) == 1
    assert asked.total() == len(ENDPOINT_PATHS) + 1


def test_an_engine_that_does_not_answer_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_paths_module, "LOOK_TIMEOUT_S", 0.1)
    found, asked = look(lambda method, path: (404, b"") if method == "GET" else None)
    assert found == [], "not known"
    assert asked.total() == 2


def test_an_engine_that_cannot_generate_serves_all_the_same() -> None:
    _, asked = at_engine(lambda method, path: (501, b"{}"), lambda pool: canary(pool, "m", {}))
    assert set(asked) >= {"POST /v1/completions", "POST /v1/chat/completions", "POST /v1/embeddings"}
    assert max(asked.values()) == 1
    with pytest.raises(NotServing, match="503"):
        at_engine(lambda method, path: (503, b"{}"), lambda pool: canary(pool, "m", {}))
