"""Messages to bytes and back; nowhere else is a wire format spelled. Samples of each are in `tests/golden/`.

JSON messages: the dataclass's fields as an object; unknown fields are ignored, so that an older reader survives a
newer writer. Frames: a 20-byte head, big-endian, then the payload:

    kind u8 · attempt u8 · reserved u16 · sequence u32 · stream u64 · payload length u32
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from serai.contracts.inference import Frame

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_HEAD = struct.Struct(">BBHIQI")
FRAME_HEAD_BYTES = _HEAD.size

_decoders: dict[type, msgspec.json.Decoder[object]] = {}
_encoder = msgspec.json.Encoder()
_defaults: dict[type, list[tuple[str, Any]]] = {}


class MalformedMessage(ValueError):
    """Bytes that are not the message they should be; the text says which field, and what was expected."""


def encode(message: object) -> bytes:
    """A dataclass message as JSON bytes."""
    return _encoder.encode(message)


def encode_sparse(message: DataclassInstance) -> bytes:
    """As `encode`, without the fields that have their default: for what is said every second, mostly of nothing.
    `decode` reads both."""
    kind = type(message)
    known = _defaults.get(kind)
    if known is None:
        known = _defaults[kind] = [(field.name, field.default) for field in fields(message)]
    said = {name: value for name, default in known if (value := getattr(message, name)) != default}
    return _encoder.encode(said)


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """The message of type `kind` in `data`. Raises MalformedMessage naming the field that is wrong."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{kind.__name__}: {error}") from error


def decode_lines(kind: type[T], data: bytes) -> tuple[list[T], int]:
    """The messages of type `kind` that stand in `data`, one a line, and how many lines are none."""
    found: list[T] = []
    malformed = 0
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            found.append(decode(kind, line))
        except MalformedMessage:
            malformed += 1
    return found, malformed


def encode_frame(frame: Frame) -> bytes:
    """One frame as bytes."""
    payload = frame.payload
    return _HEAD.pack(frame.kind, frame.attempt, 0, frame.sequence, frame.stream, len(payload)) + payload


def frame_bytes(kind: int, stream: int, attempt: int, sequence: int, payload: bytes = b"") -> bytes:
    """As `encode_frame`, without making a Frame: the path taken once per token."""
    return _HEAD.pack(kind, attempt, 0, sequence, stream, len(payload)) + payload


def encode_frames(frames: Iterable[Frame]) -> bytes:
    """Several frames as one NATS message."""
    return b"".join(map(encode_frame, frames))


def decode_frames(data: bytes) -> list[Frame]:
    """The frames of one NATS message. Raises MalformedMessage when the bytes do not end with a frame."""
    frames: list[Frame] = []
    position, size = 0, len(data)
    while position < size:
        if size - position < FRAME_HEAD_BYTES:
            raise MalformedMessage(f"frame head cut short at byte {position} of {size}")
        kind, attempt, _, sequence, stream, length = _HEAD.unpack_from(data, position)
        position += FRAME_HEAD_BYTES
        end = position + length
        if end > size:
            raise MalformedMessage(f"frame payload cut short: {length} bytes announced, {size - position} there")
        frames.append(Frame(kind, stream, attempt, sequence, data[position:end]))
        position = end
    return frames
