"""docs/clients.md is true: its blocks run as they stand there, and its versions are those that are tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clients.conftest import ROOT, TRANSLATED
from clients.test_conversations import environment, run
from integration.system import System

pytestmark = pytest.mark.timeout(300)
PAGE = (ROOT / "docs" / "clients.md").read_text()
BLOCKS = re.findall(r"^```(\w+) (\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [(kind, client, text) for kind, client, text in BLOCKS if kind in ("python", "js")]


def filled_in(text: str, system: System) -> str:
    """What a reader puts in."""
    return (
        text.replace("http://localhost:8000", system.url)
        .replace("sk-serai-…", system.key)
        .replace("my-model", TRANSLATED)
    )


@pytest.mark.parametrize(("kind", "client", "text"), PROGRAMS, ids=[f"{kind}-{client}" for kind, client, _ in PROGRAMS])
def test_a_program_runs(serving: System, clients: Path, tmp_path: Path, kind: str, client: str, text: str) -> None:
    # Node.js looks for modules from the program's own folder upwards.
    folder = clients / "node" if kind == "js" else tmp_path
    program = folder / f"page-{client}.{'mjs' if kind == 'js' else 'py'}"
    program.write_text(filled_in(text, serving))
    interpreter = clients / "python" / "bin" / ("node" if kind == "js" else "python")
    variables = environment(serving, clients, TRANSLATED, tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"):
        del variables[name]  # The page's own must do.
    output = run([str(interpreter), str(program)], variables=variables, folder=folder)
    # The last word of a whole answer, and the same of a stream.
    assert len(re.findall(r"[a-z]{4}31", output)) >= 2, output


def test_the_command_line_runs(serving: System, clients: Path, tmp_path: Path) -> None:
    models, commands = (text for kind, client, text in BLOCKS if client == "llm")
    (tmp_path / "extra-openai-models.yaml").write_text(filled_in(models, serving))
    variables = environment(serving, clients, TRANSLATED, tmp_path) | {"LLM_USER_PATH": str(tmp_path)}
    del variables["OPENAI_API_KEY"], variables["OPENAI_BASE_URL"]
    output = run(["/bin/sh", "-e", "-c", filled_in(commands, serving)], variables=variables, folder=tmp_path)
    assert len(re.findall(r"[a-z]{4}31", output)) == 2, output


def test_versions_are_those_that_are_tested() -> None:
    rows = re.findall(r"^\| `([^`]+)`( for \w+)? \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    pins = (ROOT / "deploy" / "clients" / "python.txt").read_text()
    node = json.loads((ROOT / "deploy" / "clients" / "package.json").read_text())["dependencies"]
    assert len(rows) >= 7
    for name, language, version in rows:
        if language == " for JavaScript":
            assert node[name] == version
        else:
            assert re.search(rf"^{name}=={re.escape(version)}$", pins, re.MULTILINE), f"{name} {version}"
