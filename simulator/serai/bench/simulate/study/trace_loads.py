"""Recorded traffic as loads of a study: which part of which trace, on which cluster, under which targets.

A seed is a part of the trace: another stretch of its clock each. Traces stand in the data folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serai.simulator.outcomes import SloTarget
from serai.simulator.workloads.servegen import servegen
from serai.simulator.workloads.traces import Replay, TraceFile, TraceFormat, replayed
from serai.simulator.workloads.workload import Workload

SERVEGEN = "servegen"


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """One recording and how it is used here. The n-th part begins at `first_s` + n × `every_s` of its clock;
    `rate_scale` keeps a part of its requests or doubles them."""

    file: str
    kind: str
    cluster: str
    model: str
    slo: SloTarget
    first_s: float
    every_s: float
    rate_scale: float = 1.0
    context_tokens: int = 16384

    def workload(self, data: Path, part: int, duration_s: float) -> Workload:
        """Part `part` for `duration_s`. Raises BadInput when the trace cannot be read."""
        start_s = self.first_s + part * self.every_s
        replay = Replay(start_s, duration_s, rate_scale=self.rate_scale, context_tokens=self.context_tokens)
        if self.kind == SERVEGEN:
            return servegen(self.file, data / self.file, replay, part)
        return replayed(self.file, TraceFile(data / self.file, TraceFormat(self.kind)), replay, part)


_CHAT, _LONG = SloTarget(5.0, 0.1), SloTarget(15.0, 0.1)

TRACES: Mapping[str, TraceLoad] = {
    "azure-conversation": TraceLoad(
        "traces/azure2023/AzureLLMInferenceTrace_conv.csv", "azure", "a800", "codellama-34b", _CHAT, 0, 900
    ),
    "azure-code": TraceLoad(
        "traces/azure2023/AzureLLMInferenceTrace_code.csv", "azure", "a800", "codellama-34b", _CHAT, 0, 700
    ),
    "mooncake-conversation": TraceLoad(
        "traces/mooncake/conversation_trace.jsonl", "mooncake", "a800", "codellama-34b", _LONG, 0, 900
    ),
    "servegen-reasoning": TraceLoad(
        "traces/servegen/reason-deepseek-r1", SERVEGEN, "h100", "codellama-34b", _CHAT, 36_000, 3600, rate_scale=0.5
    ),
    "servegen-language": TraceLoad(
        "traces/servegen/language-m-large", SERVEGEN, "a800", "codellama-34b", _CHAT, 36_000, 3600
    ),
}
"""ServeGen's reasoning clients ask for thousands of tokens: half of them, on the fastest GPUs."""
