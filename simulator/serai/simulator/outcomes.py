"""What became of each simulated request, and whether its latency met its target. Pure.

Outcomes are kept in columns: a hundred thousand of them are a few megabytes and are judged in a tenth of a second.
Times are integer nanoseconds of virtual time; comparisons with targets are exact, so that a result does not depend on
a machine's floating point.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

NS = 1_000_000_000
_NEVER = -1
_COLUMNS = (
    "arrival_ns",
    "prompt_tokens",
    "output_tokens",
    "instance",
    "first_token_ns",
    "decode_began_ns",
    "finished_ns",
    "preemptions",
    "cached_tokens",
    "refused",
    "model",
    "client",
    "itl_max_ns",
)


class LatencyDefinition(StrEnum):
    """From when on a request counts as answering.

    STRICT (PaDG's paper): t0 is the start of the first decode step that holds it; TTFT = t0 − arrival, TPOT = (finished
    − t0) / (output − 1). A request of one token has no decode step: its TTFT is its first token.
    INDUSTRY: t0 is the first token.
    """

    STRICT = "strict"
    INDUSTRY = "industry"


@dataclass(frozen=True, slots=True)
class SloTarget:
    """What a request must meet, both: seconds to its first token, and seconds per token after it."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ValueError(f"a target needs ttft_s and tpot_s above 0, not {self.ttft_s} and {self.tpot_s}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request's life. Times that did not happen are None: refused, or unfinished when the run ended."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    instance: int = -1
    """-1: never placed."""
    first_token_ns: int | None = None
    decode_began_ns: int | None = None
    finished_ns: int | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    refused: bool = False
    model: str = ""
    client: str = ""
    itl_max_ns: int | None = None
    """The longest wait between two tokens; None when it was not watched."""


class Outcomes:
    """Outcomes in columns. `add` is what a simulator calls; all else reads."""

    __slots__ = ("_names", "_numbers", "columns")

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self.columns = {name: array("q") for name in _COLUMNS}
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        for outcome in outcomes:
            self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        """Keep one more."""
        columns = self.columns
        columns["arrival_ns"].append(outcome.arrival_ns)
        columns["prompt_tokens"].append(outcome.prompt_tokens)
        columns["output_tokens"].append(outcome.output_tokens)
        columns["instance"].append(outcome.instance)
        columns["first_token_ns"].append(_known(outcome.first_token_ns))
        columns["decode_began_ns"].append(_known(outcome.decode_began_ns))
        columns["finished_ns"].append(_known(outcome.finished_ns))
        columns["preemptions"].append(outcome.preemptions)
        columns["cached_tokens"].append(outcome.cached_tokens)
        columns["refused"].append(outcome.refused)
        columns["model"].append(self._number(outcome.model))
        columns["client"].append(self._number(outcome.client))
        columns["itl_max_ns"].append(_known(outcome.itl_max_ns))

    def __len__(self) -> int:
        return len(self.columns["arrival_ns"])

    def __iter__(self) -> Iterator[Outcome]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: int) -> Outcome:
        row = {name: column[place] for name, column in self.columns.items()}
        return Outcome(
            arrival_ns=row["arrival_ns"],
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
            instance=row["instance"],
            first_token_ns=_time(row["first_token_ns"]),
            decode_began_ns=_time(row["decode_began_ns"]),
            finished_ns=_time(row["finished_ns"]),
            preemptions=row["preemptions"],
            cached_tokens=row["cached_tokens"],
            refused=bool(row["refused"]),
            model=self._names[row["model"]],
            client=self._names[row["client"]],
            itl_max_ns=_time(row["itl_max_ns"]),
        )

    def arriving_in(self, window: Window) -> Outcomes:
        """Those that arrived in `window`, whenever they ended."""
        return self.chosen([window.holds(arrival_ns) for arrival_ns in self.columns["arrival_ns"]])

    def chosen(self, keep: Iterable[bool]) -> Outcomes:
        """Those for which `keep` is true, one value an outcome."""
        places = [place for place, kept in enumerate(keep) if kept]
        found = Outcomes()
        found.columns = {name: array("q", [column[place] for place in places]) for name, column in self.columns.items()}
        found._names, found._numbers = self._names, self._numbers
        return found

    def names(self, column: str) -> list[str]:
        """The column `model` or `client` as text."""
        return [self._names[number] for number in self.columns[column]]

    def digest(self) -> str:
        """A hash of every field of every outcome: equal digests, equal runs."""
        columns: list[Iterable[int | str]] = [
            self.names(name) if name in ("model", "client") else column for name, column in self.columns.items()
        ]
        found = hashlib.sha256()
        for row in zip(*columns, strict=True):
            found.update(repr(row).encode())
        return found.hexdigest()

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number


