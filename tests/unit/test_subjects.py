"""Names become tokens that NATS takes in subjects and KV keys, and come back unchanged."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serai.contracts.session_record import new_session_id
from serai.contracts.subjects import CANCEL, INFERENCE, SESSION, SNAPSHOT, STATUS, from_token, to_token

names = st.text()


@given(names)
@example("Qwen2.5-7B-Instruct:latest")
@example("=")
@example("=41")
@example("")
@example("模型/ü 😀\n")
def test_a_name_comes_back_from_its_token(name: str) -> None:
    assert from_token(to_token(name)) == name


@given(names)
def test_a_token_has_only_characters_that_subjects_and_kv_keys_allow(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", to_token(name))


def test_names_of_safe_characters_stay_readable() -> None:
    assert to_token("llama-3_8B") == "llama-3_8B"
    assert to_token("Qwen2.5:7b") == "Qwen2=2E5=3A7b"


@pytest.mark.parametrize(
    "token", ["", "a.b", "a:b", "a b", "a\n", "=4", "=zz", "=e9", "==", "a=", "=FF", "ü", "*", ">"]
)
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"token|utf-8"):
        from_token(token)


@given(st.text("=0123456789ABCDEFx_-", max_size=9))
def test_a_token_is_the_only_one_of_its_name(token: str) -> None:
    try:
        name = from_token(token)
    except ValueError:
        return
    assert to_token(name) == token


@given(names, names)
def test_a_subject_of_a_session_has_one_token_more_than_its_hop(site: str, allocation: str) -> None:
    session = new_session_id(site, allocation, 0, "0a")
    for subject in (SESSION, STATUS, INFERENCE, CANCEL):
        assert subject.of(session).split(".") == [subject.hop, session]
        assert subject.every == f"{subject.hop}.*"
    assert SNAPSHOT.of_site(site).split(".")[:2] == ["registry", "snapshot"]
    assert len(SNAPSHOT.of_site(site).split(".")) == 3
