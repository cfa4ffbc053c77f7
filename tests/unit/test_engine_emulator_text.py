"""The emulated engine's text: a pure function of seed, prompt and place, also when it is continued."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serai.engine_emulator.text import answer_to, chat_prompt, estimate_tokens

prompts = st.text(max_size=40)
seeds = st.integers(0, 2**32 - 1)


@given(prompts, seeds, st.integers(0, 40), st.integers(1, 40))
def test_an_answer_continued_from_any_prefix_is_the_same_answer(prompt: str, seed: int, said: int, more: int) -> None:
    whole = answer_to(prompt, seed)
    continued = answer_to(prompt + whole.text(said), seed)
    assert whole.text(said) + continued.text(more) == whole.text(said + more)
    assert continued.prompt_tokens == whole.prompt_tokens + said
    assert continued.token(0) == whole.token(said)


@given(prompts, seeds, st.integers(1, 20))
def test_a_chat_is_continued_from_its_last_assistant_message(question: str, seed: int, said: int) -> None:
    whole = answer_to(chat_prompt([("system", "Be kind."), ("user", question)]), seed)
    open_chat = chat_prompt([("system", "Be kind."), ("user", question), ("assistant", whole.text(said))])
    assert answer_to(open_chat, seed).text(5) == whole.text(said + 5)[len(whole.text(said)) :]


def test_an_earlier_answer_is_no_prefix_of_the_next() -> None:
    first = answer_to(chat_prompt([("user", "a")]), 1)
    turns = [("user", "a"), ("assistant", first.text(3)), ("user", "b")]
    assert answer_to(chat_prompt(turns), 1).first_word == 0


def test_seed_and_prompt_both_change_the_text() -> None:
    texts = {answer_to(prompt, seed).text(8) for prompt in ("a", "b", "") for seed in (0, 1)}
    assert len(texts) == 6


def test_words_of_another_prompt_are_taken_as_prompt() -> None:
    other = answer_to("something else", 0).text(4)
    assert answer_to("prompt" + other, 0).first_word == 0
    assert answer_to("prompt kato9999999", 0).first_word == 0


def test_text_is_known_across_versions() -> None:
    # Checked in, since an ingress may continue on an engine of another version what this one began.
    assert answer_to("hello", 0).text(4) == KNOWN


def test_tokens_are_counted_by_four_characters() -> None:
    assert [estimate_tokens("x" * size) for size in (0, 1, 4, 5, 8)] == [1, 1, 1, 2, 2]


KNOWN = " geve0 gika1 kose2 meze3"
