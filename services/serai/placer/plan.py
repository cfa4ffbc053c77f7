"""From what is wanted to what is done: wanted less running, each step with its reason. Pure.

A placement is a wish; a plan is what is worth doing of it now. Starts on free GPUs are done when they serve somebody.
An exchange (an engine ends so that another can have its GPUs) is done when the worst-served of its models gains, or
when what is gained until the horizon exceeds what is lost while the new engine loads. Nothing that moved lately moves
again, and no model falls below its minimum. What is not done is told, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serai.contracts.placement import ActionKind, Assignment, PlanAction
from serai.placer.changes import Change, Changes, Seat, joined
from serai.placer.options import Option
from serai.placer.picture import Fairness, Instance, ModelFacts, Picture, PlanRules
from serai.placer.placement import Placement
from serai.placer.plan_order import in_order
from serai.placer.worth import Worth

NOTHING = 1e-9
TURNS_MAX = 4
"""Each turn doubles what the next exchange must gain, so often at most."""
PLENTY = 2.0
"""Who has so many times what is asked of it gives engines away whatever it was asked lately."""
FAIRNESS_GAIN_MAX = 0.5
"""However often it has turned, a rise of the worst-served share by so much is worth an exchange."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, in an order that serves; immutable."""

    generation: int
    actions: tuple[PlanAction, ...]
    held: tuple[str, ...] = ()
    """What the placement wants and is not done now, and why."""
    let_go: tuple[str, ...] = ()
    """Models that lose their last engine because they are cold."""

    @property
    def changes(self) -> tuple[PlanAction, ...]:
        """Without what is kept."""
        return tuple(action for action in self.actions if action.kind is not ActionKind.KEEP)


def make_plan(picture: Picture, placement: Placement, rules: PlanRules, generation: int, *, limited: bool) -> Plan:
    """What is worth doing of `placement` now. `limited`: nobody looks at it before it is done, so the limits hold."""
    return _Planner(picture, placement, rules, generation, limited).plan()


