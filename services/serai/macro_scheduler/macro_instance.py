"""One macro-instance: its members in a circle, and which of them takes a request. Pure.

Rolling activation (EcoServe §3.3): a request goes to the instance that took the last one, until that cannot take it;
then the next one in the circle is asked. Windows come out staggered by that alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import assert_never

from serai.macro_scheduler.admission import AdmissionPolicy, Request, Scan, Verdict
from serai.macro_scheduler.instance_view import InstanceView


class MacroInstance:
    """Members by session, in the order of the circle."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[str] = []
        self._active = ""

    @property
    def active(self) -> str:
        """Who took the last request; empty: nobody has, or it has left."""
        return self._active

    def join(self, session: str) -> None:
        """At the end of the circle. Idempotent."""
        if session not in self.members:
            self.members.append(session)

    def leave(self, session: str) -> None:
        """Idempotent. When the active one leaves, the next in the circle is asked first."""
        if session not in self.members:
            return
        place = self.members.index(session)
        self.members.remove(session)
        if session == self._active:
            self._active = ""
            self.members = [*self.members[place:], *self.members[:place]]

    def choose(
        self,
        request: Request,
        views: Mapping[str, InstanceView],
        policy: AdmissionPolicy,
        excluded: Collection[str],
        now_s: float,
    ) -> tuple[InstanceView | None, list[Verdict]]:
        """Who takes `request` now, None: nobody; and what was asked. Changes nothing."""
        circle = [views[session] for session in self._circle() if session not in excluded and views[session].epoch]
        if not circle:
            return None, []
        match policy.scan:
            case Scan.CYCLIC:
                return self._first_that_fits(circle, request, policy, now_s)
            case Scan.RANDOM:
                rest = sorted(circle[1:], key=lambda view: _draw(request.ask.request_id, view.session))
                return self._first_that_fits([circle[0], *rest], request, policy, now_s)
            case Scan.ONE_STEP:
                return self._one_step(circle, request, policy, now_s)
            case Scan.CHEAPEST:
                return self._cheapest(circle, request, policy, now_s)
            case _:
                assert_never(policy.scan)

    def activate(self, view: InstanceView, prefill_s: float, now_s: float, *, anew: bool = False) -> None:
        """`view` takes a request. If it is another than before, or `anew`, its window begins."""
        if anew or view.session != self._active:
            self._active = view.session
            view.window += 1
            view.switched_at_s = now_s
            view.window_prefill_s, view.window_prompt_blocks = 0.0, 0
        view.window_prefill_s += prefill_s

    def _circle(self) -> list[str]:
        if not self._active:
            return self.members
        place = self.members.index(self._active)
        return [*self.members[place:], *self.members[:place]]

    def _first_that_fits(
        self, order: list[InstanceView], request: Request, policy: AdmissionPolicy, now_s: float
    ) -> tuple[InstanceView | None, list[Verdict]]:
        verdicts = []
        for view in order:
            verdict = policy.judge(view, request, view.session == self._active, now_s)
            verdicts.append(verdict)
            if verdict.fits:
                return view, verdicts
        # Round the circle it is the active one's turn again: this time for a window that would begin now.
        again = policy.judge(order[0], request, False, now_s)
        return (order[0] if again.fits else None), [*verdicts, again]

    def _one_step(
        self, circle: list[InstanceView], request: Request, policy: AdmissionPolicy, now_s: float
    ) -> tuple[InstanceView | None, list[Verdict]]:
        active = circle[0]
        verdict = policy.judge(active, request, active.session == self._active, now_s)
        if verdict.fits or len(circle) == 1:
            return active, [verdict]
        following = circle[1]
        moves = policy.moves_on(following, request, verdict, len(circle), now_s)
        return (following if moves else active), [verdict]

    def _cheapest(
        self, circle: list[InstanceView], request: Request, policy: AdmissionPolicy, now_s: float
    ) -> tuple[InstanceView | None, list[Verdict]]:
        verdicts = [policy.judge(view, request, view.session == self._active, now_s) for view in circle]
        best, found = None, None
        for view, verdict in zip(circle, verdicts, strict=True):
            if verdict.fits and (best is None or verdict.cost < best):
                best, found = verdict.cost, view
        return found, verdicts


def _draw(request_id: str, session: str) -> bytes:
    return blake2b(f"{request_id}/{session}".encode(), digest_size=8).digest()
