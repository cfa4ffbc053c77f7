"""Every client that is promised holds its conversations, each in an environment of its own: plain and streamed, of two
turns, with tools. What they say and check is in `conversations/`, in the client's own language and library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clients.conftest import NATIVE, TRANSLATED
from integration.system import System

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
CONVERSATIONS = HERE / "conversations"
PYTHON = ("openai", "anthropic", "langchain", "litellm", "llm")
NODE = ("openai", "anthropic")
BOTH_DIALECTS = ("openai", "anthropic")
"""Those that speak Messages or Responses: an engine may do so itself, or the ingress for it."""


def environment(system: System, clients: Path, model: str, folder: Path) -> dict[str, str]:
    """What a user would export, and nothing of ours beside it."""
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "PATH": f"{clients / 'python' / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "OPENAI_BASE_URL": f"{system.url}/v1",
        "OPENAI_API_KEY": system.key,
        "ANTHROPIC_BASE_URL": system.url,
        "ANTHROPIC_API_KEY": system.key,
        "SERAI_MODEL": model,
        # Whatever a library would look up elsewhere, it must do without.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def run(command: list[str], *, variables: dict[str, str], folder: Path, timeout_s: float = 280) -> str:
    """The output; fails with it when the command fails."""
    ended = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, f"{' '.join(command)} ended with {ended.returncode}:\n{output[-8000:]}"
    return output


@pytest.mark.parametrize(
    ("client", "model"),
    [*[(client, TRANSLATED) for client in PYTHON], *[(client, NATIVE) for client in BOTH_DIALECTS]],
)
def test_a_python_client_converses(serving: System, clients: Path, tmp_path: Path, client: str, model: str) -> None:
    pytest_of_clients = [
        str(clients / "python" / "bin" / "python"),
        "-m",
        "pytest",
        "-c",
        str(CONVERSATIONS / "conversations.ini"),
    ]
    script = CONVERSATIONS / f"with_{client}.py"
    variables = environment(serving, clients, model, tmp_path)
    output = run([*pytest_of_clients, str(script)], variables=variables, folder=tmp_path)
    assert " passed" in output


@pytest.mark.parametrize("model", [TRANSLATED, NATIVE])
@pytest.mark.parametrize("client", NODE)
def test_a_node_client_converses(serving: System, clients: Path, tmp_path: Path, client: str, model: str) -> None:
    # Modules are looked for from the script's own folder upwards.
    script = shutil.copy(CONVERSATIONS / f"with_{client}.mjs", clients / "node")
    node = str(clients / "python" / "bin" / "node")
    variables = environment(serving, clients, model, tmp_path)
    output = run([node, "--test", str(script)], variables=variables, folder=clients / "node")
    assert "# fail 0" in output or "ℹ fail 0" in output
    assert "pass 0" not in output
