"""Pictures of the policy studies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from serai.simulator.reports.drawing import MARKERS, PALETTE, QUIET, legend, percent, picture


def grouped_bars(stem: Path, heights: Mapping[str, Mapping[str, float]], *, what: str, title: str) -> None:
    """A group of bars for each kind, a bar a system: `heights` by system, then by kind. A missing one is left out."""
    kinds = list(dict.fromkeys(kind for by_kind in heights.values() for kind in by_kind))
    width = 0.84 / max(1, len(heights))
    with picture(stem, title, width_in=min(14.0, max(7.0, 2.6 + 1.15 * len(kinds)))) as (figure, axes):
        for place, (system, by_kind) in enumerate(heights.items()):
            axes.bar(
                [number - 0.42 + width * (place + 0.5) for number in range(len(kinds))],
                [by_kind.get(kind, math.nan) for kind in kinds],
                width=width * 0.9,
                color=PALETTE[place % len(PALETTE)],
                label=system,
            )
        axes.set_xticks(range(len(kinds)), kinds, fontsize=7.5)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(what)
        legend(figure, axes)


def lines(
    stem: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    across: str,
    up: str,
    title: str,
    shares: bool = False,
    levels: Sequence[float] = (),
) -> None:
    """A line a system through (x, y). With `shares` the upright axis is in per cent."""
    with picture(stem, title) as (figure, axes):
        for level in levels:
            axes.axhline(level, color=QUIET, linewidth=0.8, linestyle=":", zorder=1)
        for place, (name, points) in enumerate(curves.items()):
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=PALETTE[place % len(PALETTE)],
                marker=MARKERS[place % len(MARKERS)],
                label=name,
            )
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_xlim(left=0)
        if shares:
            percent(axes)
        else:
            axes.set_ylim(bottom=0)
        legend(figure, axes)


def histogram(stem: Path, values: Sequence[float], *, across: str, up: str, title: str, mark: float) -> None:
    """How often each value occurs, with a line at `mark`."""
    with picture(stem, title) as (figure, axes):
        axes.hist(values, bins=40, color=PALETTE[0])
        axes.axvline(mark, color=PALETTE[1], linewidth=1.2, linestyle="--", label=f"{mark:g}")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_yscale("symlog")
        legend(figure, axes)
