"""Traffic by ServeGen: clients, each with a rate, a burstiness and length distributions that change over time.

A folder holds two files a client. `chunk-N-trace.csv`: a line for each window of ten minutes, without a header: begin
in seconds, requests per second, coefficient of variation of the gaps, their family (Gamma, Weibull, or nothing), and
two fitted parameters. `chunk-N-dataset.json`: by the begin of a longer window, the distributions of `input_tokens` and
`output_tokens`, each a text of a mapping from tokens to their share; an empty one where the client was silent.

The rate and the coefficient of variation are taken; the fitted parameters contradict them where a family fits badly (a
Weibull of CV 4.6 with a shape that has CV 10.6), and then mean rate and CV are what the recording had.
"""

from __future__ import annotations

import ast
import csv
import heapq
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from serai.runtime.fields import BadInput
from serai.simulator.workloads.lengths import Histogram, fitted
from serai.simulator.workloads.processes import (
    CV_MAX,
    CV_MIN,
    NS,
    GammaGaps,
    Gaps,
    PoissonGaps,
    WeibullGaps,
    arrival_times_ns,
    steady,
)
from serai.simulator.workloads.traces import Replay
from serai.simulator.workloads.workload import Arrival, Workload

_TRACE = re.compile(r"chunk-(\d+)-trace\.csv")
_WIDTH = 6


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A client's arrivals from `begin_s` to the next window's begin."""

    begin_s: float
    end_s: float
    rate_per_s: float
    cv: float
    family: str


@dataclass(frozen=True, slots=True)
class LengthWindow:
    """A client's lengths from `begin_s` on."""

    begin_s: float
    prompt: Histogram
    output: Histogram


@dataclass(frozen=True, slots=True)
class ServeGenClient:
    """One client of the recording."""

    name: str
    rates: Sequence[RateWindow]
    lengths: Sequence[LengthWindow]

    def lengths_at(self, at_s: float) -> LengthWindow:
        """Those of the window; where it has none, of the last one before that has, else of the first."""
        place = bisect_right(self.lengths, at_s, key=lambda window: window.begin_s)
        return self.lengths[max(0, place - 1)]


def servegen(name: str, folder: Path, replay: Replay, seed: int) -> Workload:
    """Arrivals made anew from the distributions of every client in `folder`. `start_s` and `duration_s` cut the
    recording's clock; `rate_scale` multiplies every client's rate, `time_scale` stretches time."""
    clients = read_clients(folder)
    replay_end_s = math.inf if replay.duration_s is None else replay.start_s + replay.duration_s
    if not any(window.rate_per_s for client in clients for window in _cut(client, replay.start_s, replay_end_s)):
        raise BadInput(str(folder), "has no requests in the chosen part", "change start_s or duration_s")

    def arrivals() -> Iterator[Arrival]:
        streams = [_arrivals(client, replay, replay_end_s, f"{seed}/{client.name}") for client in clients]
        return heapq.merge(*streams, key=lambda arrival: arrival.at_ns)

    return Workload(name, f"ServeGen, {len(clients)} clients of {folder.name}", arrivals)


def read_clients(folder: Path) -> list[ServeGenClient]:
    """All clients of a folder, by number."""
    found = sorted((int(match[1]), file) for file in _listed(folder) if (match := _TRACE.fullmatch(file.name)))
    if not found:
        raise BadInput(str(folder), "holds no chunk-N-trace.csv", "name a folder of one ServeGen model")
    return [
        ServeGenClient(f"client-{number}", _rates(file), _lengths(file.with_name(f"chunk-{number}-dataset.json")))
        for number, file in found
    ]


def _cut(client: ServeGenClient, start_s: float, end_s: float) -> Iterator[RateWindow]:
    for window in client.rates:
        begin, end = max(window.begin_s, start_s), min(window.end_s, end_s)
        if begin < end:
            yield RateWindow(begin, end, window.rate_per_s, window.cv, window.family)


