"""The figure of a replay: who agrees with whom, what a threshold drops, what an estimator misses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from predmask.analysis.replay import Replay
from predmask.analysis.replay.estimators import Estimators
from predmask.plotting import COLOURS, canvas

# Lines differ in style and marker, too.
_LOOKS = tuple(
    zip(
        COLOURS,
        ("-", "--", "-.", ":", "-", "--"),
        ("o", "^", "s", "D", "v", "x"),
        strict=True,
    )
)


def draw(found: Replay, path: Path) -> None:
    """Draw the panels that there is something for."""
    panels: list[tuple[Callable[[Any, Any], None], Any]] = [(_agreement, found)]
    if found.sweep:
        panels.append((_sweep, found))
    if found.estimators and found.estimators.rows:
        panels.append((_estimators, found.estimators))
    with canvas(path, 2.2 + 4.4 * len(panels), 3.4 + 0.16 * len(found.rules)) as figure:
        for (panel, of), axis in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            panel(axis, of)


def _agreement(axis: Any, found: Replay) -> None:
    """The share of the dropped tokens that both rules drop: tokens that neither drops say little."""
    labels = [row.label for row in found.rules]
    shares = [[found.overall.jaccard(one, other) for other in range(len(labels))] for one in range(len(labels))]
    axis.imshow(
        [[float("nan") if share is None else share for share in row] for row in shares], vmin=0, vmax=1, cmap="Blues"
    )
    for (y, row), x in itertools.product(enumerate(shares), range(len(labels))):
        share = row[x]
        colour = "white" if share is not None and share > 0.6 else "#222222"
        axis.text(x, y, "–" if share is None else f"{share:.1%}", ha="center", va="center", color=colour, size=7)
    axis.set_yticks(range(len(labels)), [f"{label}  {number}" for number, label in enumerate(labels, 1)])
    axis.set_xticks(range(len(labels)), range(1, len(labels) + 1))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title("of the tokens that at least one drops:\nshare that both drop")


def _sweep(axis: Any, found: Replay) -> None:
    from matplotlib.ticker import PercentFormatter

    for number, curve in enumerate(found.sweep):
        _line(axis, found.deltas, curve.shares, number, curve.label)
    axis.set(xscale="log", xlabel="delta", title="share of trainable tokens dropped", ylim=(0, None))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(axis)


def _estimators(axis: Any, found: Estimators) -> None:
    for number, tail in enumerate(found.rows[0].error):
        _line(axis, range(len(found.rows)), [row.error[tail] for row in found.rows], number, f"{tail} tail")
    axis.set_xticks(range(len(found.rows)), [row.top_k for row in found.rows])
    axis.set(yscale="log", xlabel="K", title="mean |rate - full rate|")
    _finish(axis)


def _line(axis: Any, x: Sequence[float], y: Sequence[float | None], number: int, label: str) -> None:
    colour, style, marker = _LOOKS[number % len(_LOOKS)]
    values = [float("nan") if value is None else value for value in y]
    axis.plot(x, values, color=colour, ls=style, marker=marker, ms=3.5, lw=1.3, label=label)


def _finish(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#dddddd", lw=0.6)
    axis.legend(frameon=False, fontsize=8)
