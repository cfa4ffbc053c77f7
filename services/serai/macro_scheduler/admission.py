"""Admission policies by name: may this instance take this request now? Pure.

`judge` answers for one instance with its reasons as data; in which order instances are asked, and what becomes of a
request that nobody may take, is the policy's `Scan`, carried out by `macro_instance`.

| name | source |
|---|---|
| `paper` | EcoServe, OSDI '26, Algorithm 1, read literally |
| `author_code` | what its released code does instead |
| `serai` | ours: `docs/scheduling.md` |
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from serai.contracts.admission import AdmissionAsk, Spread
from serai.macro_scheduler.instance_view import InstanceView, prompt_blocks

SERAI_PARTS = (
    "quantile-slack",
    "in-window-protection",
    "deadlines",
    "expected-misses",
    "answer-lengths",
    "letting-go",
    "mixed-steps",
    "giants",
    "leases",
    "patience",
    "growth",
    "ordinary-mode",
)
"""What of `serai` can be switched off alone, by `GroupSettings.without`, to see what it is worth. The first eight are
the phase gate's."""


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


Figures = tuple[tuple[str, float], ...]


class Verdict(NamedTuple):
    """One instance, judged. Figures are in seconds and tokens and stand in the order in which they were looked at."""

    session: str
    fits: bool
    failed: str = ""
    """Which check did: `ttft`, `tpot`, `memory`."""
    figures: Figures = ()
    cost: float = 0.0
    """What placing it there costs; only compared among instances of one policy."""


class Scan(StrEnum):
    """In which order instances are asked."""

    CYCLIC = "cyclic"
    """Who took the last one, then the next in the circle, and so on (EcoServe §3.3)."""
    RANDOM = "random"
    """Who took the last one, then the others in an order drawn from the request's id: the paper's ablation."""
    ONE_STEP = "one-step"
    """Who took the last one; where the policy says so the next one in the circle, which then takes it in any case."""
    CHEAPEST = "cheapest"
    """All; of those that may, the one with the least cost."""


class AdmissionPolicy(Protocol):
    """One policy."""

    name: str
    scan: Scan
    gated: bool
    """Whether instances hold requests back; else they prefill first, whatever comes."""

    def judge(self, instance: InstanceView, request: Request, active: bool, now_s: float) -> Verdict:
        """Whether `instance` may take `request` now; `active`: it took the last one. Changes nothing."""
        ...

    def moves_on(
        self, following: InstanceView, request: Request, verdict: Verdict, instances: int, now_s: float
    ) -> bool:
        """ONE_STEP: whether a request that `verdict` kept from the active instance goes to the one `following` it."""
        ...


class Paper:
    """Algorithm 1, step by step. `interval_s` instead of the TPOT check is the paper's ablation: a window that is that
    long is over, whatever slack there is."""

    name = "paper"
    gated = False

    def __init__(self, *, scan: Scan = Scan.CYCLIC, interval_share: float | None = None) -> None:
        self.scan = scan
        self._interval_share = interval_share

    def judge(self, instance: InstanceView, request: Request, active: bool, now_s: float) -> Verdict:
        """ConstraintCheck(instance, request).

        t_switch is the time at which the window began; for an instance that is not active it would be now (its window
        would begin with this request), so nothing is pending and everything exists already."""
        # 1. TTFT: everything since the last phase switch, and this request.
        prefill_s = instance.predict.prefill_s(request.ask.prompt_tokens)
        total_s = prefill_s + (instance.window_prefill_s if active else 0.0)
        if self._interval_share is not None:
            return self._by_the_clock(instance, request, active, now_s)
        if total_s > request.slo_ttft_s and not (active is False and prefill_s > request.slo_ttft_s):
            # The paper never admits a prompt that alone takes longer than S_TTFT; here it opens a window of its own,
            # lest it wait for ever.
            return Verdict(instance.session, False, "ttft", (("t_total", total_s), ("s_ttft", request.slo_ttft_s)))
        # 2. TPOT: the mean of what those that exist have saved.
        existing = _existing(instance, active)
        saved_s = existing.mean_s - (now_s - instance.reported_at_s)
        figures: Figures = (("t_total", total_s), ("mean saved", saved_s), ("existing", existing.count))
        if existing.count and saved_s < total_s:
            return Verdict(instance.session, False, "tpot", figures)
        # 3. Memory: its prompt's KV. What remains is less what prompts that wait will need, as in the released code.
        free = instance.kv_tokens_left()
        if request.ask.prompt_tokens > free:
            return Verdict(instance.session, False, "memory", (*figures, ("kv free", free)))
        return Verdict(instance.session, True, "", figures)

    def _by_the_clock(self, instance: InstanceView, request: Request, active: bool, now_s: float) -> Verdict:
        """Fixed windows: as long as it lasts the active one takes all, then the next one does."""
        assert self._interval_share is not None
        open_s, limit_s = now_s - instance.switched_at_s, self._interval_share * request.slo_ttft_s
        fits = not active or open_s < limit_s
        return Verdict(instance.session, fits, "" if fits else "interval", (("open", open_s), ("interval", limit_s)))

    def moves_on(
        self, following: InstanceView, request: Request, verdict: Verdict, instances: int, now_s: float
    ) -> bool:
        """Not asked."""
        return True


