"""What an engine's weights and version are, from its flags, its model's files and its own words."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from serai.ingress.requirements import read_requirements
from serai.worker_agent.engine.kinds import ENGINES
from serai.worker_agent.engine.model_files import model_bytes, model_config, model_path, model_word
from serai.worker_agent.engine.traits import Traits, traits_by_config, traits_by_gguf
from unit.fakes import record_of


@pytest.mark.parametrize(
    ("kind", "command", "expected"),
    [
        ("vllm", "vllm serve m --quantization awq --dtype half", Traits("awq", "float16")),
        ("vllm", "vllm serve m -q=FP8 --dtype=auto", Traits("fp8")),
        ("vllm", "vllm serve m", Traits()),
        ("sglang", "python -m sglang.launch_server --model-path m --dtype bfloat16", Traits("", "bfloat16")),
        ("llamacpp", "llama-server -m /models/Qwen2.5-7B-Instruct-Q4_K_M.gguf", Traits("q4_k_m")),
        ("llamacpp", "llama-server --model /models/smol-F16.gguf", Traits("none", "float16")),
        ("llamacpp", "llama-server -m /models/plain.gguf", Traits()),
    ],
)
def test_by_the_command_line(kind: str, command: str, expected: Traits) -> None:
    assert ENGINES[kind].traits_of(command.split()) == expected


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("vllm", {"version": "0.25.1"}, Traits(engine_version="0.25.1")),
        ("sglang", {"version": "0.5.9", "quantization": None, "dtype": "auto"}, Traits(engine_version="0.5.9")),
        ("sglang", {"version": "0.5.9", "quantization": "FP8", "dtype": "bf16"}, Traits("fp8", "bfloat16", "0.5.9")),
        ("llamacpp", {"build_info": "b6789-0123abc", "model_path": "/m/x-IQ4_XS.gguf"}, Traits("iq4_xs", "", "6789")),
        ("llamacpp", {"build_info": 7}, Traits()),
        ("vllm", {"version": ["odd"]}, Traits()),
    ],
)
def test_by_its_own_words(kind: str, body: dict[str, object], expected: Traits) -> None:
    assert ENGINES[kind].traits_in(body) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Traits()),
        ({"torch_dtype": "bfloat16"}, Traits("none", "bfloat16")),
        ({"dtype": "torch.float16", "quantization_config": {"quant_method": "GPTQ"}}, Traits("gptq", "float16")),
        ({"torch_dtype": "float32"}, Traits("none", "")),
        ({"quantization_config": {"bits": 4}}, Traits()),
        ({"quantization_config": "odd", "torch_dtype": 7}, Traits()),
    ],
)
def test_by_the_model_s_config(config: dict[str, object], expected: Traits) -> None:
    assert traits_by_config(config) == expected


def test_what_is_known_first_counts() -> None:
    assert Traits("fp8").completed_by(Traits("awq", "bfloat16", "1")) == Traits("fp8", "bfloat16", "1")
    assert traits_by_gguf("model.gguf") == Traits()


def test_the_model_is_found_by_the_command(tmp_path: Path) -> None:
    assert model_word(["vllm", "serve", "org/name", "--port", "1"]) == "org/name"
    assert model_word(["vllm", "serve", "--model=org/name"]) == "org/name"
    assert model_word(["python", "-m", "sglang.launch_server", "--model-path", "/m"]) == "/m"
    assert model_word(["llama-server", "-m", "/m.gguf"]) == "/m.gguf"
    assert model_word(["llama-server", "-m"]) == ""
    assert model_word([]) == ""
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "blob"
    blob.write_bytes(b"x" * 5000)
    (snapshot / "model.safetensors").symlink_to(blob)
    (snapshot / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    found = model_path(["vllm", "serve", "org/name"], {"HF_HOME": str(tmp_path)})
    assert found == snapshot
    assert asyncio.run(model_bytes(found)) > 5000
    assert model_config(found) == {"torch_dtype": "bfloat16"}
    assert model_path(["vllm", "serve", "org/other"], {"HF_HOME": str(tmp_path)}) is None
    assert model_path(["vllm", "serve", str(blob)], os.environ) == blob
    assert (model_config(blob), model_config(None), asyncio.run(model_bytes(None))) == ({}, {}, 0)


def test_demands_on_them_are_met_by_what_is_known_and_by_nothing_else() -> None:
    known = record_of(engine="vllm", quantization="fp8", engine_version="0.25.1", dtype="bfloat16")
    silent = record_of(engine="vllm")
    labelled = record_of(engine="vllm", labels={"quantization": "fp8"})
    for text, fits in (
        ("quantization=fp8, engine=vllm>=0.25", [known]),
        ("quantization=fp8", [known, labelled]),
        ("quantization!=awq, dtype=bfloat16", [known]),
        ("engine=vllm>=0.26", []),
        ("engine=sglang>=0.1", []),
    ):
        assert read_requirements(text).fitting([known, silent, labelled]) == fits
