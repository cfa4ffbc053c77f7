"""Paths: what answers them, what is said of those that nothing answers, and what browsers are told."""

from __future__ import annotations

import pytest

from serai.ingress.cors import EXPOSED, Cors
from serai.ingress.http_routes import Handler, Routes
from serai.ingress.http_server import HttpRequest
from serai.ingress.openai_format import ApiError


def handler() -> Handler:
    async def answer(request: HttpRequest) -> None: ...

    return answer


CHAT, MODELS, MODEL, KEPT, DEEPER, OPTIONS = (handler() for _ in range(6))
ROUTES = Routes(
    {("POST", "/v1/chat"): CHAT, ("GET", "/v1/models"): MODELS},
    {("GET", "/v1/models/.+"): MODEL, ("DELETE", "/v1/kept/[^/]+"): KEPT, ("PUT", "/v1/kept/[^/]+/deep"): DEEPER},
    OPTIONS,
)


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/v1/chat", CHAT),
        ("POST", "/v1/chat/", CHAT),
        ("GET", "/v1/models", MODELS),
        ("GET", "/v1/models/", MODELS),
        ("HEAD", "/v1/models", MODELS),
        ("GET", "/v1/models/org/name", MODEL),
        ("HEAD", "/v1/models/m", MODEL),
        ("DELETE", "/v1/kept/x", KEPT),
        ("PUT", "/v1/kept/x/deep", DEEPER),
        ("OPTIONS", "/v1/chat", OPTIONS),
        ("OPTIONS", "/v1/models/m/", OPTIONS),
        ("OPTIONS", "*", OPTIONS),
    ],
)
def test_what_answers(method: str, path: str, found: Handler) -> None:
    assert ROUTES.find(method, path) is found


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat", "OPTIONS, POST"),
        ("HEAD", "/v1/chat", "OPTIONS, POST"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PATCH", "/v1/models/m", "GET, HEAD, OPTIONS"),
        ("TRACE", "/v1/kept/x", "DELETE, OPTIONS"),
        ("DELETE", "/v1/kept/x/deep/", "OPTIONS, PUT"),
    ],
)
def test_another_method_is_told_which_there_are(method: str, path: str, allowed: str) -> None:
    with pytest.raises(ApiError) as caught:
        ROUTES.find(method, path)
    error = caught.value
    assert (error.status, error.headers, error.code) == (405, {"allow": allowed}, "method_not_allowed")


@pytest.mark.parametrize(
    "path", ["/", "", "/v1", "/v1/chatter", "/v1/models-not", "/v1/kept", "/v1/kept/x/y", "no path"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_what_is_not_there(method: str, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        ROUTES.find(method, path)
    assert (caught.value.status, caught.value.code) == (404, "unknown_path")


# -- other origins ---------------------------------------------------------------------------------------------------

ASKS = {"origin": "https://a.example", "access-control-request-method": "POST"}


def test_no_page_is_let_in_by_default() -> None:
    cors = Cors(())
    assert cors.headers("https://a.example") == cors.preflight(ASKS, ["POST"]) == {}


def test_pages_of_a_named_origin_are_let_in_and_see_what_they_need() -> None:
    cors = Cors(["https://a.example", "http://localhost:3000"])
    told = cors.headers("https://a.example")
    assert told["access-control-allow-origin"] == "https://a.example"
    assert told["access-control-expose-headers"].split(", ") == list(EXPOSED)
    assert told["vary"] == "origin"
    for other in ("https://b.example", "https://a.example.evil", "null", None):
        assert cors.headers(other) == {"vary": "origin"}, "nor may a cache confuse them"
    assert "access-control-allow-credentials" not in told


def test_all_may_be_let_in() -> None:
    told = Cors(["*"]).headers("https://anything.example")
    assert told["access-control-allow-origin"] == "*"
    assert "vary" not in told
    assert Cors(["*"]).headers(None) == {}, "not asked by a browser"


def test_a_browser_that_asks_before_it_sends_is_told_what_it_may_send() -> None:
    cors = Cors(["https://a.example"])
    assert cors.preflight(ASKS | {"access-control-request-headers": "authorization, x-session-id"}, ["POST"]) == {
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization, x-session-id",
        "access-control-max-age": "600",
    }
    assert "access-control-allow-headers" not in cors.preflight(ASKS | {"access-control-request-headers": "ü"}, [])
    assert cors.preflight(ASKS | {"origin": "https://b.example"}, ["POST"]) == {}
    assert cors.preflight({"origin": "https://a.example"}, ["POST"]) == {}, "a plain OPTIONS"


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/path", "https://a.example/", "", "null", "https://"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin; write it as in"):
        Cors([origin])
