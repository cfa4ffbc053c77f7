"""Which engines can be started on this host."""

from __future__ import annotations

import importlib.util
import shutil

from serai.worker_agent.pool_templates import Template


def is_there(template: Template) -> bool:
    """Whether its program can be started here, as far as can be seen."""
    if template.needs and importlib.util.find_spec(template.needs) is None:
        return False
    return shutil.which(template.program) is not None
