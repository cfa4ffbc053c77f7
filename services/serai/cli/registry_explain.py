"""Says why a session gets no requests, as this reader and as the registry see it, and what would change that."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

import orjson

from serai.cli.registry_reader import DONE, Reader, SeenSession, add_reader_arguments, age_text, run_reader, seen
from serai.contracts.codec import MalformedMessage, decode, encode
from serai.contracts.registry import Opinion, OpinionRequest
from serai.contracts.session_record import SessionMetadata
from serai.contracts.status import ProbeAnswer, ProbeRequest
from serai.contracts.subjects import OPINION, PROBE
from serai.runtime.bus import Bus, BusError, NoResponders
from serai.runtime.registry_copy import OPINION_TIMEOUT_S, PROBE_TIMEOUT_S
from serai.runtime.session_state import SessionState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reader_arguments(parser)
    parser.add_argument("session", metavar="SESSION", help="a session's id, or a beginning that only one has")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is printed."""

    session: SeenSession
    here: str
    """As this reader sees it, from what it hears itself."""
    probe: str
    """What the session answered just now."""
    registry: str
    """What the registry thinks."""
    remedy: str
    """What would change it."""


def run(arguments: argparse.Namespace) -> int:
    async def main(reader: Reader) -> int:
        session = reader.found(arguments.session).session
        _, probe, registry = await asyncio.gather(
            reader.listen(), probed(reader.bus, session), opinion(reader.bus, reader.settings.site, session)
        )
        record = reader.found(session)
        view = seen(reader.copy, record, time.monotonic())
        here = "it gets requests" if view.why_not_routed is None else f"it gets no requests: {view.why_not_routed}"
        explanation = Explanation(view, here, probe, registry, remedy(view.state, record.metadata))
        if arguments.json:
            print(orjson.dumps(explanation, option=orjson.OPT_INDENT_2).decode())
        else:
            print(_text(explanation))
        return DONE

    return run_reader("registry explain", arguments, main)


async def probed(bus: Bus, session: str) -> str:
    """What the session itself says, asked directly."""
    asked_at_s = time.monotonic()
    try:
        answer = decode(
            ProbeAnswer, (await bus.request(PROBE.of(session), encode(ProbeRequest()), PROBE_TIMEOUT_S)).data
        )
    except NoResponders:
        return "nobody receives what is sent to it: its agent is not connected"
    except (BusError, MalformedMessage) as error:
        return f"it does not answer a probe: {error}"
    took = f"it answers a probe in {(time.monotonic() - asked_at_s) * 1000:.0f} ms"
    return took + (f"; its engine makes no progress for {answer.stalled_s:.1f} s" if answer.stalled_s > 0 else "")


async def opinion(bus: Bus, site: str, session: str) -> str:
    """What the registry thinks of the session."""
    try:
        answer = await bus.request(OPINION.of_site(site), encode(OpinionRequest(session)), OPINION_TIMEOUT_S)
        said = decode(Opinion, answer.data)
    except (BusError, MalformedMessage) as error:
        return f"it gives no opinion: {error}"
    if said.alive is None:
        return "it does not know the session"
    thinks = "the session is alive" if said.alive else "the session does not answer"
    heard = "" if said.silent_s is None else f", heard {age_text(said.silent_s)} ago"
    return thinks + heard + (f"; {said.reason}" if said.reason else "")


def remedy(state: SessionState, said: SessionMetadata) -> str:
    """What would bring requests to a session in `state`, in plain words."""
    match state:
        case SessionState.SERVING:
            return "nothing is needed"
        case SessionState.LOADING:
            progress = "" if said.loading_progress is None else f", {said.loading_progress:.0%} done"
            phase = f" (now: {said.loading_phase}{progress})" if said.loading_phase else progress
            return f"it serves as soon as its engine has answered with a first token{phase}; its log shows the engine's"
        case SessionState.QUEUED:
            return "it loads as soon as what it waits for is free"
        case SessionState.DRAINING:
            return "nothing: it ends when its requests are done; a new session takes over"
        case SessionState.ASLEEP:
            return "its macro-scheduler: it is woken when its model needs it"
        case SessionState.STALLED:
            return "the engine's next token or step of prefill; look at the engine's log and its GPU"
        case SessionState.SUSPECTED:
            return (
                "its next sign of life. Is the job still running, does its node reach NATS? It is closed for good when "
                "the batch system says that the job is over (`serai registry ended ALLOCATION`), or after long silence"
            )
        case SessionState.DOWN:
            return "nothing: its engine has ended; a new session takes over"
        case SessionState.LEFT:
            return "nothing: it has left, and ids are never used again; a new session takes over"


def _text(explanation: Explanation) -> str:
    view = explanation.session
    return "\n".join(
        (
            f"{view.session}: {view.state}",
            f"  what      {view.model} at site {view.site}, allocation {view.allocation or '–'} on {view.host or '–'}",
            f"  record    {view.lifecycle}, version {view.version}; last heard {age_text(view.age_s)} ago",
            f"  here      {explanation.here}",
            f"  probe     {explanation.probe}",
            f"  registry  {explanation.registry}",
            f"  change    {explanation.remedy}",
        )
    )
