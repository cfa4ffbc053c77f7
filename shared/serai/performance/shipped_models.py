"""Cards of common open models, so that planning and simulation need no download.

`model_configs.json` holds, under each model's public name, the fields of its published `config.json` that decide
cost. Any other model is read from its own `config.json` with `model_card.model_card`.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from serai.performance.model_card import BadModelConfig, ModelCard, model_card

_FILE = "model_configs.json"


@cache
def _configs() -> dict[str, dict[str, Any]]:
    data = (files(__package__) / _FILE).read_bytes()
    return msgspec.json.decode(data, type=dict[str, dict[str, Any]])


def shipped_names() -> list[str]:
    """Names of the models whose dimensions come with the package."""
    return list(_configs())


@cache
def shipped_card(name: str) -> ModelCard:
    """The card of a shipped model, by its public name, with or without the organisation, in any case.

    Raises BadModelConfig naming the nearest shipped models when there is none.
    """
    configs = _configs()
    keys = {key.lower(): key for key in configs} | {key.lower().split("/")[-1]: key for key in configs}
    key = keys.get(name.strip().lower())
    if key is None:
        near = sorted({keys[match] for match in get_close_matches(name.lower(), keys, n=3, cutoff=0.4)})
        known = ", ".join(near or configs)
        raise BadModelConfig(f"no card for model {name!r} is shipped: give its config.json, or use one of {known}")
    config = configs[key]
    if "same_as" in config:
        config = configs[config["same_as"]]
    return model_card(config, f"{_FILE}:{key}", key)