def _arrivals(client: ServeGenClient, replay: Replay, end_s: float, seed: str) -> Iterator[Arrival]:
    random = Random(f"{seed}/lengths")
    for window in _cut(client, replay.start_s, end_s):
        if window.rate_per_s == 0:
            continue
        lengths = client.lengths_at(window.begin_s)
        course = steady(window.rate_per_s * replay.rate_scale, window.end_s - window.begin_s)
        begin_ns = round((window.begin_s - replay.start_s) * NS)
        for since_ns in arrival_times_ns(_gaps(window), course, f"{seed}/{window.begin_s}"):
            prompt, output = fitted(lengths.prompt.draw(random), lengths.output.draw(random), replay.context_tokens)
            at_ns = round((begin_ns + since_ns) * replay.time_scale)
            yield Arrival(at_ns, prompt, output, model=replay.model or "", client=client.name)


def _gaps(window: RateWindow) -> Gaps:
    # A window with a handful of requests has no burstiness to speak of (CV 0); an exponential is the neutral choice.
    if not window.family or not CV_MIN <= window.cv <= CV_MAX:
        return PoissonGaps()
    return GammaGaps(window.cv) if window.family == "Gamma" else WeibullGaps(window.cv)


def _rates(file: Path) -> list[RateWindow]:
    rows: list[tuple[float, float, float, str]] = []
    with file.open(encoding="utf-8", newline="") as text:
        for number, row in enumerate(csv.reader(text), start=1):
            place = f"{file}, line {number}"
            if len(row) != _WIDTH:
                raise BadInput(
                    place, f"has {len(row)} values", "a window has 6: begin, rate, cv, family, two parameters"
                )
            begin, rate, cv = (
                _number(f"{place}, field `{name}`", row[column]) for column, name in enumerate(("begin", "rate", "cv"))
            )
            if row[3] not in ("", "Gamma", "Weibull"):
                raise BadInput(f"{place}, field `family`", f"is `{row[3]}`", "write Gamma, Weibull or nothing")
            if rows and begin <= rows[-1][0]:
                raise BadInput(f"{place}, field `begin`", "is not after the line before", "sort the file by time")
            rows.append((begin, rate, cv, row[3]))
    if not rows:
        raise BadInput(f"{file}, line 1", "the file is empty", "name a file with windows")
    width = rows[1][0] - rows[0][0] if len(rows) > 1 else 600.0
    ends = [row[0] for row in rows[1:]] + [rows[-1][0] + width]
    return [RateWindow(begin, end, rate, cv, family) for (begin, rate, cv, family), end in zip(rows, ends, strict=True)]


def _lengths(file: Path) -> list[LengthWindow]:
    try:
        windows = json.loads(file.read_text(encoding="utf-8"))
        entries = sorted((float(begin), window) for begin, window in windows.items())
    except OSError as error:
        raise BadInput(
            str(file), f"cannot be read ({error.strerror})", "each trace needs its dataset beside it"
        ) from error
    except (ValueError, AttributeError) as error:
        raise BadInput(str(file), f"is no JSON object by seconds ({error})", "name a ServeGen dataset") from error
    found = []
    for begin, window in entries:
        prompt, output = (_histogram(file, begin, window, name) for name in ("input_tokens", "output_tokens"))
        if prompt is not None and output is not None:
            found.append(LengthWindow(begin, prompt, output))
    if not found:
        raise BadInput(str(file), "has no lengths in any window", "leave this client out")
    return found


def _histogram(file: Path, begin: float, window: object, name: str) -> Histogram | None:
    place = f"{file}, window {begin:g}, field `{name}`"
    try:
        weights = ast.literal_eval(window[name])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise BadInput(place, "is no text of {tokens: share, …}", "check the file") from error
    if not isinstance(weights, dict) or not all(type(key) is int for key in weights):
        raise BadInput(place, "is no text of {tokens: share, …}", "check the file")
    # A recording has requests of no tokens at all; an engine has none.
    weights = {tokens: share for tokens, share in weights.items() if tokens >= 1}
    if not weights:
        return None
    try:
        return Histogram(weights)
    except BadInput as error:
        raise BadInput(place, "has shares that cannot be", "check the file") from error


def _number(place: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BadInput(place, f"is `{text}`", "write a number, 0 or more")
    return value


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise BadInput(str(folder), f"cannot be read ({error.strerror})", "check $SERAI_DATA_DIR") from error
