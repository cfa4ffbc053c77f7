"""From an assignment to an engine's command: templates, some built in, others from a file. Pure.

    engines:
      vllm-fp8:
        command: [vllm, serve, "{path}", --served-model-name, "{model}", --tensor-parallel-size, "{tensor_parallel}",
                  [--quantization, "{quantization}"]]

Words in a list of their own are left out when one of their placeholders has no value. `{port}` and `{host}` are filled
in when the engine starts; without them the agent adds the flags of the engine's kind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.contracts.placement import Assignment
from serai.runtime.fields import BadInput, Fields
from serai.runtime.strict_yaml import NotYaml, lines, load, placed
from serai.worker_agent.engine.kinds import ENGINES

Word = str | tuple[str, ...]
"""A word of a command, or several that are there only together."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_LATER = {"port", "host"}
PLACEHOLDERS = (
    *("model", "path", "tensor_parallel", "pipeline_parallel", "data_parallel", "gpus", "quantization", "gpu"),
    *sorted(_LATER),
)
_UNQUANTIZED = {"", "none", "bf16", "fp16", "float16", "bfloat16", "fp32"}
"""Formats that weights are stored in: no engine has to be told."""


@dataclass(frozen=True, slots=True)
class Template:
    """How engines of one name are started."""

    name: str
    command: tuple[Word, ...]
    kind: str = "auto"
    """Engine kind; `auto` = by its command."""
    needs: str = ""
    """A module of our own Python without which it does not run."""

    @property
    def program(self) -> str:
        first = self.command[0]
        return first if isinstance(first, str) else first[0]


BUILT_IN: dict[str, Template] = {
    template.name: template
    for template in (
        Template(
            "vllm",
            (
                *("vllm", "serve", "{path}", "--served-model-name", "{model}"),
                *("--tensor-parallel-size", "{tensor_parallel}", "--pipeline-parallel-size", "{pipeline_parallel}"),
                *("--data-parallel-size", "{data_parallel}"),
                ("--quantization", "{quantization}"),
            ),
            "vllm",
        ),
        Template(
            "sglang",
            (
                *("sglang", "serve", "--model-path", "{path}", "--served-model-name", "{model}"),
                *("--tp-size", "{tensor_parallel}", "--pp-size", "{pipeline_parallel}", "--dp-size", "{data_parallel}"),
                ("--quantization", "{quantization}"),
            ),
            "sglang",
        ),
        Template(
            "llamacpp",
            (
                *(sys.executable, "-m", "serai.worker_agent.engine.llamacpp_server"),
                *("--model-file", "{path}", "--alias", "{model}"),
            ),
            "llamacpp",
            "xllamacpp",
        ),
        Template("emulated", (sys.executable, "-m", "serai.engine_emulator", "--model", "{model}"), "emulated"),
    )
}


def command_of(template: Template, assignment: Assignment, gpu: str = "") -> list[str]:
    """The engine's command, its address aside. `gpu`: kind of the agent's GPUs."""
    quantization = assignment.quantization
    values = {
        "model": assignment.model,
        "path": assignment.path or assignment.model,
        "tensor_parallel": str(assignment.tensor),
        "pipeline_parallel": str(assignment.pipeline),
        "data_parallel": str(assignment.data),
        "gpus": str(assignment.gpus),
        "quantization": "" if quantization.lower() in _UNQUANTIZED else quantization,
        "gpu": gpu,
    }
    words: list[str] = []
    for part in template.command:
        if isinstance(part, str):
            words.append(_filled(part, values))
        elif all(values.get(name, name) for word in part for name in _PLACEHOLDER.findall(word)):
            words += [_filled(word, values) for word in part]
    return [*words, *assignment.arguments]


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word)


def read_templates(text: str, file: str) -> dict[str, Template]:
    """The built-in ones, and those of a file, which may replace them. Raises BadInput."""
    try:
        found = load(text)
    except NotYaml as error:
        raise BadInput(file, str(error), "correct the YAML") from error
    try:
        top = Fields({} if found is None else found, "")
        engines = top.part("engines")
        read = {name: _template(name, engines.part(name)) for name in engines.names()}
        top.done()
    except BadInput as error:
        raise BadInput(placed(file, error.place, lines(text)), error.problem, error.remedy) from error
    return BUILT_IN | read


def _template(name: str, fields: Fields) -> Template:
    words = tuple([_word(word, f"{fields.at('command')}[{place}]") for place, word in enumerate(_list(fields))])
    kind = fields.choice("kind", ["auto", *ENGINES]) if fields.has("kind") else "auto"
    fields.done()
    if not isinstance(words[0], str):
        raise BadInput(f"{fields.at('command')}[0]", "is a list", "write the program's name first")
    return Template(name, words, kind)


def _list(fields: Fields) -> Sequence[object]:
    value = fields.any("command")
    if not isinstance(value, list) or not value:
        raise BadInput(fields.at("command"), f"is {value!r}", "write a list of words")
    return value


def _word(word: object, place: str) -> Word:
    if isinstance(word, list) and word:
        return tuple([_text(one, f"{place}[{number}]") for number, one in enumerate(word)])
    return _text(word, place)


def _text(word: object, place: str) -> str:
    if isinstance(word, bool) or not isinstance(word, str | int | float) or word == "":
        raise BadInput(place, f"is {word!r}", "write text")
    for name in _PLACEHOLDER.findall(text := str(word)):
        if name not in PLACEHOLDERS:
            raise BadInput(place, f"`{{{name}}}` is not known", f"known: {', '.join(PLACEHOLDERS)}")
    return text
