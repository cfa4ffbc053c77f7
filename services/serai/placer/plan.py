"""From what is wanted to what is done: wanted less running, each step with its reason. Pure.

A placement is a wish; a plan is what is worth doing of it now. Starts on free GPUs are done when they serve somebody.
An exchange (an engine ends so that another can have its GPUs) is done when the worst-served of its models gains, or
when what is gained until the horizon exceeds what is lost while the new engine loads. Nothing that moved lately moves
again, and no model falls below its minimum. What is not done is told, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serai.contracts.placement import ActionKind, Assignment, PlanAction
from serai.placer.options import Option
from serai.placer.picture import Instance, ModelFacts, Picture, PlanRules, PoolFacts, failed_key
from serai.placer.placement import Placed, Placement
from serai.placer.worth import Worth

__all__ = ["Instance", "ModelFacts", "Picture", "Plan", "PlanRules", "PoolFacts", "failed_key", "make_plan"]

NOTHING = 1e-9
TURNS_MAX = 4
"""Each turn doubles what the next exchange must gain, so often at most."""
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


@dataclass(frozen=True, slots=True)
class _Change:
    """Engines of one pool that end, and engines that start; done together or not at all."""

    pool: str
    stops: tuple[Instance, ...]
    starts: tuple[Option, ...]

    @property
    def gpus_taken(self) -> int:
        """GPUs that somebody has now."""
        return sum(one.option.gpus for one in self.stops)

    @property
    def load_s(self) -> float:
        return max((option.load_s for option in self.starts), default=0.0)


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
        self._pools = {pool.name: pool for pool in picture.pools}
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
        self._judge_all(self._ordered(self._changes(starts, stops)))
        self._stop_cold()
        gone = {action.assignment.id for action in self._actions if action.kind is ActionKind.STOP}
        keeps = [_keep(one) for one in self._picture.instances if one.id not in gone]
        actions = (*self._after(self._actions), *keeps)
        return Plan(self._generation, actions, tuple(self._held), tuple(self._let_go))

    # -- what belongs together -----------------------------------------------------------------------------------

    def _changes(self, starts: Sequence[Placed], stops: Sequence[Instance]) -> list[_Change]:
        free = {pool.name: pool.gpus for pool in self._picture.pools}
        for one in self._picture.instances:
            free[one.pool] = free.get(one.pool, 0) - one.option.gpus
        changes: list[_Change] = []
        crowded: list[Placed] = []
        for placed in starts:
            if len(placed.nodes) != 1:
                self._hold(placed.option, "pool agents run engines of one node only; this one needs several")
            elif why := self._no_engine(placed.option):
                self._hold(placed.option, why)
            elif (seat := self._seat(placed, free)) is not None:
                free[seat] -= placed.option.gpus
                changes.append(_Change(seat, (), (placed.option,)))
            else:
                crowded.append(placed)
        waiting = list(stops)
        for placed in crowded:
            change = self._exchange(placed, free, waiting)
            if change is None:
                self._hold(placed.option, f"there is no room on {placed.nodes[0][0]} now")
            else:
                changes.append(change)
        return changes

    def _seat(self, placed: Placed, free: Mapping[str, int]) -> str | None:
        """A pool with room for it: the one that the solver chose, unless another has the weights at hand, or the
        engine has failed there."""
        option, chosen = placed.option, placed.nodes[0][0]
        fits = [
            pool.name
            for pool in self._picture.pools
            if pool.gpu == option.gpu and free[pool.name] >= option.gpus and self._can_start(option.model, pool.name)
        ]
        warm = self._picture.warm.get(option.model, ())
        return min(fits, key=lambda name: (name not in warm, name != chosen, free[name], name), default=None)

    def _no_engine(self, option: Option) -> str:
        """Why no pool could start it, whatever else runs there; empty = one could."""
        facts = self._facts.get(option.model)
        if facts is None:
            return "nothing is known of its model"
        of_kind = [pool for pool in self._picture.pools if pool.gpu == option.gpu]
        if any(facts.engine in pool.engines for pool in of_kind):
            return ""
        there = ", ".join(sorted({engine for pool in of_kind for engine in pool.engines})) or "none"
        return f"no pool with {option.gpu} has the engine `{facts.engine}` (there is {there})"

    def _can_start(self, model: str, pool: str) -> bool:
        """Whether the pool has its engine, may have its requests, and has not failed with it lately."""
        facts, there = self._facts[model], self._pools.get(pool)
        if there is None or facts.engine not in there.engines or failed_key(model, pool) in self._picture.failed:
            return False
        allowed = facts.demand.providers_allowed
        return not allowed or there.provider in allowed

    def _exchange(self, placed: Placed, free: dict[str, int], stops: list[Instance]) -> _Change | None:
        """Takes from `stops` those of the pool that must end for it."""
        option, pool = placed.option, placed.nodes[0][0]
        if pool not in free or not self._can_start(option.model, pool):
            return None
        room = free[pool]
        taken: list[Instance] = []
        for one in sorted((one for one in stops if one.pool == pool), key=lambda one: (one.in_flight, one.id)):
            if room >= option.gpus:
                break
            taken.append(one)
            room += one.option.gpus
        if room < option.gpus:
            return None
        for one in taken:
            stops.remove(one)
        free[pool] = room - option.gpus
        return _Change(pool, tuple(taken), (option,))

    # -- what is worth it ----------------------------------------------------------------------------------------

    def _ordered(self, changes: Sequence[_Change]) -> list[_Change]:
        """Those first that need no engine to end, then those that help the worst-served most."""
        worst = self._worth.shares(self._live_and_new())

        def rank(change: _Change) -> tuple[bool, bool, float, str]:
            helped = min((worst.get(option.model, 1.0) for option in change.starts), default=1.0)
            lacks = any(self._lacks(option.model) for option in change.starts)
            return bool(change.stops), not lacks, helped, change.pool

        return sorted(changes, key=rank)

    def _judge_all(self, changes: Sequence[_Change]) -> None:
        """In order; who counts on room that an exchange leaves comes after it, or not at all when that is not done."""
        waiting = list(changes)
        while ready := [change for change in waiting if self._has_room(change)]:
            self._judge(ready[0])
            waiting.remove(ready[0])
        for change in waiting:
            for option in change.starts:
                self._hold(option, f"there is no room on {change.pool} now")

    def _has_room(self, change: _Change) -> bool:
        return sum(option.gpus for option in change.starts) <= self._room.get(change.pool, 0) + change.gpus_taken

    def _judge(self, change: _Change) -> None:
        if why := self._why_not(change):
            for option in change.starts:
                self._hold(option, why)
            return
        why = self._why(change)
        for one in change.stops:
            del self._live[one.id]
        for option in change.starts:
            self._new.append(option)
            self._actions.append(self._start(option, change.pool, why))
        starts = " and ".join(sorted({option.model for option in change.starts}))
        for one in change.stops:
            self._actions.append(_stop(one, f"its place is for {starts}: {why}"))
        self._moves += len(change.stops) + len(change.starts)
        self._moved_gpus += change.gpus_taken
        self._room[change.pool] += change.gpus_taken - sum(option.gpus for option in change.starts)

    def _why_not(self, change: _Change) -> str:
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
        before, after = self._live_and_new(), [*self._without(change), *change.starts]
        if not change.stops:
            helps = self._worth.total(after) > self._worth.total(before) + NOTHING or self._lacks(
                change.starts[0].model
            )
            return "" if helps else "nobody waits for it"
        return self._not_worth(change, before, after)

    def _not_worth(self, change: _Change, before: Sequence[Option], after: Sequence[Option]) -> str:
        rules = self._rules
        left_s = rules.horizon_s - change.load_s
        if left_s <= 0:
            return f"it loads for {change.load_s:.0f} s, and the horizon is {rules.horizon_s:.0f} s"
        if any(self._lacks(option.model) for option in change.starts):
            return ""
        affected = {option.model for option in (*change.starts, *[one.option for one in change.stops])}
        turns = max(self._picture.turns.get(model, 0) for model in affected)
        # What goes back and forth follows a demand that nobody can measure so well: it has to gain more each time.
        patience = 2.0 ** min(turns, TURNS_MAX)
        fairness_gain = max(rules.fairness_gain, min(FAIRNESS_GAIN_MAX, rules.fairness_gain * patience))
        if self._worth.worst(after, affected) >= self._worth.worst(before, affected) + fairness_gain:
            return ""
        gain = (self._worth.total(after) - self._worth.total(before)) * left_s
        lost_s = change.load_s + rules.drain_s
        loss = (self._worth.total(before) - self._worth.total(self._without(change))) * lost_s
        loss += sum(one.in_flight for one in change.stops)
        # What the place itself is worth while it loads, or nothing would be lost where somebody can spare it.
        loss += change.load_s * sum(self._facts[one.model].demand.priority * one.requests_s for one in change.starts)
        if gain > patience * rules.margin * loss and gain > NOTHING:
            return ""
        if gain <= NOTHING:
            return "fewer requests would be served than now"
        return (
            f"until the horizon of {rules.horizon_s:.0f} s it would serve {gain:.0f} more requests, "
            f"and lose {loss:.0f} while it loads" + (f"; its models have turned {turns} times lately" if turns else "")
        )

    def _over_limit(self, change: _Change) -> str:
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

    def _below_minimum(self, stopped: Instance, change: _Change) -> str:
        facts = self._facts.get(stopped.model)
        if facts is None:
            return ""
        ending = sum(one.model == stopped.model for one in change.stops)
        left = sum(one.model == stopped.model for one in self._live.values()) - ending
        left += sum(option.model == stopped.model for option in (*self._new, *change.starts))
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

    def _without(self, change: _Change) -> list[Option]:
        ending = {one.id for one in change.stops}
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

    # -- words ---------------------------------------------------------------------------------------------------

    def _start(self, option: Option, pool: str, why: str) -> PlanAction:
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
        return PlanAction(ActionKind.START, pool, assignment, "", why)

    def _why(self, change: _Change) -> str:
        model = change.starts[0].model
        facts = self._facts[model]
        minimum, wanted = facts.demand.min_replicas, facts.demand.planned_requests_s
        if self._lacks(model):
            return (
                f"{model} has fewer engines than its minimum of {minimum}" if minimum else f"{model} will be used soon"
            )
        before = self._worth.shares(self._live_and_new())[model]
        shares = self._worth.shares([*self._without(change), *change.starts])
        text = f"{model} is asked {wanted:.2f} requests/s, of which {shares[model]:.0%} are served in time with it"
        losers = sorted({one.model for one in change.stops} - {model})
        return "; ".join([f"{text}, {before:.0%} without", *[self._loss(loser, shares) for loser in losers]])

    @staticmethod
    def _loss(loser: str, shares: Mapping[str, float]) -> str:
        share = shares.get(loser, 1.0)
        return f"{loser} can spare it" if share >= 1 else f"{loser} then gets {share:.0%} of what it is asked"

    def _hold(self, option: Option, why: str) -> None:
        self._held.append(f"{option.key} is not started: {why}")

    @staticmethod
    def _after(actions: Sequence[PlanAction]) -> list[PlanAction]:
        """Starts before stops; a stop waits for the new engines of its own model that do not need its GPUs."""
        starts = [action for action in actions if action.kind is ActionKind.START]
        freed = {action.pool for action in actions if action.kind is ActionKind.STOP}
        ordered = list(starts)
        for stop in (action for action in actions if action.kind is ActionKind.STOP):
            model = stop.assignment.model
            first = [s.assignment.id for s in starts if s.assignment.model == model and s.pool not in freed]
            ordered.append(replace(stop, after=first))
        return ordered


def _keep(one: Instance) -> PlanAction:
    return PlanAction(ActionKind.KEEP, one.pool, one.assignment, one.session)


def _stop(one: Instance, why: str) -> PlanAction:
    return PlanAction(ActionKind.STOP, one.pool, one.assignment, one.session, why)
