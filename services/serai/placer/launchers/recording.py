"""Does nothing and keeps what it was asked for: for tests and rehearsals."""

from __future__ import annotations

from dataclasses import dataclass, field

from serai.placer.placement_file import Launchable


@dataclass(slots=True)
class RecordingLauncher:
    """`asked` is what it was asked for, in order."""

    answer: str = ""
    asked: list[tuple[str, int, str]] = field(default_factory=list)

    async def scale(self, what: Launchable, count: int, why: str) -> str:
        self.asked.append((what.name, count, why))
        return self.answer
