"""What is promised on paper holds: requests made from the API documents, valid ones and broken ones, by schemathesis.

Against our own document everything that it says is checked; against OpenAI's that nothing is a failure of ours and that
answers have OpenAI's form. What of OpenAI's document an engine refuses is the engine's affair.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from clients.conftest import NATIVE, TRANSLATED
from clients.test_conversations import HERE, environment, run
from integration.system import System

SEED = "7"
EXAMPLES = os.environ.get("SERAI_CONTRACT_EXAMPLES", "8")
"""Requests per operation and phase; more are worth an evening."""
OURS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,ignored_auth"
)
FREE_HEADERS = ("x-serai-require", "x-serai-providers")
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 50}
_SAID = {
    "type": "object",
    "properties": {"role": {"enum": ["user"]}, "content": _TEXT},
    "required": ["role", "content"],
}
_TURNS = {"type": "array", "items": _SAID, "minItems": 1, "maxItems": 3}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _TURNS},
    "/v1/messages": {"messages": _TURNS, "max_tokens": {"type": "integer", "minimum": 1, "maximum": 50}},
    "/v1/messages/count_tokens": {"messages": _TURNS},
    **{path: {"text_1": _TEXT, "text_2": _TEXT} for path in ("/v1/score", "/score")},
    **{path: {"input": _TEXT} for path in ("/v1/classify", "/classify", "/v1/responses")},
    **{path: {"prompt": _TEXT} for path in ("/tokenize", "/v1/tokenize")},
    **{
        path: {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 2, "maximum": 999}}}
        for path in ("/detokenize", "/v1/detokenize")
    },
    **{
        path: {"query": _TEXT, "documents": {"type": "array", "items": _TEXT, "minItems": 1}}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
}
THEIRS = "not_a_server_error,content_type_conformance,response_schema_conformance"


def schemathesis(clients: Path, system: System, document: Path, *words: str, folder: Path) -> dict[str, Counter[int]]:
    """How often each path was answered with each status. Fails with what it found. The seed is fixed, so that a finding
    can be had again."""
    (folder / "schemathesis.toml").write_text("")
    har = folder / "requests.har"
    command = [str(clients / "contract" / "bin" / "schemathesis"), "run", str(document), *words, "--seed", SEED]
    command += [
        "-H",
        f"Authorization: Bearer {system.key}",
        "--phases",
        "examples,fuzzing",
        "--report-har-path",
        str(har),
    ]
    command += ["--continue-on-failure", "--warnings", "off", "--suppress-health-check", "all", "--no-shrink"]
    command += ["--request-timeout", "30", "--no-color"]
    run(command, variables=environment(system, clients, TRANSLATED, folder), folder=folder, timeout_s=280)
    answers: dict[str, Counter[int]] = {}
    for entry in json.loads(har.read_text())["log"]["entries"]:
        path = urlsplit(entry["request"]["url"]).path
        answers.setdefault(path, Counter())[entry["response"]["status"]] += 1
    return answers


def with_model(document: Any, model: str) -> Any:
    """Every property `model` can only be this one: else nearly all requests would end at an unknown model."""
    if isinstance(document, list):
        return [with_model(part, model) for part in document]
    if not isinstance(document, dict):
        return document
    fixed = {name: with_model(part, model) for name, part in document.items()}
    properties = fixed.get("properties")
    if isinstance(properties, dict) and "model" in properties:
        properties["model"] = {"type": "string", "enum": [model]}
    return fixed


def as_the_engine_needs(document: Any) -> Any:
    """Our document leaves to engines what is theirs; this is what the emulated engine makes of it. Headers with a
    grammar of their own are left out."""
    for path, fields in NEEDED.items():
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        schema["properties"] |= fields
        schema["required"] = ["model", *fields]
    for path in document["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                told = operation.get("parameters", [])
                operation["parameters"] = [one for one in told if one["name"] not in FREE_HEADERS]
    return document


@pytest.mark.timeout(300)
def test_our_own_document_is_true(serving: System, clients: Path, tmp_path: Path) -> None:
    with serving.client() as client:
        document = client.get("/openapi.json").json()
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(as_the_engine_needs(with_model(document, NATIVE))))
    words = ["--url", serving.url, "--max-examples", EXAMPLES, "--checks", OURS]
    answers = schemathesis(clients, serving, file, *words, folder=tmp_path)
    for path, operations in document["paths"].items():
        if "post" in operations and "{" not in path and not path.endswith("/translations"):
            assert answers[path][200] > 0, (
                f"{path} never succeeded, so nothing was seen of its answers: {answers[path]}"
            )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [TRANSLATED, NATIVE])
def test_openais_document_finds_no_failure_of_ours(serving: System, clients: Path, tmp_path: Path, model: str) -> None:
    document = tmp_path / "openai.json"
    python = str(clients / "contract" / "bin" / "python")
    variables = environment(serving, clients, model, tmp_path)
    run([python, str(HERE / "contract_document.py"), str(document), model], variables=variables, folder=tmp_path)
    words = ["--url", f"{serving.url}/v1", "--max-examples", EXAMPLES, "--checks", THEIRS]
    answers = schemathesis(clients, serving, document, *words, folder=tmp_path)
    for path in ("/chat/completions", "/completions", "/embeddings", "/responses", "/models"):
        assert answers[f"/v1{path}"][200] > 0, f"{path} never succeeded: {answers[f'/v1{path}']}"
