"""How pictures look, and how they are written: one palette, one size of letters, legends outside the data.

Colours are those of Okabe and Ito, which people with any of the common colour blindnesses tell apart; what a colour
says, a marker or a line style says too. Figures are made without pyplot: no display, nothing global.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
QUIET = "#767676"
"""For what is not data: targets, levels, notes."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "svg.hashsalt": "serai",
    "svg.fonttype": "none",
}


class ExtraMissing(Exception):
    """A library that draws is not installed; one line that says how to get it."""


@contextmanager
def picture(stem: Path, title: str, *, width_in: float = 7.0, height_in: float = 3.6) -> Iterator[tuple[Figure, Axes]]:
    """A figure to draw into; when the block ends it is written as `stem`.png and `stem`.svg."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ExtraMissing(f"pictures need {error.name}: run `pip install 'serai[simulator]'`") from error
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        # A line for each dozen letters or so that an inch holds; the legend stands beside, in the middle.
        axes.set_title(textwrap.fill(title, round(width_in * 11)))
        yield figure, axes
        stem.parent.mkdir(parents=True, exist_ok=True)
        # Dates and versions would make each run's file another.
        figure.savefig(written(stem, "png"), dpi=150, metadata={"Software": None})
        figure.savefig(written(stem, "svg"), metadata={"Date": None, "Creator": None})


def written(stem: Path, ending: str) -> Path:
    """The file of a picture. Names may hold points, so the ending is added, not replaced."""
    return stem.with_name(f"{stem.name}.{ending}")


def legend(figure: Figure, axes: Axes) -> None:
    """Names beside the data, in the order drawn."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="outside right center")


def percent(axes: Axes) -> None:
    """The upright axis in per cent, from 0 to 100."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def logarithmic(axes: Axes) -> None:
    """The level axis on a logarithmic scale, with plain numbers; the shorter it is, the more of them. After drawing."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    numbers = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0) if high < 15 * low else (1.0, 2.0, 5.0) if high < 3000 * low else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=numbers))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