class _Planner:
    def __init__(
        self, picture: Picture, placement: Placement, rules: PlanRules, generation: int, limited: bool
    ) -> None:
        self._picture = picture
        self._placement = placement
        self._rules = rules
        self._generation = generation
        self._limited = limited
        self._facts = {facts.model: facts for facts in picture.models}
        self._worth = Worth(self._facts)
        self._live: dict[str, Instance] = {one.id: one for one in picture.instances}
        self._new: list[Option] = []
        self._room = {pool.name: pool.gpus for pool in picture.pools}
        """GPUs that nobody has, if what is planned so far is done."""
        for one in picture.instances:
            self._room[one.pool] = self._room.get(one.pool, 0) - one.option.gpus
        self._actions: list[PlanAction] = []
        self._held: list[str] = []
        self._let_go: list[str] = []
        self._moved_gpus = 0
        self._moves = 0

    def plan(self) -> Plan:
        kept = {placed.session for placed in self._placement.placed if placed.session is not None}
        starts = [placed for placed in self._placement.placed if placed.session is None]
        stops = [one for one in self._picture.instances if one.id not in kept]
        changes, unseated = Changes(self._picture, self._facts).of(starts, stops)
        for one in unseated:
            self._hold(one.option, one.why)
        self._judge_all(self._ordered(joined(changes)))
        self._stop_surplus(kept)
        self._stop_cold()
        gone = {action.assignment.id for action in self._actions if action.kind is ActionKind.STOP}
        keeps = [_keep(one) for one in self._picture.instances if one.id not in gone]
        actions = (*in_order(self._actions, self._starting()), *keeps)
        return Plan(self._generation, actions, tuple(self._held), tuple(self._let_go))

    # -- what is worth it ----------------------------------------------------------------------------------------

    def _starting(self) -> dict[str, list[str]]:
        """Engines that load now and stay, by model: what ends beside them waits for them."""
        found: dict[str, list[str]] = {}
        for one in self._live.values():
            if not one.serving and self._useful(one):
                found.setdefault(one.model, []).append(one.id)
        return found

    def _ordered(self, changes: Iterable[Change]) -> list[Change]:
        """Those first that need no engine to end, then those that help the worst-served most."""
        worst = self._worth.shares(self._live_and_new())

        def rank(change: Change) -> tuple[bool, bool, float, tuple[str, ...]]:
            helped = min((worst.get(seat.option.model, 1.0) for seat in change.starts), default=1.0)
            lacks = any(self._lacks(seat.option.model) for seat in change.starts)
            return bool(change.stops), not lacks, helped, change.pools

        return sorted(changes, key=rank)

    def _judge_all(self, changes: Sequence[Change]) -> None:
        """In order; who counts on room that an exchange leaves comes after it, or not at all when that is not done."""
        waiting = list(changes)
        while ready := [change for change in waiting if self._has_room(change)]:
            self._judge(ready[0])
            waiting.remove(ready[0])
        for change in waiting:
            for seat in change.starts:
                self._hold(seat.option, f"there is no room on {seat.pool} now")

    def _has_room(self, change: Change) -> bool:
        return all(change.gpus_more(pool) <= self._room.get(pool, 0) for pool in change.pools)

    def _judge(self, change: Change) -> None:
        if why := self._why_not(change):
            for seat in change.starts:
                self._hold(seat.option, why)
            return
        whys = {seat: self._why(seat, change) for seat in change.starts}
        for one in change.stops:
            del self._live[one.id]
        for seat in change.starts:
            self._new.append(seat.option)
            self._actions.append(self._start(seat, whys[seat]))
        for one in change.stops:
            here = [seat for seat in change.starts if seat.pool == one.pool] or change.starts
            models = " and ".join(sorted({seat.option.model for seat in here}))
            self._actions.append(_stop(one, f"its place is for {models}: {whys[here[0]]}"))
        self._moves += len(change.stops) + len(change.starts)
        self._moved_gpus += change.gpus_taken
        for pool in change.pools:
            self._room[pool] = self._room.get(pool, 0) - change.gpus_more(pool)

    def _why_not(self, change: Change) -> str:
        """Why not to do it; empty = do."""
        rules = self._rules
        for one in change.stops:
            if one.pinned:
                return f"{one.model} on {one.pool} is pinned"
            if one.age_s < rules.cool_down_s and self._useful(one):
                left_s = rules.cool_down_s - one.age_s
                return f"{one.model} on {one.pool} was started {one.age_s:.0f} s ago, and stays for {left_s:.0f} s more"
            if why := self._below_minimum(one, change):
                return why
        if why := self._over_limit(change):
            return why
        before, after = self._live_and_new(), self._with(change)
        if not change.stops:
            helps = self._worth.total(after) > self._worth.total(before) + NOTHING or any(
                self._lacks(seat.option.model) for seat in change.starts
            )
            return "" if helps else "nobody waits for it"
        return self._not_worth(change, before, after)

    def _not_worth(self, change: Change, before: Sequence[Option], after: Sequence[Option]) -> str:
        rules = self._rules
        left_s = rules.horizon_s - change.load_s
        if left_s <= 0:
            return f"it loads for {change.load_s:.0f} s, and the horizon is {rules.horizon_s:.0f} s"
        if any(self._lacks(seat.option.model) for seat in change.starts):
            return ""
        affected = change.models
        turns = max(self._picture.turns.get(model, 0) for model in affected)
        if self._has_plenty(change):
            turns = 0
        # What goes back and forth follows a demand that nobody can measure so well: it has to gain more each time.
        patience = 2.0 ** min(turns, TURNS_MAX)
        fairness_gain = max(rules.fairness_gain, min(FAIRNESS_GAIN_MAX, rules.fairness_gain * patience))
        floor = self._fair_floor()
        now, then = (min(floor, self._worth.worst(options, affected)) for options in (before, after))
        if then >= now + fairness_gain:
            return ""
        gain = (self._worth.total(after) - self._worth.total(before)) * left_s
        lost_s = change.load_s + rules.drain_s
        # What only moves serves until its new engine does.
        meanwhile = self._without(change, but=change.moved)
        loss = (self._worth.total(before) - self._worth.total(meanwhile)) * lost_s
        loss += sum(one.in_flight for one in change.stops)
        # What the place itself is worth while it loads, or nothing would be lost where somebody can spare it.
        loss += sum(self._idle_while_loading(seat.option) for seat in change.starts)
        if gain > patience * rules.margin * loss and gain > NOTHING:
            return ""
        if gain <= NOTHING:
            return "fewer requests would be served than now"
        return (
            f"until the horizon of {rules.horizon_s:.0f} s it would serve {gain:.0f} more requests, "
            f"and lose {loss:.0f} while it loads" + (f"; its models have turned {turns} times lately" if turns else "")
        )

    def _has_plenty(self, change: Change) -> bool:
        """Whether whoever gives keeps so much more than is asked that it need not be measured well."""
        left: dict[str, float] = {}
        for option in self._without(change, but=change.moved):
            left[option.model] = left.get(option.model, 0.0) + option.requests_s
        giving = {one.model for one in change.stops} - change.moved
        return all(
            left.get(model, 0.0) >= PLENTY * self._facts[model].demand.planned_requests_s
            for model in giving & self._facts.keys()
        )

    def _fair_floor(self) -> float:
        """A share above which nobody need be helped at the cost of others."""
        if self._rules.fairness is Fairness.STRICT:
            return 1.0
        shares = self._placement.served_share
        return min((shares.get(name, 1.0) for name, one in self._facts.items() if _asked(one)), default=1.0)

    def _idle_while_loading(self, option: Option) -> float:
        """Requests that it could have served by the time it has loaded."""
        demand = self._facts[option.model].demand
        return option.load_s * demand.priority * min(option.requests_s, demand.planned_requests_s)

    def _over_limit(self, change: Change) -> str:
        if not self._limited:
            return ""
        rules, moves = self._rules, len(change.stops) + len(change.starts)
        done = self._picture.moves_last_hour + self._moves
        if done + moves > rules.moves_per_hour:
            return f"{done} engines have been started or stopped within the hour; the limit is {rules.moves_per_hour}"
        all_gpus = sum(pool.gpus for pool in self._picture.pools)
        most = rules.gpu_share_per_change * all_gpus
        if change.stops and self._moved_gpus and self._moved_gpus + change.gpus_taken > most:
            return f"{self._moved_gpus} GPUs change hands already; the limit is {most:.0f} of {all_gpus} at once"
        return ""

    def _below_minimum(self, stopped: Instance, change: Change) -> str:
        facts = self._facts.get(stopped.model)
        if facts is None:
            return ""
        ending = sum(one.model == stopped.model for one in change.stops)
        left = sum(one.model == stopped.model for one in self._live.values()) - ending
        left += sum(option.model == stopped.model for option in self._new)
        left += sum(seat.option.model == stopped.model for seat in change.starts)
        minimum = facts.demand.min_replicas
        return f"{stopped.model} would have {left} engines, and its minimum is {minimum}" if left < minimum else ""

    def _useful(self, one: Instance) -> bool:
        """Whether anybody wants it now."""
        facts = self._facts.get(one.model)
        return facts is not None and (facts.demand.planned_requests_s > 0 or facts.demand.min_replicas > 0)

    def _lacks(self, model: str) -> bool:
        """Whether the model has too few engines whatever is asked of it."""
        facts = self._facts.get(model)
        if facts is None:
            return False
        there = sum(one.model == model for one in self._live.values()) + sum(o.model == model for o in self._new)
        return there < facts.demand.min_replicas or (facts.prewarm and there == 0)

    def _with(self, change: Change) -> list[Option]:
        return [*self._without(change), *[seat.option for seat in change.starts]]

    def _without(self, change: Change, but: frozenset[str] = frozenset()) -> list[Option]:
        """Engines once those of the change have ended, except for models in `but`."""
        ending = {one.id for one in change.stops if one.model not in but}
        return [*[one.option for one in self._live.values() if one.id not in ending], *self._new]

    def _live_and_new(self) -> list[Option]:
        return [*[one.option for one in self._live.values()], *self._new]

    # -- what nobody wants ---------------------------------------------------------------------------------------

    def _stop_cold(self) -> None:
        after_s = self._rules.cold_after_s
        if after_s is None:
            return
        for facts in self._picture.models:
            if facts.unused_s < after_s or facts.prewarm or facts.demand.planned_requests_s > 0:
                continue
            there = [one for one in self._live.values() if one.model == facts.model]
            spare = sorted(there, key=lambda one: one.id)[facts.demand.min_replicas :]
            for one in spare:
                if one.pinned or one.age_s < after_s:
                    continue
                if self._limited and self._picture.moves_last_hour + self._moves >= self._rules.moves_per_hour:
                    return
                del self._live[one.id]
                self._moves += 1
                why = f"no request has come for {facts.unused_s:.0f} s"
                self._actions.append(_stop(one, why))
            if there and not any(one.model == facts.model for one in self._live.values()):
                self._let_go.append(facts.model)

    def _stop_surplus(self, kept: Collection[str]) -> None:
        """Engines beyond the most that a model may have: the file says so, or its macro-scheduler needs no more."""
        for facts in self._picture.models:
            most = facts.demand.max_replicas
            there = [one for one in self._live.values() if one.model == facts.model and not one.pinned]
            if most is None:
                continue
            in_turn = sorted(there, key=lambda one: (one.id in kept, one.in_flight, one.id))
            for one in in_turn[: max(0, len(there) - most)]:
                if self._limited and self._picture.moves_last_hour + self._moves >= self._rules.moves_per_hour:
                    return
                del self._live[one.id]
                self._moves += 1
                self._actions.append(_stop(one, f"{facts.model} is to have {most} engines and no more"))

    # -- words ---------------------------------------------------------------------------------------------------

    def _start(self, seat: Seat, why: str) -> PlanAction:
        option = seat.option
        facts = self._facts[option.model]
        number = sum(action.kind is ActionKind.START for action in self._actions) + 1
        assignment = Assignment(
            f"g{self._generation}-{number}",
            option.model,
            facts.engine,
            option.gpus,
            option.tensor,
            option.pipeline,
            option.data,
            option.quantisation,
            facts.path,
            list(facts.arguments),
            why,
        )
        return PlanAction(ActionKind.START, seat.pool, assignment, "", why)

    def _why(self, seat: Seat, change: Change) -> str:
        model = seat.option.model
        facts = self._facts[model]
        minimum, wanted = facts.demand.min_replicas, facts.demand.planned_requests_s
        if self._lacks(model):
            return (
                f"{model} has fewer engines than its minimum of {minimum}" if minimum else f"{model} will be used soon"
            )
        before = self._worth.shares(self._live_and_new())[model]
        shares = self._worth.shares(self._with(change))
        if model in change.moved and shares[model] <= before + NOTHING:
            return self._why_it_moves(model, change, shares)
        text = f"{model} is asked {wanted:.2f} requests/s, of which {shares[model]:.0%} are served in time with it"
        losers = sorted({one.model for one in change.stops} - {model} - change.moved)
        return "; ".join([f"{text}, {before:.0%} without", *[self._loss(loser, shares) for loser in losers]])

    @staticmethod
    def _why_it_moves(model: str, change: Change, shares: Mapping[str, float]) -> str:
        gains = sorted({seat.option.model for seat in change.starts} - {model})
        if not gains:
            return f"{model} runs better there"
        served = " and ".join(f"{one}, which is then served {shares[one]:.0%} of what it is asked" for one in gains)
        return f"{model} makes room for {served}"

    @staticmethod
    def _loss(loser: str, shares: Mapping[str, float]) -> str:
        share = shares.get(loser, 1.0)
        return f"{loser} can spare it" if share >= 1 else f"{loser} then gets {share:.0%} of what it is asked"

    def _hold(self, option: Option, why: str) -> None:
        self._held.append(f"{option.key} is not started: {why}")


def _asked(facts: ModelFacts) -> bool:
    return facts.demand.planned_requests_s > 0


def _keep(one: Instance) -> PlanAction:
    return PlanAction(ActionKind.KEEP, one.pool, one.assignment, one.session)


def _stop(one: Instance, why: str) -> PlanAction:
    return PlanAction(ActionKind.STOP, one.pool, one.assignment, one.session, why)
