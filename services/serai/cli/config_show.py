"""Shows what an ingress would start with, given the same flags, environment and file: each setting, and where from."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from serai.cli.config_check import effective
from serai.ingress.configuration_file import BadConfiguration, Configured
from serai.ingress.settings import IngressSettings
from serai.runtime.settings import add_settings, setting_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_settings(parser, IngressSettings)


def run(arguments: argparse.Namespace) -> int:
    try:
        configured = Configured(arguments, os.environ)
    except BadConfiguration as error:
        sys.stderr.write(f"serai config show: {error}\n")
        return 2
    settings = [(name, _shown(getattr(configured.settings, name))) for name in setting_names(IngressSettings)]
    sources = {name: given.source for name, given in configured.given.items()}
    if arguments.json:
        found = {name: {"value": value, "source": sources.get(name, "default")} for name, value in settings}
        print(json.dumps({"settings": found, "configuration": effective(configured)}, indent=2))
        return 0
    for name, value in settings:
        print(f"{name} = {_plain(value)}   ({sources.get(name, 'default')})")
    for section, content in effective(configured).items():
        if content and section != "policy":
            print(f"{section}: {json.dumps(content)}")
    return 0


def _plain(value: Any) -> str:
    """As it would be written."""
    return "none" if value in (None, []) else json.dumps(value) if isinstance(value, bool) else str(value)


def _shown(value: Any) -> Any:
    if isinstance(value, str) and "://" in value and "@" in value:
        parts = urlsplit(value)
        return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
    return value if isinstance(value, int | float | str | list | None) else _text(value)


def _text(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value)
