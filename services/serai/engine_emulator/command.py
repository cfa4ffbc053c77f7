"""`serai engine emulate`: flags, and from flags to a running emulated engine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

import uvloop

from serai.engine_emulator import service
from serai.engine_emulator.batching.settings import BatchMode
from serai.engine_emulator.faults import BadFault, Fault, FaultKind, parse_fault
from serai.engine_emulator.model_flags import CannotModel, EngineName, ModelFlags, ModelledEngine
from serai.engine_emulator.settings import BadSettings, EmulatorSettings, Native

_DEFAULT_GPU = "h100"
_NEEDS_GPU = (
    ("tp", "--tp"),
    ("pp", "--pp"),
    ("weights", "--weights"),
    ("kv_format", "--kv-format"),
    ("mode", "--mode"),
    ("max_num_seqs", "--max-num-seqs"),
    ("max_num_batched_tokens", "--max-num-batched-tokens"),
    ("chunk", "--chunk"),
    ("prefix_cache", "--no-prefix-cache"),
    ("speed", "--speed"),
    ("step_noise", "--step-noise"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai engine emulate`."""
    parser.description = (
        "An OpenAI-compatible engine without a model: fixed timing, or with --gpu a batch scheduler on the cost "
        "model; faults on demand."
    )
    parser.add_argument("--model", required=True, help="the name it serves")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (%(default)s)")
    parser.add_argument("--engine", type=EngineName, choices=list(EngineName), default=EngineName.VLLM,
                        help="whose metrics, endpoints and habits (%(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="chooses the text (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="answer length without max_tokens (%(default)s)")
    parser.add_argument("--context-tokens", type=int, default=16_777_216, help="prompt and answer (%(default)s)")
    parser.add_argument("--kv-tokens", type=int, help="KV cache size (what fits beside the weights; fixed: 1048576)")
    parser.add_argument("--native", type=_native, default=(), metavar="DIALECT[,…]",
                        help=f"dialects it speaks itself: {', '.join(Native)} (none)")  # fmt: skip
    parser.add_argument("--without", type=_paths, default=(), metavar="PATH[,…]",
                        help="paths it has not, e.g. /v1/embeddings (none)")  # fmt: skip
    parser.add_argument("--body-limit-mb", type=float, default=64.0, help="larger bodies get 413 (%(default)s)")
    parser.add_argument("--start-delay-s", type=float, default=0.0, help="time before it listens (%(default)s)")
    parser.add_argument("--sleep-s", type=float, default=1.0, help="time to fall asleep when asked to (%(default)s)")
    parser.add_argument("--wake-s", type=float, default=2.0, help="time to wake (%(default)s)")
    parser.add_argument(
        "--fault",
        dest="faults",
        metavar="KIND[:key=value,…]",
        type=_fault,
        action="append",
        default=[],
        help=f"may be given more than once; kinds: {', '.join(FaultKind)}; keys: tokens, factor, status, "
        "retry_after_s, count, skip",
    )
    _add_fixed(parser.add_argument_group("fixed timing"))
    _add_modelled(parser.add_argument_group("batch scheduler on the cost model"))


def _add_fixed(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ttft-ms", type=float, default=50.0, help="time to first token (%(default)s)")
    group.add_argument("--tpot-ms", type=float, default=20.0, help="time per output token (%(default)s)")
    group.add_argument("--step-ms", type=float, default=1.0, help="tokens come in steps this long (%(default)s)")
    group.add_argument("--max-concurrency", type=int, default=256, help="requests that run at once (%(default)s)")


def _add_modelled(group: argparse._ArgumentGroup) -> None:
    """Flags without a default here are None unless given, so that one without --gpu can be refused."""
    group.add_argument("--gpu", help=f"GPU of the catalogue; switches this on ({_DEFAULT_GPU} with --card alone)")
    group.add_argument("--card", "--hf-config", metavar="NAME|FILE", help="shipped model or a config.json (--model)")
    group.add_argument("--tp", type=int, help="tensor parallelism (1)")
    group.add_argument("--pp", type=int, help="pipeline parallelism (1)")
    group.add_argument("--weights", metavar="FORMAT", help="of weights: bf16, fp8, int4, … (as stored)")
    group.add_argument("--kv-format", metavar="FORMAT", help="of keys and values: bf16, fp8 (as stored)")
    group.add_argument("--mode", type=BatchMode, choices=list(BatchMode),
                       help="what shares a step (vllm: mixed; sglang: prefill-first)")  # fmt: skip
    group.add_argument("--max-num-seqs", type=int, help="requests that run at once (256)")
    group.add_argument("--max-num-batched-tokens", type=int, help="token budget of a step or prefill batch (8192)")
    group.add_argument("--chunk", type=int, help="longest piece of a prompt per step; 0: whole (sglang: 8192)")
    group.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_const", const=False,
                       help="compute every prompt whole")  # fmt: skip
    group.add_argument("--speed", type=float, help="steps take their time divided by this (1)")
    group.add_argument("--step-noise", type=float, help="standard deviation of a step's duration, as a share (0)")


def run(arguments: argparse.Namespace) -> int:
    """Run the emulated engine until a signal. Exit status: 0 stopped, 1 could not start, 2 bad flags."""
    names = [field.name for field in fields(EmulatorSettings) if field.name not in ("faults", "modelled")]
    values = {name: getattr(arguments, name) for name in names}
    try:
        modelled = _modelled(arguments)
        settings = EmulatorSettings(**values, faults=tuple(arguments.faults), modelled=modelled)
    except (BadSettings, CannotModel) as error:
        return _complain(str(error), 2)
    try:
        uvloop.run(service.run(settings))
    except service.StartFailed as error:
        return _complain(str(error), 1)
    return 0


def _modelled(arguments: argparse.Namespace) -> ModelledEngine | None:
    """The engine to run on the cost model; None for fixed timing. Raises CannotModel."""
    given = {name: getattr(arguments, name) for name, _ in _NEEDS_GPU if getattr(arguments, name) is not None}
    if arguments.gpu is None and arguments.card is None:
        for name, flag in _NEEDS_GPU:
            if name in given:
                raise CannotModel(f"{flag} needs --gpu: without it the timing is fixed")
        return None
    flags = ModelFlags(
        arguments.model,
        arguments.gpu or _DEFAULT_GPU,
        arguments.card,
        engine=arguments.engine,
        kv_tokens=arguments.kv_tokens,
        **given,
    )
    from serai.engine_emulator.modelled import modelled_engine  # fixed timing starts without the cost model

    return modelled_engine(flags)


def _native(text: str) -> tuple[Native, ...]:
    parts = tuple(filter(None, text.split(",")))
    for part in parts:
        if part not in list(Native):
            raise argparse.ArgumentTypeError(f"no dialect {part!r}; there are {', '.join(Native)}")
    return tuple([Native(part) for part in parts])


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(filter(None, text.split(",")))
    for path in paths:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"a path begins with a slash: {path!r}")
    return paths


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except BadFault as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _complain(text: str, status: int) -> int:
    sys.stderr.write(f"serai engine emulate: {text}\n")
    return status
