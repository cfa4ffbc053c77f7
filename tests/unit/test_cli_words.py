"""What is wrong with a command's words or files is one line, and never a traceback."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from serai.cli import keys_list
from serai.cli.main import EXTRAS, main
from serai.runtime.settings import file_fault


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Exit code and lines on standard error."""
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("ingress", "--polcy", "x"), "serai ingress: unrecognized arguments: --polcy x; did you mean --policy? ("),
        (("ingress", "--zzzz"), "serai ingress: unrecognized arguments: --zzzz ("),
        (("keys", "add", "bob"), "serai keys add: the following arguments are required: --keys-file ("),
        (
            ("keys", "add", "bob", "--keys-file", "k", "--rpm", "-1"),
            "serai keys add: --rpm: '-1': write a whole number",
        ),
        (("usage", "--by", "planet"), "serai usage: --by: invalid choice: 'planet' (choose from"),
        (("registry", "show"), "serai registry show: the following arguments are required: SESSION ("),
    ],
)
def test_wrong_words_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.delenv("SERAI_KEYS_FILE", raising=False)
    code, lines = said(capsys, *words)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(line)
    assert lines[0].endswith("--help` tells more)")


def test_a_file_that_cannot_be_had_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: object) -> int:
        raise PermissionError(13, "Permission denied", "a/file")

    monkeypatch.setattr(keys_list, "run", run)
    assert said(capsys, "keys", "list", "--keys-file", "k") == (1, ["serai keys list: a/file: Permission denied"])


def test_an_interrupt_is_no_error_to_be_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # Put back afterwards.
    monkeypatch.setattr(keys_list, "run", run)
    assert said(capsys, "keys", "list", "--keys-file", "k") == (130, [])


def test_what_is_not_installed_is_told_with_the_extra_that_brings_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'ortools.sat'", name="ortools.sat")

    monkeypatch.setattr(keys_list, "run", run)
    line = "serai keys list: needs ortools.sat; install it with: pip install 'serai[placer]'"
    assert said(capsys, "keys", "list", "--keys-file", "k") == (2, [line])
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS.values()) <= set(extras)


def test_who_reads_no_further_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(arguments: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(keys_list, "run", run)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(("keys", "list", "--keys-file", "k")) == 0
        os.write(out.fileno(), b"lost")
    assert (tmp_path / "out").read_bytes() == b""


def test_why_a_path_is_no_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert file_fault(file) == f"no such file: {file}"
    file.touch()
    assert file_fault(file) == ""
    assert file_fault(tmp_path) == f"{tmp_path} is no file"
    assert file_fault(file / "below") == f"{file}/below: Not a directory"


@pytest.mark.parametrize("flag", ["--raw", "--out", "--cache"])
def test_a_folder_that_cannot_take_results_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str
) -> None:
    (tmp_path / "file").touch()
    code, lines = said(capsys, "simulate", "burst", "--quick", flag, str(tmp_path / "file" / "below"))
    told = f"{flag}: {tmp_path}/file/below: Not a directory (`serai simulate burst --help` tells more)"
    assert (code, lines) == (2, [f"serai simulate burst: {told}"])