class AuthorCode:
    """What the released code does: the most optimistic request speaks for all, and nothing ever waits here."""

    name = "author_code"
    gated = False
    scan = Scan.ONE_STEP

    def judge(self, instance: InstanceView, request: Request, active: bool, now_s: float) -> Verdict:
        """Admit where min(S_TTFT if anything is pending, max saved) > need_time and its blocks are free."""
        need_s = instance.predict.prefill_s(request.ask.prompt_tokens)
        saved: list[float] = []
        if active and instance.window_prefill_s:
            need_s += instance.window_prefill_s
            saved.append(request.slo_ttft_s)
        existing = _existing(instance, active)
        if existing.count:
            # As of the switch: the released code stamps an instance's time when it becomes active, and not again; so
            # slack of then is held against all prefills since, those that are done included.
            at_s = instance.switched_at_s if active else now_s
            saved.append(existing.most_s - (at_s - instance.reported_at_s))
        least_s = min(saved, default=float("inf"))
        figures = (("need_time", need_s), ("min saved", least_s))
        if least_s <= need_s:
            return Verdict(instance.session, False, "ttft" if need_s > request.slo_ttft_s else "tpot", figures)
        # The window's prompts and this one in blocks of 16, without any room for what is said. Those that are prefilled
        # count too, although their blocks are not free any more: its list of who waits is only emptied by a switch.
        blocks = prompt_blocks(request.ask.prompt_tokens) + (instance.window_prompt_blocks if active else 0)
        if blocks > _kv_free(instance) // 16:
            return Verdict(instance.session, False, "memory", (*figures, ("blocks", blocks)))
        return Verdict(instance.session, True, "", figures)

    def moves_on(
        self, following: InstanceView, request: Request, verdict: Verdict, instances: int, now_s: float
    ) -> bool:
        """It stays, although it does not fit, while the next one has saved too little to be active."""
        if verdict.failed != "tpot":
            return True
        ahead = _existing(following, False)
        if not ahead.count:
            return True
        saved_s = ahead.most_s - (now_s - following.reported_at_s)
        return saved_s >= request.slo_ttft_s * (instances - 1) / instances


_GROWTH_TOKENS = 64
_PATIENCE = 0.8
_SPARE = 0.2
"""Of the TTFT target. While more than the first is left, and more than the second beside its prefill, a request that
fits nowhere waits for an instance that turns out better than predicted. Then it goes where it costs least, for there
the gate knows best whom to leave out."""


class Serai:
    """Deadlines with all that is waited for, a low quantile of slack, every lease debited at once."""

    name = "serai"
    gated = True
    scan = Scan.CHEAPEST

    def __init__(self, without: str = "") -> None:
        self._patient = without != "patience"
        self._grows = without != "growth"

    def judge(self, instance: InstanceView, request: Request, active: bool, now_s: float) -> Verdict:
        """Whether it would decode before its deadline there, by prediction, without anyone's slack overdrawn."""
        prefill_s = instance.predict.prefill_s(request.ask.prompt_tokens)
        finish_s = instance.finish_in_s(prefill_s, request.slo_tpot_s, now_s)
        left_s = request.deadline_s - now_s
        step_s = instance.decode_s()
        cost = finish_s + step_s + instance.ending() * request.slo_ttft_s
        figures = (("finished in", finish_s), ("left", left_s), ("decode step", step_s))
        spare_s = left_s - prefill_s - 2 * step_s
        may_wait = self._patient and left_s > _PATIENCE * request.slo_ttft_s and spare_s > _SPARE * request.slo_ttft_s
        if finish_s > left_s and (prefill_s > left_s or may_wait):
            return Verdict(instance.session, False, "ttft", figures, cost)
        left = instance.kv_tokens_left()
        needed = kv_tokens(request.ask) if self._grows else request.ask.prompt_tokens
        if needed > left:
            return Verdict(instance.session, False, "memory", (*figures, ("kv left", left)), cost)
        return Verdict(instance.session, True, "", figures, cost)

    def moves_on(
        self, following: InstanceView, request: Request, verdict: Verdict, instances: int, now_s: float
    ) -> bool:
        """Not asked."""
        return True


def kv_tokens(ask: AdmissionAsk) -> int:
    """What a lease debits: the prompt, and what its answer grows by until the next release, which the gate watches from
    there on."""
    most = ask.output_tokens_max or _GROWTH_TOKENS
    return ask.prompt_tokens + min(most, _GROWTH_TOKENS)


def _existing(instance: InstanceView, active: bool) -> Spread:
    """Streams of before the window. A report that does not know of the window yet has only such."""
    report = instance.report
    if report is None:
        return Spread(0)
    return report.older if active and report.window >= instance.window else report.decoding


def _kv_free(instance: InstanceView) -> float:
    report = instance.report
    if report is None or not report.kv_tokens_total:
        return instance.kv_tokens_total or float("inf")
    return report.kv_tokens_free
