"""OpenAI JSON and error bodies. Pure: bytes in, bytes out.

Bodies and streams pass as they came; what is read here is read from a copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from serai.contracts.inference import FailureCode, InferenceFailure

DONE = b"data: [DONE]\n\n"


class ApiError(Exception):
    """An answer to the client that is an error object (`error_body`)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        """Of the answer, beside those that follow from the rest."""
        self.request_id: str | None = None

    def body(self) -> bytes:
        """The OpenAI error object."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def event(self) -> bytes:
        """The same as one SSE event, for a stream whose status has been sent already."""
        return b"data: " + self.body() + b"\n\n"


class RequestBody(NamedTuple):
    """What the ingress itself needs to know of a body; everything else in it is between client and engine."""

    model: str
    stream: bool
    output_tokens_max: int = 0
    """For each answer; 0 = it does not say."""
    outputs: int = 1
    """How many answers it asks for."""


def parsed_object(body: bytes) -> dict[str, Any]:
    """Raises ApiError (400)."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    return parsed


def read_fields(parsed: Mapping[str, Any]) -> RequestBody:
    """Of a parsed body. Raises ApiError (400) naming the field that is wrong."""
    model = parsed.get("model")
    if not isinstance(model, str) or not model:
        problem = "is missing" if model is None else "must be a non-empty string"
        raise ApiError(400, f"`model` {problem}.", param="model", code="invalid_model")
    stream = parsed.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise ApiError(400, "`stream` must be true or false.", param="stream", code="invalid_type")
    return RequestBody(model, bool(stream), _output_tokens_max(parsed), _outputs(parsed))


_OUTPUT_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SEVERAL = frozenset({"prompt", "n", "best_of"})
_NUMBER_MAX = 1 << 31


def _output_tokens_max(parsed: Mapping[str, Any]) -> int:
    """Whether what stands there makes sense is the engine's to say."""
    return max([_number(parsed[name]) for name in _OUTPUT_TOKENS if name in parsed], default=0)


def _outputs(parsed: Mapping[str, Any]) -> int:
    """For each prompt, of which `/v1/completions` takes several, as many as `n` or `best_of`."""
    if _SEVERAL.isdisjoint(parsed):
        return 1
    prompt = parsed.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return min(_NUMBER_MAX, prompts * max(1, _number(parsed.get("n")), _number(parsed.get("best_of"))))


def _number(value: Any) -> int:
    return min(value, _NUMBER_MAX) if type(value) is int and value > 0 else 0


def with_model(body: bytes, model: str, engine_model: str) -> bytes:
    """`body` with its `model` changed to the engine's name for it; every other byte as it was wherever possible."""
    if model == engine_model:
        return body
    pattern = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(model)))
    if len(pattern.findall(body)) == 1:
        name = orjson.dumps(engine_model)
        edited = pattern.sub(lambda match: match.group(1) + name, body)
        if orjson.loads(edited)["model"] == engine_model:
            return edited
    # Written with escapes, or the same words stand elsewhere too: only a parser knows which one is meant.
    return dumped(loaded(body) | {"model": engine_model})


def loaded(body: bytes) -> dict[str, Any]:
    """An object that has been read before, by the slow parser, because it keeps integers of any length. Raises ApiError
    (400) for one nested more deeply than that one goes."""
    try:
        found: dict[str, Any] = json.loads(body)
    except RecursionError:
        raise _too_deep() from None
    return found


def dumped(fields: Mapping[str, Any]) -> bytes:
    """What `loaded` has read, edited. Raises ApiError (400) as that does."""
    try:
        return json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> ApiError:
    return ApiError(400, "The request body is nested too deeply.", code="invalid_json")


def unknown_model(model: str, known: Sequence[str]) -> ApiError:
    """404, naming what exists."""
    there = f"Available: {', '.join(known[:20])}." if known else "No model is being served now."
    return ApiError(
        404,
        f"The model `{model[:200]}` does not exist. {there}",
        code="model_not_found",
        param="model",
        kind="not_found_error",
    )


def endpoint_not_supported(model: str, path: str, instead: Sequence[str]) -> ApiError:
    """404, naming what the model has."""
    return ApiError(
        404,
        f"The model `{model[:200]}` has no {path}. It has: {', '.join(instead)}.",
        code="endpoint_not_supported",
        param="model",
    )


_STATUS: dict[FailureCode, tuple[int, str]] = {
    FailureCode.BODY_TOO_LARGE: (413, "invalid_request_error"),
    FailureCode.BUSY: (503, "overloaded_error"),
    FailureCode.DRAINING: (503, "overloaded_error"),
    FailureCode.LEASE_REFUSED: (503, "overloaded_error"),
    FailureCode.NO_RESPONDERS: (503, "server_error"),
    FailureCode.AGENT_SILENT: (503, "server_error"),
    FailureCode.AGENT_LEFT: (503, "server_error"),
    FailureCode.BUS_LOST: (503, "server_error"),
    FailureCode.STOPPED: (503, "server_error"),
    FailureCode.DEADLINE: (504, "timeout_error"),
    FailureCode.ENGINE_SILENT: (504, "timeout_error"),
    FailureCode.CREDIT_STARVED: (504, "timeout_error"),
}


def failure_error(failure: InferenceFailure) -> ApiError:
    """What a client is told of a failure; 502 when nothing better fits."""
    status, kind = _STATUS.get(failure.code, (502, "server_error"))
    retry_after_s = failure.retry_after_s or (1.0 if status == 503 else None)
    return ApiError(status, _sentence(failure.message), kind=kind, code=str(failure.code), retry_after_s=retry_after_s)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


_TAIL_BYTES = 4096


def usage_of(body: bytes) -> dict[str, Any] | None:
    """Of a whole answer: mostly near its end, but what else a client asks for (`prompt_logprobs`, token ids) may come
    behind it and be long, and is not to make the answer free of charge."""
    found = read_usage(body[-_TAIL_BYTES:])
    return found or (read_usage(body) if len(body) > _TAIL_BYTES else None)


def read_usage(data: bytes) -> dict[str, Any] | None:
    """The last whole `usage` object in `data`, without parsing the rest."""
    place = data.rfind(b'"usage"')
    while place >= 0:
        if data.startswith(b'"usage":{', place) and (usage := _object(data[place + 8 : data.find(b"}", place) + 1])):
            return usage  # Without further objects in it, as nearly all are: a third of the time.
        if found := _USAGE.match(data, place):
            return _object(found[1])
        place = data.rfind(b'"usage"', 0, place)  # `null`, or a text that only looks like it.
    return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
