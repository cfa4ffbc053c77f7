"""How much of a session's time, and of its GPUs' energy, each of its requests has had. Pure: time is an argument.

While n requests run at a session, each of them has an n-th of its time. So the shares of all requests add up to the
time in which the session was busy: no second of a GPU is charged twice, and none of a busy one is lost. What runs there
for other ingresses is known from the session's status, about once a second; own requests are known exactly. So is the
power of the GPUs, which is divided as the time is: what they draw while nobody is there is nobody's.
"""

from __future__ import annotations

from collections.abc import Collection

_NEW_REPORT_COUNTS = 0.25
"""How much of a report is believed: its own requests may have changed since it was made."""


class Share:
    """One request's part of one session's time."""

    __slots__ = ("_began_at", "_began_j", "ended_at", "ended_j", "session")

    def __init__(self, session: str, began_at: float, began_j: float) -> None:
        self.session = session
        self._began_at = began_at
        self._began_j = began_j
        self.ended_at: float | None = None
        self.ended_j = 0.0

    def until(self, reading: float) -> float:
        """Its part, in seconds, until the session's clock read so much, or until it ended."""
        return (reading if self.ended_at is None else self.ended_at) - self._began_at

    def joules_until(self, reading_j: float) -> float:
        """Its part of the energy, until the session's meter read so much, or until it ended."""
        return (reading_j if self.ended_at is None else self.ended_j) - self._began_j


class _Clock:
    """Of one session: in each second it goes on by one n-th of a second, and its meter by one n-th of its power."""

    __slots__ = ("_at_s", "_others", "_power_w", "_reading", "_sequence", "joules", "running")

    def __init__(self, now: float) -> None:
        self._reading = 0.0
        self._power_w = 0.0
        self.joules = 0.0
        """As of the last reading."""
        self._at_s = now
        self._others = 0.0
        self._sequence = -1
        self.running: set[Share] = set()

    def read(self, now: float) -> float:
        if now > self._at_s:
            if self.running:
                part_s = (now - self._at_s) / (len(self.running) + max(0, round(self._others)))
                self._reading += part_s
                self.joules += part_s * self._power_w
            self._at_s = now
        return self._reading

    def report(self, sequence: int, in_flight: int, power_w: float, now: float) -> None:
        if sequence != self._sequence:
            self.read(now)
            self._sequence = sequence
            self._power_w = power_w
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
        share = Share(session, clock.read(now), clock.joules)
        clock.running.add(share)
        return share

    def seconds(self, share: Share, now: float) -> float:
        """What it has had until now."""
        clock = self._clocks.get(share.session)
        return share.until(0.0 if clock is None else clock.read(now))

    def joules(self, share: Share, now: float) -> float:
        """What it has had of the GPUs' energy until now."""
        clock = self._clocks.get(share.session)
        if clock is None:
            return share.joules_until(0.0)
        clock.read(now)
        return share.joules_until(clock.joules)

    def end(self, share: Share, now: float) -> None:
        """It is over. May be said twice."""
        clock = self._clocks[share.session]
        if share in clock.running:
            share.ended_at, share.ended_j = clock.read(now), clock.joules
            clock.running.remove(share)

    def report(self, session: str, sequence: int, in_flight: int, now: float, power_w: float | None = None) -> None:
        """The session says how many requests it has, of all ingresses, and what its GPUs draw together, if it knows;
        each `sequence` counts once."""
        self._clocks[session].report(sequence, in_flight, power_w or 0.0, now)

    @property
    def sessions(self) -> list[str]:
        return list(self._clocks)

    def retain(self, sessions: Collection[str]) -> None:
        """Forgets all others, unless a request is still there."""
        for session in [s for s, clock in self._clocks.items() if s not in sessions and not clock.running]:
            del self._clocks[session]
