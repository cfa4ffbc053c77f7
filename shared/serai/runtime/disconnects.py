"""The NATS server's own word that a client's connection has closed: sooner than any silence, and a reason with it.

It comes in the system account, to which a service has no access otherwise: a second connection, as a user of that
account. Without one, everything works as before, only later: silence is noticed after seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from serai.runtime.bus import BusError, Message
from serai.runtime.nats_bus import NatsAddress, NatsBus
from serai.runtime.reconnect_curve import SPAN_FEW_S

log = structlog.get_logger()

DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"
TRY_AGAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class DisconnectedClient:
    """One connection that is no more. The process behind it may be there again in a second."""

    name: str
    """As it gave it to `NatsBus.connect`."""
    user: str
    """Its public nkey, or the name of its user."""
    reason: str
    """The server's words, such as `Client Closed` or `Stale Connection`; `Read Error` when the process died."""
    account: str = ""
    server: str = ""


def read_disconnect(payload: bytes) -> DisconnectedClient:
    """A client from the server's event. Raises ValueError for anything else."""
    try:
        event = json.loads(payload)
        client = event["client"]
        return DisconnectedClient(
            name=str(client.get("name", "")),
            user=str(client.get("nkey") or client.get("user") or ""),
            reason=str(event.get("reason", "")),
            account=str(client.get("acc", "")),
            server=str(event.get("server", {}).get("name", "")),
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"no disconnect event: {error!r}") from error


async def watch_disconnects(address: NatsAddress, on_gone: Callable[[DisconnectedClient], None]) -> None:
    """Calls `on_gone` for each client of any account that goes, until cancelled; `address` is that of a user of the
    system account. Returns at once, having said so, when it has no credentials; tries again for ever, having said so
    once, when NATS does not take them: nothing rests on this alone."""
    if address.nkey_file is None and address.credentials_file is None:
        log.info("disconnects.off", effect="a lost agent is noticed by its silence only, some seconds later")
        return
    tell = log.warning
    while True:
        try:
            await _watch(address, on_gone)
        except BusError as error:
            tell("disconnects.failed", error=str(error), again_in_s=TRY_AGAIN_S)
            tell = log.debug
        await asyncio.sleep(TRY_AGAIN_S)


async def _watch(address: NatsAddress, on_gone: Callable[[DisconnectedClient], None]) -> None:
    """Until the connection is lost for good; raises BusError then."""

    def on_event(message: Message) -> None:
        try:
            client = read_disconnect(message.data)
        except ValueError as error:
            log.warning("disconnects.malformed", subject=message.subject, error=str(error))
            return
        on_gone(client)

    bus = await NatsBus.connect(address, "system", reconnect_span_s=SPAN_FEW_S)
    try:
        await bus.subscribe(DISCONNECTS, on_event)
        await bus.barrier()
        log.info("disconnects.on", server=address.url)
        await bus.closed
    finally:
        await bus.aclose()
