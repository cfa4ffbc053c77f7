"""The `llm` command, told of the service by its file of OpenAI-compatible models."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

MODEL = os.environ["SERAI_MODEL"]
MODELS = f"""
- model_id: serai
  model_name: {MODEL}
  api_base: {os.environ["OPENAI_BASE_URL"]}
  api_key_name: serai
  supports_tools: true
  supports_schema: true
"""
TOOL = """
def weather(city: str) -> str:
    "The weather at a place"
    return "sun in " + city
"""


@pytest.fixture(scope="module", autouse=True)
def configured(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("llm")
    os.environ["LLM_USER_PATH"] = str(folder)
    (folder / "extra-openai-models.yaml").write_text(MODELS)
    llm("keys", "set", "serai", "--value", os.environ["OPENAI_API_KEY"])


def llm(*words: str) -> str:
    ended = subprocess.run(["llm", *words], capture_output=True, text=True, timeout=50, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_two_turns_streamed_and_plain_say_the_same() -> None:
    streamed = llm("-m", "serai", "Where do caravans rest?", "-o", "max_tokens", "12")
    assert len(streamed.split()) == 12
    assert llm("-m", "serai", "--no-stream", "Where do caravans rest?", "-o", "max_tokens", "12") == streamed
    again = llm("-c", "And where do they go?", "-o", "max_tokens", "12")
    assert len(again.split()) == 12
    assert again != streamed


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_tools(more: list[str]) -> None:
    said = llm("-m", "serai", "Where do caravans rest?", "--functions", TOOL, *more)
    assert len(said.split()) == 32, "the tool was called, and what it said was answered"
    assert "sun in" in llm("logs", "-n", "1")


def test_schema() -> None:
    assert '"name"' in llm("-m", "serai", "Where?", "--schema", "name, wells int")
