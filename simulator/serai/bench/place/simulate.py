"""`serai place simulate TRACE`: a trace replayed through the placer: attainment, GPU-hours, moves, cold starts.

TRACE is a CSV file with the columns `minute`, `model`, `requests` and `card` (a shipped model as large as it), or
`marginals` for the synthetic trace of 142 models. The first half is the past from which the static placement is made;
the second half is replayed, with that placement and with the placer.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

from serai.bench.place.study import HEAD, compare, fleet_of, raw, row
from serai.bench.place.traces import RateTrace, TracedModel, published_marginals
from serai.bench.report import Report, add_report_arguments, hand_out, say
from serai.performance.hardware import UnknownHardware, find_gpu
from serai.performance.model_card import BadModelConfig
from serai.performance.shipped_models import shipped_card
from serai.placer.demand import LengthSpread
from serai.runtime.fields import BadInput
from serai.runtime.settings import refuse

MINUTES_MAX = 14 * 1440
REQUESTS_MAX = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serai place simulate`."""
    parser.add_argument("trace", help="a CSV file, or `marginals`")
    add_report_arguments(parser)
    parser.add_argument(
        "--gpus", default="a100=80,h100=64,gh200=32", help="kinds and counts, in nodes of four (%(default)s)"
    )
    parser.add_argument("--prompt", type=float, default=700.0, help="mean tokens of a prompt (%(default)s)")
    parser.add_argument("--output", type=float, default=150.0, help="mean tokens of an answer (%(default)s)")
    parser.add_argument(
        "--solve-s", type=float, default=0.0, help="CP-SAT's time a decision; 0 is greedy (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the synthetic trace (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Replay it both ways."""
    try:
        fleet = fleet_of(_gpus(arguments.gpus))
        trace = _trace(arguments)
    except BadInput as error:
        refuse(str(error))
    middle = trace.steps // 2
    past, rest = trace.cut(0, middle), trace.cut(middle, trace.steps - middle)
    if arguments.quick:
        rest = rest.cut(0, min(rest.steps, 120))
    say(f"{trace.name}: {rest.steps} minutes on {fleet.gpus} GPUs")
    compared = compare(past, rest, fleet, arguments.solve_s, say)
    static, moved = compared.static, compared.dynamic
    figures = {
        "attainment": moved.attainment,
        "model_attainment": moved.model_attainment,
        "gpu_hours": moved.gpu_hours,
        "moves": float(moved.starts + moved.stops),
        "moves_per_hour": moved.moves_per_hour,
        "cold_starts": float(moved.cold_starts),
        "static_attainment": static.attainment,
        "static_gpu_hours": static.gpu_hours,
    }
    table = [HEAD, row("static", static), row("dynamic", moved)]
    config = {"trace": arguments.trace, "gpus": arguments.gpus, "minutes": rest.steps, "solve_s": arguments.solve_s}
    hand_out(
        Report("place simulate", config, figures, table, [], raw([("static", static), ("dynamic", moved)])), arguments
    )
    return 0


def _gpus(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, sign, count = part.partition("=")
        if not sign or not count.strip().isdigit() or not 4 <= int(count) <= 100_000:
            raise BadInput("--gpus", f"`{part}` is no KIND=COUNT", "write, for example, a100=80,h100=64")
        try:
            found[find_gpu(kind).name] = int(count)
        except UnknownHardware as error:
            raise BadInput("--gpus", str(error), "write a name of the catalogue") from error
    return found


def _trace(arguments: argparse.Namespace) -> RateTrace:
    if arguments.trace == "marginals":
        return published_marginals(arguments.seed, hours=8 if arguments.quick else 48, mean_s=150.0)
    about = LengthSpread.about
    return read_trace(Path(arguments.trace), about(arguments.prompt), about(arguments.output))


def read_trace(file: Path, prompt: LengthSpread, output: LengthSpread) -> RateTrace:
    """A CSV file as a trace. Raises BadInput naming the line."""
    counts: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    cards: dict[str, str] = {}
    last = -1
    try:
        with file.open(encoding="utf-8", newline="") as text:
            reader = csv.DictReader(text)
            missing = {"minute", "model", "requests", "card"} - set(reader.fieldnames or ())
            if missing:
                raise BadInput(f"{file}, line 1", f"lacks {', '.join(sorted(missing))}", "write these columns")
            for number, line in enumerate(reader, start=2):
                at = f"{file}, line {number}"
                minute = _whole(at, "minute", line["minute"], MINUTES_MAX)
                counts[line["model"]][minute] += _whole(at, "requests", line["requests"], REQUESTS_MAX)
                cards[line["model"]] = _card(at, line["card"])
                last = max(last, minute)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(str(file), f"cannot be read ({why})", "name a CSV file, or `marginals`") from error
    if last < 1:
        raise BadInput(str(file), "has fewer than two minutes", "name a longer trace")
    models = tuple(TracedModel(name, cards[name], prompt, output) for name in counts)
    rows = tuple(tuple(counts[name].get(minute, 0) for minute in range(last + 1)) for name in counts)
    return RateTrace(file.name, models, rows)


def _whole(at: str, name: str, text: str | None, most: int) -> int:
    if text is None or not text.strip().isdigit() or int(text) > most:
        raise BadInput(f"{at}, field `{name}`", f"is {text!r}", f"write a whole number of 0 to {most}")
    return int(text)


def _card(at: str, name: str | None) -> str:
    try:
        return shipped_card(name or "").name and (name or "")
    except BadModelConfig as error:
        raise BadInput(f"{at}, field `card`", str(error), "name a shipped model") from error
