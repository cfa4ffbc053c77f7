"""Replays of recorded traffic: who asked when, how long, and what was shared.

azure          CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
mooncake       JSON lines: timestamp (ms), input_length, output_length, hash_ids (512 tokens, each of its whole prefix)
llmservingsim  JSON lines: arrival_time_ns, input_toks, output_toks
vidur          CSV: num_prefill_tokens, num_decode_tokens; no times, so for lengths only
opentela       JSON lines: created_at (date and time), model, reported_token_input, reported_token_output; maybe
               token_count, bucket_ids (16 tokens, the last one padded)
columns        CSV or JSON lines: timestamp (seconds, or date and time), prompt_tokens or input_tokens, output_tokens or
               completion_tokens; maybe model, user; other names by a mapping

`opentela` is the schema of the OpenTela paper's public trace (data set `swissai-serving-trace`). Its service did not
count the tokens of every request and wrote −1 then; such lines are refused unless `uncounted` is `skip`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from random import Random

from serai.runtime.fields import BadInput
from serai.simulator.workloads.lengths import fitted
from serai.simulator.workloads.trace_rows import NS, Line, TraceRow, csv_lines, in_order, jsonl_lines, lines
from serai.simulator.workloads.workload import BLOCK_TOKENS, SOURCE_BITS, Arrival, Workload

COPY_SPREAD_NS = NS
"""Copies of a request, when a rate is scaled up, come within a second after it: bursts stay bursts, but nothing is sent
twice at once."""
COPIES_MAX = 64
_COPY_BITS = SOURCE_BITS - 6
_MASK = (1 << _COPY_BITS) - 1


class TraceFormat(StrEnum):
    """How a trace is written."""

    AZURE = "azure"
    MOONCAKE = "mooncake"
    LLMSERVINGSIM = "llmservingsim"
    VIDUR = "vidur"
    OPENTELA = "opentela"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Replay:
    """Which part of a trace is replayed, and how. `start_s` and `duration_s` count from the trace's first request,
    on its own clock. `time_scale` 2: all takes twice as long. `rate_scale` 2: twice the requests in the same time (each
    comes twice, the copy within a second and with prefixes of its own); below 1: a part, chosen by the seed."""

    start_s: float = 0.0
    duration_s: float | None = None
    time_scale: float = 1.0
    rate_scale: float = 1.0
    context_tokens: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("start_s", 0.0), ("duration_s", 1e-9), ("time_scale", 1e-6), ("rate_scale", 1e-6)):
            value = getattr(self, name)
            if value is not None and not low <= value < 1e9:
                raise BadInput(name, f"is {value}", f"give {low:g} or more")
        if self.rate_scale > COPIES_MAX:
            raise BadInput("rate_scale", f"is {self.rate_scale}", f"give at most {COPIES_MAX}")
        if self.context_tokens is not None and self.context_tokens < 2:
            raise BadInput("context_tokens", f"is {self.context_tokens}", "give at least 2")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace and how to read it. `columns` maps our names (timestamp, prompt_tokens, output_tokens, model, user)
    to the file's, for the format `columns`."""

    file: Path
    format: TraceFormat
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_uncounted: bool = False


def replayed(name: str, trace: TraceFile, replay: Replay, seed: int) -> Workload:
    """The trace as a workload. It is read, and refused, now; the lines that count are kept."""
    kept = _cut(trace, replay)
    description = f"replay of {trace.file.name} ({trace.format}), {len(kept):,} requests before scaling"
    return Workload(name, description, lambda: _scaled(kept, replay, seed))


