"""The direction study as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from predmask.analysis.direction.bootstrap import Estimate
from predmask.analysis.direction.logit_steps import EPSILONS
from predmask.analysis.direction.outcomes import CRITERIA, OUTSIDE, Counts, Row
from predmask.plotting import BLUE, VERMILLION, canvas

Cells = list[list[str]]
"""The rows of a table, its heading first."""

DIVERGENCES = {"topk": "top-K KL", "full": "full-vocabulary KL"}
_FIGURES = {"unsafe_keep": "unsafe-keep", "shrink_kept": "shrink-kept"}


def outside_table(rows: Iterable[Row], divergence: str) -> Cells:
    """All tokens outside, a row for each criterion."""
    return _table([row for row in rows if row.divergence == divergence and row.of == OUTSIDE])


def disagreement_table(rows: Iterable[Row], divergence: str) -> Cells:
    """The tokens where a criterion disagrees with the ratio: for each criterion a set of its own, so in pairs."""
    return _table([row for row in rows if row.divergence == divergence and row.of != OUTSIDE])


def steps_table(counts: Counts, divergence: str) -> Cells:
    """Single logit steps: share of the tokens where the sign is right, by the step's size and criterion."""
    criteria = [name for name in CRITERIA if f"{divergence}/{EPSILONS[0]:g}/{name}" in counts]
    cells = [["step", *criteria]]
    for epsilon in EPSILONS:
        pooled = [counts[f"{divergence}/{epsilon:g}/{name}"].sum(0).tolist() for name in criteria]
        cells.append([f"{epsilon:g}", *(f"{100 * right / tokens:.2f}" if tokens else "-" for tokens, right in pooled)])
    return cells


def aligned(cells: Cells) -> str:
    """A table for a terminal: the first column to the left, numbers to the right."""
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in cells)


def draw(variants: Mapping[str, Sequence[Row]], path: Path, *, delta: float, divergence: str = "topk") -> None:
    """For each variant, unsafe-keep and shrink-kept of every criterion beside the ratio on the same tokens."""
    panels = [(name, figure) for figure in _FIGURES for name in variants]
    with canvas(path, 1 + 3.1 * len(panels), 5.2) as figure:
        axes = figure.subplots(2, len(panels), squeeze=False, sharey="row")
        for column, (name, what) in enumerate(panels):
            rows = [row for row in variants[name] if row.divergence == divergence and row.criterion != "ratio"]
            ratios = {
                row.of: row for row in variants[name] if row.divergence == divergence and row.criterion == "ratio"
            }
            for axis, inside in zip(axes[:, column], (True, False), strict=True):
                shown = [row for row in rows if (row.of == OUTSIDE) == inside and row.criterion != "ratio"]
                _panel(axis, shown, ratios, what)
            axes[0, column].set_title(f"{_FIGURES[what]}, {name}", fontsize=10)
            axes[1, column].set_xlabel("% of the tokens kept")
        axes[0, 0].set_ylabel("all tokens outside")
        axes[1, 0].set_ylabel("where it disagrees\nwith the ratio")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        label = DIVERGENCES[divergence]
        figure.suptitle(
            f"{label} of tokens outside (delta {delta:g}) over their optimiser step; "
            "numbers: paired difference to the ratio, in points, with its 95 % interval",
            fontsize=10,
        )


def _panel(axis: Any, rows: Sequence[Row], ratios: Mapping[str, Row], what: str) -> None:
    for place, row in enumerate(rows):
        for at, of, colour, mark, label in (
            (place - 0.13, row, BLUE, "o", "the criterion"),
            (place + 0.13, ratios[row.of], VERMILLION, "D", "the ratio, on the same tokens"),
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
            # Above the marks: the paired difference is what the study says.
            at = (0.98, place - 0.3)
            axis.annotate(_points(difference), at, xycoords=("axes fraction", "data"), ha="right", va="bottom", size=7)
    axis.set_yticks(range(len(rows)), [row.criterion for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.margins(x=0.12)
    axis.grid(axis="x", color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _table(rows: Sequence[Row]) -> Cells:
    cells = [["criterion", "tokens", "kept", "unsafe-keep", "minus ratio's", "shrink-kept", "minus ratio's", "right"]]
    for row in rows:
        cell = [row.criterion, f"{row.tokens:,}", f"{row.kept:,}"]
        for figure in _FIGURES:
            cell += [_share(row.figures[figure]), "" if row.criterion == "ratio" else _points(row.to_ratio[figure])]
        cells.append([*cell, _share(row.figures["accuracy"])])
    return cells


def _share(figure: Estimate) -> str:
    """In percent."""
    return "-" if figure.value is None else f"{100 * figure.value:.1f}"


def _points(figure: Estimate) -> str:
    """In percentage points, with the interval as far as there is one."""
    if figure.value is None:
        return "-"
    ends = "" if figure.low is None or figure.high is None else f" [{100 * figure.low:+.1f}, {100 * figure.high:+.1f}]"
    return f"{100 * figure.value:+.1f}{ends}"
