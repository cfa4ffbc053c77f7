"""Commands, flags and variables: those that pages print are ones that programs take, all explain themselves, and
docs/settings.md has each setting of each service. When settings have changed, write that page anew:

    SERAI_WRITE_DOCS=1 .venv/bin/pytest tests/unit/test_documented_commands.py
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from serai.cli.main import COMMANDS, Command, Tree
from serai.cli.registry_reader import ReaderSettings
from serai.ingress.settings import IngressSettings
from serai.launcher.settings import LauncherSettings
from serai.ledger.settings import LedgerSettings
from serai.macro_scheduler.settings import MacroSchedulerSettings
from serai.placer.settings import PlacerSettings
from serai.registry.settings import RegistrySettings
from serai.runtime.connection_settings import ConnectionSettings
from serai.runtime.settings import SettingFacts, setting_facts
from serai.worker_agent.pool_settings import PoolSettings
from unit.documents import GUIDES, ROOT, blocks_of, name_of, words_of

SETTINGS_PAGE = ROOT / "docs" / "settings.md"
MARK = "<!-- What follows is made from the code by tests/unit/test_documented_commands.py. -->\n"

SERVICES: dict[str, type[Any]] = {
    "agent": PoolSettings,
    "ingress": IngressSettings,
    "registry": RegistrySettings,
    "ledger": LedgerSettings,
    "launcher": LauncherSettings,
    "macro-scheduler": MacroSchedulerSettings,
    "placer": PlacerSettings,
}

_OTHERS = """
sbatch, srun, scancel: --account --array --batch --constraint --cpus-per-task --dependency --exclude --gres --mem
  --nodes --ntasks-per-node --output --partition --signal --test-only --time
vllm, sglang, ray, llama.cpp: --address --block --chunked-prefill-size --dist-init-addr --distributed-executor-backend
  --enable-memory-saver --enable-metrics --enable-mixed-chunk --enable-sleep-mode --head --headless --host --master-addr
  --master-port --max-model-len --max-num-batched-tokens --metrics --nnodes --node-rank --port --quantization
  --schedule-policy --scheduler-cls --served-model-name --shutdown-timeout --stream-interval --tensor-parallel-size
