"""What every figure has in common: colours that all eyes tell apart, formats, and the same file for the same data."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
"""The palette of Okabe and Ito (2008)."""
RC: dict[Any, Any] = {"svg.hashsalt": "predmask", "font.size": 9}
"""Matplotlib's settings: the same data draws the same file, whose text is readable at its own size."""
_FORMATS = (".svg", ".png")


class FigureError(ValueError):
    """A figure that cannot be written; the text says what to change."""


def need_matplotlib() -> None:
    """Raise ImportError where matplotlib is missing: before anything is measured or read."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("no matplotlib", name="matplotlib")


def check_path(path: Path) -> None:
    """Raise FigureError for a format that is not offered, ImportError where matplotlib is missing."""
    if path.suffix not in _FORMATS:
        raise FigureError(f"{path}: the figure is written as {' or '.join(_FORMATS)}")
    need_matplotlib()


@contextmanager
def canvas(path: Path, width: float, height: float) -> Iterator[Any]:
    """An empty matplotlib figure, in inches; it is written when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white", dpi=150)
