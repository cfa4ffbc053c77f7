"""Who waits for its turn, model by model: the shell around `queueing`. It keeps time, and wakes who may go.

While there is room, a request costs a few additions. What a model's sessions can take is looked at again when the
registry copy has changed, after `LOOK_EVERY_S`, and every `TICK_S` while somebody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

from serai.ingress import metrics
from serai.ingress.queueing import (
    Arrived,
    Cancelled,
    Capacity,
    Closed,
    Effect,
    Ended,
    Event,
    QueueSettings,
    Refuse,
    RequestQueue,
)

TICK_S = 0.05
LOOK_EVERY_S = 1.0
"""As often as sessions tell what others have them do."""
LOOK_APART_S = 0.02
"""However much changes in the registry copy."""
GAP_RETRY_AFTER_S = 5.0
START_PATIENCE = 2.0
"""An engine may take so many times as long to start as is said of it."""
FIRST_BYTE_SAMPLE = 0.1
"""Weight of one more stream in the observed time from dispatch to first byte."""


class Sessions(Protocol):
    """What the sessions of a model can do now, as far as is known here: `Chooser`."""

    def serves(self, model: str, now: float) -> bool: ...

    def expects(self, model: str) -> bool: ...

    def start_s(self, model: str) -> float: ...

    def capacity(self, model: str, now: float) -> int | None: ...


class NotServed(Exception):
    """The request is refused."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__(refuse.why)
        self.refuse = refuse


