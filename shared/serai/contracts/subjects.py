"""Subject names and KV buckets, each with the message type that travels on it. No other module spells a subject.

| subject                    | from → to                  | message                                                |
|----------------------------|----------------------------|--------------------------------------------------------|
| `session.<session>`        | agent → all                | `SessionRecord`; its site's registry acks it, joined    |
| `status.<session>`         | agent → all                | `SessionStatus`, about once a second, may be lost      |
| `probe.<session>`          | anyone → one agent         | `ProbeRequest`, answered with `ProbeAnswer`            |
| `drain.<session>`          | launcher, tools → one agent | `DrainRequest`, answered with `DrainAnswer`           |
| `sleep.<session>`          | macro-scheduler → one agent | `SleepRequest`, answered with `SleepAnswer`           |
| `inference.<session>`      | ingress → one agent        | frames: request, body, credit                          |
| `cancel.<session>`         | ingress → one agent        | frame: cancel                                          |
| `<inbox>.<stream>`         | agent → one ingress        | frames: alive, head, data, end, error, body credit     |
| `registry.beat.<site>`     | registry → all             | `RegistryBeat`                                         |
| `registry.digest.<site>`   | anyone → that registry     | `DigestRequest`, answered with `DigestAnswer`          |
| `registry.snapshot.<site>` | anyone → that registry     | `SnapshotRequest`, answered with `SnapshotPage`        |
| `registry.opinion.<site>`  | anyone → that registry     | `OpinionRequest`, answered with `Opinion`              |
| `registry.disconnected.<site>` | registry → all         | `Disconnected`                                         |
| `registry.ended.<site>`    | batch system → registry    | `AllocationEnded`, answered with the same              |
| `launcher.explain.<site>`  | tools → launcher           | `ExplainRequest`, answered with `LauncherWord`         |
| `launcher.wake.<site>`     | tools → launcher           | `WakeRequest`, answered with `LauncherWord`            |
| `launcher.scale.<site>`    | placer → launcher          | `ScaleRequest`, answered with `LauncherWord`           |
| `registry.cleared.<site>`  | tools → registry           | `HostCleared`, answered with the same                  |
| `usage.record.<site>`      | ingress → stream → ledger  | `UsageRecord`s, one a line, kept until taken            |
| `usage.spent.<site>`       | ingress → ledger           | `SpentRequest`, answered with `SpentAnswer`            |
| `limits.<process>`         | ingress → ingresses        | `LimitsUse`, may be lost                               |
| `admission.<model>`        | ingress → group's leader   | `AdmissionRequest`, answered with `AdmissionAnswers`   |
| `instance.<session>`       | agent → macro-schedulers   | `InstanceReport`, may be lost                          |
| `take.<session>`           | group's leader → one agent | `TakeInstance`, answered with `InstanceState`          |
| `macro.explain.<site>`     | tools → macro-scheduler    | `MacroExplainRequest`, answered with `MacroWord`       |
| `macro.presence.<process>` | macro-schedulers → one     | `GroupLease` it should hold; or nobody is there        |
| `macro.wish.<site>`        | macro-scheduler → placer or launcher | `ScaleWish`, every few seconds, may be lost  |
| `usage.demand.<site>`      | placer → ledger            | `DemandRequest`, answered with `DemandAnswer`          |
| `pool.<pool>`              | pool agent → placers       | `PoolReport`, every few seconds, may be lost           |
| `assign.<pool>`            | placer → one pool agent    | `Assignments`, answered with `PoolReport`              |
| `placement.explain.<site>` | tools → placer             | `PlacementRequest`, answered with `PlacementWord`      |
| `placement.apply.<site>`   | tools → placer             | `ApplyRequest`, answered with `PlacementWord`          |
| `placement.startable.<site>` | placer → ingresses       | `StartableModels`, every few seconds, may be lost      |
| `placement.knock.<site>`   | ingress → placer           | `Knock`, every two seconds, may be lost                |

`<session>`, `<process>` and `<pool>` are tokens already; `<site>` and `<model>` are made one by `to_token`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from serai.contracts.admission import (
    AdmissionRequest,
    GroupLease,
    InstanceReport,
    MacroExplainRequest,
    ScaleWish,
    TakeInstance,
)
from serai.contracts.drain import DrainRequest, SleepRequest
from serai.contracts.inference import Frame
from serai.contracts.launcher import ExplainRequest, ScaleRequest, WakeRequest
from serai.contracts.limits import LimitsUse
from serai.contracts.placement import (
    ApplyRequest,
    Assignments,
    Knock,
    PlacementRequest,
    PoolReport,
    StartableModels,
)
from serai.contracts.registry import (
    AllocationEnded,
    DigestRequest,
    Disconnected,
    HostCleared,
    OpinionRequest,
    RegistryBeat,
    SnapshotRequest,
)
from serai.contracts.session_record import SessionRecord
from serai.contracts.status import ProbeRequest, SessionStatus
from serai.contracts.usage import DemandRequest, SpentRequest, UsageRecord

T = TypeVar("T")

_SAFE = re.compile(rb"[A-Za-z0-9_-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+|=")


def to_token(name: str) -> str:
    """Any text as one token that is valid in a NATS subject and in a KV key; `from_token` gives the text back.

    Letters, digits, `_` and `-` stay as they are; every other byte of the UTF-8 form becomes `=XX`; the empty text
    becomes `=`. Needed because `.` splits subjects and `:` is forbidden in KV keys ("Qwen2.5", "llama:8b").
    """
    if not name:
        return "="
    return "".join(chr(b) if _SAFE.match(bytes((b,))) else f"={b:02X}" for b in name.encode())


def from_token(token: str) -> str:
    """The text that `to_token` made `token` from. Raises ValueError when no text did."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"not a token made by to_token: {token!r}")
    if token == "=":
        return ""
    raw = bytearray()
    position = 0
    while position < len(token):
        if token[position] == "=":
            raw.append(int(token[position + 1 : position + 3], 16))
            position += 3
        else:
            raw.append(ord(token[position]))
            position += 1
    name = raw.decode()
    if to_token(name) != token:
        raise ValueError(f"not a token made by to_token: {token!r}")
    return name


