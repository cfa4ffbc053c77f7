"""`serai profile engine URL`: measures a running OpenAI-compatible engine and fits a profile to it.

Sends prompts of several lengths one at a time, then batches of several sizes, all streamed and bounded by `--budget`.
The engine should have nothing else to do meanwhile. The profile goes to `--out` and is used with `--profiles` or
beside the shipped ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from serai.bench.profile.engine_fit import EngineFit, fit_engine
from serai.bench.profile.engine_measuring import (
    EngineMeasurer,
    EngineSamples,
    EngineUnusable,
    MeasuringPlan,
    batches_up_to,
    first_model,
)
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.performance.fitting import FitFailed
from serai.performance.hardware import UnknownHardware, find_gpu
from serai.performance.latency_profile import encode_profile, profile_for
from serai.performance.memory import BadParallelism, Parallelism
from serai.performance.model_card import BadModelConfig, ModelCard, model_card
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai profile engine`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("url", metavar="URL", help="base of the engine's API, for example http://127.0.0.1:8000")
    parser.add_argument("--gpu", required=True, help="what the engine runs on, for example H100 or cpu-desktop")
    parser.add_argument("--model", default="", help="name the engine answers to (default: the first it lists)")
    parser.add_argument(
        "--card", default="", metavar="NAME|FILE", help="shipped model or config.json (default: --model)"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism of the engine")
    parser.add_argument("--engine", default="vllm", help="engine stack, for the starting profile and the file's name")
    parser.add_argument("--batch-max", type=int, default=64, help="largest decode batch")
    parser.add_argument("--budget", type=float, default=120.0, metavar="S", help="seconds all measuring may take")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the profile goes (default: only printed)")
    parser.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key")


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write. Exit status 2 when the engine or the arguments are unusable."""
    try:
        fitted, samples = asyncio.run(_measure_and_fit(arguments))
    except (EngineUnusable, FitFailed, BadModelConfig, BadParallelism, UnknownHardware, OSError, ValueError) as error:
        print(f"serai profile engine: {error}", file=sys.stderr)
        return 2
    if arguments.out is not None:
        arguments.out.write_bytes(encode_profile(fitted.profile))
        say(f"profile written to {arguments.out}")
    hand_out(_report(arguments, fitted, samples), arguments)
    return 0


async def _measure_and_fit(arguments: argparse.Namespace) -> tuple[EngineFit, EngineSamples]:
    if urlsplit(arguments.url).scheme not in ("http", "https"):
        raise EngineUnusable(f"{arguments.url!r} is no http URL")
    gpu = find_gpu(arguments.gpu)
    key = os.environ.get(arguments.api_key_env, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        model = arguments.model or await first_model(session, arguments.url)
        instance = RooflineModel(read_card(arguments.card or model), gpu, Parallelism(arguments.tp))
        say(f"measuring {model} at {arguments.url}, at most {arguments.budget:g} s")
        samples = await EngineMeasurer(session, arguments.url, model, _plan(arguments)).measure()
    say(f"{len(samples.prompts)} prompt lengths, {len(samples.decodes)} batches")
    start = replace(profile_for(gpu.name, arguments.engine), gpu=gpu.name, engine=arguments.engine)
    return fit_engine(instance, samples, start), samples


def _plan(arguments: argparse.Namespace) -> MeasuringPlan:
    batches = tuple(batches_up_to(arguments.batch_max))
    if not arguments.quick:
        return MeasuringPlan(batches=batches, budget_s=arguments.budget)
    return MeasuringPlan((64, 512, 1024), batches[:4], (64, 512), 16, 2, min(40.0, arguments.budget))


def read_card(name: str) -> ModelCard:
    """The card of a shipped model, or of the `config.json` at a path. Raises BadModelConfig."""
    path = Path(name)
    if path.suffix != ".json" and not os.path.isfile(path):  # Which also says no where it may not look.
        return shipped_card(name)
    try:
        config = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadModelConfig(f"{name}: cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise BadModelConfig(f"{name}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadModelConfig(f"{name}: holds no JSON object, as a model's config.json does")
    return model_card(config, name)


def _report(arguments: argparse.Namespace, fitted: EngineFit, samples: EngineSamples) -> Report:
    table = [("", "measured ms", "fitted error")]
    for prompt, error in zip(samples.prompts, fitted.prompt_errors, strict=True):
        table.append((f"prompt of {prompt.prompt_tokens} tokens", f"{prompt.ttft_s * 1e3:.1f}", f"{error:+.1%}"))
    for decode, error in zip(samples.decodes, fitted.decode_errors, strict=True):
        label = f"decode step, {decode.sequences} × {decode.mean_context_tokens:.0f} tokens"
        table.append((label, f"{decode.step_s * 1e3:.2f}", f"{error:+.1%}"))
    config: Mapping[str, Any] = {
        "model": samples.model,
        "gpu": fitted.profile.gpu,
        "engine": fitted.profile.engine,
        "tensor_parallel": arguments.tp,
    }
    figures = {
        "fit_error": fitted.error,
        "samples": len(table) - 1,
        "step_overhead_ms": fitted.profile.overheads.step_s * 1e3,
        "linear_compute": fitted.profile.efficiency.linear_compute,
        "linear_memory": fitted.profile.efficiency.linear_memory,
    }
    return Report("profile engine", config, figures, table, [], encode_profile(fitted.profile).decode())
