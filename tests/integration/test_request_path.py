"""One real request, walked hop by hop under the headings of docs/request-path.md."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import orjson

from integration.system import System, wait_for
from serai.contracts.codec import decode, decode_frames
from serai.contracts.inference import Frame, FrameKind, InferenceRequest, ResponseEnd, ResponseHead
from serai.contracts.subjects import CANCEL, INFERENCE
from serai.runtime.bus import Message
from serai.runtime.nats_bus import NatsAddress, NatsBus

PAGE = Path(__file__).parents[2] / "docs" / "request-path.md"
BODY = (
    b'{"model":"org/m-1.5:8b", "messages":[{"role":"user","content":"hi"}],  "max_tokens":3,"stream":true,'
    b'"stream_options":{"include_usage":true},"extra":[1]}'
)
"""It asks for usage itself: the ingress would have to, otherwise, and so change the body."""


class Tap:
    """Everything that passes on the hops' subjects, as it passes."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.messages: list[Message] = []

    async def __aenter__(self) -> Tap:
        url = f"nats://127.0.0.1:{self._system.nats_port}"
        self._agent_side = await NatsBus.connect(NatsAddress(url, self._system.nats.key_file("agent")), "agent")
        self._ingress_side = await NatsBus.connect(NatsAddress(url, self._system.nats.key_file("ingress")), "ingress")
        for subject in (INFERENCE.every, CANCEL.every):
            await self._agent_side.subscribe(subject, self.messages.append)
        await self._ingress_side.subscribe("_INBOX_ingress.>", self.messages.append)
        await self._agent_side.barrier()
        await self._ingress_side.barrier()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._agent_side.aclose()
        await self._ingress_side.aclose()

    async def settle(self) -> None:
        """What passed before this, is here on both connections."""
        await self._agent_side.barrier()
        await self._ingress_side.barrier()

    def frames(self, *kinds: FrameKind) -> list[tuple[str, Frame]]:
        seen = ((m.subject, frame) for m in self.messages if m.data[:1] != b"{" for frame in decode_frames(m.data))
        return [(subject, frame) for subject, frame in seen if frame.kind in kinds]


def headings() -> Iterator[str]:
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"## \d\. (.+)", line):
            yield match.group(1)


def test_the_page_names_eight_hops_and_this_test_walks_them(small_system: System) -> None:
    assert list(headings()) == [name for name, _ in HOPS]
    agent = small_system.start_agent("--ttft-ms", "5", "--tpot-ms", "1", model="org/m-1.5:8b")
    small_system.wait_for_sessions(1, "org/m-1.5:8b")
    asyncio.run(walk(small_system))
    assert agent.terminate() == 0


async def walk(system: System) -> None:
    async with Tap(system) as tap:
        headers = {"Authorization": f"Bearer {system.key}", "X-Request-Id": "walk-1"}
        async with httpx2.AsyncClient(base_url=system.url, headers=headers, timeout=20) as client:
            answer = await client.post("/v1/chat/completions", content=BODY)
        await asyncio.to_thread(wait_for, lambda: tap.frames(FrameKind.END), "the END frame passes")
        await tap.settle()
        for _, step in HOPS:
            step(tap, answer)


def receive(tap: Tap, answer: httpx2.Response) -> None:
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "walk-1"


def pick(tap: Tap, answer: httpx2.Response) -> None:
    assert answer.headers["x-serai-session"].startswith("local-a0-0-")


def send(tap: Tap, answer: httpx2.Response) -> None:
    ((subject, frame),) = tap.frames(FrameKind.REQUEST)
    assert subject == f"inference.{answer.headers['x-serai-session']}"
    request = decode(InferenceRequest, frame.payload)
    assert (request.request_id, request.path) == ("walk-1", "/v1/chat/completions")
    assert (request.body_bytes, request.body_frames) == (len(BODY), 1)


def take(tap: Tap, answer: httpx2.Response) -> None:
    ((_, request),) = tap.frames(FrameKind.REQUEST)
    ((_, body),) = tap.frames(FrameKind.BODY)
    assert (body.stream, body.attempt, body.sequence) == (request.stream, 1, 0)


def post(tap: Tap, answer: httpx2.Response) -> None:
    ((_, body),) = tap.frames(FrameKind.BODY)
    assert body.payload == BODY, "not a byte of the body is changed"


def answer_frames(tap: Tap, answer: httpx2.Response) -> None:
    frames = tap.frames(FrameKind.HEAD, FrameKind.DATA, FrameKind.END, FrameKind.ERROR)
    assert [frame.sequence for _, frame in frames] == list(range(len(frames)))
    assert all(re.fullmatch(r"_INBOX_ingress\.[0-9a-f]{24}\.stream\.\d+", subject) for subject, _ in frames)
    head = decode(ResponseHead, frames[0][1].payload)
    assert head.status == 200
    assert head.headers["content-type"].startswith("text/event-stream")


def relay(tap: Tap, answer: httpx2.Response) -> None:
    data = b"".join(frame.payload for _, frame in tap.frames(FrameKind.DATA))
    assert answer.content == data, "the client reads the engine's bytes"
    contents = [orjson.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    assert sum(bool(c["choices"] and c["choices"][0]["delta"].get("content")) for c in contents) == 3
    assert contents[-1]["usage"]["completion_tokens"] == 3


def end(tap: Tap, answer: httpx2.Response) -> None:
    ((_, frame),) = tap.frames(FrameKind.END)
    assert decode(ResponseEnd, frame.payload).data_bytes == len(answer.content)
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert not tap.frames(FrameKind.CANCEL), "an answer that is whole is not cancelled"


HOPS = [
    ("Receive", receive),
    ("Pick", pick),
    ("Send", send),
    ("Take", take),
    ("Post", post),
    ("Answer", answer_frames),
    ("Relay", relay),
    ("End", end),
]
