"""The model's files on this host, found by the engine's command: how large they are, and what their config says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from serai.runtime.bounded_command import output_of

SIZE_TIMEOUT_S = 20.0
CONFIG_BYTES_MAX = 4 << 20
_NAMES = ("--model", "--model-path", "--model-file", "-m", "--hf-repo")


def model_word(command: Sequence[str]) -> str:
    """What the command names as its model: a path or a name; empty = it does not say."""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in _NAMES and index:
            if equals:
                return value
            # `python -m module` is no model.
            following = command[index + 1] if index + 1 < len(command) else ""
            if name != "-m" or not Path(command[0]).name.startswith("python"):
                return following
    if "serve" in command:  # `vllm serve MODEL`
        for word in command[command.index("serve") + 1 :]:
            if not word.startswith("-"):
                return word
            break
    return ""


def model_path(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the command's model lies, or its newest snapshot in the cache of Hugging Face; None = not here."""
    word = model_word(command)
    if not word:
        return None
    try:
        path = Path(word).expanduser()
        if path.exists():
            return path
        home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        hub = Path(environment.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
        snapshots = hub / f"models--{word.replace('/', '--')}" / "snapshots"
        return max(snapshots.iterdir(), key=lambda folder: folder.stat().st_mtime, default=None)
    except (OSError, ValueError):
        return None


async def model_bytes(path: Path | None) -> int:
    """Size of what lies at `path`, links followed; 0 when there is nothing or it cannot be told in time."""
    if path is None:
        return 0
    text = await output_of(["du", "-Lsb", "--", str(path)], SIZE_TIMEOUT_S)
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdigit() else 0


def model_config(path: Path | None) -> dict[str, Any]:
    """Its config.json; empty when there is none that can be read."""
    if path is None:
        return {}
    file = path / "config.json"
    try:
        if file.stat().st_size > CONFIG_BYTES_MAX:
            return {}
        config = orjson.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
