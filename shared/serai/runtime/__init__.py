"""How a service lives: bus, settings, start and stop, logs, traces, metrics, and its copy of the registry."""

from serai.runtime.lean_imports import without

with without("rich"):  # Our tracebacks are plain: no values of variables in them.
    import structlog  # noqa: F401
