"""Admission policies by name: may this instance take this request now? Pure.

`judge` answers for one instance with its reasons as data; who is asked next, and what becomes of a request that nobody
may take, is `macro_instance`'s.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from serai.contracts.admission import AdmissionAsk
from serai.macro_scheduler.instance_view import InstanceView


class Request(NamedTuple):
    """An ask with its targets made absolute, on the scheduler's clock."""

    ask: AdmissionAsk
    arrived_s: float
    """At its ingress: now − waited."""
    slo_ttft_s: float
    slo_tpot_s: float

    @property
    def deadline_s(self) -> float:
        """Until when it should decode."""
        return self.arrived_s + self.slo_ttft_s


class Verdict(NamedTuple):
    """One instance, judged. Figures are in seconds and tokens and stand in the order in which they were looked at."""

    session: str
    fits: bool
    failed: str = ""
    """Which check did: `ttft`, `tpot`, `memory`, …"""
    figures: tuple[tuple[str, float], ...] = ()


class AdmissionPolicy(Protocol):
    """One policy."""

    name: str

    def judge(self, instance: InstanceView, request: Request, now_s: float) -> Verdict:
        """Whether `instance` may take `request` now. Changes nothing."""
        ...


class Everybody:
    """Whoever comes may be taken: for the trivial behaviour."""

    name = "everybody"

    def judge(self, instance: InstanceView, request: Request, now_s: float) -> Verdict:
        """Yes."""
        return Verdict(instance.session, True)