class ModelTurns:
    """The queue of one model, and who waits in it."""

    __slots__ = (
        "_changes",
        "_changes_seen",
        "_gap_since_s",
        "_looked_at_s",
        "_sessions",
        "_timer",
        "_waiting",
        "first_byte_s",
        "model",
        "queue",
        "settings",
        "waited",
    )

    def __init__(
        self,
        model: str,
        settings: QueueSettings,
        sessions: Sessions,
        changes: Callable[[], int],
    ) -> None:
        self.model = model
        self.settings = settings
        self.queue = RequestQueue(settings, 0)
        self.waited = metrics.QUEUE_WAIT.of(model)
        self.first_byte_s = 0.0
        """How long a stream takes from its dispatch to its first byte; 0 = not known."""
        self._sessions = sessions
        self._changes = changes
        self._gap_since_s: float | None = None
        """No session has served the model since then, as far as somebody who waits has looked."""
        self._changes_seen = -1
        self._looked_at_s = 0.0
        self._waiting: dict[str, asyncio.Future[Effect]] = {}
        self._timer: asyncio.TimerHandle | None = None

    # -- in and out ----------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Before a request comes: what the sessions can take, if that may have changed."""
        since_s = now - self._looked_at_s
        if since_s > LOOK_EVERY_S or (self._changes() != self._changes_seen and since_s > LOOK_APART_S):
            self.look_now(now)

    def look_now(self, now: float) -> None:
        """What the sessions can take; something has been learned of it."""
        self._looked_at_s = now
        self._changes_seen = self._changes()
        capacity = self._sessions.capacity(self.model, now)
        if capacity != self.queue.capacity:
            self._obey(self.queue.handle(Capacity(capacity), now))

    async def wait(self, asked: Arrived) -> float:
        """Until it is its turn; how long that took, in seconds. Raises NotServed. Who is cancelled is out at once."""
        turn: asyncio.Future[Effect] = asyncio.get_running_loop().create_future()
        self._waiting[asked.request] = turn
        try:
            self._handle(asked)
            effect = await turn
        except asyncio.CancelledError:
            runs = self.queue.runs(asked.request)  # Its turn came in the very moment in which its client left.
            self._handle(Ended(asked.request, 0, 0, served=False) if runs else Cancelled(asked.request))
            raise
        finally:
            del self._waiting[asked.request]
            self._show()
        if isinstance(effect, Refuse):
            raise NotServed(effect)
        return effect.waited_s

    def end(self, ended: Ended, now: float, first_byte_s: float | None) -> None:
        """One that had its turn is over."""
        if first_byte_s is not None:
            before_s = self.first_byte_s or first_byte_s
            self.first_byte_s = before_s + FIRST_BYTE_SAMPLE * (first_byte_s - before_s)
        if self._waiting:
            self._handle(ended)
        else:
            self.queue.handle(ended, now)

    def apply(self, settings: QueueSettings) -> None:
        """Takes effect at once; who waits is not put off by it."""
        self.settings = settings
        self.queue.apply(settings)

    def refuse_all(self) -> None:
        """All that wait."""
        self._handle(Closed(1.0))

    def close(self) -> None:
        """Nobody comes any more, and nobody is there."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.queue.running

    # -- inside --------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        self._obey(self.queue.handle(event, now))
        self._arm(now)

    def _obey(self, effects: list[Effect]) -> None:
        for effect in effects:
            turn = self._waiting.get(effect.request)
            if turn is not None and not turn.done():
                turn.set_result(effect)
            # Else it has been cancelled in this turn of the loop, and says so itself in the next.

    def _arm(self, now: float) -> None:
        if self._timer is None and self.queue.waiting:
            wake_s = self.queue.next_wake_s
            wait_s = TICK_S if wake_s is None else max(0.001, min(TICK_S, wake_s - now))
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)
            self._show()

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._looked_at_s = now
        self._changes_seen = self._changes()
        self._handle(Capacity(self._sessions.capacity(self.model, now)))
        if self._sessions.serves(self.model, now):
            self._gap_since_s = None
        elif not self._sessions.expects(self.model):
            self._handle(Closed(GAP_RETRY_AFTER_S))
        elif self._gap_since_s is None:
            self._gap_since_s = now
        elif now - self._gap_since_s >= (gap_max_s := self._gap_max_s()):
            self._handle(Closed(GAP_RETRY_AFTER_S, now - gap_max_s))

    def _gap_max_s(self) -> float:
        """Longer where an engine is started for those who wait: who could not wait for it was refused at once."""
        return max(self.settings.gap_max_s, START_PATIENCE * self._sessions.start_s(self.model))

    def _show(self) -> None:
        metrics.QUEUE_DEPTH.labels(self.model).set(self.queue.waiting)


class Turns:
    """Those of all models."""

    def __init__(self, sessions: Sessions, changes: Callable[[], int]) -> None:
        self._sessions = sessions
        self._changes = changes
        self._models: dict[str, ModelTurns] = {}
        self.settings = QueueSettings()
        self.stopped = False

    def get(self, model: str) -> ModelTurns | None:
        return self._models.get(model)

    def make(self, model: str) -> ModelTurns:
        """Only for models that exist: names come from clients."""
        made = self._models[model] = ModelTurns(model, self.settings, self._sessions, self._changes)
        return made

    def apply(self, settings: QueueSettings) -> None:
        """Of all queues."""
        self.settings = settings
        for turns in self._models.values():
            turns.apply(settings)

    def stop(self) -> None:
        """All that wait are refused: this process ends before their turn comes."""
        self.stopped = True
        for turns in self._models.values():
            turns.refuse_all()

    def retain(self, models: Collection[str]) -> None:
        """Forgets all models but these, as soon as nobody waits for them or runs."""
        for model in self._models.keys() - set(models):
            if self._models[model].is_idle:
                self._models.pop(model).close()

    def unserved(self, now: float) -> dict[str, int]:
        """How many wait for each model that nothing serves."""
        waiting = {model: turns.queue.waiting for model, turns in self._models.items() if turns.queue.waiting}
        return {model: count for model, count in waiting.items() if not self._sessions.serves(model, now)}

    @property
    def waiting(self) -> int:
        return sum([turns.queue.waiting for turns in self._models.values()])

    @property
    def running(self) -> int:
        return sum([turns.queue.running for turns in self._models.values()])
