"""How a service lives: bus, settings, start and stop, logs, traces, metrics, and its copy of the registry."""
