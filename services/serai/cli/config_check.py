"""Says whether an ingress would start with a configuration file, and what it would do then. Exit code 0 = yes, 2 = no.

Environment variables count as they would for the ingress; flags that it will be given can be repeated here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from serai.ingress.access import Access, BadKeysFile
from serai.ingress.configuration_file import BadConfiguration, Configured
from serai.ingress.settings import IngressSettings
from serai.runtime.settings import add_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the configuration file (docs/configuration.md)")
    parser.add_argument("--json", action="store_true", help="all that would be in effect, as JSON")
    add_settings(parser, IngressSettings)


def run(arguments: argparse.Namespace) -> int:
    arguments.config = str(arguments.file)
    try:
        configured = Configured(arguments, os.environ)
        access = Access(configured.settings.keys_file, anonymous=configured.settings.anonymous)
    except (BadConfiguration, BadKeysFile) as error:
        sys.stderr.write(f"serai config check: {error}\n")
        return 2
    access.apply(configured.configuration)
    strays = [f"key `{key.name}` has the project `{key.project}`, which is not configured" for key in access.strays()]
    if arguments.json:
        print(json.dumps({"configuration": effective(configured), "warnings": strays}, indent=2))
        return 0
    print(f"{arguments.file} is right: {_summary(configured)}")
    for stray in strays:
        print(f"warning: {stray}; its holder would be refused")
    return 0


def effective(configured: Configured) -> dict[str, Any]:
    """The sections of the file, with what is in effect where nothing is written."""
    fields: dict[str, Any] = msgspec.to_builtins(configured.configuration)
    del fields["keys"]  # Of the keys file: `serai keys list`.
    return fields


def _summary(configured: Configured) -> str:
    found = configured.configuration
    counts = {
        "project": len(found.projects),
        "issuer": len(found.oidc),
        "alias": len(found.aliases),
        "policy": len(found.policies),
        "price": len(found.prices),
    }
    plural = {"alias": "aliases", "policy": "policies"}
    words = [f"{n} {name if n == 1 else plural.get(name, name + 's')}" for name, n in counts.items()]
    settings = sum(given.in_file for given in configured.given.values())
    return f"{', '.join(words)}; {settings} setting{'' if settings == 1 else 's'}"
