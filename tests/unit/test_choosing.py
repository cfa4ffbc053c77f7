"""Choosing: who may answer, who is asked next, and that each try is accounted for exactly once."""

from __future__ import annotations

import pytest

from serai.contracts.inference import FailureCode, InferenceFailure
from serai.contracts.session_record import SessionRecord
from serai.contracts.status import SessionStatus
from serai.ingress.choosing import Chooser, Wish
from serai.ingress.configuration import Configuration, Interchange
from serai.ingress.endpoints import BY_PATH
from serai.ingress.requirements import read_providers, read_requirements
from serai.ingress.routing import Ask, PolicyChoice, PolicyNeeds, SessionSpeeds
from serai.ingress.session_health import HealthSettings
from serai.runtime.registry_replica import RegistryReplica
from unit.fakes import Clock, record_of

NOW = 1000.0
WISH = Wish(Ask("m"))
FAILURE = InferenceFailure(FailureCode.ENGINE_CUT, "broke off")


class Fleet:
    """Sessions of model `m` that were all just heard, each in an allocation of its own."""

    def __init__(self, *records: SessionRecord) -> None:
        self.replica = RegistryReplica()
        self.in_flight: dict[str, int] = {}
        speeds = SessionSpeeds()
        self.chooser = Chooser(
            self.replica,
            lambda session: self.in_flight.get(session, 0),
            PolicyChoice("least-loaded", needs=PolicyNeeds(speeds=speeds)),
            speeds,
        )
        for record in records or [record_of(f"s{n}", allocation=f"a{n}") for n in range(3)]:
            self.replica.merge(record, NOW, heard=True)
            self.report(record.session, 0)

    def report(self, session: str, in_flight: int) -> None:
        known, record = self.replica.status(session), self.replica.get(session)
        assert record is not None
        sequence = known.sequence + 1 if known else 1
        status = SessionStatus(session, sequence, record.lifecycle, record.version, 1.0, in_flight=in_flight)
        self.replica.hear(status, NOW)
        self.chooser.reported(status)

    def choose(self, *tried: SessionRecord, wish: Wish = WISH) -> str | None:
        record = self.chooser.choose(wish, self.chooser.fitting(wish, NOW), tried, NOW)
        return record.session if record else None

    def record(self, session: str) -> SessionRecord:
        record = self.replica.get(session)
        assert record is not None
        return record

    def fail(self, session: str, clock: Clock, times: int) -> None:
        for _ in range(times):
            with self.chooser.attempt("m", self.record(session), lambda: clock.now_s) as attempt:
                attempt.failed(FAILURE)


def test_the_least_loaded_is_chosen_and_never_one_that_was_tried() -> None:
    fleet = Fleet()
    fleet.in_flight.update(s0=2, s1=1, s2=3)
    assert fleet.choose() == "s1"
    assert fleet.choose(fleet.record("s1")) == "s0"
    assert fleet.choose(*[fleet.record(f"s{n}") for n in range(3)]) is None


def test_a_session_that_keeps_failing_is_left_out_while_others_are_well() -> None:
    fleet, clock = Fleet(), Clock()
    fleet.fail("s0", clock, HealthSettings().consecutive_max)
    fleet.in_flight.update(s1=5, s2=5)
    assert fleet.choose() in ("s1", "s2")
    assert fleet.choose(fleet.record("s1"), fleet.record("s2")) == "s0", "better than nobody"


def test_requirements_and_providers_leave_only_those_that_fit() -> None:
    fleet = Fleet(
        record_of("s0", context_tokens_max=8192, provider="cscs"),
        record_of("s1", context_tokens_max=65536, provider="csc"),
    )
    long = Wish(Ask("m"), read_requirements("context>=32768"))
    assert fleet.choose(wish=long) == "s1"
    nobody = Wish(Ask("m"), read_requirements("context>=32768"), read_providers("cscs"))
    assert fleet.choose(wish=nobody) is None
    assert fleet.chooser.in_the_way(nobody, NOW) == "context>=32768"
    assert fleet.chooser.in_the_way(Wish(Ask("m"), providers=read_providers("-cscs,-csc")), NOW) == (
        "the providers that may answer"
    )
    assert fleet.chooser.in_the_way(Wish(Ask("unserved")), NOW) == ""


def test_another_try_needs_somebody_else_and_a_budget() -> None:
    fleet = Fleet(record_of("s0", allocation="a0"), record_of("s1", allocation="a1"))
    first, second = fleet.record("s0"), fleet.record("s1")
    again = fleet.chooser.again_after_failure
    assert again(WISH, [first], FAILURE, NOW).again
    verdict = again(WISH, [first, second], FAILURE, NOW)
    assert (verdict.again, verdict.reason.rpartition("; ")[2]) == (False, "there is nobody else")
    tried = 0
    while fleet.chooser.again_after_status(WISH, [first], 502, None, NOW).again:
        tried += 1
        assert tried < 1000
    assert 0 < tried < 50
    assert "used up" in fleet.chooser.again_after_status(WISH, [first], 502, None, NOW).reason


def test_a_busy_session_is_left_in_peace_for_as_long_as_it_asks() -> None:
    fleet, clock = Fleet(record_of("s0", allocation="a0"), record_of("s1", allocation="a1")), Clock()
    clock.now_s = NOW
    with fleet.chooser.attempt("m", fleet.record("s0"), lambda: clock.now_s) as attempt:
        attempt.answered(429, 5.0)
    fleet.in_flight["s1"] = 50
    assert fleet.choose() == "s1"
    assert fleet.chooser.again_after_status(WISH, [fleet.record("s0")], 429, None, NOW).again
    with fleet.chooser.attempt("m", fleet.record("s1"), lambda: clock.now_s) as attempt:
        attempt.answered(429, 5.0)
    assert not fleet.chooser.again_after_status(WISH, [fleet.record("s0")], 429, None, NOW).again


