"""A comparison as a table, as JSON and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from predmask.analysis.compare import CONFIDENCE, FIGURES, IGNORED, Comparison, Figure, Group, Mean, show_option
from predmask.analysis.runs import Run
from predmask.analysis.text import visible
from predmask.plotting import COLOURS, canvas

# Beyond the colours, and in print, the line styles tell groups apart.
_LINES = ("-", "--", ":", "-.")
_CURVES = {"accuracy": "training accuracy", "mask_frac": "masked share", "behaviour_kl": "KL(mu‖pi)"}


def text(comparison: Comparison, width: int = 100) -> str:
    """The whole comparison, in lines of up to `width` columns."""
    groups = comparison.groups
    parts = [_runs(comparison)]
    heads = [group.label.split(" ") for group in groups]
    if comparison.differing:
        rows = [[name, *(show_option(group.options.get(name)) for group in groups)] for name in comparison.differing]
        parts.append(_table(["options that differ"], heads, rows, width))
    parts.append("\n".join(_legend(comparison)))
    rows = [[_row_label(comparison, figure), *(_cell(group, figure) for group in groups)] for figure in FIGURES]
    counted = [[*head, f"n = {len(group.runs)}"] for head, group in zip(heads, groups, strict=True)]
    parts.append(_table(["mean ± 95 % interval"], counted, rows, width))
    for seeds, same in groupby(comparison.pairs(), key=lambda pair: pair[1]):
        parts.append(_differences(comparison, [group for group, _ in same], seeds, width))
    if comparison.notes:
        parts.append("\n".join(f"note  {note}" for note in comparison.notes))
    return "\n".join(map(visible, "\n\n".join(parts).split("\n")))


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Every number of the comparison, by the names of metrics.jsonl."""
    return {
        "steps": [comparison.first, comparison.last],
        "evaluated": comparison.evaluated,
        "confidence": CONFIDENCE,
        "ignored": list(IGNORED),
        "differing": list(comparison.differing),
        "groups": [
            {
                "label": group.label,
                "options": {name: group.options.get(name) for name in comparison.differing},
                "runs": [_run_json(run) for run in group.runs],
                "figures": {
                    figure.key: {**_mean_json(group.mean(figure)), "values": list(group.values[figure.key])}
                    for figure in FIGURES
                },
            }
            for group in comparison.groups
        ],
        "differences": [
            {
                "of": group.label,
                "to": comparison.groups[0].label,
                "seeds": seeds,
                "figures": {figure.key: _mean_json(comparison.difference(group, seeds, figure)) for figure in FIGURES},
            }
            for group, seeds in comparison.pairs()
        ],
        "notes": list(comparison.notes),
    }


