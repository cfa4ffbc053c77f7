"""The server's event that a client has gone, read strictly."""

from __future__ import annotations

import pytest

from serai.runtime.disconnects import DisconnectedClient, read_disconnect

# As nats-server 2.15.1 sent it, shortened.
EVENT = b"""{"type":"io.nats.server.advisory.v1.client_disconnect","id":"x","timestamp":"2026-11-30T11:03:05Z",
"server":{"name":"hub","id":"NDW","ver":"2.15.1"},"client":{"start":"2026-11-30T11:03:04Z","host":"127.0.0.1","id":9,
"acc":"SERAI","user":"UCHRQW","name":"agent-47","lang":"python3","kind":"Client"},
"sent":{"msgs":1,"bytes":2},"received":{"msgs":0,"bytes":0},"reason":"Client Closed"}"""


def test_an_event_is_read() -> None:
    assert read_disconnect(EVENT) == DisconnectedClient("agent-47", "UCHRQW", "Client Closed", "SERAI", "hub")


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"[]", b"{}", b"null", b'{"client": 1}', b'{"client": {}, "server": 1}']
)
def test_what_is_no_event_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no disconnect event"):
        read_disconnect(payload)
