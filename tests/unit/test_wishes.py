"""What a request wants: which model an alias means now, what its caller may use, who may answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serai.ingress.caller import Caller
from serai.ingress.choosing import Wish
from serai.ingress.configuration import Configuration
from serai.ingress.endpoints import BY_PATH
from serai.ingress.openai_format import ApiError
from serai.ingress.requirements import Providers
from serai.ingress.wishes import Wishes
from unit.fakes import record_of
from unit.test_choosing import NOW, Fleet

CHAT = BY_PATH["/v1/chat/completions"]
ALIASES = {"gpt": ("m1", "m2", "m3"), "gone": ("x", "y")}
ANYONE = Caller("a")


class Stage:
    def __init__(self, **configuration: Any) -> None:
        self.fleet = Fleet(
            record_of("s2", model="m2", provider="alps", context_tokens_max=8192),
            record_of("s3", model="m3", provider="jsc", context_tokens_max=65536),
        )
        self.wishes = Wishes(self.fleet.chooser)
        configured = Configuration(**({"aliases": ALIASES} | configuration))
        self.fleet.chooser.apply(configured)
        self.wishes.apply(configured)

    def wish(self, model: str, caller: Caller = ANYONE, body: bytes = b"{}", **headers: str) -> Wish:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        request: Any = SimpleNamespace(headers=sent, body=body)
        return self.wishes.of(model, CHAT, request, "r1", caller, NOW)

    def model(self, *words: Any, **headers: str) -> str:
        return self.wish(*words, **headers).ask.model

    def refused(self, *words: Any, **headers: str) -> ApiError:
        with pytest.raises(ApiError) as error:
            self.wish(*words, **headers)
        return error.value


def test_an_alias_is_the_first_of_its_models_that_can_answer_this_request_now() -> None:
    stage = Stage()
    assert stage.model("gpt") == "m2"
    assert stage.model("gpt", x_serai_require="context>=32768") == "m3"
    assert stage.model("gpt", x_serai_providers="jsc") == "m3"
    assert stage.model("gpt", Caller("a", providers=Providers(denied=frozenset({"alps"})))) == "m3"
    stage.fleet.replica.merge(record_of("s1", model="m1"), NOW, heard=True)
    assert stage.model("gpt") == "m1"


def test_when_none_can_the_first_is_meant_so_that_the_error_names_it() -> None:
    assert Stage().model("gone") == "x"
    assert Stage().model("gpt", x_serai_providers="nobody") == "m1"


def test_names_that_are_no_aliases_are_models() -> None:
    assert Stage().model("m3") == "m3"
    assert Stage().model("who") == "who"


def test_a_caller_may_use_what_all_of_its_lists_allow() -> None:
    stage = Stage()
    caller = Caller("alice", models=(("m2", "m3"), ("m*", "!")))
    assert stage.model("m2", caller) == "m2"
    error = stage.refused("m1", caller)
    assert (error.status, error.code, error.param) == (403, "model_not_allowed", "model")
    assert error.message == "`alice` may not use the model `m1`. Allowed are: m2, m3 and m*, !."
    assert stage.refused("m2", Caller("a", models=((),))).message.endswith("Allowed are: none.")


def test_a_caller_gets_of_an_alias_what_it_may_use() -> None:
    stage = Stage()
    assert stage.model("gpt", Caller("a", models=(("m3",),))) == "m3"
    assert stage.model("gpt", Caller("a", models=(("gpt",),))) == "m2"
    assert stage.refused("m2", Caller("a", models=(("gpt",),))).code == "model_not_allowed"
    assert stage.refused("gpt", Caller("a", models=(("gpt",), ("x",)))).code == "model_not_allowed"


def test_a_request_narrows_its_callers_providers_and_never_widens_them() -> None:
    caller = Caller("a", providers=Providers(frozenset({"alps", "jsc"}), frozenset({"cloud"})))
    stage = Stage()
    assert stage.wish("m2", caller).providers == caller.providers
    narrowed = stage.wish("m2", caller, x_serai_providers="alps, cloud, -x").providers
    assert narrowed == Providers(frozenset({"alps"}), frozenset({"cloud", "x"}))
    assert stage.wish("m2", caller, x_serai_require="context>=1").providers == caller.providers


def test_a_header_that_cannot_be_understood_is_an_error_for_aliases_too() -> None:
    error = Stage().refused("gpt", x_serai_require="???")
    assert (error.status, error.code, error.param) == (400, "invalid_header", "x-serai-require")


def test_a_prompt_is_read_where_the_policy_of_the_meant_model_wants_it() -> None:
    stage = Stage(policies={"m2": "prefix-affine"})
    body = b'{"model":"gpt","messages":[{"role":"user","content":"hello"}]}'
    assert stage.wish("gpt", ANYONE, body).ask.prompt_head == b"user\nhello\n"
    assert stage.wish("m3", ANYONE, body).ask.prompt_head == b""


def test_aliases_are_listed_with_what_they_mean_now_for_who_may_use_them() -> None:
    stage = Stage()
    assert stage.wishes.aliases(ANYONE, NOW) == {"gpt": "m2", "gone": "x"}
    assert stage.wishes.aliases(Caller("a", models=(("m3",),)), NOW) == {"gpt": "m3"}
    assert stage.wishes.aliases(Caller("a", models=(("m9",),)), NOW) == {}
