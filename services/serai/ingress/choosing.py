"""Which session a try goes to, whether another is worth it, and what the end of each try teaches. Pure: takes `now`.

It joins what is known: the registry copy (who may have requests at all), the caller's requirements, each session's
health, the load, and the policy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.contracts.session_record import SessionRecord
from serai.contracts.status import SessionStatus
from serai.ingress import retry, time_left
from serai.ingress.configuration import Configuration, Interchange
from serai.ingress.endpoints import Endpoint, offered
from serai.ingress.patterns import ByPattern
from serai.ingress.requirements import Providers, Requirements
from serai.ingress.retry import RetryBudget, Verdict
from serai.ingress.routing import (
    Ask,
    Candidate,
    OwnShare,
    Policy,
    PolicyChoice,
    SessionSpeeds,
    capacity,
    untried,
    with_room,
)
from serai.ingress.session_health import Outcome, SessionHealth, of_failure, of_status
from serai.runtime.registry_replica import RegistryReplica

_NO_REQUIREMENTS, _ALL_PROVIDERS = Requirements(), Providers()


@dataclass(slots=True)  # Not frozen: one is made per request, and that would cost three times as much.
class Wish:
    """What one call wants of whoever answers it."""

    ask: Ask
    requirements: Requirements = _NO_REQUIREMENTS
    providers: Providers = _ALL_PROVIDERS
    endpoint: Endpoint | None = None
    """What is asked for; None = any session will do."""

    def has_endpoint(self, record: SessionRecord) -> bool:
        """Whether that session has it, as far as is known."""
        return self.endpoint is None or self.endpoint.path_at(record.metadata.endpoints) is not None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long an engine wants to be left in peace, in seconds; None when it does not say, or says a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None


class Attempt:
    """One request at one session, counted from its start to its end, whatever ends it: use it with `with`."""

    __slots__ = ("_chooser", "_now", "_outcome", "_policy", "_retry_after_s", "record", "whole")

    def __init__(self, chooser: Chooser, policy: Policy, record: SessionRecord, now: Callable[[], float]) -> None:
        self.record = record
        self.whole = False
        """Whether the session gave its whole answer."""
        self._chooser = chooser
        self._policy = policy
        self._now = now
        self._outcome = Outcome.NOTHING
        self._retry_after_s: float | None = None

    def __enter__(self) -> Attempt:
        self._policy.on_request_start(self.record.session)
        self._chooser.health.on_start(self.record.session, self._now())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self.record.session
        self._chooser.health.on_outcome(session, self._outcome, self._now(), self._retry_after_s)
        self._policy.on_request_end(session, whole=self.whole)

    def began(self) -> None:
        """The first byte of the answer is there."""
        self._chooser.health.on_first_byte(self.record.session)

    def answered(self, status: int, retry_after_s: float | None = None) -> None:
        """The session gave a whole answer."""
        self._outcome, self._retry_after_s = of_status(status), retry_after_s
        self.whole = True

    def failed(self, failure: InferenceFailure) -> None:
        """The session gave no whole answer."""
        self._outcome, self._retry_after_s = of_failure(failure), failure.retry_after_s
        if failure.code is FailureCode.BUSY:
            self._chooser.note_full(self.record.session)

    def broke_off(self) -> None:
        """The session's stream ended without being whole."""
        self._outcome = Outcome.FAILURE

    def cancelled(self) -> None:
        """Its client left; that says nothing of the session."""
        self._outcome = Outcome.NOTHING


class Starts(Protocol):
    """Who has engines started of models that nothing serves: `ColdModels`."""

    def load_s(self, model: str) -> float | None:
        """How long that takes; None: nobody starts one."""
        ...


