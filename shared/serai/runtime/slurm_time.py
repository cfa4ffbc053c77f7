"""How Slurm writes durations. Pure."""

from __future__ import annotations

import re

_CLOCK = re.compile(r"(?:(\d{1,7})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?")


def duration_s(text: str) -> float | None:
    """Seconds of a Slurm duration: `30` (minutes), `5:00`, `1:00:00`, `2-12`, `2-12:30`, `2-12:30:00`. None for
    `UNLIMITED`, `INVALID`, `NOT_SET` and everything else that is none."""
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        return None
    days, *clock = (None if part is None else int(part) for part in found.groups())
    first, second, third = clock
    assert first is not None
    if days is not None:
        return float(days * 86_400 + first * 3600 + (second or 0) * 60 + (third or 0))
    if third is not None:
        return float(first * 3600 + (second or 0) * 60 + third)
    return float(first * 60 + (second or 0))


def duration_text(seconds: float) -> str:
    """As sbatch takes it: `8:00:00`, `1-12:00:00`. Slurm counts in minutes, so what is more than a whole one is left
    out; at least one minute."""
    minutes = max(1, int(seconds // 60))
    days, minutes = divmod(minutes, 24 * 60)
    hours, minutes = divmod(minutes, 60)
    return f"{days}-{hours:02}:{minutes:02}:00" if days else f"{hours}:{minutes:02}:00"
