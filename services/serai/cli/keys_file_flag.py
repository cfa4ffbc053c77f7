"""The flag by which `serai keys …` finds its file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

VARIABLE = "SERAI_KEYS_FILE"


def add_keys_file(parser: argparse.ArgumentParser, note: str = "") -> None:
    """`--keys-file`; the variable of the ingress will do as well."""
    given = os.environ.get(VARIABLE)
    parser.add_argument(
        "--keys-file",
        type=Path,
        default=Path(given) if given else None,
        required=not given,
        metavar="FILE",
        help=f"the file of keys{note} ({VARIABLE}; required)",
    )
