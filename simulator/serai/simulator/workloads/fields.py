"""A workload from the mapping of a scenario file, strictly: what is not known is refused, with the nearest known name.

```yaml
workload:
  seed: 1                          # 0 if left out
  name: chat
  model: llama-70b                 # of all requests; traces may bring their own
  context_tokens: 8192             # what does not fit is cut
  arrivals:                        # made-up traffic …
    process: gamma                 # poisson · gamma · weibull (with cv) · even · on-off
    cv: 2
    rate_per_s: 20
    duration_s: 600
    # instead of rate and duration: a course of the mean rate
    # course: [{duration_s: 120, rate_per_s: 20}, {duration_s: 60, rate_from_per_s: 20, rate_to_per_s: 50}]
    # on-off: rate_on_per_s, rate_off_per_s, mean_on_s, mean_off_s, duration_s
  lengths: {dataset: sharegpt}     # or {prompt: {fixed: 512}, output: {log-normal: {mean: 100, median: 60}}}
                                   # or {trace: {format: vidur, file: traces/vidur/arxiv_summarization_stats.csv}}
  system_prompts: {number: 20, tokens: 800, zipf: 1.1}
  sessions: {turns_mean: 4, gap_s_mean: 30}
  clients: {number: 100, zipf: 1}
```

or `trace: {format: azure, file: …, start_s: 600, duration_s: 300, rate_scale: 0.5}`, or `mix: [workload, workload]`.
Files are sought from the data folder ($SERAI_DATA_DIR) unless their names are absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from serai.runtime.fields import BadInput, Fields
from serai.simulator.data_folder import data_folder
from serai.simulator.workloads.lengths import (
    DATASETS,
    ClampedNormal,
    Fixed,
    Histogram,
    Independent,
    Lengths,
    LogNormal,
    Recorded,
    Tokens,
    TruncatedNormal,
    dataset,
)
from serai.simulator.workloads.prefixes import Clients, Sessions, SystemPrompts
from serai.simulator.workloads.processes import (
    Course,
    EvenGaps,
    GammaGaps,
    Gaps,
    OnOff,
    PoissonGaps,
    Segment,
    WeibullGaps,
    steady,
    steps_and_ramps,
)
from serai.simulator.workloads.servegen import servegen
from serai.simulator.workloads.synthetic import Traffic, synthetic
from serai.simulator.workloads.traces import COLUMNS, Replay, TraceFile, TraceFormat, length_pairs, replayed
from serai.simulator.workloads.workload import Workload, mixed

_SERVEGEN = "servegen"


class Process(StrEnum):
    """Families of arrivals, by the names that scenarios use."""

    POISSON = "poisson"
    GAMMA = "gamma"
    WEIBULL = "weibull"
    EVEN = "even"
    ON_OFF = "on-off"


def workload_from_fields(found: Mapping[str, Any], *, place: str = "workload", data: Path | None = None) -> Workload:
    """The workload that `found` describes. `place` begins the messages (a file's name, say); `data` is where its files
    are sought (None: the data folder)."""
    return _workload(Fields(found, place), data_folder() if data is None else data, "", 0)


def _workload(fields: Fields, data: Path, model: str, seed: int) -> Workload:
    model, seed = fields.text("model", model), fields.whole("seed", seed)
    kind = fields.only(["arrivals", "trace", "mix"])
    name = fields.text("name", kind)
    if kind == "mix":
        # Parts have seeds of their own: with one seed their arrivals would come at the same moments.
        parts = enumerate(fields.parts("mix"), start=1)
        made = mixed(name, [_workload(part, data, model, 1000 * seed + number) for number, part in parts])
        fields.done()
        return made
    context = fields.whole("context_tokens") if fields.has("context_tokens") else None
    if kind == "trace":
        made = _replay(fields.part("trace"), data, name, seed, context, model)
        fields.done()
        return made
    process, gaps, course = _arrivals(fields.part("arrivals"))
    lengths = _lengths(fields.part("lengths"), data)
    traffic = fields.made(
        Traffic, gaps, course, lengths, model, context, _system_prompts(fields), _sessions(fields), _clients(fields)
    )
    fields.done()
    return synthetic(name, f"{process} arrivals, seed {seed}", traffic, seed)


def _arrivals(fields: Fields) -> tuple[str, Gaps, Course]:
    process = Process(fields.choice("process", Process))
    gaps = _gaps(process, fields)
    if process is Process.ON_OFF:
        names = ("rate_on_per_s", "rate_off_per_s", "mean_on_s", "mean_off_s", "duration_s")
        on, off, mean_on, mean_off, duration = (fields.number(name) for name in names)
        fields.done()
        if off < 0:
            raise BadInput(fields.at("rate_off_per_s"), f"is {off:g}", "write 0 or more")
        for name, value in zip(names, (on, 1.0, mean_on, mean_off, duration), strict=True):
            _above_zero(fields, name, value)
        return process, gaps, OnOff(on, off, mean_on, mean_off, duration)
    if fields.has("course"):
        segments = [_segment(part) for part in fields.parts("course")]
        fields.done()
        return process, gaps, steps_and_ramps(segments)
    rate, duration = fields.number("rate_per_s"), fields.number("duration_s")
    fields.done()
    _above_zero(fields, "rate_per_s", rate)
    _above_zero(fields, "duration_s", duration)
    return process, gaps, steady(rate, duration)


def _gaps(process: Process, fields: Fields) -> Gaps:
    match process:
        case Process.GAMMA:
            return fields.made(GammaGaps, fields.number("cv"))
        case Process.WEIBULL:
            return fields.made(WeibullGaps, fields.number("cv"))
        case Process.EVEN:
            return EvenGaps()
        case Process.POISSON | Process.ON_OFF:
            return PoissonGaps()


def _segment(fields: Fields) -> Segment:
    duration = fields.number("duration_s")
    if fields.has("rate_per_s"):
        begin = end = fields.number("rate_per_s")
    else:
        begin, end = fields.number("rate_from_per_s"), fields.number("rate_to_per_s")
    fields.done()
    return fields.made(Segment, duration, begin, end)


def _lengths(fields: Fields, data: Path) -> Lengths:
    if fields.has("dataset"):
        found = dataset(fields.choice("dataset", list(DATASETS)))
        fields.done()
        return found
    if fields.has("trace"):
        part = fields.part("trace")
        trace = _trace_file(part, data, TraceFormat(part.choice("format", TraceFormat)))
        part.done()
        fields.done()
        return Recorded(length_pairs(trace))
    made = Independent(_tokens(fields.part("prompt")), _tokens(fields.part("output")))
    fields.done()
    return made


def _tokens(fields: Fields) -> Tokens:
    kind = fields.only(["fixed", "log-normal", "clamped-normal", "truncated-normal", "histogram"])
    if kind == "fixed":
        tokens = fields.whole("fixed")
        fields.done()
        return fields.made(Fixed, tokens)
    part = fields.part(kind)
    fields.done()
    return part.made(_DISTRIBUTIONS[kind], part)


def _log_normal(part: Fields) -> Tokens:
    mean, median = part.number("mean"), part.number("median")
    maximum = part.whole("maximum") if part.has("maximum") else None
    part.done()
    return LogNormal(mean, median, maximum)


def _clamped_normal(part: Fields) -> Tokens:
    mean, deviation, minimum = part.number("mean"), part.number("deviation"), part.whole("minimum", 1)
    part.done()
    return ClampedNormal(mean, deviation, minimum)


def _truncated_normal(part: Fields) -> Tokens:
    mean, deviation, minimum, maximum = (
        part.number("mean"),
        part.number("deviation"),
        part.whole("minimum", 1),
        part.whole("maximum"),
    )
    part.done()
    return TruncatedNormal(mean, deviation, minimum, maximum)


def _histogram(part: Fields) -> Tokens:
    return Histogram(part.weights())


_DISTRIBUTIONS: Mapping[str, Callable[[Fields], Tokens]] = {
    "log-normal": _log_normal,
    "clamped-normal": _clamped_normal,
    "truncated-normal": _truncated_normal,
    "histogram": _histogram,
}


def _system_prompts(fields: Fields) -> SystemPrompts | None:
    if not fields.has("system_prompts"):
        return None
    part = fields.part("system_prompts")
    number, tokens, zipf = part.whole("number"), part.whole("tokens"), part.number("zipf", 1.0)
    part.done()
    return part.made(SystemPrompts, number, tokens, zipf)


def _sessions(fields: Fields) -> Sessions | None:
    if not fields.has("sessions"):
        return None
    part = fields.part("sessions")
    turns, gap = part.number("turns_mean"), part.number("gap_s_mean")
    part.done()
    return part.made(Sessions, turns, gap)


def _clients(fields: Fields) -> Clients | None:
    if not fields.has("clients"):
        return None
    part = fields.part("clients")
    number, zipf = part.whole("number"), part.number("zipf", 1.0)
    part.done()
    return part.made(Clients, number, zipf)


def _replay(fields: Fields, data: Path, name: str, seed: int, context: int | None, model: str) -> Workload:
    kind = fields.choice("format", [*TraceFormat, _SERVEGEN])
    start, duration = fields.number("start_s", 0.0), fields.number("duration_s") if fields.has("duration_s") else None
    time_scale, rate_scale = fields.number("time_scale", 1.0), fields.number("rate_scale", 1.0)
    replay = fields.made(Replay, start, duration, time_scale, rate_scale, context, model or None)
    if kind == _SERVEGEN:
        folder = data / fields.text("folder")
        fields.done()
        return servegen(name, folder, replay, seed)
    trace = _trace_file(fields, data, TraceFormat(kind))
    fields.done()
    return replayed(name, trace, replay, seed)


def _trace_file(fields: Fields, data: Path, kind: TraceFormat) -> TraceFile:
    file = data / fields.text("file")
    columns: dict[str, str] = {}
    if kind is TraceFormat.COLUMNS and fields.has("columns"):
        part = fields.part("columns")
        columns = {ours: part.text(ours) for ours in COLUMNS if part.has(ours)}
        part.done()
    skip = False
    if kind is TraceFormat.OPENTELA and fields.has("uncounted"):
        skip = fields.choice("uncounted", ["refuse", "skip"]) == "skip"
    return TraceFile(file, kind, columns, skip)


def _above_zero(fields: Fields, name: str, value: float) -> None:
    if not value > 0:
        raise BadInput(fields.at(name), f"is {value:g}", "write a number above 0")