def draw(comparison: Comparison, path: Path) -> None:
    """Curves of each group: the mean over its runs, and the range from the least to the largest."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with canvas(path, 11, 3.6) as figure:
        axes = figure.subplots(1, len(_CURVES))
        for axis, (key, title) in zip(axes, _CURVES.items(), strict=True):
            for index, group in enumerate(comparison.groups):
                steps, runs = _curves(group, key)
                colour = COLOURS[index % len(COLOURS)]
                style = {"color": colour, "ls": _LINES[index % len(_LINES)], "marker": "." if len(steps) < 2 else None}
                axis.plot(steps, [fmean(values) for values in runs], label=group.label, lw=1.6, **style)
                if any(len(values) > 1 for values in runs):
                    low, high = [min(values) for values in runs], [max(values) for values in runs]
                    axis.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
            axis.set(title=title, xlabel="step")
            axis.set_ylim(bottom=0.0)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            if key != "behaviour_kl":
                axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylim(0.0, 1.02)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
        if any(len(group.runs) > 1 for group in comparison.groups):
            figure.suptitle("mean over seeds, and their range", fontsize=10)


def _curves(group: Group, key: str) -> tuple[list[int], list[list[float]]]:
    """Steps at which every run of the group has been, and the finite numbers of its runs there."""
    end = min(run.steps[-1]["step"] for run in group.runs)
    found: dict[int, list[float]] = {}
    for run in group.runs:
        for record in run.steps:
            value = record.get(key)
            if record["step"] <= end and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(record["step"], []).append(float(value))
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _runs(comparison: Comparison) -> str:
    count = sum(len(group.runs) for group in comparison.groups)
    groups = len(comparison.groups)
    lines = [f"{count} runs in {groups} group{'s' if groups > 1 else ''} (runs that differ in their seed only are one)"]
    for group in comparison.groups:
        lines.append(f"  {group.label}")
        lines += [f"    seed {_or_dash(run.config.get('seed')):<4} {run.path}" for run in group.runs]
    return "\n".join(lines)


def _legend(comparison: Comparison) -> list[str]:
    first, last = comparison.first, comparison.last
    over = f"steps {first} to {last}" if first < last else f"step {last}"
    lines = [f"Means over {over} (step {last} is the last that every run has); sums over steps 1 to {last}."]
    if comparison.evaluated is None:
        lines.append("There is no step after training began at which every run was evaluated on held-out problems.")
    if any(len(group.runs) > 1 for group in comparison.groups):
        lines += [
            "± is half the 95 % interval of the mean over seeds (Student's t); one in twenty misses by chance. Whether",
            "groups differ is for the intervals of differences to say, where they share seeds.",
        ]
    else:
        lines.append("One run a group: without more seeds nobody can tell a difference from chance.")
    return lines


def _row_label(comparison: Comparison, figure: Figure) -> str:
    at = figure.over == "heldout" and comparison.evaluated is not None
    return f"{figure.label} (step {comparison.evaluated})" if at else figure.label


def _cell(group: Group, figure: Figure) -> str:
    mean = group.mean(figure)
    return _show(mean, figure.form) + (f" (n = {mean.runs})" if mean and mean.runs < len(group.runs) else "")


def _show(mean: Mean | None, form: str, sign: str = "") -> str:
    if mean is None:
        return "-"
    shown = format(mean.value, sign + form)
    return shown if mean.half_width is None else f"{shown} ± {format(mean.half_width, form.replace('.3g', '.2g'))}"


def _differences(comparison: Comparison, groups: Sequence[Group], seeds: Sequence[Any], width: int) -> str:
    rows = []
    for figure in FIGURES:
        found = [comparison.difference(group, seeds, figure) for group in groups]
        shown = [_show(mean, figure.form, "+").replace("%", " pp") for mean in found]
        short = [f" (n = {mean.runs})" if mean and mean.runs < len(seeds) else "" for mean in found]
        rows.append([figure.label, *(a + b for a, b in zip(shown, short, strict=True))])
    title = (
        f"Differences to {comparison.groups[0].label}, paired by seed ({', '.join(map(str, seeds))}; pp: percentage "
        "points).\nAn interval that holds 0 shows no difference."
    )
    return title + "\n\n" + _table(["difference ± 95 %"], [group.label.split(" ") for group in groups], rows, width)


def _table(corner: list[str], heads: Sequence[list[str]], rows: Sequence[list[str]], width: int) -> str:
    """Columns under heads of several lines; as many beside each other as fit, the others below."""
    first = max(map(len, corner + [row[0] for row in rows]))
    columns = [[row[1 + index] for row in rows] for index in range(len(heads))]
    widths = [max(map(len, head + column)) for head, column in zip(heads, columns, strict=True)]
    blocks: list[list[int]] = []
    for index in range(len(heads)):
        if not blocks or first + sum(2 + widths[i] for i in [*blocks[-1], index]) > width:
            blocks.append([])
        blocks[-1].append(index)
    height = max(map(len, heads))

    def line(label: str, cells: Sequence[str], block: Sequence[int]) -> str:
        return (label.ljust(first) + "".join(f"  {cells[i]:>{widths[i]}}" for i in block)).rstrip()

    parts = []
    for block in blocks:
        lines = [
            line("" if row else corner[0], [head[row] if row < len(head) else "" for head in heads], block)
            for row in range(height)
        ]
        parts.append("\n".join(lines + [line(row[0], row[1:], block) for row in rows]))
    return "\n\n".join(parts)


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "seed": run.config.get("seed"),
        "status": run.status,
        "steps": run.steps[-1]["step"],
    }


def _mean_json(mean: Mean | None) -> dict[str, Any]:
    if mean is None:
        return {"mean": None, "half_width": None, "runs": 0}
    return {"mean": mean.value, "half_width": mean.half_width, "runs": mean.runs}


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
