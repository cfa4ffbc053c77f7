"""Attributes of spans: numbers and names, never content, whatever stands in requests and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serai.contracts.inference import InferenceRequest
from serai.ingress import genai
from serai.runtime.telemetry import TraceContext, Tracing
from serai.worker_agent.spans import RequestSpans

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


def test_what_was_asked_is_told_in_numbers_only() -> None:
    body = {
        "max_tokens": 5,
        "temperature": 1,
        "top_p": 0.5,
        "seed": 7,
        "n": 2,
        "top_k": "many",
        "presence_penalty": True,
        "stop": ["secret"],
        "user": "secret",
        "messages": [{"role": "user", "content": "secret"}],
    }
    assert genai.asked(json.dumps(body).encode(), stream=True) == {
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
    }
    assert genai.asked(b"--a form--", stream=False) == {"gen_ai.request.stream": False}


CHUNK = 'data: {"id":"c1","model":"M","choices":[{"delta":{"content":"secret"},"finish_reason":%s}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"id":"c1","model":"M","choices":[{"message":{"content":"secret"},"finish_reason":"stop"}]}', ["stop"]),
        ((CHUNK % "null" + CHUNK % '"length"' + "data: [DONE]\n\n").encode(), ["length"]),
        (b'{"id":"c1","model":"M","stop_reason":"end_turn","content":[{"text":"secret"}]}', ["end_turn"]),
        (
            b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"c1","model":"M"}}\n\n',
            None,
        ),
    ],
)
def test_what_was_answered_is_told_in_each_dialect(answer: bytes, said: list[str] | None) -> None:
    expected: dict[str, Any] = {"gen_ai.response.id": "c1", "gen_ai.response.model": "M"}
    assert genai.answered(answer) == expected | ({"gen_ai.response.finish_reasons": said} if said else {})


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"data: broken\n\n", b'{"id":3,"choices":null}', b'data: {"choices":[1]}\n\n']
)
def test_odd_answers_say_nothing(answer: bytes) -> None:
    assert genai.answered(answer) == {}


def request(traceparent: str) -> InferenceRequest:
    return InferenceRequest("r1", "/v1/x", 0, 0, 65536, 1.0, traceparent=traceparent, operation="chat")


def test_the_engine_gets_the_place_of_its_own_span() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing("agent", provider, 0.0)
    assert RequestSpans.begin(tracing, request(PARENT + "00"), 1) is None, "its caller asked not to record it"
    spans = RequestSpans.begin(tracing, request(PARENT + "01"), 1)
    assert spans is not None
    about = {"gen_ai.request.model": "M", "server.port": 8001}
    given = TraceContext.parse(spans.post(about, 2))
    spans.end(500, "", 3, 4)
    engine, inference = exporter.get_finished_spans()
    assert given is not None
    assert (engine.name, engine.context.span_id) == ("chat M", given.span_id)
    assert engine.parent is not None
    assert engine.parent.span_id == inference.context.span_id
    said = dict(engine.attributes or {})
    assert (said["error.type"], said["server.port"], said["gen_ai.operation.name"]) == ("500", 8001, "chat")
    assert "error.type" not in (inference.attributes or {}), "the agent did what it should"
