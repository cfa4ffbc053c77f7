"""`serai engine llamacpp`: llama.cpp's own HTTP server, from the xllamacpp wheel, in a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from serai.runtime.settings import file_fault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-file", type=Path, required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="name the model is served under")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--parallel", type=int, default=4, help="requests decoded at once (default: 4)")
    parser.add_argument(
        "--context-tokens",
        type=int,
        default=2048,
        help="longest prompt and answer of each of them, in tokens (default: 2048)",
    )
    parser.add_argument("--embeddings", action="store_true", help="serve /v1/embeddings, too")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads that compute (default: all cores)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Returns 2 when the model file is not there or xllamacpp is not installed."""
    if fault := model_fault(arguments.model_file):
        sys.stderr.write(f"serai engine llamacpp: --model-file: {fault}\n")
        return 2
    try:
        import xllamacpp
    except ModuleNotFoundError:
        sys.stderr.write("serai engine llamacpp: needs xllamacpp; install it with: pip install 'serai[local]'\n")
        return 2
    except ImportError as error:  # A shared library that xllamacpp needs, most often OpenMP (Debian's libgomp1).
        sys.stderr.write(f"serai engine llamacpp: xllamacpp cannot be loaded: {error}\n")
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(arguments.model_file)
    parameters.model_alias = [arguments.alias]
    parameters.hostnames = [arguments.host]
    parameters.port = arguments.port
    parameters.n_parallel = arguments.parallel
    parameters.n_ctx = arguments.context_tokens * arguments.parallel
    parameters.cpuparams.n_threads = arguments.threads
    if arguments.embeddings:
        parameters.embedding = True
        # A model that was made to embed says how its tokens become one vector; of others the mean is the usual way.
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    parameters.endpoint_metrics = True
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:
        sys.stderr.write(f"serai engine llamacpp: {error} What llama.cpp itself says of it stands above\n")
        return 2
    sys.stderr.write(f"llama.cpp serves {arguments.alias} at {server.listening_address}\n")
    stop.wait()
    # The server's threads do not end by themselves while a request runs; the requests have been ended by the agent.
    os._exit(0)


def model_fault(path: Path) -> str:
    """Why `path` cannot be served; empty when it looks like a model."""
    if fault := file_fault(path):
        return fault
    with path.open("rb") as file:
        return "" if file.read(4) == b"GGUF" else f"{path} is no GGUF file"


def main() -> int:
    parser = argparse.ArgumentParser(prog="serai engine llamacpp", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
