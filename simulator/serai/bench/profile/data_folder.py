"""Where the measurements are: never in the project, only named to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from serai.simulator.data_folder import data_folder


class DataMissing(Exception):
    """The folder of measurements is not there; one line that says how to name it."""


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """The flag that names the folder."""
    parser.add_argument(
        "--data",
        type=Path,
        default=data_folder(),
        metavar="DIR",
        help="folder of measurements, with `profiles/` in it (default: $SERAI_DATA_DIR or ../shared/data)",
    )


def checked_data(folder: Path) -> Path:
    """`folder` itself. Raises DataMissing when it holds no measurements."""
    if not (folder / "profiles").is_dir():
        raise DataMissing(f"no measurements in {folder}: name the folder that holds `profiles/` with --data")
    return folder
