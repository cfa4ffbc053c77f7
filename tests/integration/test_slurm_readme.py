"""deploy/slurm/README.md followed to the letter: its commands, pasted in order, end with a streamed answer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.slurm_cluster import SlurmCluster
from integration.system import wait_for
from serai.worker_agent.engine.process import free_port

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]

HOUSE = Path(__file__).parents[2]
README = HOUSE / "deploy" / "slurm" / "README.md"
FROM_LOGIN_NODE_TO_MODEL = ("1.", "2.", "3.", "4.", "5.")
"""The sections that lead there begin so."""

_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> str:
    """What a reader would paste, section by section."""
    _, *rest = _SECTION.split(README.read_text())
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    wanted = [text for title, text in sections.items() if title.startswith(FROM_LOGIN_NODE_TO_MODEL)]
    assert len(wanted) == len(FROM_LOGIN_NODE_TO_MODEL)
    return "\n".join(block for text in wanted for block in _COMMANDS.findall(text))


@contextmanager
def pasted(text: str, folder: Path, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A login shell's session: the commands run in it, and what they left in the background ends with it."""
    output = folder / "session.out"
    with output.open("wb") as log:
        shell = subprocess.Popen(
            ["bash", "-eu", "-c", text], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield shell, output
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(shell.pid, number)
                wait_for(lambda: not _group_lives(shell), "the services stop", 20)
            except ProcessLookupError:
                break
        shell.wait()


def _group_lives(shell: subprocess.Popen[bytes]) -> bool:
    shell.poll()
    try:
        os.killpg(shell.pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_readme_leads_from_a_login_node_to_a_served_model(cluster: SlurmCluster, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    # What is made in a checkout, and what only its developers need, is not copied.
    shutil.copytree(HOUSE, checkout, symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "results", "*.pyc"))
    environment = cluster.environment | {
        "SERAI_HOME": str(tmp_path / "serai"),
        "SERAI_STATE": str(tmp_path / "state"),
        "CONFIG": str(tmp_path / "config"),
        "NATS_HOST": "127.0.0.1",
        "NATS_PORT": str(free_port()),
        "API_PORT": str(free_port()),
    }
    try:
        with pasted(commands(), checkout, environment) as (shell, output):
            code = shell.wait(360)
            told = output.read_text(errors="replace")
            assert code == 0, told[-5000:]
            answer = told[told.index("data: ") :].splitlines()
            assert sum('"content"' in line for line in answer) >= 20, told[-5000:]
            assert [line for line in answer if line][-1] == "data: [DONE]"
            assert cluster.command("squeue", "--noheader", "--format=%T").split() == ["RUNNING"]
    finally:
        cluster.command("scancel", "--user", "root")
        wait_for(lambda: not cluster.command("squeue", "--noheader"), "no jobs are left", 60)
