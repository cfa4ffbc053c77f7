"""`GET /v1/models` from the ingress's own copy of the registry: nobody is asked, and unchanged parts are kept. Pure.

A model's entry holds OpenAI's fields and, beside them, what becomes of it: `state`, `sessions` by state, `progress`
while it loads, `max_model_len`, `fingerprints` when its sessions are not all the same build, `age_s`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import orjson

from serai.contracts.session_record import SessionRecord
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.session_state import SessionState, state_of

_MODEL_STATES = (SessionState.SERVING, SessionState.LOADING, SessionState.QUEUED, SessionState.DRAINING)
"""A model's state is the first of these that one of its sessions is in; else it is offline."""
_GONE = (SessionState.DOWN, SessionState.LEFT)
OFFLINE = "offline"
BODY_KEPT_S = 0.25
"""For so long the same list is given out again when nothing has changed: only its ages would be other ones."""


class _Part(NamedTuple):
    """One model's entry without its end, kept until something changes."""

    generation: int
    entry: dict[str, Any]
    text: bytes
    open: bool


class ModelListing:
    """Lists the models of one replica."""

    def __init__(self, replica: RegistryReplica) -> None:
        self._replica = replica
        self._parts: dict[str, _Part] = {}
        self._names: tuple[int, list[str]] = (-1, [])
        self._bodies: dict[bool, tuple[int, float, bytes]] = {}

    def body(self, now: float, *, everything: bool = False) -> bytes:
        """The list of models that have a session which is not gone; with `everything`, of all that are known."""
        kept = self._bodies.get(everything)
        if kept is not None and kept[0] == self._replica.changes and 0 <= now - kept[1] < BODY_KEPT_S:
            return kept[2]
        parts = []
        for model in self._model_names():
            part = self._part(model, now)
            if part.open or everything:
                parts.append(b'%s,"age_s":%s}' % (part.text, _age(self._replica.heard_model_ago_s(model, now))))
        body = b'{"object":"list","data":[%s]}' % b",".join(parts)
        self._bodies[everything] = (self._replica.changes, now, body)
        return body

    def entry(self, model: str, now: float, *, everything: bool = False) -> dict[str, Any] | None:
        """The entry of one model; None when it would not be in the list."""
        if not self._replica.sessions_of(model):
            return None
        part = self._part(model, now)
        if not (part.open or everything):
            return None
        return part.entry | {"age_s": orjson.loads(_age(self._replica.heard_model_ago_s(model, now)))}

    def _model_names(self) -> list[str]:
        if self._names[0] != self._replica.changes:
            names = self._replica.model_names
            self._names = (self._replica.changes, names)
            for model in self._parts.keys() - set(names):
                del self._parts[model]
        return self._names[1]

    def _part(self, model: str, now: float) -> _Part:
        part = self._parts.get(model)
        generation = self._replica.generation(model)
        if part is None or part.generation != generation:
            entry, there = self._made(model, now)
            part = self._parts[model] = _Part(generation, entry, orjson.dumps(entry)[:-1], there)
        return part

    def _made(self, model: str, now: float) -> tuple[dict[str, Any], bool]:
        replica = self._replica
        sessions = replica.sessions_of(model)
        records = {session: record for session in sessions if (record := replica.get(session)) is not None}
        states = {session: state_of(replica, session, now) for session in records}
        there = [session for session, state in states.items() if state not in _GONE]
        counts = Counter(states[session] for session in there)
        state = next((state for state in _MODEL_STATES if counts[state]), None)
        speaking = [records[session] for session in there if states[session] is state] or list(records.values())
        entry: dict[str, Any] = {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": speaking[0].metadata.provider,
            "state": OFFLINE if state is None else str(state),
            "sessions": {str(one): counts[one] for one in SessionState if counts[one]},
        }
        if state is SessionState.LOADING:
            entry["progress"] = _furthest(speaking)
        if limits := [r.metadata.context_tokens_max for r in speaking if r.metadata.context_tokens_max]:
            entry["max_model_len"] = min(limits)
        builds = Counter(records[session].metadata.fingerprint for session in there)
        if len(builds) > 1:
            entry["fingerprints"] = dict(sorted(builds.items()))
        return entry, bool(there)


def _furthest(loading: list[SessionRecord]) -> float | None:
    told = [record.metadata.loading_progress for record in loading if record.metadata.loading_progress is not None]
    return max(told, default=None)


def _age(seconds: float | None) -> bytes:
    return b"null" if seconds is None else b"%.1f" % max(0.0, seconds)