@dataclass(frozen=True, slots=True)
class Subject(Generic[T]):
    """A family of subjects, `<hop>.<session>` or `<hop>.<site>`, and the type of the message on it."""

    hop: str
    message: type[T]

    def of_site(self, site: str) -> str:
        """The subject of one site's registry. Any text is a site's name."""
        return f"{self.hop}.{to_token(site)}"

    def of_model(self, model: str) -> str:
        """The subject of one model's group. Any text is a model's name."""
        return f"{self.hop}.{to_token(model)}"

    def of(self, session: str) -> str:
        """The subject of one session. Session ids are tokens already (`session_record.new_session_id`)."""
        return f"{self.hop}.{session}"

    @property
    def every(self) -> str:
        """The wildcard that matches this hop for every session or site."""
        return f"{self.hop}.*"


SESSION: Subject[SessionRecord] = Subject("session", SessionRecord)
STATUS: Subject[SessionStatus] = Subject("status", SessionStatus)
INFERENCE: Subject[Frame] = Subject("inference", Frame)
CANCEL: Subject[Frame] = Subject("cancel", Frame)
PROBE: Subject[ProbeRequest] = Subject("probe", ProbeRequest)
DRAIN: Subject[DrainRequest] = Subject("drain", DrainRequest)
SLEEP: Subject[SleepRequest] = Subject("sleep", SleepRequest)

# Of one site's registry: `of_site`.
BEAT: Subject[RegistryBeat] = Subject("registry.beat", RegistryBeat)
DIGEST: Subject[DigestRequest] = Subject("registry.digest", DigestRequest)
SNAPSHOT: Subject[SnapshotRequest] = Subject("registry.snapshot", SnapshotRequest)
OPINION: Subject[OpinionRequest] = Subject("registry.opinion", OpinionRequest)
DISCONNECTED: Subject[Disconnected] = Subject("registry.disconnected", Disconnected)
ENDED: Subject[AllocationEnded] = Subject("registry.ended", AllocationEnded)
CLEARED: Subject[HostCleared] = Subject("registry.cleared", HostCleared)

USAGE: Subject[UsageRecord] = Subject("usage.record", UsageRecord)
USAGE_SPENT: Subject[SpentRequest] = Subject("usage.spent", SpentRequest)
USAGE_DEMAND: Subject[DemandRequest] = Subject("usage.demand", DemandRequest)
LIMITS: Subject[LimitsUse] = Subject("limits", LimitsUse)
ADMISSION: Subject[AdmissionRequest] = Subject("admission", AdmissionRequest)
"""Of one model: `of_model`."""
INSTANCE: Subject[InstanceReport] = Subject("instance", InstanceReport)
TAKE: Subject[TakeInstance] = Subject("take", TakeInstance)
MACRO_EXPLAIN: Subject[MacroExplainRequest] = Subject("macro.explain", MacroExplainRequest)
MACRO_PRESENCE: Subject[GroupLease] = Subject("macro.presence", GroupLease)
MACRO_WISH: Subject[ScaleWish] = Subject("macro.wish", ScaleWish)
LAUNCHER_EXPLAIN: Subject[ExplainRequest] = Subject("launcher.explain", ExplainRequest)
LAUNCHER_WAKE: Subject[WakeRequest] = Subject("launcher.wake", WakeRequest)
LAUNCHER_SCALE: Subject[ScaleRequest] = Subject("launcher.scale", ScaleRequest)
POOL: Subject[PoolReport] = Subject("pool", PoolReport)
ASSIGN: Subject[Assignments] = Subject("assign", Assignments)
PLACEMENT_EXPLAIN: Subject[PlacementRequest] = Subject("placement.explain", PlacementRequest)
PLACEMENT_APPLY: Subject[ApplyRequest] = Subject("placement.apply", ApplyRequest)
PLACEMENT_STARTABLE: Subject[StartableModels] = Subject("placement.startable", StartableModels)
PLACEMENT_KNOCK: Subject[Knock] = Subject("placement.knock", Knock)

SESSIONS_BUCKET = "serai_sessions"
"""KV bucket of session records, key = session id. A cache that may lie or vanish: readers join, owners re-announce."""
BUDGETS_BUCKET = "serai_budgets"
"""KV bucket of budgets, key = scope as a token, value = `BudgetAccount`; written by compare-and-set only."""
LAUNCHERS_BUCKET = "serai_launchers"
"""KV bucket of launchers, key = site as a token, value = `LauncherState`, a lease too; by compare-and-set only."""
GROUPS_BUCKET = "serai_groups"
"""KV bucket of models' groups, key = model as a token, value = `GroupLease`; by compare-and-set only."""
OWNERS_BUCKET = "serai_owners"
"""KV bucket of instances' owners, key = session id, value = `InstanceOwner`; by compare-and-set only."""
PLACEMENT_BUCKET = "serai_placement"
"""KV bucket of placers, key = site as a token, value = `PlanRecord`, a lease too; by compare-and-set only."""
POOLS_BUCKET = "serai_pools"
"""KV bucket of what pool agents are to run, key = pool, value = `Assignments`; by compare-and-set only."""

USAGE_STREAM, USAGE_CONSUMER = "serai_usage", "ledger"
"""JetStream stream of a site's usage records, one a JetStream domain, and its one durable consumer: all ledgers of the
site share it."""
