"""Answers that are numbers or tokens of a text: embeddings, ranks, scores, classes, and the tokenizer itself. Pure.

Shapes as vLLM has them. Every number comes from the text alone.
"""

from __future__ import annotations

import base64
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from math import sqrt
from random import Random
from typing import Any, NamedTuple

import orjson

from serai.engine_emulator.completion import RequestRefused, content_text
from serai.engine_emulator.responses import new_id
from serai.engine_emulator.text import chat_prompt, estimate_tokens

DIMENSIONS = 64
_DIMENSIONS_MAX = 8192
_TEXTS_MAX = 4096
_TOKEN_BYTES = 4
_LABELS = ("LABEL_0", "LABEL_1")
_DECIMALS = 6


class Pooled(NamedTuple):
    """The body of an answer, and what it cost."""

    body: bytes
    tokens: int


def embeddings(fields: Mapping[str, Any], model: str) -> Pooled:
    """`/v1/embeddings`. Raises RequestRefused."""
    texts = _texts(fields, "input")
    form = fields.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise RequestRefused(400, "encoding_format must be float or base64.", param="encoding_format")
    dimensions = fields.get("dimensions")
    dimensions = DIMENSIONS if dimensions is None else dimensions
    if not isinstance(dimensions, int) or not 1 <= dimensions <= _DIMENSIONS_MAX:
        message = f"dimensions must be an integer from 1 to {_DIMENSIONS_MAX}."
        raise RequestRefused(400, message, param="dimensions")
    data = []
    for index, text in enumerate(texts):
        vector = _vector(text, dimensions)
        said: Any = vector if form == "float" else base64.b64encode(array("f", vector).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": said})
    return _listed("embd-", data, model, _tokens(texts))


def rerank(fields: Mapping[str, Any], model: str) -> Pooled:
    """`/v1/rerank`: the documents by their score, best first. Raises RequestRefused."""
    query = fields.get("query")
    if not isinstance(query, str):
        raise RequestRefused(400, "query must be a string.", param="query")
    documents = _documents(fields)
    top = fields.get("top_n")
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 0):
        raise RequestRefused(400, "top_n must be an integer of at least 0.", param="top_n")
    ranked = sorted([(-score(query, text), index, text) for index, text in enumerate(documents)])
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": -negative} for negative, index, text in ranked
    ]
    tokens = _tokens([query, *documents])
    body = {"id": new_id("rerank-"), "model": model, "usage": {"total_tokens": tokens}}
    return Pooled(orjson.dumps({**body, "results": results[:top] if top else results}), tokens)


def scores(fields: Mapping[str, Any], model: str) -> Pooled:
    """`/v1/score`: each pair of texts, or one text with each of the others. Raises RequestRefused."""
    first, second = _texts(fields, "text_1"), _texts(fields, "text_2")
    if len(first) not in (1, len(second)):
        raise RequestRefused(400, "text_1 must be one text, or as many as text_2.", param="text_1")
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    data = [{"object": "score", "index": index, "score": score(*pair)} for index, pair in enumerate(pairs)]
    return _listed("score-", data, model, _tokens([*first, *second]))


def classes(fields: Mapping[str, Any], model: str) -> Pooled:
    """`/v1/classify`. Raises RequestRefused."""
    texts = _texts(fields, "input")
    data = []
    for index, text in enumerate(texts):
        share = score("class", text)
        probabilities = [share, round(1 - share, _DECIMALS)]
        label = _LABELS[share < probabilities[1]]
        data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(_LABELS)})
    return _listed("classify-", data, model, _tokens(texts))


def tokenized(fields: Mapping[str, Any], context_tokens: int) -> Pooled:
    """`/tokenize`: a prompt, or messages. Raises RequestRefused."""
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        prompt = chat_prompt([(str(turn.get("role")), content_text(turn.get("content"))) for turn in messages])
    if not isinstance(prompt, str):
        raise RequestRefused(400, "prompt must be a string, or messages a list.", param="prompt")
    tokens = tokens_of(prompt)
    strings = [text_of([token]) for token in tokens] if fields.get("return_token_strs") is True else None
    body = {"count": len(tokens), "max_model_len": context_tokens, "tokens": tokens, "token_strs": strings}
    return Pooled(orjson.dumps(body), len(tokens))


def detokenized(fields: Mapping[str, Any]) -> Pooled:
    """`/detokenize`. Raises RequestRefused."""
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) and 1 < token < 2**33 for token in tokens):
        raise RequestRefused(400, "tokens must be a list of token ids.", param="tokens")
    return Pooled(orjson.dumps({"prompt": text_of(tokens)}), len(tokens))


def tokens_of(text: str) -> list[int]:
    """Token ids: four bytes of UTF-8 each, behind a bit that tells how many there are."""
    raw = text.encode("utf-8", "replace")
    parts = [raw[at : at + _TOKEN_BYTES] for at in range(0, len(raw), _TOKEN_BYTES)]
    return [int.from_bytes(b"\x01" + part, "big") for part in parts]


def text_of(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    parts = [token.to_bytes(_TOKEN_BYTES + 1, "big").lstrip(b"\x00")[1:] for token in tokens]
    return b"".join(parts).decode("utf-8", "replace")


def score(one: str, other: str) -> float:
    """How well two texts fit, from 0 to 1: the share of words that they have in common, and a little chance."""
    words, others = set(one.lower().split()), set(other.lower().split())
    shared = len(words & others) / max(1, len(words))
    chance = zlib.crc32(f"{one}\x00{other}".encode("utf-8", "replace")) / 2**32
    return round(0.8 * shared + 0.2 * chance, _DECIMALS)


def _vector(text: str, dimensions: int) -> list[float]:
    """Of length 1, as float32 has it: both encodings say the same."""
    random = Random(zlib.crc32(text.encode("utf-8", "replace")))
    drawn = [random.uniform(-1, 1) for _ in range(dimensions)]
    length = sqrt(sum([part * part for part in drawn])) or 1.0
    return list(array("f", [part / length for part in drawn]))


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    """One text or several: strings, or lists of token ids."""
    given = fields.get(name)
    several = isinstance(given, list) and given and all(isinstance(one, str | list) for one in given)
    texts = []
    for one in given if isinstance(given, list) and several else [given]:
        if isinstance(one, list) and one and all(isinstance(token, int) for token in one):
            one = " ".join(map(str, one))
        if not isinstance(one, str):
            message = f"{name} must be a string or a list of token ids, or a list of those."
            raise RequestRefused(400, message, param=name)
        texts.append(one)
    return _bounded(texts, name)


def _documents(fields: Mapping[str, Any]) -> list[str]:
    documents = fields.get("documents")
    listed = documents if isinstance(documents, list) else []
    texts = [one.get("text") if isinstance(one, dict) else one for one in listed]
    if not texts or not all(isinstance(text, str) for text in texts):
        message = "documents must be a list of strings, or of objects with a text."
        raise RequestRefused(400, message, param="documents")
    return _bounded([str(text) for text in texts], "documents")


def _bounded(texts: list[str], name: str) -> list[str]:
    if len(texts) > _TEXTS_MAX:
        raise RequestRefused(400, f"{name} holds {len(texts)} texts; {_TEXTS_MAX} is the limit.", param=name)
    return texts


def _tokens(texts: Sequence[str]) -> int:
    return sum([estimate_tokens(text) for text in texts])


def _listed(prefix: str, data: list[dict[str, Any]], model: str, tokens: int) -> Pooled:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"id": new_id(prefix), "object": "list", "created": int(time.time()), "model": model}
    return Pooled(orjson.dumps({**body, "data": data, "usage": usage}), tokens)
