"""`GET /v1/models` from the ingress's own copy of the registry: nobody is asked, and unchanged parts are kept. Pure.

A model's entry holds OpenAI's fields and, beside them, what becomes of it: `state`, `sessions` by state, `progress`
while it loads, `max_model_len`, `endpoints`, `fingerprints` when its sessions are not all the same build, `age_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from serai.ingress.caller import ANONYMOUS, Caller
from serai.ingress.endpoints import offered
from serai.ingress.requirements import Providers
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.session_state import SessionState, state_of

_MODEL_STATES = (SessionState.SERVING, SessionState.LOADING, SessionState.QUEUED, SessionState.DRAINING)
"""A model's state is the first of these that one of its sessions is in; else it is offline."""
_GONE = (SessionState.DOWN, SessionState.LEFT)
OFFLINE = "offline"
COLD = "cold"
"""No session of it is there; one is started when somebody asks."""
_COLD_ENTRY: Mapping[str, Any] = MappingProxyType(
    {"id": "", "object": "model", "created": 0, "owned_by": "serai", "state": COLD, "sessions": {}}
)
NO_ALIASES: Mapping[str, str] = MappingProxyType({})
BODY_KEPT_S = 0.25
"""For so long the same list is given out again when nothing has changed: only its ages would be other ones."""


class _Trait(NamedTuple):
    """What one session adds to its model's entry; thousands of sessions have few different ones."""

    state: SessionState
    provider: str
    fingerprint: str
    context_tokens_max: int
    loading_progress: float | None
    endpoints: tuple[str, ...]


class _Part(NamedTuple):
    """One model's entry but for its age, kept until something changes."""

    entry: dict[str, Any]
    text: bytes
    """As JSON, without the closing brace."""
    listed: bool
    """Whether a session of it is not gone."""