docker compose, apptainer, llm, pip: --rm --scale --profile --nv --value --no-deps
every command: --version --help
"""
OTHER_FLAGS = frozenset(_OTHERS.split())
"""Flags of other programs that guides speak of."""

each_guide = pytest.mark.parametrize("page", GUIDES, ids=name_of)


# -- what there is -----------------------------------------------------------------------------------------------------


def _commands(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    for name, node in tree.items():
        own = (*path, name) if name else path
        if isinstance(node, Command):
            yield own, node
        else:
            yield from _commands(node, own)


ALL = dict(_commands(COMMANDS))


@cache
def parser_of(path: tuple[str, ...]) -> argparse.ArgumentParser:
    """As `serai` makes it."""
    module: Any = importlib.import_module(ALL[path].module)
    parser = argparse.ArgumentParser(prog=f"serai {' '.join(path)}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def flags_of(path: tuple[str, ...]) -> set[str]:
    return {flag for action in parser_of(path)._actions for flag in action.option_strings}


@cache
def all_flags() -> frozenset[str]:
    return frozenset(flag for path in ALL for flag in flags_of(path))


@cache
def variables() -> frozenset[str]:
    """Of settings, and those that stand in programs, scripts and files that start them."""
    facts = [fact for kind in (*SERVICES.values(), ReaderSettings) for fact in setting_facts(kind)]
    sources = [
        ROOT / "Makefile",
        *(ROOT / "deploy" / "compose").glob("*.*"),
        ROOT / "deploy" / "slurm" / "agent.sbatch",
    ]
    for folder in ("services", "shared", "simulator", "engines", "tests"):
        sources += (ROOT / folder).rglob("*.py")
    written = {name for file in sources for name in re.findall(r"SERAI_[A-Z_]*[A-Z]", file.read_text())}
    return frozenset(written | {fact.variable for fact in facts})


# -- the help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_command_says_what_it_does_and_what_each_argument_is_for(path: tuple[str, ...]) -> None:
    parser = parser_of(path)
    assert parser.format_help()
    assert parser.description
    assert "collaborators" not in parser.description, "written for those who read the code, not for those who run it"
    unexplained = [action.option_strings or action.dest for action in parser._actions if not action.help]
    assert unexplained == []


# -- what guides print -------------------------------------------------------------------------------------------------

_PRINTED = re.compile(r"^ *(?:nohup |srun .*? |ExecStart=)?(?:\S*/)?serai ((?:\\\n|[^\n|#>&;])*)", re.MULTILINE)


def _printed(text: str) -> Iterator[str]:
    """What follows `serai`, in blocks of shell and between backticks."""
    for kind, body in blocks_of(text):
        if kind in ("sh", "", "ini"):
            yield from (found.replace("\\\n", " ") for found in _PRINTED.findall(body))
    for word in words_of(text):
        if word.startswith("serai "):
            yield word.removeprefix("serai ")


@each_guide
def test_every_command_that_is_printed_is_one_and_takes_the_flags_beside_it(page: Path) -> None:
    wrong = [f"serai {line.strip()}: {fault}" for line in _printed(page.read_text()) if (fault := _fault(line))]
    assert wrong == []


def _fault(line: str) -> str:
    """Why a command cannot be given so; empty when it can."""
    words = re.sub(r"\"[^\"]*\"", "TEXT", re.split(r" -- | …\s*$", line)[0]).split()
    if words[:1] == ["simulate"] and any(word.endswith(".yaml") for word in words):
        words.insert(1, "run")
    node: Command | Tree = COMMANDS
    path: tuple[str, ...] = ()
    while isinstance(node, dict):
        if "" in node and (not words or words[0] not in node):
            node = node[""]
            break
        if not words or words[0] in ("…", "--help"):
            return ""  # A group is meant.
        unknown = [name for name in words[0].split("|") if name not in node]
        if unknown:
            return f"no command {unknown[0]}"
        if "|" in words[0]:
            return ""
        node, path = node[words[0]], (*path, words.pop(0))
    if path not in ALL:
        return ""
    flags = {flag for word in words for flag in re.findall(r"^\[?(--[a-z][a-z0-9-]*)", word)}
    unknown = sorted(flags - flags_of(path) - {"--help"})
    return f"has no {', '.join(unknown)}" if unknown else ""


@each_guide
def test_every_flag_that_is_named_is_one(page: Path) -> None:
    words = " ".join(words_of(page.read_text()))
    named = set(re.findall(r"(?:^|[\s\[])(--[a-z][a-z0-9-]+)", words))
    assert sorted(named - all_flags() - OTHER_FLAGS) == []


@each_guide
def test_every_variable_that_is_named_is_one(page: Path) -> None:
    named = set(re.findall(r"\bSERAI_[A-Z_]*[A-Z]\b", page.read_text()))
    assert sorted(named - variables()) == []


# -- the page of settings ----------------------------------------------------------------------------------------------


def test_the_page_of_settings_has_each_as_it_is() -> None:
    written = SETTINGS_PAGE.read_text()
    head = written.partition(MARK)[0]
    wanted = head + MARK + _tables()
    if os.environ.get("SERAI_WRITE_DOCS"):
        SETTINGS_PAGE.write_text(wanted)
    assert SETTINGS_PAGE.read_text() == wanted, "settings have changed: SERAI_WRITE_DOCS=1 writes the page anew"


def _tables() -> str:
    common = setting_facts(ConnectionSettings)
    parts = [_table("Every service", common)]
    for name, kind in SERVICES.items():
        assert dataclasses.is_dataclass(kind)
        parts.append(_table(f"`serai {name}`", [fact for fact in setting_facts(kind) if fact not in common]))
    return "".join(parts)


def _table(title: str, facts: list[SettingFacts]) -> str:
    head = [f"\n## {title}\n", "| flag | variable | default | meaning |", "|---|---|---|---|"]
    rows = [
        f"| `{fact.flag}` | `{fact.variable}` | {fact.default} | {fact.help} |".replace("*", "\\*") for fact in facts
    ]
    return "\n".join([*head, *rows, ""])
