"""What the emulated engine says: word i of an answer depends on seed, prompt and i, and on nothing else.

A prompt that already ends with the first k words of its own answer is continued with word k. That makes a stream
moved to another engine comparable, word by word, with one that was not.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghklmnprstvwz" for vowel in "aeio")
_LAST_WORD = re.compile(r" [a-z]{4}(\d{1,7})\Z")
_LONGEST_WORD = 12
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one prompt, from its word `first_word` on."""

    key: int
    first_word: int
    prompt_tokens: int
    prompt_characters: int = 0
    """Length of the prompt without the words of its own answer at its end."""

    def token(self, position: int) -> str:
        """The text of the token at `position` after the prompt: a space and a word."""
        return " " + word(self.key, self.first_word + position)

    def text(self, tokens: int) -> str:
        """The first `tokens` tokens after the prompt, joined."""
        key, first = self.key, self.first_word
        return "".join([" " + word(key, index) for index in range(first, first + tokens)])


def word(key: int, index: int) -> str:
    """Word `index` of the answer with this key: two syllables and the index, e.g. `kato17`."""
    mixed = ((key ^ (index * 0x9E3779B1)) * 0x85EBCA6B) & 0xFFFFFFFF
    return f"{_SYLLABLES[mixed >> 26]}{_SYLLABLES[(mixed >> 20) & 63]}{index}"


def answer_to(prompt: str, seed: int) -> Answer:
    """The answer to `prompt`, continued when the prompt ends with the beginning of its own answer."""
    original, spoken = _split_spoken(prompt, seed)
    key = _key(original, seed)
    return Answer(key, spoken, estimate_tokens(original) + spoken, len(original))


def chat_prompt(turns: Sequence[tuple[str, str]]) -> str:
    """Messages (role, text) as one prompt, as a chat template does; a last assistant message is left open."""
    parts = [f"{role}\n{text}\n" for role, text in turns[:-1]]
    role, text = turns[-1]
    parts.append(f"assistant\n{text}" if role == "assistant" else f"{role}\n{text}\nassistant\n")
    return "".join(parts)


def estimate_tokens(text: str) -> int:
    """How many tokens the emulated tokenizer makes of `text`: one per four characters, at least one."""
    return max(1, (len(text) + _CHARACTERS_PER_TOKEN - 1) // _CHARACTERS_PER_TOKEN)


def block_keys(text: str, block_tokens: int) -> tuple[int, ...]:
    """One key per full block of `text`, chained: equal keys mean equal text up to there. Only within one process."""
    size = block_tokens * _CHARACTERS_PER_TOKEN
    keys: list[int] = []
    key = 0
    for end in range(size, len(text) + 1, size):
        key = hash((key, text[end - size : end]))
        keys.append(key)
    return tuple(keys)


def _key(original: str, seed: int) -> int:
    return zlib.crc32(original.encode("utf-8", "surrogatepass"), seed & 0xFFFFFFFF)


def _split_spoken(prompt: str, seed: int) -> tuple[str, int]:
    """`prompt` without the words of its own answer at its end, and how many those were."""
    last = _LAST_WORD.search(prompt[-_LONGEST_WORD - 1 :])
    if last is None:
        return prompt, 0
    spoken = int(last[1]) + 1
    original, *words = prompt.rsplit(" ", spoken)
    key = _key(original, seed)
    if len(words) != spoken or any(said != word(key, index) for index, said in enumerate(words)):
        return prompt, 0
    return original, spoken
