"""What an engine's weights and version are, from its command line, its model's config and its own words. Pure.

Empty = not known, and what is not known meets no demand (`ingress/requirements.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNQUANTIZED = "none"
_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_GGUF = re.compile(r"(?:^|[-_.])((?:I?Q\d(?:_[A-Z0-9]+)*)|BF16|F16|F32|MXFP4(?:_MOE)?)(?=[-_.]|$)", re.IGNORECASE)
_GGUF_WEIGHTS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True, slots=True)
class Traits:
    """Of an engine that runs."""

    quantization: str = ""
    """`none` = the weights are as they were trained."""
    dtype: str = ""
    engine_version: str = ""

    def completed_by(self, other: Traits) -> Traits:
        """This, and what is empty here from `other`."""
        return Traits(
            self.quantization or other.quantization,
            self.dtype or other.dtype,
            self.engine_version or other.engine_version,
        )


def dtype_named(word: str) -> str:
    """One name for each: `half`, `torch.float16` and `fp16` are `float16`; `auto` is none."""
    name = word.lower().removeprefix("torch.")
    return "" if name == "auto" else _DTYPES.get(name, name)


def traits_by_flags(command: Sequence[str]) -> Traits:
    """vLLM's and SGLang's flags have the same names."""
    quantization = value_after(command, ("--quantization", "-q")).lower()
    return Traits(quantization, dtype_named(value_after(command, ("--dtype",))))


def traits_by_config(config: Mapping[str, Any]) -> Traits:
    """A model's config.json, when no flag says otherwise: engines take its quantisation and its type."""
    if not config:
        return Traits()
    found = config.get("quantization_config", config.get("compression_config"))
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    quantization = (method if isinstance(method, str) else "") if found else UNQUANTIZED
    dtype = config.get("dtype") or config.get("torch_dtype")
    # Engines do not compute in float32 unless they are told to; in what they do instead, they do not agree.
    name = dtype_named(dtype) if isinstance(dtype, str) else ""
    return Traits(quantization.lower(), "" if name == "float32" else name)


def traits_by_gguf(file: str) -> Traits:
    """By the customary name of a GGUF file (`model-Q4_K_M.gguf`)."""
    found = _GGUF.findall(file.rpartition("/")[2].removesuffix(".gguf"))
    if not found:
        return Traits()
    name = found[-1].lower()
    return Traits(UNQUANTIZED, _GGUF_WEIGHTS[name]) if name in _GGUF_WEIGHTS else Traits(name)


def value_after(command: Sequence[str], flags: Sequence[str]) -> str:
    """Of the last of `flags`, as `--flag value` or `--flag=value`; empty when there is none."""
    found = ""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in flags:
            found = value if equals else "".join(command[index + 1 : index + 2])
    return found
