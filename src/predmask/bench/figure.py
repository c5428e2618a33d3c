"""The figure: time over the bound and peak memory, a bar for each variant and configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predmask.bench.ops import Clock, Ratio, Result
from predmask.bench.variants import BOUND
from predmask.plotting import COLOURS, canvas

_LONGEST = 6.0
"""Longer bars are cut off, and labelled with an arrow."""


def draw(results: Sequence[Result], path: Path, clock: Clock = "wall") -> None:
    """Draw the results."""
    names = list(dict.fromkeys(row.name for result in results for row in result.rows if row.name != BOUND))
    labels = {row.name: row.label for result in results for row in result.rows}
    ratios = [result.ratio(row, clock) for result in results for row in result.rows]
    longest = min(_LONGEST, max(ratio.most for ratio in ratios))
    height = 0.8 / len(results)
    with canvas(path, 10, 1.4 + len(names) * (0.18 + 0.19 * len(results))) as figure:
        measured = any(row.peak_bytes is not None for result in results for row in result.rows)
        times, *others = figure.subplots(1, 1 + measured, sharey=True, squeeze=False)[0]
        memory = others[0] if others else None
        for index, result in enumerate(results):
            colour = COLOURS[index % len(COLOURS)]
            for place, name in enumerate(names):
                if (row := result.row(name)) is None:
                    continue
                at = place - 0.4 + (index + 0.5) * height
                _time_bar(times, at, height, result.ratio(row, clock), longest, colour)
                if memory is not None and row.peak_bytes is not None:
                    size = row.peak_bytes / 1e9
                    memory.barh(at, size, height * 0.92, color=colour)
                    memory.annotate(f"{size:.2f}", (size, at), (2, 0), textcoords="offset points", va="center", size=7)
            times.barh(0, 0, color=colour, label=f"{result.case.dtype}, {result.case.tokens:,} tokens")
        times.axvline(1.0, color="#555555", lw=1, ls="--")
        times.set(title="time over that of the three products alone", xlim=(0, longest * 1.14))
        times.set_yticks(range(len(names)), [labels[name] for name in names])
        times.set_ylim(len(names) - 0.5, -0.5)
        if memory is not None:
            memory.set(title="peak memory beyond inputs and gradients, GB")
            memory.margins(x=0.12)
        for axis in (times, *others):
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="y", length=0)
        case = results[0].case
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(f"D = {case.hidden_size:,}, V = {case.vocabulary:,}, K = {case.top_k}", fontsize=10)


def _time_bar(axis: Any, at: float, height: float, ratio: Ratio, longest: float, colour: str) -> None:
    """The ratio with its range, and the number."""
    fits = ratio.median <= longest
    end = min(ratio.most if fits else ratio.median, longest)
    axis.barh(at, min(ratio.median, longest), height * 0.92, color=colour)
    if fits:
        axis.hlines(at, ratio.least, end, color="#222222", lw=0.8)
    text = f"{ratio.median:.2f}" if fits else f"{ratio.median:.3g} →"
    axis.annotate(text, (end, at), (2, 0), textcoords="offset points", va="center", size=7)
