"""The wrapper by which a request of another dialect looks like one for chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from serai.contracts.session_record import SessionRecord
from serai.ingress.endpoints import BY_PATH
from serai.ingress.http_server import ClientGone, ClientRequest
from serai.ingress.openai_format import DONE, ApiError
from serai.ingress.request_body import read_body
from serai.ingress.translated import CHAT, as_served
from unit.chat_answers import TEXT, answer, chunk, events_of
from unit.fakes import record_of

MESSAGES, RESPONSES = BY_PATH["/v1/messages"], BY_PATH["/v1/responses"]
ASKED = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stream": True}
HEADERS = {"x-request-id": "r1", "content-type": "application/json", "x-serai-session": "s1"}


@dataclass
class FakeClient:
    """A client that notes what it is told, and reads as fast as it is told to."""

    body: bytes = orjson.dumps(ASKED)
    headers: Mapping[str, str] = field(default_factory=dict)
    has_room: bool = True
    is_gone: bool = False
    waited: int = 0
    aborted: bool = False
    ended: bool = False
    status: int = 0
    told: dict[str, str] = field(default_factory=dict)
    data: bytes = b""

    def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.told, self.data = status, dict(headers), body

    def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> FakeClient:
        self.respond(status, headers, data)
        return self

    def send(self, data: bytes) -> bool:
        if self.is_gone:
            raise ClientGone
        self.data += data
        return self.has_room

    async def room(self) -> None:
        self.waited += 1

    def end(self, data: bytes = b"") -> None:
        self.data += data
        self.ended = True

    def abort(self) -> None:
        self.aborted = True

    @property
    def names(self) -> list[str]:
        return [name for name, _ in events_of(self.data)]

    @property
    def object(self) -> Any:
        return orjson.loads(self.data)


def chat_for(client: FakeClient, path: str = "/v1/messages") -> ClientRequest:
    request, endpoint = as_served(client, BY_PATH[path], lambda model: [])
    assert endpoint is CHAT
    return request


def asked_for(client: FakeClient, path: str = "/v1/messages") -> ClientRequest:
    """As `chat_for`, and its body has been read."""
    request = chat_for(client, path)
    assert request.body
    return request


class TestWhoTranslates:
    @pytest.mark.parametrize(
        ("served", "native"),
        [
            ([("/v1/messages",)], True),
            ([("/v1/chat/completions", "/v1/messages"), ("/v1/messages",)], True),
            ([("/v1/messages",), ("/v1/chat/completions",)], False),
            ([("/v1/messages",), ()], False),
            ([], False),
        ],
    )
    def test_the_engine_where_all_sessions_are_known_to_have_it(
        self, served: list[tuple[str, ...]], native: bool
    ) -> None:
        client = FakeClient()
        records = [record_of(f"s{index}", endpoints=paths) for index, paths in enumerate(served)]
        asked_for: list[str] = []

        def serving(model: str) -> list[SessionRecord]:
            asked_for.append(model)
            return records

        request, endpoint = as_served(client, MESSAGES, serving)

        assert asked_for == ["m"]
        assert (request is client) == native
        assert endpoint is (MESSAGES if native else CHAT)

    def test_other_endpoints_pass_unread(self) -> None:
        client = FakeClient(b"no JSON")

        assert as_served(client, CHAT, lambda model: []) == (client, CHAT)

    def test_an_engine_whose_own_endpoint_cannot_be_relied_on(self) -> None:
        client = FakeClient(b'{"model": "m", "input": "hi"}')
        paths = ("/v1/responses", "/v1/chat/completions")

        assert as_served(client, RESPONSES, lambda model: [record_of(engine="llamacpp", endpoints=paths)])[1] is CHAT
        assert as_served(client, RESPONSES, lambda model: [record_of(engine="vllm", endpoints=paths)])[1] is RESPONSES

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1}', b"[" * 100_000, b'{"model":"m"}'])
    def test_bad_bodies_are_told_what_is_wrong(self, body: bytes) -> None:
        for path in ("/v1/messages", "/v1/responses"):
            request, endpoint = as_served(FakeClient(body), BY_PATH[path], lambda model: [])
            with pytest.raises(ApiError) as caught:
                read_body(endpoint, "application/json", request.body)
            assert caught.value.status == 400

    @pytest.mark.parametrize("field", ["x", "metadata", "text"])
    def test_what_is_too_deep_to_be_written_is_refused_before_it_is_sent(self, field: str) -> None:
        deep = b'{"d":' * 300 + b"1" + b"}" * 300
        body = b'{"model":"m","input":"hi","%s":%s}' % (field.encode(), deep)

        with pytest.raises(ApiError) as caught:
            _ = chat_for(FakeClient(body), "/v1/responses").body
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


class TestWholeAnswers:
    def test_an_answer(self) -> None:
        client = FakeClient()
        asked_for(client).respond(200, HEADERS, answer(content="Hi"))

        assert client.object["content"] == [{"type": "text", "text": "Hi"}]
        assert client.told == HEADERS | {"request-id": "r1"}

    def test_arguments_that_are_too_deep_to_be_written(self) -> None:
        function = {"name": "look", "arguments": '{"d":' * 300 + "1" + "}" * 300}

        with pytest.raises(ApiError) as caught:
            asked_for(FakeClient()).respond(200, HEADERS, answer(tool_calls=[{"id": "1", "function": function}]))
        assert caught.value.status == 502

    def test_an_answer_that_cannot_be_read_is_an_error(self) -> None:
        client = FakeClient()

        with pytest.raises(ApiError) as caught:
            asked_for(client).respond(200, HEADERS, b'{"choices":')
        assert (caught.value.status, client.status) == (502, 0)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}', "too long"),
            (b'{"object": "error", "message": "too long"}', "too long"),
            (b'{"detail": "too long"}', "too long"),
            (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
            (b"too long", "too long"),
            (b"", "The engine answered with status 400."),
        ],
    )
    def test_an_engines_error_in_the_clients_form(self, body: bytes, message: str) -> None:
        client = FakeClient()
        asked_for(client).respond(400, HEADERS | {"content-type": "text/plain"}, body)

        error = {"type": "invalid_request_error", "message": message}
        assert client.object == {"type": "error", "error": error, "request_id": "r1"}
        assert (client.status, client.told["content-type"]) == (400, "application/json")

    def test_an_engines_error_in_openais_form(self) -> None:
        client = FakeClient(b'{"model": "m", "input": "hi"}')
        body = {"error": {"message": "too long", "type": "t", "param": "input", "code": "c"}}
        asked_for(client, "/v1/responses").respond(400, HEADERS, orjson.dumps(body))

        assert client.object == body
        assert "request-id" not in client.told


class TestStreams:
    def test_events_leave_in_the_call_in_which_they_came(self) -> None:
        client = FakeClient()
        stream = asked_for(client).start(200, HEADERS, TEXT[0])
        assert client.names == ["message_start"]
        stream.send(TEXT[1])
        assert client.names[-1] == "content_block_delta"
        assert client.told["content-type"] == "text/event-stream; charset=utf-8"
        stream.end(b"".join(TEXT[2:]))
        assert client.ended
        assert client.names[-2:] == ["message_delta", "message_stop"]

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
    @pytest.mark.parametrize("end", [b"", ApiError(502, "gone", code="engine_cut").event() + DONE, TEXT[2]])
    def test_an_end_that_is_not_one_is_told(self, path: str, end: bytes) -> None:
        client = FakeClient(orjson.dumps(ASKED | {"input": "hi"}))
        stream = asked_for(client, path).start(200, HEADERS, TEXT[0])
        stream.end(end)

        assert client.names[-1] in ("error", "response.failed")

    def test_an_error_before_the_first_event(self) -> None:
        client = FakeClient()
        stream = asked_for(client).start(200, HEADERS)
        stream.send(b": keep-alive\n\n")
        stream.end(ApiError(503, "full", kind="overloaded_error").event() + DONE)

        assert client.names == ["ping", "error"]
        assert events_of(client.data)[-1][1]["error"] == {"type": "overloaded_error", "message": "full"}

    def test_a_slow_client_and_one_that_left(self) -> None:
        client = FakeClient(has_room=False)
        request = asked_for(client)
        stream = request.start(200, HEADERS)

        assert stream.send(TEXT[0]) is False
        asyncio.run(stream.room())
        assert client.waited == 1
        request.abort()
        assert client.aborted
        client.is_gone = True
        with pytest.raises(ClientGone):
            stream.send(chunk(content="x"))


class TestTokenCounts:
    PATH = "/v1/messages/count_tokens"
    PATHS = ("/v1/chat/completions", "/tokenize")

    @pytest.mark.parametrize(("engine", "through"), [("vllm", "/tokenize"), ("llamacpp", PATH), ("sglang", PATH)])
    def test_only_an_engine_that_renders_the_conversation_counts_it(self, engine: str, through: str) -> None:
        records = [record_of(engine=engine, endpoints=self.PATHS)]

        assert as_served(FakeClient(), BY_PATH[self.PATH], lambda model: records)[1] is BY_PATH[through]

    def test_a_count(self) -> None:
        words = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
        user = {"role": "user", "content": words}
        client = FakeClient(orjson.dumps({"model": "m", "system": "Be", "messages": [user]}))
        request, _ = as_served(client, BY_PATH[self.PATH], lambda model: [])
        said = [{"role": "system", "content": "Be"}, user]
        assert orjson.loads(request.body) == {"model": "m", "messages": said}

        request.respond(200, HEADERS, b'{"count": 7, "tokens": [1]}')
        assert client.object == {"input_tokens": 7}
        for nothing in (b"{", b"[]", b'{"tokens": []}'):
            with pytest.raises(ApiError):
                request.respond(200, HEADERS, nothing)

    def test_images_are_not_counted(self) -> None:
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client = FakeClient(orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}))
        request, _ = as_served(client, BY_PATH[self.PATH], lambda model: [])

        with pytest.raises(ApiError, match="image"):
            _ = request.body