@dataclass(frozen=True, slots=True)
class Window:
    """Which requests count: those that arrive in [begin, end), also when they finish later. What arrives before is
    warm-up; what arrives after only keeps the system loaded while the counted ones finish."""

    begin_ns: int = 0
    end_ns: int | None = None

    def __post_init__(self) -> None:
        if self.end_ns is not None and self.end_ns <= self.begin_ns:
            raise ValueError(f"a window must end after it begins: {self.begin_ns} to {self.end_ns} ns")

    def holds(self, arrival_ns: int) -> bool:
        """Whether a request that arrives then counts."""
        return self.begin_ns <= arrival_ns and (self.end_ns is None or arrival_ns < self.end_ns)


def in_columns(outcomes: Outcomes | Iterable[Outcome]) -> Outcomes:
    """`outcomes` as columns, without copying what is already so."""
    return outcomes if isinstance(outcomes, Outcomes) else Outcomes(outcomes)


def answered_from_ns(outcomes: Outcomes, definition: LatencyDefinition) -> list[int | None]:
    """t0 of each request by `definition`; None where it was refused or did not finish.
    Raises ValueError where a finished request lacks the time that the definition needs."""
    columns = outcomes.columns
    strict = definition is LatencyDefinition.STRICT
    found: list[int | None] = []
    for output, first, began, finished, refused in zip(
        columns["output_tokens"],
        columns["first_token_ns"],
        columns["decode_began_ns"],
        columns["finished_ns"],
        columns["refused"],
        strict=True,
    ):
        if refused or finished < 0:
            found.append(None)
            continue
        from_ns = began if strict and output > 1 else first
        if from_ns < 0:
            lacking = "decode_began_ns" if strict and output > 1 else "first_token_ns"
            raise ValueError(f"outcome {len(found)} is finished but has no {lacking}, which `{definition}` needs")
        found.append(from_ns)
    return found


def met(outcomes: Outcomes, slo: SloTarget, definition: LatencyDefinition) -> list[bool]:
    """Whether each request met both targets. Refused and unfinished ones did not."""
    ttft_ns, tpot_ns = round(slo.ttft_s * NS), round(slo.tpot_s * NS)
    columns = outcomes.columns
    return [
        from_ns is not None and from_ns - arrival <= ttft_ns and finished - from_ns <= tpot_ns * (output - 1)
        if output > 1
        else from_ns is not None and from_ns - arrival <= ttft_ns
        for from_ns, arrival, finished, output in zip(
            answered_from_ns(outcomes, definition),
            columns["arrival_ns"],
            columns["finished_ns"],
            columns["output_tokens"],
            strict=True,
        )
    ]


def attainment(
    outcomes: Outcomes | Iterable[Outcome],
    slo: SloTarget,
    definition: LatencyDefinition,
    window: Window | None = None,
) -> float:
    """The share of requests that met both targets, of all that arrived in `window`; NaN when none did."""
    counted = in_columns(outcomes)
    if window is not None:
        counted = counted.arriving_in(window)
    judged = met(counted, slo, definition)
    return sum(judged) / len(judged) if judged else float("nan")


def _known(time_ns: int | None) -> int:
    return _NEVER if time_ns is None else time_ns


def _time(kept: int) -> int | None:
    return None if kept == _NEVER else kept
