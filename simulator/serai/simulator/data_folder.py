"""Where recorded traces and measurements are: never in the project, only named to it."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT = Path("../shared/data")
"""Seen from the project's root."""


def data_folder() -> Path:
    """$SERAI_DATA_DIR, or the default."""
    return Path(os.environ.get("SERAI_DATA_DIR") or DEFAULT)
