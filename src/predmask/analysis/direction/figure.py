"""The figure of the direction study: each criterion beside the ratio, on the same sets of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predmask.analysis.direction.outcomes import ALL_OUTSIDE, Row
from predmask.analysis.direction.view import LABELS, interval_text, value_text
from predmask.plotting import BLUE, VERMILLION, canvas

_FIGURES = {
    "unsafe_keep": ("unsafe-keep", "% of the tokens kept"),
    "accuracy": ("right", "% of the set's tokens"),
}
"""What is shown, and of what it is a share. Shrink-kept is what unsafe-keep leaves, changes of exactly 0 aside."""


def draw(variants: Mapping[str, Sequence[Row]], path: Path, *, delta: float, divergence: str = "topk") -> None:
    """For each variant, unsafe-keep and the share of right signs of every criterion and of the ratio on its sets."""
    panels = [(name, what) for what in _FIGURES for name in variants]
    with canvas(path, 1 + 3.1 * len(panels), 5.2) as figure:
        axes = figure.subplots(2, len(panels), squeeze=False, sharey="row")
        for column, (name, what) in enumerate(panels):
            rows = [row for row in variants[name] if row.divergence == divergence]
            ratios = {row.of: row for row in rows if row.criterion == "ratio"}
            for axis, inside in zip(axes[:, column], (True, False), strict=True):
                shown = [row for row in rows if (row.of == ALL_OUTSIDE) == inside and row.criterion != "ratio"]
                _panel(axis, shown, ratios, what)
            title, of = _FIGURES[what]
            axes[0, column].set_title(f"{title}, {name}", fontsize=10)
            axes[1, column].set_xlabel(of)
        axes[0, 0].set_ylabel("all tokens outside")
        axes[1, 0].set_ylabel("where it disagrees\nwith the ratio")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        known = any(row.figures[what].low is not None for name, what in panels for row in variants[name])
        figure.suptitle(
            f"{LABELS[divergence]} of tokens outside (delta {delta:g}) over their optimiser step; "
            f"{'lines: 95 % intervals; ' if known else ''}numbers: the difference to the ratio, in points",
            fontsize=10,
        )


def _panel(axis: Any, rows: Sequence[Row], ratios: Mapping[str, Row], what: str) -> None:
    for place, row in enumerate(rows):
        for at, of, colour, mark, label in (
            (place - 0.13, row, BLUE, "o", "the criterion"),
            (place + 0.13, ratios[row.of], VERMILLION, "D", "the ratio, on the same set"),
        ):
            value, low, high = of.figures[what]
            if value is None:
                continue
            if low is not None and high is not None:
                axis.plot([100 * low, 100 * high], [at, at], color=colour, lw=1.4)
            face = colour if mark == "o" else "white"
            axis.plot([100 * value], [at], mark, color=colour, mfc=face, ms=5, ls="", label="" if place else label)
        difference = row.to_ratio[what]
        if difference.value is not None:
            # Above the marks: the difference is what the study says.
            text = f"{value_text(difference, '+')} {interval_text(difference, '+')}".rstrip()
            at = (0.98, place - 0.3)
            axis.annotate(text, at, xycoords=("axes fraction", "data"), ha="right", va="bottom", size=7)
    axis.set_yticks(range(len(rows)), [row.criterion for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.margins(x=0.12)
    axis.grid(axis="x", color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
