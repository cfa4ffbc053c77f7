"""`GET /openapi.json`: the OpenAPI 3.1 document of all that is served, made from the table of endpoints.

It binds the ingress only as far as the ingress looks: the fields it reads itself and the few without which no engine
answers. Everything else is the engine's, and passes both ways, so nothing here forbids fields that are not named.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from serai.ingress.endpoints import ENDPOINTS, Body, Dialect, Endpoint
from serai.runtime.version import VERSION

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_LIST: Schema = {"type": "array", "minItems": 1}
_MODEL: Schema = {"type": "string", "minLength": 1, "description": "Name of a model, as in `/v1/models`."}
_STREAM: Schema = {"type": ["boolean", "null"], "description": "Answer with events as they come."}
_MESSAGES: Schema = _LIST | {
    "items": {"type": "object", "required": ["role"], "properties": {"role": _TEXT}},
}
_FILE: Schema = {"type": "string", "format": "binary"}

_FIELDS: dict[str, dict[str, Schema]] = {
    "/v1/chat/completions": {"messages": _MESSAGES},
    "/v1/completions": {"prompt": {"type": ["string", "array"]}},
    "/v1/embeddings": {"input": {"type": ["string", "array"]}},
    "/v1/responses": {"input": {"type": ["string", "array"]}},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": {"type": "integer", "minimum": 1}},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/v1/rerank": {"query": {}, "documents": _LIST},
    "/v1/audio/transcriptions": {"file": _FILE},
    "/v1/audio/translations": {"file": _FILE},
}
"""What an engine needs beside the model, where all engines agree on it."""

_SUMMARIES = {
    "/v1/chat/completions": "Chat with a model",
    "/v1/completions": "Let a model complete a text",
    "/v1/embeddings": "Embed texts",
    "/v1/responses": "Ask by OpenAI's Responses API, statelessly",
    "/v1/messages": "Ask by Anthropic's Messages API",
    "/v1/messages/count_tokens": "Count the tokens of a request of the Messages API",
    "/v1/rerank": "Rank documents by a query",
    "/v1/score": "Score pairs of texts",
    "/v1/classify": "Classify texts",
    "/tokenize": "Turn text into tokens",
    "/detokenize": "Turn tokens into text",
    "/v1/audio/transcriptions": "Write down what is said",
    "/v1/audio/translations": "Write down in English what is said",
}

_REFUSALS = {
    "400": "The request is wrong; the message names the field.",
    "401": "The API key is missing, not known or expired.",
    "403": "The API key may not do this.",
    "404": "There is no such model, or the model has no such endpoint; the message names what there is.",
    "405": "The path takes other methods.",
    "413": "The body is larger than this gateway takes.",
    "415": "The body is encoded in a way that is not understood here.",
    "429": "A limit is reached, the budget is spent, or the engine is busy.",
    "431": "The head of the request is too large.",
    "500": "The engine failed, or the gateway did.",
    "502": "The engine's answer broke off or cannot be read.",
    "503": "Nobody can answer at this moment.",
    "504": "The answer took too long.",
}
_WAITS = ("429", "503")
_REFUSED_BEFORE_ANYTHING = ("400", "405", "413", "415", "431", "500")
_REFUSED_TO_READERS = (*_REFUSED_BEFORE_ANYTHING, "401", "403")

_HEADERS_IN = {
    "x-request-id": "Name of the request, 1 to 128 visible ASCII characters; one is made up otherwise.",
    "x-session-id": "Requests with the same one go to the same session, where that is the model's policy.",
    "x-serai-require": "What the session must be, as in `context>=32768, engine=vllm>=0.25`.",
    "x-serai-providers": "Which providers may answer, as in `cscs, -other`.",
    "x-serai-track": "`none`: no usage record by name, where the project allows that.",
    "x-request-timeout": "Longest time that the whole request may take, in seconds.",
    "x-slo-ttft-ms": "Time to the first token that is of use, in milliseconds; refused early when it cannot be kept.",
    "x-slo-tpot-ms": "Time per further token that is of use, in milliseconds.",
    "x-slo-best-effort": "Under the policy `macro-scheduled`, `no`: refused when these times cannot be met, not late.",
    "x-priority": "`interactive`, `normal` or `batch`; never above the class of the caller.",
}
_HEADER_SCHEMAS: dict[str, Schema] = {
    "x-request-id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "x-serai-track": {"const": "none"},
    "x-request-timeout": {"type": "number", "exclusiveMinimum": 0},
    "x-slo-ttft-ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400_000},
    "x-slo-tpot-ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400_000},
    "x-slo-best-effort": {"enum": ["yes", "no"]},
    "x-priority": {"enum": ["interactive", "normal", "batch"]},
}
"""Of those that are more than text."""
_HEADERS_OUT = {
    "x-request-id": "Name of the request.",
    "x-serai-session": "The session that answered.",
    "x-serai-provider": "Whose session it is.",
    "x-serai-fingerprint": "What the model really is there.",
    "x-serai-attempts": "How many sessions were asked.",
    "x-serai-queue-ms": "How long the request waited for its turn, in milliseconds.",
    "retry-after": "Seconds to wait before the next try.",
    "x-ratelimit-limit-requests": "Of the limit of which least is left: its size.",
    "x-ratelimit-limit-tokens": "The same of tokens.",
    "x-ratelimit-remaining-requests": "What is left of it.",
    "x-ratelimit-remaining-tokens": "The same of tokens.",
    "x-ratelimit-reset-requests": "When it will be full again, as in `1m30s`.",
    "x-ratelimit-reset-tokens": "The same of tokens.",
}


@lru_cache(maxsize=1)
def openapi_document() -> bytes:
    """The document, as JSON."""
    paths = {path: {"post": _operation(endpoint, path)} for endpoint in ENDPOINTS for path in endpoint.paths}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Serai",
            "version": VERSION,
            "description": "Language models that run in short-lived allocations, behind one address. Requests and "
            "answers pass as they are; what is not described here is between client and engine.",
        },
        "security": [{"key": []}, {"anthropicKey": []}],
        "paths": paths | _PATHS,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _SCHEMAS,
            "headers": {name: {"description": text, "schema": _TEXT} for name, text in _HEADERS_OUT.items()},
        },
    }
    return orjson.dumps(document)


def _operation(endpoint: Endpoint, path: str) -> Schema:
    fields = {"model": _MODEL, **({"stream": _STREAM} if endpoint.streams else {}), **_FIELDS.get(endpoint.path, {})}
    if endpoint.body is Body.MULTIPART:
        fields["stream"] = {"type": "string", "enum": ["true", "false", "1", "0"]}
    required = ["model", *_FIELDS.get(endpoint.path, {})]
    media = "application/json" if endpoint.body is Body.JSON else "multipart/form-data"
    error = "AnthropicError" if endpoint.dialect is Dialect.ANTHROPIC else "Error"
    whole: Schema = {"schema": _OBJECT}
    answers = {"application/json": whole}
    if endpoint.streams:
        answers["text/event-stream"] = {"schema": {"description": "Server-sent events."}}
    if endpoint.body is Body.MULTIPART:
        answers |= {"text/plain": {"schema": _TEXT}, "text/vtt": {"schema": _TEXT}}
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADERS_OUT}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": _SUMMARIES[endpoint.path],
        "parameters": [
            {"name": name, "in": "header", "description": text, "schema": _HEADER_SCHEMAS.get(name, _TEXT)}
            for name, text in _HEADERS_IN.items()
        ],
        "requestBody": {
            "required": True,
            "content": {media: {"schema": {"type": "object", "required": required, "properties": fields}}},
        },
        "responses": {
            "200": {"description": "The engine's answer.", "headers": headers, "content": answers},
            **{status: _refusal(status, error) for status in _REFUSALS},
            "default": {"description": "The engine's own answer.", "content": {"*/*": {"schema": {}}}},
        },
    }


def _refusal(status: str, *schemas: str) -> Schema:
    """Of the ingress; those of engines pass as they came, in whichever form."""
    told = [{"$ref": f"#/components/schemas/{name}"} for name in (*schemas, "EngineError")]
    answer: Schema = {
        "description": _REFUSALS[status],
        "content": {"application/json": {"schema": {"anyOf": told}}},
    }
    if status in _WAITS:
        answer["headers"] = {"retry-after": {"$ref": "#/components/headers/retry-after"}}
    if status == "405":
        answer["headers"] = {"allow": {"schema": _TEXT}}
    return answer


def _reading(summary: str, schema: Schema, media: str = "application/json") -> Schema:
    """A path that anyone may read."""
    told: Schema = {"description": summary + ".", "content": {media: {"schema": schema}}}
    answers = {status: _own_refusal(status) for status in _REFUSED_BEFORE_ANYTHING}
    return {"get": {"summary": summary, "security": [], "responses": answers | {"200": told}}}


def _health(summary: str) -> Schema:
    """A path whose status alone says it."""
    path = _reading(summary, _STATUS)
    answers = path["get"]["responses"]
    answers["503"] = answers["200"] | {"description": "Not now; it says why."}
    return path


def _models(summary: str, schema: str, *refused: str, parameters: list[Schema]) -> Schema:
    """A path that is read with a key."""
    told = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    answers = {status: _own_refusal(status) for status in (*_REFUSED_TO_READERS, *refused)}
    answers["200"] = {"description": summary + ".", "content": {"application/json": told}}
    return {"get": {"summary": summary, "parameters": parameters, "responses": answers}}


def _own_refusal(status: str) -> Schema:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": _REFUSALS[status], "content": {"application/json": {"schema": schema}}}


def _not_kept(summary: str) -> Schema:
    answers = {status: _own_refusal(status) for status in (*_REFUSED_TO_READERS, "404")}
    return {"summary": summary, "description": "Always 404: responses are not kept.", "responses": answers}


def _in_path(name: str, description: str) -> list[Schema]:
    return [{"name": name, "in": "path", "required": True, "schema": _MODEL | {"description": description}}]


_ALL: Schema = {
    "name": "all",
    "in": "query",
    "description": "`true`: models whose sessions have all left, too.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}
_STATUS: Schema = {"type": "object", "required": ["status"], "properties": {"status": _TEXT}}
_PATHS: dict[str, Schema] = {
    "/v1/models": _models("Models that are served or coming", "ModelList", parameters=[_ALL]),
    "/v1/models/{model}": _models(
        "One model",
        "Model",
        "404",
        parameters=[*_in_path("model", "Its name; slashes in it may be written as they are, or as `%2F`."), _ALL],
    ),
    "/v1/responses/{response_id}": {
        "parameters": _in_path("response_id", "As it stood in the answer."),
        "get": _not_kept("A response, later"),
        "delete": _not_kept("Forget a response"),
    },
    "/v1/responses/{response_id}/input_items": {
        "parameters": _in_path("response_id", "As it stood in the answer."),
        "get": _not_kept("What a response was asked"),
    },
    "/v1/responses/{response_id}/cancel": {
        "parameters": _in_path("response_id", "As it stood in the answer."),
        "post": _not_kept("Cancel a response that is made in the background"),
    },
    "/health": _health("Whether requests can be served"),
    "/health/ready": _health("Whether requests can be served"),
    "/health/live": _reading("Whether the process runs", _STATUS),
    "/metrics": _reading("Metrics for Prometheus", _TEXT, "text/plain"),
    "/version": _reading(
        "The gateway's version", {"type": "object", "required": ["version"], "properties": {"version": _TEXT}}
    ),
    "/openapi.json": _reading("This document", _OBJECT),
}

_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
_SCHEMAS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _OPTIONAL_TEXT | {"description": "The field or header that is wrong."},
                    "code": _OPTIONAL_TEXT | {"description": "What is wrong, for programs."},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
            "request_id": _TEXT,
        },
    },
    "EngineError": {"type": "object", "description": "An engine's own words, as they came."},
    "Model": {
        "type": "object",
        "required": ["id", "object", "created", "owned_by", "state", "sessions", "age_s"],
        "properties": {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": _TEXT | {"description": "The provider."},
            "state": {"enum": ["serving", "loading", "queued", "draining", "offline"]},
            "sessions": {"type": "object", "additionalProperties": {"type": "integer"}},
            "progress": {"type": ["number", "null"], "description": "Share of the start that is done."},
            "max_model_len": {"type": "integer"},
            "endpoints": {"type": "array", "items": _TEXT, "description": "Those that its sessions are known to have."},
            "fingerprints": {"type": "object", "additionalProperties": {"type": "integer"}},
            "age_s": {"type": ["number", "null"], "description": "For how long nothing was heard of it."},
        },
    },
    "ModelList": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
    },
}
