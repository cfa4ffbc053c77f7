"""A hash of the code that a result depends on, so that results kept from an earlier run are used only while it is the
same code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_COMMON = (
    "serai.bench.simulate.study.cells",
    "serai.bench.simulate.study.trace_loads",
    "serai.engine_emulator.batching",
    "serai.ingress.patterns",
    "serai.ingress.routing",
    "serai.performance",
    "serai.simulator.data_folder",
    "serai.simulator.fast.cluster",
    "serai.simulator.fast.disaggregated",
    "serai.simulator.fast.dispatch",
    "serai.simulator.fast.instance",
    "serai.simulator.fast.kv_connectors",
    "serai.simulator.fast.kv_handover",
    "serai.simulator.fast.life",
    "serai.simulator.fast.links",
    "serai.simulator.fast.paper_clusters",
    "serai.simulator.fast.presets",
    "serai.simulator.fast.routed",
    "serai.simulator.fast.run",
    "serai.simulator.fast.step_times",
    "serai.simulator.fast.store_traffic",
    "serai.simulator.outcomes",
    "serai.simulator.summary",
    "serai.simulator.workloads",
    "serai.bench.simulate.study.systems",
)
_MACRO = (
    "serai.contracts.admission",
    "serai.macro_scheduler",
    "serai.simulator.fast.macro_scheduled",
    "serai.worker_agent.first_tokens",
    "serai.worker_agent.gate_events",
    "serai.worker_agent.gate_requests",
    "serai.worker_agent.overload",
    "serai.worker_agent.phase_gate",
    "serai.worker_agent.slack_book",
    "serai.worker_agent.step_times",
    "serai.worker_agent.window_rule",
)

UNRELATED = (
    "serai.bench.simulate.study.code_digest",
    "serai.bench.simulate.study.paper_figures",
    "serai.contracts.session_record",
    "serai.runtime.fields",
    "serai.runtime.lean_imports",
)
"""What a run imports, too, and no result depends on: names, messages of errors, how modules are loaded."""


def covered() -> tuple[str, ...]:
    """Modules and packages whose text names a macro-scheduled result."""
    return (*_COMMON, *_MACRO)


@cache
def code_digest(macro: bool) -> str:
    """Of what every run depends on; with `macro`, of what macro-scheduled ones do, too."""
    found = hashlib.sha256()
    for file in _files((*_COMMON, *(_MACRO if macro else ()))):
        found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()


def _files(modules: Iterable[str]) -> Iterable[Path]:
    """Every file of modules and packages, in the order of `modules`; a module that is not there is left out."""
    for name in modules:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        # A compiled module counts by its source.
        file = origin if origin.suffix == ".py" else origin.with_name(f"{origin.name.partition('.')[0]}.py")
        yield from _package(file.parent) if file.name == "__init__.py" else [file]


def _package(folder: Path) -> list[Path]:
    """What is in it, profiles of GPUs and models included."""
    return sorted([*folder.rglob("*.py"), *folder.rglob("*.json")])
