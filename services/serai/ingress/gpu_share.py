"""How much of a session's time each of its requests has had. Pure: time is an argument.

While n requests run at a session, each of them has an n-th of its time. So the shares of all requests add up to the
time in which the session was busy: no second of a GPU is charged twice, and none of a busy one is lost. What runs there
for other ingresses is known from the session's status, about once a second; own requests are known exactly.
"""

from __future__ import annotations

from collections.abc import Collection

_NEW_REPORT_COUNTS = 0.25
"""How much of a report is believed: its own requests may have changed since it was made."""


class Share:
    """One request's part of one session's time."""

    __slots__ = ("_began_at", "ended_at", "session")

    def __init__(self, session: str, began_at: float) -> None:
        self.session = session
        self._began_at = began_at
        self.ended_at: float | None = None

    def until(self, reading: float) -> float:
        """Its part, in seconds, until the session's clock read so much, or until it ended."""
        return (reading if self.ended_at is None else self.ended_at) - self._began_at


class _Clock:
    """Of one session: in each second it goes on by one n-th of a second."""

    __slots__ = ("_at_s", "_others", "_reading", "_sequence", "running")

    def __init__(self, now: float) -> None:
        self._reading = 0.0
        self._at_s = now
        self._others = 0.0
        self._sequence = -1
        self.running: set[Share] = set()

    def read(self, now: float) -> float:
        if now > self._at_s:
            if self.running:
                self._reading += (now - self._at_s) / (len(self.running) + max(0, round(self._others)))
            self._at_s = now
        return self._reading

    def report(self, sequence: int, in_flight: int, now: float) -> None:
        if sequence != self._sequence:
            self.read(now)
            self._sequence = sequence
            self._others += _NEW_REPORT_COUNTS * (in_flight - len(self.running) - self._others)


class GpuShares:
    """Of all sessions that have had requests of this ingress."""

    def __init__(self) -> None:
        self._clocks: dict[str, _Clock] = {}

    def begin(self, session: str, now: float) -> Share:
        """A request starts at `session`."""
        clock = self._clocks.get(session)
        if clock is None:
            clock = self._clocks[session] = _Clock(now)
        share = Share(session, clock.read(now))
        clock.running.add(share)
        return share

    def seconds(self, share: Share, now: float) -> float:
        """What it has had until now."""
        clock = self._clocks.get(share.session)
        return share.until(0.0 if clock is None else clock.read(now))

    def end(self, share: Share, now: float) -> None:
        """It is over. May be said twice."""
        clock = self._clocks[share.session]
        if share in clock.running:
            share.ended_at = clock.read(now)
            clock.running.remove(share)

    def report(self, session: str, sequence: int, in_flight: int, now: float) -> None:
        """The session says how many requests it has, of all ingresses; each `sequence` counts once."""
        self._clocks[session].report(sequence, in_flight, now)

    @property
    def sessions(self) -> list[str]:
        return list(self._clocks)

    def retain(self, sessions: Collection[str]) -> None:
        """Forgets all others, unless a request is still there."""
        for session in [s for s, clock in self._clocks.items() if s not in sessions and not clock.running]:
            del self._clocks[session]
