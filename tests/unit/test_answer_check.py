"""Answers with status 200 that can be none."""

from __future__ import annotations

import pytest

from serai.ingress.answer_check import what_is_wrong

JSON = "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        (JSON, b'{"choices": [{"message": {"con', "no whole JSON"),
        (JSON, b"", "no whole JSON"),
        (JSON, b"<html>Please log in</html>", "no whole JSON"),
        ("text/html", b"<html>Please log in</html>", "a page of HTML"),
        (JSON, b'{"a": 1}\n', ""),
        (JSON, b" [1, 2]", ""),
        ("text/plain", b"a transcription", ""),
        ("audio/mpeg", b"\xff\xfb", ""),
        ("", b"anything", ""),
    ],
)
def test_an_answer_in_one_piece_is_whole_json_or_something_else_but_no_page(
    content_type: str, body: bytes, words: str
) -> None:
    wrong = what_is_wrong(content_type, body, stream_wanted=False)
    assert words in wrong
    assert bool(words) == bool(wrong)


@pytest.mark.parametrize(
    ("content_type", "words"),
    [(JSON, "application/json instead of a stream"), ("", "without a content type"), ("text/html", "a page of HTML")],
)
def test_who_asked_for_a_stream_is_told_that_none_came(content_type: str, words: str) -> None:
    assert words in what_is_wrong(content_type, b"{}", stream_wanted=True)
