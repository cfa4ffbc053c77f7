"""Which site file a command reads: `--site FILE`, `--site NAME`, or the usual one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from serai.launcher.site import Site
from serai.launcher.site_file import read_site
from serai.runtime.fields import BadInput
from serai.runtime.settings import refuse


def add_site_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site",
        metavar="FILE",
        default=os.environ.get("SERAI_SITE_FILE", ""),
        help="the site file, or the NAME of ~/.config/serai/NAME.yaml (SERAI_SITE_FILE; default: "
        "~/.config/serai/site.yaml)",
    )


def asked_site(arguments: argparse.Namespace) -> Site:
    """Exits with status 2 and one line when there is none or it cannot be used."""
    try:
        return read_site(site_path(arguments.site))
    except BadInput as error:
        refuse(str(error))


def site_path(asked: str) -> Path:
    """Where it is: a NAME has neither a slash nor an ending."""
    folder = Path("~/.config/serai").expanduser()
    if not asked:
        return folder / "site.yaml"
    path = Path(asked).expanduser()
    return path if "/" in asked or path.suffix or path.exists() else folder / f"{asked}.yaml"
