"""The short way through nats-py's parser gives what the long way gives, however the bytes are cut."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.nats_bus import _DirectClient

payloads = st.binary(max_size=30) | st.sampled_from([b"", b"MSG x 1 3\r\n", b"\r\n", b"PING\r\n"])
messages = st.tuples(
    st.sampled_from(["a", "inference.s-1"]), st.sampled_from([1, 2]), st.sampled_from(["", "r.1"]), payloads
)


def wire(message: tuple[str, int, str, bytes]) -> bytes:
    subject, sid, reply, payload = message
    return f"MSG {subject} {sid} {reply + ' ' if reply else ''}{len(payload)}\r\n".encode() + payload + b"\r\n"


@given(st.lists(messages | st.just("PING"), max_size=8), st.lists(st.integers(1, 60), max_size=12))
def test_messages_come_whole_and_in_order_however_they_are_cut(sent: list, cuts: list[int]) -> None:
    async def main() -> None:
        client = _DirectClient()
        seen: list[tuple[str, int, str, bytes]] = []
        pings = 0

        async def process_ping() -> None:
            nonlocal pings
            pings += 1

        client._process_ping = process_ping
        for sid in (1, 2):
            client.direct[sid] = lambda subject, data, reply, silent, sid=sid: seen.append((subject, sid, reply, data))
        data = b"".join(b"PING\r\n" if one == "PING" else wire(one) for one in sent)
        position = 0
        for size in [*cuts, len(data) + 1]:
            await client._ps.parse(data[position : position + size])
            position += size
        assert seen == [one for one in sent if one != "PING"]
        assert pings == sent.count("PING")

    asyncio.run(main())


def test_no_responders_is_told_apart_from_an_empty_message() -> None:
    async def main() -> None:
        client = _DirectClient()
        seen: list[bool] = []
        client.direct[1] = lambda subject, data, reply, silent: seen.append(silent)
        await client._ps.parse(b"HMSG in 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\nMSG in 1 0\r\n\r\n")
        assert seen == [True, False]

    asyncio.run(main())