def test_a_cancelled_try_says_nothing_of_its_session() -> None:
    fleet, clock = Fleet(), Clock()
    for _ in range(100):
        with (
            pytest.raises(KeyboardInterrupt),
            fleet.chooser.attempt("m", fleet.record("s0"), lambda: clock.now_s),
        ):
            raise KeyboardInterrupt
    assert fleet.chooser.health.allowed("s0", clock.now_s)
    assert fleet.choose() == "s0"


def test_what_is_gone_is_forgotten() -> None:
    fleet, clock = Fleet(), Clock()
    fleet.fail("s0", clock, 3)
    assert len(fleet.chooser.health) == 1
    fleet.chooser.retain({"s1", "s2"}, {"m"}, NOW)
    assert len(fleet.chooser.health) == 0


def test_only_sessions_that_have_the_endpoint_are_asked() -> None:
    wish = Wish(Ask("m"), endpoint=BY_PATH["/rerank"])
    fleet = Fleet(
        record_of("s0", endpoints=["/v1/chat/completions"]),
        record_of("s1", endpoints=["/v2/rerank"]),
    )
    assert fleet.choose(wish=wish) == "s1"
    assert fleet.choose(fleet.record("s1"), wish=wish) is None
    assert fleet.chooser.endpoints_instead(wish, NOW) == [], "a session has it"
    fleet.replica.merge(record_of("s2"), NOW + 1, heard=True)
    assert fleet.choose(fleet.record("s1"), wish=wish) == "s2", "what it has is not known, so it may have it"


def test_what_a_model_has_instead_is_told_only_when_all_of_it_is_known() -> None:
    wish = Wish(Ask("m"), endpoint=BY_PATH["/v1/score"])
    fleet = Fleet(record_of("s0", endpoints=["/tokenize"]), record_of("s1", endpoints=["/v1/rerank", "/tokenize"]))
    assert fleet.choose(wish=wish) is None
    assert fleet.chooser.endpoints_instead(wish, NOW) == ["/v1/rerank", "/tokenize"]
    assert fleet.chooser.endpoints_instead(Wish(Ask("other"), endpoint=BY_PATH["/v1/score"]), NOW) == []
    fleet.replica.merge(record_of("s2"), NOW, heard=True)
    assert fleet.chooser.endpoints_instead(wish, NOW) == []


# -- as configured -----------------------------------------------------------------------------------------------------


def two_builds() -> Fleet:
    return Fleet(
        record_of("s1", allocation="a1", fingerprint="x"),
        record_of("s2", allocation="a2", fingerprint="y"),
        record_of("s3", allocation="a3", fingerprint="x"),
    )


def test_h46_a_retry_goes_to_any_fingerprint_unless_only_the_same_may_stand_in() -> None:
    fleet = two_builds()
    first = fleet.record("s1")
    fleet.in_flight["s3"] = 9
    assert fleet.choose(first) == "s2"
    fleet.chooser.apply(Configuration(fingerprints={"m*": Interchange.SAME}))
    assert fleet.choose(first) == "s3"
    assert fleet.choose(first, fleet.record("s3")) is None
    assert fleet.choose(fleet.record("s2")) is None
    fleet.chooser.apply(Configuration(fingerprints={"other": Interchange.SAME}))
    assert fleet.choose(first) == "s2"


def test_no_retry_is_promised_where_nobody_may_stand_in() -> None:
    fleet = two_builds()
    fleet.chooser.apply(Configuration(fingerprints={"m": Interchange.SAME}))
    assert not fleet.chooser.again_after_failure(WISH, [fleet.record("s2")], FAILURE, NOW).again
    assert fleet.chooser.again_after_failure(WISH, [fleet.record("s1")], FAILURE, NOW).again


def test_policies_change_while_requests_run() -> None:
    fleet = Fleet()
    sticky = Wish(Ask("m", session_key="one"))
    assert not fleet.chooser.reads_prompts("m")
    with fleet.chooser.attempt("m", fleet.record("s0"), lambda: NOW) as attempt:
        fleet.chooser.apply(Configuration(policy="round-robin", policies={"?": "session-sticky"}))
        attempt.answered(200)
    assert len({fleet.choose(wish=sticky) for _ in range(5)}) == 1
    fleet.chooser.apply(Configuration(policy="round-robin"))
    assert len({fleet.choose(wish=sticky) for _ in range(5)}) == 3
    fleet.chooser.apply(Configuration(policy="prefix-affine"))
    assert fleet.chooser.reads_prompts("m")


def test_streams_that_were_given_teach_how_fast_their_sessions_are() -> None:
    fleet = Fleet()
    fleet.chooser.apply(Configuration(policy="hardware-weighted"))
    for session, tokens in (("s0", 301), ("s1", 101), ("s2", 101)):
        fleet.chooser.streamed(fleet.record(session), {"completion_tokens": tokens}, 1.0)
    for usage in (None, {}, {"completion_tokens": None}, {"completion_tokens": 1}):
        fleet.chooser.streamed(fleet.record("s1"), usage, 1.0)
    chosen = [fleet.choose() for _ in range(10)]
    assert [chosen.count(session) for session in ("s0", "s1", "s2")] == [6, 2, 2]


def test_a_request_of_ours_that_ended_since_the_report_is_nobody_elses() -> None:
    fleet = Fleet()
    fleet.in_flight["s0"] = 1
    fleet.report("s0", 1)  # Comes while ours runs, and is not looked at before that has ended.
    fleet.in_flight["s0"] = 0
    assert [fleet.choose() for _ in range(6)] == ["s0", "s1", "s2"] * 2
