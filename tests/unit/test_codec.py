"""Every message and frame comes back from its bytes; bytes that are none are MalformedMessage and nothing else."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.codec import (
    FRAME_HEAD_BYTES,
    MalformedMessage,
    decode,
    decode_frames,
    encode,
    encode_frame,
    encode_frames,
    encode_sparse,
    frame_bytes,
)
from serai.contracts.inference import (
    Frame,
    FrameKind,
    InferenceFailure,
    InferenceRequest,
    ResponseEnd,
    ResponseHead,
)
from serai.contracts.registry import SnapshotPage, SnapshotRequest
from serai.contracts.session_record import Lifecycle, SessionRecord
from serai.contracts.status import SessionStatus

MESSAGES = (
    InferenceRequest,
    ResponseHead,
    ResponseEnd,
    InferenceFailure,
    SessionRecord,
    SessionStatus,
    SnapshotRequest,
    SnapshotPage,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """What JSON can carry of a type: whole numbers of 64 bits, finite floats."""
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        return st.builds(hint, **{name: values(inner) for name, inner in get_type_hints(hint).items()})
    if get_origin(hint) is list:
        return st.lists(values(*get_args(hint)), max_size=3)
    if get_origin(hint) is UnionType:
        return st.one_of([values(inner) for inner in get_args(hint)])
    return st.from_type(hint)


messages = st.sampled_from(MESSAGES).flatmap(values)
frames = st.builds(
    Frame,
    kind=st.sampled_from([int(kind) for kind in FrameKind]),
    stream=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 255),
    sequence=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=60),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(messages)
def test_a_message_comes_back_from_its_bytes(message: object) -> None:
    assert decode(type(message), encode(message)) == message


@given(messages, st.data())
def test_a_message_cut_short_is_malformed(message: object, data: st.DataObject) -> None:
    encoded = encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(MalformedMessage, match=type(message).__name__):
        decode(type(message), encoded[:cut])


@given(st.sampled_from(MESSAGES), st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_malformed(kind: type, data: bytes) -> None:
    try:
        message = decode(kind, data)
    except MalformedMessage:
        return
    assert isinstance(message, kind)


@given(messages, st.data())
def test_a_field_of_the_wrong_type_is_named(message: object, data: st.DataObject) -> None:
    content: dict[str, Any] = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(content)))
    content[name] = [[]] if not isinstance(content[name], list) else "no list"
    with pytest.raises(MalformedMessage, match=rf"\$\.{name}"):
        decode(type(message), json.dumps(content).encode())


@given(messages, json_values)
def test_fields_of_a_newer_writer_are_ignored(message: object, value: object) -> None:
    content = json.loads(encode(message)) | {"a_later_field": value}
    assert decode(type(message), json.dumps(content).encode()) == message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(MalformedMessage, match=r"SessionStatus: .*`session`"):
        decode(SessionStatus, b"{}")


def test_text_that_is_not_utf_8_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="SnapshotRequest"):
        decode(SnapshotRequest, b'{"after": "\xff"}')


def test_nesting_deeper_than_can_be_read_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="SnapshotRequest"):
        decode(SnapshotRequest, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@given(frames)
def test_a_frame_comes_back_from_its_bytes(frame: Frame) -> None:
    assert decode_frames(encode_frame(frame)) == [frame]
    assert encode_frame(frame) == frame_bytes(frame.kind, frame.stream, frame.attempt, frame.sequence, frame.payload)


@given(st.lists(frames, max_size=8), st.data())
def test_frames_survive_any_split_into_messages(sent: list[Frame], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=4)))
    groups = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert [frame for group in groups for frame in decode_frames(encode_frames(group))] == sent


@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_frames_cut_short_are_malformed_unless_the_cut_is_between_two(sent: list[Frame], data: st.DataObject) -> None:
    encoded = encode_frames(sent)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    ends = [len(encode_frames(sent[:count])) for count in range(len(sent))]
    if cut in ends:
        assert decode_frames(encoded[:cut]) == sent[: ends.index(cut)]
    else:
        with pytest.raises(MalformedMessage, match="cut short"):
            decode_frames(encoded[:cut])


@given(st.binary(max_size=3 * FRAME_HEAD_BYTES))
def test_any_bytes_are_frames_or_malformed(data: bytes) -> None:
    try:
        assert encode_frames(decode_frames(data))[4:] == data[4:]  # Bytes 2 and 3 of a head are reserved.
    except MalformedMessage:
        pass


def test_frames_show_what_they_are() -> None:
    assert repr(Frame(FrameKind.DATA, 7, 1, 3, b"x")) == "Frame(DATA stream=7 attempt=1 seq=3 b'x')"
    assert repr(Frame(99, 7, 1, 3)) == "Frame(99 stream=7 attempt=1 seq=3 b'')"


@given(values(SessionStatus))
def test_what_is_said_sparsely_is_the_same(status: SessionStatus) -> None:
    sparse = encode_sparse(status)
    assert decode(SessionStatus, sparse) == status
    assert len(sparse) <= len(encode(status))


def test_what_is_at_its_default_is_not_said() -> None:
    status = SessionStatus("s", 1, Lifecycle.SERVING, 2, 1.0, in_flight=3)
    assert json.loads(encode_sparse(status)) == {
        "session": "s",
        "sequence": 1,
        "lifecycle": 1,
        "version": 2,
        "interval_s": 1.0,
        "in_flight": 3,
    }
