"""Predictions as checked-in text: a change of the model or its factors shows up as a diff that someone must read.

When the change is meant, write the file anew: `python tests/unit/test_performance_golden.py`.
"""

from __future__ import annotations

from pathlib import Path

from serai.performance.hardware import GPUS, find_link
from serai.performance.latency_model import PrefillChunk, Step
from serai.performance.latency_profile import PURE_ROOFLINE, profile_for
from serai.performance.memory import Parallelism
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card

FILE = Path(__file__).parents[1] / "golden" / "performance" / "predictions.txt"
INSTANCES = (
    ("meta-llama/Llama-3.1-8B", "h100-sxm-80", 1, "ideal"),
    ("meta-llama/Llama-3.1-8B", "h100-sxm-80", 1, "vllm"),
    ("meta-llama/Llama-3.1-8B", "rtx-4090", 1, "vllm"),
    ("meta-llama/Llama-3.3-70B-Instruct", "gh200-96", 4, "vllm"),
    ("meta-llama/Llama-2-70b-hf", "a100-sxm-80", 4, "vllm-2023"),
    ("Qwen/Qwen3-32B", "h200-sxm-141", 2, "sglang"),
    ("Qwen/Qwen3-235B-A22B-FP8", "h100-sxm-80", 8, "trtllm-1.0"),
    ("deepseek-ai/DeepSeek-R1", "h200-sxm-141", 8, "vllm"),
    ("openai/gpt-oss-120b", "b200", 1, "vllm"),
    ("huggyllama/llama-30b", "l20", 4, "vllm"),
    ("codellama/CodeLlama-34b-hf", "a800-sxm-80", 2, "vllm"),
    ("Qwen/Qwen3-0.6B", "cpu-desktop", 1, "llamacpp"),
)


def predictions() -> str:
    """One line an instance: milliseconds, tokens, joules."""
    lines = [f"{'model':34} {'gpu':13} tp {'engine':10} {'prefill 2048':>12} {'decode 32×1024':>14} {'mixed':>9}"]
    lines[0] += f" {'KV tokens':>10} {'KV 1k over 25G':>14} {'J a token':>9}"
    for name, gpu, tensor, engine in INSTANCES:
        profile = PURE_ROOFLINE if engine == "ideal" else profile_for(gpu, engine)
        model = RooflineModel(shipped_card(name), GPUS[gpu], Parallelism(tensor), profile=profile)
        decode = Step((), 32, 32 * 1024)
        mixed = Step([PrefillChunk(512, 512)], 32, 32 * 1024)
        numbers = [
            f"{model.prefill_s(2048) * 1e3:12.4g}",
            f"{model.step_s(decode) * 1e3:14.4g}",
            f"{model.step_s(mixed) * 1e3:9.4g}",
            f"{model.kv_capacity_tokens():10d}",
            f"{model.kv_transfer_s(1024, find_link('ethernet-25g')) * 1e3:14.4g}",
            f"{model.energy_j(decode) / 32:9.3g}",
        ]
        lines.append(f"{name:34} {gpu:13} {tensor:2d} {engine:10} {' '.join(numbers)}")
    return "\n".join(lines) + "\n"


def test_predictions_are_those_written_down() -> None:
    assert predictions() == FILE.read_text()


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(predictions())
