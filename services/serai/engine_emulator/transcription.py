"""`/v1/audio/transcriptions`: reads a form with a file, and says words that come from the file's bytes alone."""

from __future__ import annotations

import zlib
from email import message_from_bytes
from email.message import Message
from email.policy import HTTP
from typing import Any

import orjson

from serai.engine_emulator.completion import RequestRefused
from serai.engine_emulator.responses import JSON
from serai.engine_emulator.text import word

WORDS = 12
_SECONDS_PER_WORD = 0.5
_FORMS = ("json", "text", "verbose_json")


def form_fields(body: bytes, content_type: str) -> dict[str, str | bytes]:
    """The fields of a multipart form; a file as its bytes. Raises RequestRefused."""
    head = b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n"
    message: Any = message_from_bytes(head + body, policy=HTTP)
    if not content_type.startswith("multipart/form-data") or not message.is_multipart():
        raise RequestRefused(400, "The body must be a multipart form (multipart/form-data).")
    fields: dict[str, str | bytes] = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        if not isinstance(part, Message) or not isinstance(name, str):
            raise RequestRefused(400, "A part of the form has no name.")
        content = part.get_payload(decode=True)
        raw = content if isinstance(content, bytes) else b""
        fields[name] = raw if part.get_filename() is not None else raw.decode("utf-8", "replace")
    return fields


def transcribed(fields: dict[str, str | bytes], seed: int) -> tuple[bytes, str]:
    """The body of the answer and its content type. Raises RequestRefused."""
    audio = fields.get("file")
    if not isinstance(audio, bytes) or not audio:
        raise RequestRefused(400, "file must be a file that is not empty.", param="file")
    form = fields.get("response_format", "json")
    if form not in _FORMS:
        message = f"response_format must be one of {', '.join(_FORMS)}."
        raise RequestRefused(400, message, param="response_format")
    if fields.get("stream") == "true":
        raise RequestRefused(400, "Transcriptions are not streamed by this engine.", param="stream")
    key = zlib.crc32(audio, seed & 0xFFFFFFFF)
    text = " ".join([word(key, index) for index in range(WORDS)])
    if form == "text":
        return f"{text}\n".encode(), "text/plain; charset=utf-8"
    seconds = WORDS * _SECONDS_PER_WORD
    if form == "json":
        return orjson.dumps({"text": text, "usage": {"type": "duration", "seconds": int(seconds)}}), JSON
    segment = {"id": 0, "seek": 0, "start": 0.0, "end": seconds, "text": text, "tokens": [], "temperature": 0.0}
    segment |= {"avg_logprob": -0.1, "compression_ratio": 1.0, "no_speech_prob": 0.0}
    whole = {"task": "transcribe", "language": fields.get("language", "english"), "duration": seconds, "text": text}
    return orjson.dumps({**whole, "segments": [segment]}), JSON
