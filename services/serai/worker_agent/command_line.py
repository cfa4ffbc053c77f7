"""What the engine's command line tells of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serai.contracts.session_record import EngineParallelism

# vLLM's and SGLang's names.
_FLAGS = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size"),
    "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}


def parallelism_of(command: Sequence[str]) -> EngineParallelism:
    """How the engine will be spread over its GPUs; 1 where the command does not say, or not as a number."""
    degrees = {}
    for field, flags in _FLAGS.items():
        if (degree := _number_after(command, flags)) > 1:
            degrees[field] = degree
    return EngineParallelism(**degrees)


def _number_after(command: Sequence[str], flags: Sequence[str]) -> int:
    """The number of the last of `flags`, as `--flag 2` or `--flag=2`; 0 when there is none."""
    found = ""
    for index, word in enumerate(command):
        name, equals, value = word.replace("_", "-").partition("=")
        if name in flags:
            found = value if equals else "".join(command[index + 1 : index + 2])
    return int(found) if found.isdigit() else 0