class Chooser:
    """One per ingress."""

    def __init__(
        self,
        replica: RegistryReplica,
        in_flight: Callable[[str], int],
        policies: PolicyChoice,
        speeds: SessionSpeeds,
        starts: Starts | None = None,
    ) -> None:
        self._starts = starts
        self.health = SessionHealth()
        self.speeds = speeds
        self._replica = replica
        self._in_flight = in_flight
        self._policies = policies
        self._budget = RetryBudget()
        self._share = OwnShare()
        self._full: dict[str, int] = {}
        """By session: the number of the status after which it said that it was full."""
        self._interchange = ByPattern[Interchange]({}, Interchange.RETRIES)
        self._ends: dict[str, tuple[Sequence[SessionRecord], Mapping[str, float]]] = {}
        self._having: dict[tuple[str, str], tuple[Sequence[SessionRecord], Sequence[SessionRecord]]] = {}

    def apply(self, configuration: Configuration) -> None:
        """Policies and fingerprints, from the next pick on."""
        self._policies.change(configuration.policy, configuration.policies)
        self._interchange = ByPattern(configuration.fingerprints, Interchange.RETRIES)

    def interchange(self, model: str) -> Interchange:
        """Whether sessions of `model` that differ in their fingerprint stand in for one another."""
        return self._interchange.of(model)

    def reads_prompts(self, model: str) -> bool:
        """Whether the model's policy looks at the beginning of prompts."""
        return self._policies.name(model) == "prefix-affine"

    def fitting(self, wish: Wish, now: float) -> Sequence[SessionRecord]:
        """The sessions that may answer, and have time to."""
        return self._in_time(wish, self._permitted(wish, now), now)

    def lacks_time(self, wish: Wish, now: float) -> bool:
        """Whether there are sessions that might answer, but all of them end before the answer would."""
        permitted = self._permitted(wish, now)
        return bool(permitted) and not self._in_time(wish, permitted, now)

    def _permitted(self, wish: Wish, now: float) -> Sequence[SessionRecord]:
        """The sessions that may answer at all."""
        records = self._having_endpoint(wish, now)
        if wish.requirements.every:
            records = wish.requirements.fitting(records)
        if wish.providers.allowed is not None or wish.providers.denied:
            records = wish.providers.permitted(records)
        return records

    def _in_time(self, wish: Wish, records: Sequence[SessionRecord], now: float) -> Sequence[SessionRecord]:
        if not wish.ask.output_tokens_max:
            return records
        left_s = self._time_left_s(wish.ask.model, now)
        return time_left.in_time(records, left_s, wish.ask.output_tokens_max, self.speeds.of) if left_s else records

    def _time_left_s(self, model: str, now: float) -> Mapping[str, float]:
        """Of the model's sessions that end soon: looked for once per list that the replica makes."""
        routable = self._replica.routable(model, now)
        kept = self._ends.get(model)
        if kept is None or kept[0] is not routable:
            kept = (routable, time_left.ends(routable, self._replica.status))
            if routable:
                self._ends[model] = kept
        return kept[1]

    def in_the_way(self, wish: Wish, now: float) -> str:
        """Why none of the sessions that serve the model, and have the endpoint, fits the wish; empty when there is no
        such session."""
        records = self._having_endpoint(wish, now)
        unmet = wish.requirements.in_the_way(records)
        if records and not wish.providers.permitted(records):
            unmet.append("the providers that may answer")
        return ", ".join(unmet)

    def endpoints_instead(self, wish: Wish, now: float) -> list[str]:
        """The endpoints that the model's sessions have, when all of them are known and what the wish asks for is none
        of them; else nothing: a session that is not routable now may have it."""
        records = self._replica.records_of_model(wish.ask.model)
        if not records or any(wish.has_endpoint(record) for record in records):
            return []
        return offered({path for record in records for path in record.metadata.endpoints})

    def serves(self, model: str, now: float) -> bool:
        """Whether any session may have requests for `model` now."""
        return bool(self._replica.routable(model, now))

    def expects(self, model: str) -> bool:
        """Whether a session of `model` is there that has not left, whatever keeps it from serving; or would be started
        for whoever asks."""
        return self._replica.knows_model(model) or self.start_s(model) > 0

    def start_s(self, model: str) -> float:
        """How long an engine takes that is started because somebody asks; 0: nobody starts one."""
        return 0.0 if self._starts is None else self._starts.load_s(model) or 0.0

    def capacity(self, model: str, now: float) -> int | None:
        """How many requests of `model` this ingress may have out at once, all in all; None = no limit."""
        records = self._replica.routable(model, now)
        candidates = [
            candidate
            for candidate in self._candidates(self.health.usable(records, now), now)
            if not self._is_full(candidate.record.session)
        ]
        room = capacity(candidates)
        if room is None:
            return None
        counted = sum([candidate.own_in_flight for candidate in candidates])
        return room + sum([self._in_flight(record.session) for record in records]) - counted

    def context_tokens_max(self, model: str, now: float) -> int:
        """The longest that any session of `model` takes; 0 = not known."""
        return max([record.metadata.context_tokens_max for record in self._replica.routable(model, now)], default=0)

    def note_full(self, session: str) -> None:
        """It has said that it takes no more. That holds until it tells anew how much it has."""
        status = self._replica.status(session)
        self._full[session] = status.sequence if status is not None else -1

    def reported(self, status: SessionStatus) -> None:
        """A session's status has just come."""
        self._share.when_reported(status.session, status.sequence, self._in_flight(status.session))

    def _is_full(self, session: str) -> bool:
        if session not in self._full:
            return False
        status = self._replica.status(session)
        return self._full[session] == (status.sequence if status is not None else -1)

    def first_try(self, model: str, now: float) -> None:
        """A request of `model`, which exists: it earns the model a part of a retry."""
        self._budget.on_request(model, now)

    def choose(
        self, wish: Wish, records: Sequence[SessionRecord], tried: Sequence[SessionRecord], now: float
    ) -> SessionRecord | None:
        """One of `records` that was not tried yet; None when there is none."""
        records = self._alike(wish, records, tried)
        ready = untried(self.health.usable(records, now), tried) or untried(records, tried)
        if len(ready) <= 1:
            return ready[0] if ready else None
        return self._policies.of(wish.ask.model).pick(wish.ask, with_room(self._candidates(ready, now))).record

    def grants(self, model: str) -> bool:
        """Whether a macro-scheduler is asked where the model's requests go."""
        return self._policies.name(model) == "macro-scheduled"

    def excluded(
        self, wish: Wish, tried: Sequence[SessionRecord], refused: Sequence[str], now: float
    ) -> list[str] | None:
        """The model's sessions that may not have a lease for the request now, `refused` among them; None when none of
        them may."""
        routable = self._replica.routable(wish.ask.model, now)
        fitting = self.fitting(wish, now)
        usable = untried(self.health.usable(self._alike(wish, fitting, tried), now), tried)
        if not usable:
            return None
        if len(usable) == len(routable) and not refused and not tried:
            return []
        open_to_it = {record.session for record in usable} - set(refused)
        if not open_to_it:
            return None
        # What was tried may not be routable any more here, and still be so for the scheduler.
        known = dict.fromkeys([*[record.session for record in (*tried, *routable)], *refused])
        return [session for session in known if session not in open_to_it]

    def granted(self, wish: Wish, session: str, now: float) -> SessionRecord | None:
        """The session that a macro-scheduler named, if it may still have the request."""
        return next((record for record in self.fitting(wish, now) if record.session == session), None)

    def streamed(self, record: SessionRecord, usage: Mapping[str, object] | None, decode_s: float) -> None:
        """A session has given a whole stream, in that time from its first byte to its last."""
        tokens = (usage or {}).get("completion_tokens")
        if isinstance(tokens, int):
            self.speeds.observed(record.session, tokens - 1, decode_s)

    def attempt(self, model: str, record: SessionRecord, clock: Callable[[], float]) -> Attempt:
        """One try at `record`; the policy is the one that the model has now."""
        return Attempt(self, self._policies.of(model), record, clock)

    def again_after_status(
        self, wish: Wish, tried: Sequence[SessionRecord], status: int, marked_safe: bool | None, now: float
    ) -> Verdict:
        """Whether another session is to be tried after an engine's whole answer."""
        others = untried(self._alike(wish, self.fitting(wish, now), tried), tried)
        rested = self.health.rested(others, now)
        return self._affordable(
            wish, others, retry.after_status(status, len(tried), rested=rested, marked_safe=marked_safe), now
        )

    def again_after_failure(
        self, wish: Wish, tried: Sequence[SessionRecord], failure: InferenceFailure, now: float
    ) -> Verdict:
        """Whether another session is to be tried after a failure of which the client has seen nothing."""
        others = untried(self._alike(wish, self.fitting(wish, now), tried), tried)
        rested = self.health.rested(others, now)
        return self._affordable(wish, others, retry.after_failure(failure, len(tried), rested=rested), now)

    def retain(self, sessions: Collection[str], models: Collection[str], now: float) -> None:
        """Forgets what is known of all sessions and models but these. To be called now and then."""
        self.health.retain(sessions, now)
        self.speeds.retain(sessions)
        self._share.retain(sessions)
        self._full = {session: number for session, number in self._full.items() if session in sessions}
        self._budget.retain(models)
        self._ends = {model: kept for model, kept in self._ends.items() if model in models}
        self._having = {key: kept for key, kept in self._having.items() if key[0] in models}

    def _having_endpoint(self, wish: Wish, now: float) -> Sequence[SessionRecord]:
        """The routable sessions that have the endpoint: looked for once per list that the replica makes."""
        routable = self._replica.routable(wish.ask.model, now)
        if wish.endpoint is None or not routable:
            return routable
        key = (wish.ask.model, wish.endpoint.path)
        kept = self._having.get(key)
        if kept is None or kept[0] is not routable:
            kept = self._having[key] = (routable, [record for record in routable if wish.has_endpoint(record)])
        return kept[1]

    def _alike(
        self, wish: Wish, records: Sequence[SessionRecord], tried: Sequence[SessionRecord]
    ) -> Sequence[SessionRecord]:
        """Those that may stand in for the first that was tried."""
        if not tried or self._interchange.of(wish.ask.model) is not Interchange.SAME:
            return records
        return [record for record in records if record.metadata.fingerprint == tried[0].metadata.fingerprint]

    def _affordable(self, wish: Wish, others: Sequence[SessionRecord], verdict: Verdict, now: float) -> Verdict:
        if not verdict.again:
            return verdict
        if not others:
            return Verdict(False, f"{verdict.reason}; there is nobody else")
        if not self._budget.take(wish.ask.model, verdict, now):
            return Verdict(False, f"{verdict.reason}; the model's retries are used up")
        return verdict

    def _candidates(self, records: Sequence[SessionRecord], now: float) -> list[Candidate]:
        candidates = []
        for record in records:
            session = record.session
            own, status = self._in_flight(session), self._replica.status(session)
            penalty = self.health.load_penalty(session, now)
            if status is None:
                candidates.append(Candidate(record, own, 0, penalty))
            else:
                share = self._share.when_reported(session, status.sequence, own)
                candidates.append(Candidate(record, own, status.in_flight, penalty, share))
        return candidates
