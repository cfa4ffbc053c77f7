"""What `GET /v1/models` says of each model, from a copy of the registry alone."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serai.contracts.session_record import Draining, Lifecycle
from serai.contracts.status import SessionStatus
from serai.ingress.caller import ANONYMOUS, Caller
from serai.ingress.model_listing import BODY_KEPT_S, ModelListing
from serai.ingress.requirements import Providers
from serai.runtime.registry_replica import RegistryReplica
from serai.runtime.session_state import SessionState, state_of
from unit.fakes import record_of

DRAINING = Draining("the allocation ends", 60.0)


class Stage:
    def __init__(self) -> None:
        self.now = 1000.0
        self.replica = RegistryReplica()
        self.listing = ModelListing(self.replica)

    def say(self, session: str, lifecycle: Lifecycle = Lifecycle.SERVING, version: int = 1, **metadata: Any) -> None:
        self.replica.merge(record_of(session, lifecycle, version, **metadata), self.now, heard=True)

    def advance(self, seconds: float) -> None:
        """As time passes in a service: it looks for silences."""
        self.now += seconds
        self.replica.doubtful(self.now)

    def models(self, *, everything: bool = False) -> dict[str, Any]:
        body = json.loads(self.listing.body(self.now, everything=everything))
        assert body["object"] == "list"
        for entry in body["data"]:
            assert self.listing.entry(entry["id"], self.now, everything=everything) == entry
        return {entry["id"]: entry for entry in body["data"]}


def test_an_entry_holds_openais_fields_and_what_becomes_of_the_model() -> None:
    stage = Stage()
    stage.say("s1", context_tokens_max=8192, provider="uni")
    stage.say("s2", context_tokens_max=4096)
    stage.say("s3", Lifecycle.JOIN, loading_progress=0.4, loading_phase="weights")
    stage.advance(1.5)
    assert stage.models() == {
        "m": {
            "id": "m",
            "object": "model",
            "created": 0,
            "owned_by": "local",
            "state": "serving",
            "sessions": {"serving": 2, "loading": 1},
            "max_model_len": 4096,
            "age_s": 1.5,
        }
    }


def test_an_entry_tells_what_the_model_can_be_asked_where_that_is_known() -> None:
    stage = Stage()
    stage.say("s1")
    assert "endpoints" not in stage.models()["m"]
    stage.say("s2", endpoints=["/v1/chat/completions"])
    stage.say("s3", endpoints=["/v1/embeddings", "/rerank"])
    stage.say("s4", Lifecycle.JOIN, endpoints=["/tokenize"])
    chat = ["/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank"]
    assert stage.models()["m"]["endpoints"] == chat


def test_the_state_of_a_model_is_that_of_its_most_useful_session() -> None:
    stage = Stage()
    stage.say("s1", Lifecycle.DOWN)
    assert stage.models() == {}
    stage.say("s2", draining=DRAINING)
    assert stage.models()["m"]["state"] == "draining"
    stage.say("s3", Lifecycle.JOIN, loading_phase="queued")
    assert stage.models()["m"]["state"] == "queued"
    stage.say("s4", Lifecycle.JOIN)
    assert (stage.models()["m"]["state"], stage.models()["m"]["progress"]) == ("loading", None)
    stage.say("s4", Lifecycle.JOIN, 2, loading_progress=0.25)
    stage.say("s5", Lifecycle.JOIN, loading_progress=0.5)
    assert stage.models()["m"]["progress"] == 0.5
    stage.say("s4", version=3)
    assert stage.models()["m"]["state"] == "serving"
    assert "progress" not in stage.models()["m"]
    assert stage.models()["m"]["sessions"] == {"serving": 1, "loading": 1, "queued": 1, "draining": 1}


def test_h45_a_model_whose_sessions_are_silent_is_offline_but_listed_until_they_have_left() -> None:
    stage = Stage()
    stage.say("s1")
    assert stage.models()["m"]["state"] == "serving"
    stage.advance(2.5)
    stage.advance(1.0)
    entry = stage.models()["m"]
    assert (entry["state"], entry["sessions"], entry["age_s"]) == ("offline", {"suspected": 1}, 3.5)
    stage.say("s1", Lifecycle.LEFT, 2)
    assert stage.models() == {}
    assert stage.listing.entry("m", stage.now) is None
    assert stage.models(everything=True)["m"]["state"] == "offline"
    assert stage.models(everything=True)["m"]["sessions"] == {}
    stage.replica.forget(["s1"])
    assert stage.models(everything=True) == {}
    assert stage.listing.entry("m", stage.now, everything=True) is None


def test_a_stalled_engine_and_a_closed_connection_show_and_so_does_their_end() -> None:
    stage = Stage()
    stage.say("s1")

    def status(sequence: int, stalled_s: float) -> SessionStatus:
        return SessionStatus("s1", sequence, Lifecycle.SERVING, 1, 1.0, stalled_s=stalled_s)

    stage.replica.hear(status(1, 2.0), stage.now)
    assert stage.models()["m"]["sessions"] == {"stalled": 1}
    stage.replica.hear(status(2, 0.0), stage.now)
    assert stage.models()["m"]["sessions"] == {"serving": 1}
    stage.replica.unreachable("s1")
    assert stage.models()["m"]["sessions"] == {"suspected": 1}
    stage.replica.hear(status(3, 0.0), stage.now)
    assert stage.models()["m"]["sessions"] == {"serving": 1}


def test_h46_fingerprints_are_told_when_sessions_of_one_name_are_different_builds() -> None:
    stage = Stage()
    stage.say("s1", fingerprint="fp8-32k")
    stage.say("s2", fingerprint="fp8-32k")
    assert "fingerprints" not in stage.models()["m"]
    stage.say("s3", fingerprint="bf16-128k")
    assert stage.models()["m"]["fingerprints"] == {"bf16-128k": 1, "fp8-32k": 2}


def test_the_list_is_kept_while_nothing_changes_and_made_anew_when_something_does() -> None:
    stage = Stage()
    stage.say("s1")
    first = stage.listing.body(stage.now)
    assert stage.listing.body(stage.now + BODY_KEPT_S / 2) is first
    later = stage.listing.body(stage.now + 1)
    assert json.loads(later)["data"][0]["age_s"] == 1.0
    stage.say("s2", model="another")
    assert set(stage.models()) == {"m", "another"}
    stage.say("s2", version=2, model="renamed")
    assert set(stage.models(everything=True)) == {"m", "renamed"}


def test_who_hears_nothing_any_more_tells_states_of_then_and_ages_of_now() -> None:
    stage = Stage()
    stage.say("s1")
    stage.say("s2", Lifecycle.JOIN)
    body = stage.listing.body(stage.now + 60, judged_at_s=stage.now)
    (entry,) = json.loads(body)["data"]
    assert entry["sessions"] == {"serving": 1, "loading": 1}
    assert entry["age_s"] == 60.0
    assert stage.listing.entry("m", stage.now + 60, judged_at_s=stage.now) == entry


steps = st.lists(
    st.tuples(
        st.sampled_from(["s1", "s2", "s3"]),
        st.sampled_from(["record", "status", "stalled", "unreachable", "vouch", "wait", "excuse"]),
        st.integers(0, 3),
    ),
    max_size=25,
)


@given(steps)
def test_what_is_kept_is_what_a_new_listing_would_say_and_serving_is_what_is_routed_to(
    steps: list[tuple[str, str, int]],
) -> None:
    stage = Stage()
    for number, (session, step, amount) in enumerate(steps, 1):
        match step:
            case "record":
                known = stage.replica.get(session)
                lifecycle = Lifecycle(max(amount, known.lifecycle if known else 0))
                stage.say(session, lifecycle, number, model="ab"[amount % 2], draining=DRAINING if amount > 2 else None)
            case "status" | "stalled":
                stalled_s = float(amount) if step == "stalled" else 0.0
                said = SessionStatus(session, number, Lifecycle.SERVING, 1, 1.0, stalled_s=stalled_s)
                stage.replica.hear(said, stage.now)
            case "unreachable":
                stage.replica.unreachable(session)
            case "vouch":
                stage.replica.vouch(session, stage.now, silent_s=float(amount))
            case "excuse":
                stage.replica.excuse(float(amount), stage.now)
            case "wait":
                stage.advance(amount)
        for everything in (False, True):
            kept = stage.listing.body(stage.now, everything=everything)
            assert kept == ModelListing(stage.replica).body(stage.now, everything=everything)
        for record in stage.replica.records():
            routed = record in stage.replica.routable(record.metadata.model, stage.now)
            assert (state_of(stage.replica, record.session, stage.now) is SessionState.SERVING) == routed


# -- for whom ----------------------------------------------------------------------------------------------------------


def listed(stage: Stage, caller: Caller, aliases: dict[str, str] | None = None) -> dict[str, Any]:
    body = json.loads(stage.listing.body(stage.now, caller=caller, aliases=aliases or {}))
    for entry in body["data"]:
        assert stage.listing.entry(entry["id"], stage.now, caller=caller, aliases=aliases or {}) == entry
    return {entry["id"]: entry for entry in body["data"]}


def test_only_what_a_caller_may_use_is_listed() -> None:
    stage = Stage()
    stage.say("s1", model="llama", provider="alps")
    stage.say("s2", model="qwen", provider="jsc")
    stage.say("s3", model="qwen", provider="cloud")
    assert list(listed(stage, ANONYMOUS)) == ["llama", "qwen"]
    assert list(listed(stage, Caller("a", models=(("ll*",),)))) == ["llama"]
    assert list(listed(stage, Caller("a", providers=Providers(frozenset({"jsc"}))))) == ["qwen"]
    assert list(listed(stage, Caller("a", providers=Providers(denied=frozenset({"jsc", "cloud"}))))) == ["llama"]
    assert list(listed(stage, ANONYMOUS)) == ["llama", "qwen"]
    narrow = Caller("a", models=(("ll*",),))
    assert stage.listing.entry("qwen", stage.now, caller=narrow) is None


def test_an_alias_says_what_its_model_says_and_which_that_is() -> None:
    stage = Stage()
    stage.say("s1", model="llama", context_tokens_max=4096)
    found = listed(stage, ANONYMOUS, {"gpt": "llama", "gone": "nothing", "llama": "llama"})
    assert list(found) == ["gpt", "llama"]
    assert found["gpt"] == found["llama"] | {"id": "gpt", "alias_of": "llama"}
    assert "alias_of" not in found["llama"]
    assert list(listed(stage, Caller("a", models=(("gpt",),)), {"gpt": "llama"})) == ["gpt"]


def test_a_list_that_is_kept_follows_its_aliases() -> None:
    stage = Stage()
    stage.say("s1", model="llama")
    stage.say("s2", model="qwen")
    assert listed(stage, ANONYMOUS, {"gpt": "llama"})["gpt"]["alias_of"] == "llama"
    assert listed(stage, ANONYMOUS, {"gpt": "qwen"})["gpt"]["alias_of"] == "qwen"
    assert list(listed(stage, ANONYMOUS)) == ["llama", "qwen"]


def test_a_model_that_is_started_for_whoever_asks_is_listed_as_cold() -> None:
    stage = Stage()
    startable: tuple[str, ...] = ("asleep", "m")
    stage.listing = ModelListing(stage.replica, lambda now: startable)
    stage.say("s1")
    assert {name: entry["state"] for name, entry in stage.models().items()} == {"asleep": "cold", "m": "serving"}
    assert stage.models()["asleep"] == {
        "id": "asleep", "object": "model", "created": 0, "owned_by": "serai", "state": "cold", "sessions": {},
        "age_s": None,
    }  # fmt: skip
    stage.say("s1", Lifecycle.LEFT, 2)
    stage.advance(1)
    assert {name: entry["state"] for name, entry in stage.models().items()} == {"asleep": "cold", "m": "cold"}
    startable = ()
    stage.advance(1)
    assert stage.models() == {}
    assert stage.models(everything=True)["m"]["state"] == "offline"
