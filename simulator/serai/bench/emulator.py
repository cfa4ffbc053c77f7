"""`serai bench emulator`: how punctual the emulated engine is with many streams, on one core.

Fixed timing: lateness of a token is its arrival at a client of its own minus the time it was due, which is the arrival
of the stream's first token and from there one token time per token. Measured from when the request was sent, the
first token's own lateness counts too. Batched: all tokens of a step are due together; lateness is the arrival after
the first of the step, and `step_stretch` how much longer steps take than the batch scheduler says.

The engine has one core to itself, the client the others. The client's own time counts as lateness.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serai.bench.percentiles import median_of, percentile
from serai.bench.processes import BenchFailed, Processes, cpu_s, last_lines
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.bench.stand import MODEL, get
from serai.bench.stream_times import StreamOutcome, StreamTask
from serai.performance.hardware import find_gpu
from serai.performance.latency_model import Step
from serai.performance.latency_profile import profile_for
from serai.performance.roofline import RooflineModel
from serai.performance.shipped_models import shipped_card
from serai.worker_agent.engine.process import free_port

_TTFT_S = 0.2
_RAMP_S = 2.0
_SETTLE_S = 1.0
"""Tokens that came sooner than this after the last stream began are not counted."""
_CARD, _GPU = "meta-llama/Llama-3.1-8B", "h100"
_START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Round:
    """One run of all streams."""

    timing: str
    lateness_ms: list[float]
    from_sent_ms: list[float]
    """Lateness from when the request was sent; fixed timing only."""
    engine_cpu_share: float
    client_cpu_share: float
    step_stretch: float
    streams_whole: int
    load_average: float

    def p(self, share: float) -> float:
        """A percentile of lateness."""
        return percentile(self.lateness_ms, share)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai bench emulator`."""
    parser.description = __doc__
    add_report_arguments(parser)
    parser.add_argument("--streams", type=int, default=500, help="streams at the same time (%(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each (%(default)s)")
    parser.add_argument("--rounds", type=int, help="runs of each timing (3; quick: 1)")
    parser.add_argument("--seconds", type=float, help="measured time of a run (20; quick: 6)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the engine does not come up, 2 for numbers that cannot be."""
    if arguments.streams < 1 or arguments.rate <= 0:
        print("serai bench emulator: --streams and --rate must be above 0", file=sys.stderr)
        return 2
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    seconds = arguments.seconds or (6.0 if arguments.quick else 20.0)
    done: list[Round] = []
    try:
        for number in range(rounds):
            for timing in ("fixed", "batched"):
                one = _measure(timing, arguments.streams, arguments.rate, seconds)
                done.append(one)
                say(
                    f"round {number + 1}/{rounds}  {timing:8} p50 {one.p(0.5):6.2f} ms  p99 {one.p(0.99):6.2f} ms  "
                    f"engine {one.engine_cpu_share:.0%} of a core"
                )
    except BenchFailed as failure:
        say(f"serai bench emulator: {failure}")
        return 1
    config = {"streams": arguments.streams, "rate": arguments.rate, "rounds": rounds, "seconds": seconds}
    report = Report(
        "bench emulator", config, figures_of(done), _table(done), _notes(done, arguments.streams), _raw(done)
    )
    hand_out(report, arguments)
    return 0


def figures_of(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians over rounds, and the quietest round beside them."""
    fixed = [one for one in rounds if one.timing == "fixed"]
    batched = [one for one in rounds if one.timing == "batched"]
    return {
        "token_lateness_p99_ms": median_of([one.p(0.99) for one in fixed]),
        "token_lateness_p50_ms": median_of([one.p(0.5) for one in fixed]),
        "token_lateness_p99_ms_quietest": min([one.p(0.99) for one in fixed], default=float("nan")),
        "token_lateness_from_sent_p99_ms": median_of([percentile(one.from_sent_ms, 0.99) for one in fixed]),
        "engine_cpu_share": median_of([one.engine_cpu_share for one in fixed]),
        "batched_token_lateness_p99_ms": median_of([one.p(0.99) for one in batched]),
        "batched_token_lateness_p50_ms": median_of([one.p(0.5) for one in batched]),
        "batched_token_lateness_p99_ms_quietest": min([one.p(0.99) for one in batched], default=float("nan")),
        "batched_step_stretch": median_of([one.step_stretch for one in batched]),
        "batched_engine_cpu_share": median_of([one.engine_cpu_share for one in batched]),
    }


def lateness_fixed_ms(tokens_s: Sequence[float], first_due_s: float, tpot_s: float, after_s: float) -> list[float]:
    """How late the tokens of one stream came, of those that came after `after_s`."""
    return [
        (at_s - first_due_s - place * tpot_s) * 1e3 for place, at_s in enumerate(tokens_s) if at_s > after_s and place
    ]


def lateness_batched_ms(tokens_s: Sequence[Sequence[float]], tpot_s: float, after_s: float) -> list[float]:
    """How late tokens came after the first of their step: a step's tokens come together, then for a while none."""
    found: list[float] = []
    step_s = last_s = float("-inf")
    for at_s in sorted([at_s for stream in tokens_s for at_s in stream]):
        if at_s - last_s > tpot_s / 4:
            step_s = at_s
        last_s = at_s
        if at_s > after_s:
            found.append((at_s - step_s) * 1e3)
    return found


def _measure(timing: str, streams: int, rate: float, seconds: float) -> Round:
    tokens = round((_RAMP_S + _SETTLE_S + seconds) * rate)
    with TemporaryDirectory() as work, Processes(Path(work)) as processes:
        port = free_port()
        flags = _fixed_flags(streams, rate) if timing == "fixed" else _batched_flags(streams, rate, tokens)
        command = [sys.executable, "-m", "serai.engine_emulator", "--model", MODEL, "--port", str(port), *flags]
        engine = processes.start("engine", command)
        processes.wait_until("engine", engine, lambda: _is_up(port), _START_TIMEOUT_S)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(engine.pid, {cores[0]})
        task = StreamTask(port, streams, tokens, _RAMP_S, timeout_s=4 * tokens / rate + 30)
        outcome, cpu_share, stretch = _stream(task, seconds, engine.pid, cores[1:] or cores, processes)
        return _round(timing, task, outcome, 1 / rate, cpu_share, stretch)


def _stream(
    task: StreamTask, seconds: float, engine_pid: int, cores: Sequence[int], processes: Processes
) -> tuple[StreamOutcome, float, float]:
    """The streams' times; and while all run, the engine's share of a core, and wall time over what was planned."""
    client = processes.start("client", [sys.executable, "-m", "serai.bench.stream_times"], pipes=True)
    os.sched_setaffinity(client.pid, set(cores))
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
    client.stdin.flush()
    time.sleep(_RAMP_S + _SETTLE_S)
    before = _progress(task.port, engine_pid)
    time.sleep(0.8 * seconds)
    after = _progress(task.port, engine_pid)
    try:
        out, _ = client.communicate(timeout=task.timeout_s)
        outcome = StreamOutcome(**json.loads(out))
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise BenchFailed(f"the client did not end well\n{last_lines([processes.log_of('client')])}") from error
    (wall, cpu, busy) = (later - sooner for later, sooner in zip(after, before, strict=True))
    return outcome, cpu / wall, wall / busy if busy else float("nan")


def _progress(port: int, engine_pid: int) -> tuple[float, float, float]:
    """Now, the engine's processor time so far, and its steps' planned time so far, in seconds."""
    state = json.loads(get(port, "/emulator/state"))
    return time.perf_counter(), cpu_s([engine_pid]), float(state.get("busy_s", 0.0))


def _round(
    timing: str, task: StreamTask, outcome: StreamOutcome, tpot_s: float, cpu_share: float, stretch: float
) -> Round:
    after_s = max(outcome.sent_s) + _TTFT_S + _SETTLE_S
    lateness: list[float] = []
    from_sent: list[float] = []
    if timing == "fixed":
        for sent_s, tokens_s in zip(outcome.sent_s, outcome.token_s, strict=True):
            if tokens_s:
                lateness += lateness_fixed_ms(tokens_s, tokens_s[0], tpot_s, after_s)
                from_sent += lateness_fixed_ms(tokens_s, sent_s + _TTFT_S, tpot_s, after_s)
    else:
        lateness = lateness_batched_ms(outcome.token_s, tpot_s, after_s)
    whole = sum(len(tokens_s) == task.tokens for tokens_s in outcome.token_s)
    load = os.getloadavg()[0]
    return Round(timing, lateness, from_sent, cpu_share, outcome.client_cpu_share, stretch, whole, load)


def _fixed_flags(streams: int, rate: float) -> list[str]:
    return ["--ttft-ms", f"{_TTFT_S * 1e3:g}", "--tpot-ms", f"{1e3 / rate:g}", "--max-concurrency", str(streams)]


def _batched_flags(streams: int, rate: float, tokens: int) -> list[str]:
    """A model whose steps, with all streams half-way, take one token time: the speed of time is set so."""
    model = RooflineModel(shipped_card(_CARD), find_gpu(_GPU), profile=profile_for(_GPU))
    step_s = model.step_s(Step(decode_sequences=streams, decode_context_tokens=streams * tokens // 2))
    kv_tokens = streams * (tokens + 64)
    return [
        *("--gpu", _GPU, "--card", _CARD, "--max-num-seqs", str(streams), "--kv-tokens", str(kv_tokens)),
        *("--max-num-batched-tokens", str(max(8192, streams)), "--speed", f"{step_s * rate:g}"),
    ]


def _is_up(port: int) -> bool:
    try:
        get(port, "/health")
    except OSError:
        return False
    return True


def _notes(rounds: Sequence[Round], streams: int) -> list[str]:
    notes = [
        f"{one.timing}: only {one.streams_whole} of {streams} streams were whole"
        for one in rounds
        if one.streams_whole < streams
    ]
    busy = max(one.load_average for one in rounds)
    if busy > 3:
        notes.append(f"the machine was busy with other things (load average up to {busy:.1f}): take the quietest round")
    return notes


def _raw(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    shares = (0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
    return [
        {
            "timing": one.timing,
            "tokens": len(one.lateness_ms),
            "lateness_ms_by_percentile": {f"{share:g}": round(one.p(share), 3) for share in shares},
            "from_sent_ms_by_percentile": {
                f"{share:g}": round(percentile(one.from_sent_ms, share), 3) for share in shares if one.from_sent_ms
            },
            "engine_cpu_share": round(one.engine_cpu_share, 4),
            "client_cpu_share": round(one.client_cpu_share, 4),
            "step_stretch": round(one.step_stretch, 4) if one.step_stretch == one.step_stretch else None,
            "streams_whole": one.streams_whole,
            "load_average_1min": round(one.load_average, 2),
        }
        for one in rounds
    ]


def _table(rounds: Sequence[Round]) -> list[list[str]]:
    rows = [["", "p50 ms", "p99 ms", "engine CPU", "client CPU", "step stretch", "load"]]
    for one in rounds:
        stretch = f"{one.step_stretch:.3f}" if one.step_stretch == one.step_stretch else "–"
        shares = [f"{one.engine_cpu_share:.0%}", f"{one.client_cpu_share:.0%}"]
        rows.append(
            [one.timing, f"{one.p(0.5):.2f}", f"{one.p(0.99):.2f}", *shares, stretch, f"{one.load_average:.1f}"]
        )
    return rows