def length_pairs(trace: TraceFile) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request, without its time."""
    pairs = [(row.prompt_tokens, row.output_tokens) for row in read(trace)]
    if not pairs:
        raise BadInput(str(trace.file), "has no requests", "name another file")
    return pairs


def read(trace: TraceFile) -> Iterator[TraceRow]:
    """The requests of a trace, in the order of their times."""
    reader = _READERS.get(trace.format)
    if reader is not None:
        return in_order(reader(trace.file))
    if trace.format is TraceFormat.OPENTELA:
        return in_order(_opentela(trace.file, trace.skip_uncounted))
    return in_order(_columns(trace.file, trace.columns))


def _cut(trace: TraceFile, replay: Replay) -> Sequence[TraceRow]:
    if trace.format is TraceFormat.VIDUR:
        raise BadInput(str(trace.file), "has lengths but no times", "use it under `lengths`, with an arrival process")
    start_ns = round(replay.start_s * NS)
    end_ns = None if replay.duration_s is None else start_ns + round(replay.duration_s * NS)
    kept: list[TraceRow] = []
    first_ns: int | None = None
    for row in read(trace):
        first_ns = row.at_ns if first_ns is None else first_ns
        since_ns = row.at_ns - first_ns
        if end_ns is not None and since_ns >= end_ns:
            break
        if since_ns >= start_ns:
            kept.append(_moved(row, since_ns - start_ns))
    if first_ns is None:
        raise BadInput(str(trace.file), "has no requests", "name another file")
    if not kept:
        raise BadInput(str(trace.file), "has no requests in the chosen part", "change start_s or duration_s")
    return kept


def _moved(row: TraceRow, at_ns: int) -> TraceRow:
    return TraceRow(at_ns, row.prompt_tokens, row.output_tokens, row.blocks, row.block_tokens, row.model, row.client)


def _scaled(rows: Iterable[TraceRow], replay: Replay, seed: int) -> Iterator[Arrival]:
    random = Random(f"{seed}/copies")
    whole = int(replay.rate_scale)
    part = replay.rate_scale - whole
    number = count()
    late: list[tuple[int, int, int, TraceRow]] = []
    for row in rows:
        at_ns = round(row.at_ns * replay.time_scale)
        while late and late[0][0] <= at_ns:
            yield _arrival(*_popped(late), replay)
        copies = whole + (part > 0 and random.random() < part)
        if copies:
            yield _arrival(at_ns, 0, row, replay)
        for copy in range(1, copies):
            copy_ns = at_ns + int(random.random() * COPY_SPREAD_NS)
            heapq.heappush(late, (copy_ns, next(number), copy, row))
    while late:
        yield _arrival(*_popped(late), replay)


def _popped(late: list[tuple[int, int, int, TraceRow]]) -> tuple[int, int, TraceRow]:
    at_ns, _, copy, row = heapq.heappop(late)
    return at_ns, copy, row


def _arrival(at_ns: int, copy: int, row: TraceRow, replay: Replay) -> Arrival:
    prompt, output = fitted(row.prompt_tokens, row.output_tokens, replay.context_tokens)
    return Arrival(
        at_ns,
        prompt,
        output,
        block_keys(row.blocks, row.block_tokens, prompt, copy),
        row.model if replay.model is None else replay.model,
        row.client,
    )


def block_keys(blocks: tuple[int, ...], block_tokens: int, prompt_tokens: int, copy: int = 0) -> tuple[int, ...]:
    """A trace's keys of `block_tokens` as keys of 16 tokens, for the full blocks of the prompt. A key stands for its
    whole prefix, so its parts are it and their place in it."""
    parts = block_tokens // BLOCK_TOKENS
    full = prompt_tokens // BLOCK_TOKENS
    base = copy << _COPY_BITS
    if parts == 1:
        return tuple([base + key for key in blocks[:full]])
    found: list[int] = []
    for key in blocks[: -(-full // parts)]:
        found.extend(range(base + key * parts, base + (key + 1) * parts))
    return tuple(found[:full])


_Rows = Iterator[tuple[Line, str, TraceRow]]


def _azure(file: Path) -> _Rows:
    for line in csv_lines(file, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at_ns = line.time_ns("TIMESTAMP")
        yield line, "TIMESTAMP", TraceRow(at_ns, line.tokens("ContextTokens"), line.tokens("GeneratedTokens"))


def _mooncake(file: Path) -> _Rows:
    for line in jsonl_lines(file, ("timestamp", "input_length", "output_length", "hash_ids")):
        prompt, blocks = line.tokens("input_length"), line.whole_numbers("hash_ids")
        if len(blocks) != -(-prompt // 512):
            raise line.bad("hash_ids", f"has {len(blocks)} ids for {prompt} tokens", "give one for each 512 tokens")
        at_ns = line.time_ns("timestamp", 1_000_000)
        yield line, "timestamp", TraceRow(at_ns, prompt, line.tokens("output_length"), blocks, 512)


def _llmservingsim(file: Path) -> _Rows:
    for line in jsonl_lines(file, ("input_toks", "output_toks", "arrival_time_ns")):
        at_ns = line.time_ns("arrival_time_ns", 1)
        yield line, "arrival_time_ns", TraceRow(at_ns, line.tokens("input_toks"), line.tokens("output_toks"))


def _vidur(file: Path) -> _Rows:
    for line in csv_lines(file, ("num_prefill_tokens", "num_decode_tokens")):
        row = TraceRow(0, line.tokens("num_prefill_tokens"), line.tokens("num_decode_tokens"))
        yield line, "num_prefill_tokens", row


_READERS: Mapping[TraceFormat, Callable[[Path], _Rows]] = {
    TraceFormat.AZURE: _azure,
    TraceFormat.MOONCAKE: _mooncake,
    TraceFormat.LLMSERVINGSIM: _llmservingsim,
    TraceFormat.VIDUR: _vidur,
}


def _opentela(file: Path, skip_uncounted: bool) -> _Rows:
    for line in jsonl_lines(file, ("created_at", "model", "reported_token_output")):
        # Our tokenizer's count (`token_count`) stands in for the service's where there is one.
        given = "token_count" if "token_count" in line.fields else "reported_token_input"
        uncounted = [name for name in (given, "reported_token_output") if str(line.fields.get(name)) in ("-1", "0")]
        if uncounted and skip_uncounted:
            continue
        if uncounted:
            raise line.bad(
                uncounted[0], "was not counted by the service", "set `uncounted: skip` to leave such requests out"
            )
        prompt, output = line.tokens(given), line.tokens("reported_token_output")
        buckets = line.whole_numbers("bucket_ids") if "bucket_ids" in line.fields else ()
        row = TraceRow(line.time_ns("created_at"), prompt, output, chain(buckets), BLOCK_TOKENS, line.text("model"))
        yield line, "created_at", row


def chain(contents: Iterable[int]) -> tuple[int, ...]:
    """Keys that stand for whole prefixes, from ids that stand for the content of one block only. Splitmix64's
    mixer over key and content; of a million different prefixes, two share a key once in two thousand traces."""
    found: list[int] = []
    key = 0
    for content in contents:
        mixed = (key * 0x9E3779B97F4A7C15 + content + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key = mixed ^ (mixed >> 31)
        found.append(key & _MASK)
    return tuple(found)


_NAMES: Mapping[str, tuple[str, ...]] = {
    "timestamp": ("timestamp",),
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "output_tokens": ("output_tokens", "completion_tokens"),
    "model": ("model",),
    "user": ("user",),
}
COLUMNS = tuple(_NAMES)
"""Our names in the format `columns`."""


def _columns(file: Path, mapping: Mapping[str, str]) -> _Rows:
    names: dict[str, str | None] | None = None
    for line in lines(file, tuple(mapping.values())):
        if names is None:
            names = {ours: mapping.get(ours) or _present(line, theirs) for ours, theirs in _NAMES.items()}
        at, prompt, output = (_needed(line, names, ours) for ours in ("timestamp", "prompt_tokens", "output_tokens"))
        row = TraceRow(
            line.time_ns(at),
            line.tokens(prompt),
            line.tokens(output),
            model=line.text(names["model"]),
            client=line.text(names["user"]),
        )
        yield line, at, row


def _present(line: Line, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in line.fields), None)


def _needed(line: Line, names: Mapping[str, str | None], ours: str) -> str:
    name = names[ours]
    if name is None:
        accepted = " or ".join(f"`{known}`" for known in _NAMES[ours])
        raise BadInput(
            f"{line.file}, line {line.number}, field `{ours}`",
            f"no column {accepted} among {', '.join(line.fields)}",
            f"map it: `columns: {{{ours}: its name}}`",
        )
    return name