class ModelListing:
    """Lists the models of one replica."""

    def __init__(
        self, replica: RegistryReplica, startable: Callable[[float], tuple[str, ...]] = lambda now: ()
    ) -> None:
        """`startable`: models of which an engine is started when somebody asks."""
        self._replica = replica
        self._startable = startable
        self._cold: tuple[str, ...] = ()
        self._seen = -1
        self._sessions: dict[str, tuple[str, _Trait]] = {}
        """Per session: its model, and what was counted for it there."""
        self._traits: dict[str, Counter[_Trait]] = {}
        self._parts: dict[str, _Part] = {}
        self._bodies: dict[bool, tuple[int, float, Mapping[str, str], bytes]] = {}

    def body(
        self,
        now: float,
        *,
        everything: bool = False,
        judged_at_s: float | None = None,
        caller: Caller = ANONYMOUS,
        aliases: Mapping[str, str] = NO_ALIASES,
    ) -> bytes:
        """The list of models that `caller` may use and that have a session which is not gone; with `everything`, of all
        that are known. `aliases` are listed with what their models say. States are as of `judged_at_s` (None: now),
        when the observer last had ears; ages are as of now."""
        narrowed = bool(caller.models) or caller.providers != Providers()
        kept = None if narrowed else self._bodies.get(everything)
        if (
            kept is not None
            and kept[0] == self._replica.changes
            and 0 <= now - kept[1] < BODY_KEPT_S
            and kept[2] == aliases
        ):
            return kept[3]
        self._refresh(now if judged_at_s is None else judged_at_s, now)
        entries = [
            b'%s,"age_s":%s}' % (text, _age(self._replica.heard_model_ago_s(model, now)))
            for model, text in self._listed(everything, caller, aliases)
        ]
        body = b'{"object":"list","data":[%s]}' % b",".join(entries)
        if not narrowed:
            self._bodies[everything] = (self._replica.changes, now, aliases, body)
        return body

    def entry(
        self,
        model: str,
        now: float,
        *,
        everything: bool = False,
        judged_at_s: float | None = None,
        caller: Caller = ANONYMOUS,
        aliases: Mapping[str, str] = NO_ALIASES,
    ) -> dict[str, Any] | None:
        """The entry of one model, or alias; None when it would not be in the list."""
        self._refresh(now if judged_at_s is None else judged_at_s, now)
        meant = aliases.get(model, model)
        if not self._is_listed(meant, everything, caller, alias=model in aliases):
            return None
        age = orjson.loads(_age(self._replica.heard_model_ago_s(meant, now)))
        return _by_alias(self._part(meant).entry, model, meant) | {"age_s": age}

    def _listed(self, everything: bool, caller: Caller, aliases: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
        """The model of each entry, and its entry's text without age and closing brace."""
        for name in sorted({*self._traits, *self._cold, *aliases}):
            meant = aliases.get(name, name)
            if self._is_listed(meant, everything, caller, alias=name in aliases):
                part = self._part(meant)
                yield meant, part.text if meant == name else orjson.dumps(_by_alias(part.entry, name, meant))[:-1]

    def _is_listed(self, model: str, everything: bool, caller: Caller, *, alias: bool) -> bool:
        """`alias`: the caller knows it by one that it may use."""
        if not alias and not caller.may_use(model):
            return False
        if model in self._cold and not self._part(model).listed:
            return True  # Where it would be started is not known yet.
        if model not in self._traits or not (self._part(model).listed or everything):
            return False
        return caller.providers == Providers() or any(
            caller.providers.permit_name(trait.provider) for trait in self._traits[model]
        )

    def _refresh(self, judged_at_s: float, now: float) -> None:
        """Takes over what has changed since last time."""
        if (cold := self._startable(now)) != self._cold:
            for model in {*cold} ^ {*self._cold}:
                self._parts.pop(model, None)
            self._cold = cold
        changed = self._replica.changed_since(self._seen)
        self._seen = self._replica.changes
        for session in {*self._sessions, *self._replica.sessions} if changed is None else changed:
            was, now_is = self._sessions.get(session), self._seen_as(session, judged_at_s)
            if was == now_is:
                continue
            if was is not None:
                self._count(*was, -1)
            if now_is is None:
                del self._sessions[session]
            else:
                self._sessions[session] = now_is
                self._count(*now_is, 1)

    def _seen_as(self, session: str, now: float) -> tuple[str, _Trait] | None:
        record = self._replica.get(session)
        if record is None:
            return None
        said = record.metadata
        state = state_of(self._replica, session, now)
        progress = said.loading_progress if state is SessionState.LOADING else None
        return said.model, _Trait(
            state, said.provider, said.fingerprint, said.context_tokens_max, progress, tuple(said.endpoints)
        )

    def _count(self, model: str, trait: _Trait, change: int) -> None:
        self._parts.pop(model, None)
        traits = self._traits.setdefault(model, Counter())
        traits[trait] += change
        if not traits[trait]:
            del traits[trait]
            if not traits:
                del self._traits[model]

    def _part(self, model: str) -> _Part:
        part = self._parts.get(model)
        if part is None:
            traits = self._traits.get(model)
            entry, listed = _entry(model, traits) if traits else (dict(_COLD_ENTRY, id=model), False)
            if not listed and model in self._cold:
                entry["state"] = COLD
            part = self._parts[model] = _Part(entry, orjson.dumps(entry)[:-1], listed)
        return part


def _entry(model: str, traits: Counter[_Trait]) -> tuple[dict[str, Any], bool]:
    """A model's entry, and whether a session of it is not gone."""
    there = {trait: count for trait, count in traits.items() if trait.state not in _GONE}
    counts = Counter[SessionState]()
    builds = Counter[str]()
    for trait, count in there.items():
        counts[trait.state] += count
        builds[trait.fingerprint] += count
    state = next((state for state in _MODEL_STATES if counts[state]), None)
    speaking = [trait for trait in there if trait.state is state] or list(there) or list(traits)
    entry: dict[str, Any] = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": min(trait.provider for trait in speaking),
        "state": OFFLINE if state is None else str(state),
        "sessions": {str(one): counts[one] for one in SessionState if counts[one]},
    }
    if state is SessionState.LOADING:
        told = [trait.loading_progress for trait in speaking if trait.loading_progress is not None]
        entry["progress"] = max(told, default=None)
    if limits := [trait.context_tokens_max for trait in speaking if trait.context_tokens_max]:
        entry["max_model_len"] = min(limits)
    if known := {path for trait in speaking for path in trait.endpoints}:
        entry["endpoints"] = offered(known)
    if len(builds) > 1:
        entry["fingerprints"] = dict(sorted(builds.items()))
    return entry, bool(there)


def _by_alias(entry: dict[str, Any], name: str, model: str) -> dict[str, Any]:
    return entry if name == model else entry | {"id": name, "alias_of": model}


def _age(seconds: float | None) -> bytes:
    return b"null" if seconds is None else b"%.1f" % max(0.0, seconds)
