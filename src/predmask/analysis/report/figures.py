"""The report's figures.

All text in them is ours, never that of a trace or configuration. No colour carries a meaning alone: lines differ in
style and marker, areas in hatching, signs in the direction of a triangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from predmask.analysis.report.curves import Chart, Line, Row
from predmask.analysis.report.digest import CELLS, DIVERGENCE_BINS, LIMIT, Digest, ProbabilityMap, log_odds, outside
from predmask.analysis.report.markup import Element
from predmask.analysis.report.svg import drawing, to_svg
from predmask.analysis.show import MARKS
from predmask.core import IcePop, PPOClip, Reason, Rule
from predmask.core.rules import CISPO
from predmask.plotting import BLUE, GREEN, ORANGE, PURPLE, VERMILLION


@dataclass(frozen=True)
class Style:
    """How a line looks."""

    colour: str
    line: str
    marker: str


_HEIGHT = 2.7
"""Inches."""
_LONG_LABEL = 22
"""Letters of which two columns are too wide."""

STYLES = {
    "blue": Style(BLUE, "-", "^"),
    "vermillion": Style(VERMILLION, "--", "v"),
    "green": Style(GREEN, "-", "o"),
    "grey": Style("#555555", ":", "s"),
    "purple": Style(PURPLE, "-", "D"),
}
REASON_COLOURS = {
    Reason.KEPT_RETURNING: ORANGE,
    Reason.DROPPED_POSITIVE: BLUE,
    Reason.DROPPED_NEGATIVE: VERMILLION,
}
_HATCHES = {Reason.KEPT_RETURNING: "", Reason.DROPPED_POSITIVE: "///", Reason.DROPPED_NEGATIVE: "\\\\\\"}
NOTABLE = (Reason.KEPT_RETURNING, Reason.DROPPED_POSITIVE, Reason.DROPPED_NEGATIVE)
"""The reasons of tokens that were dropped, or kept though outside the trust region."""


def chart(which: Chart, rows: Sequence[Row], threshold: Mapping[str, float], name: str) -> Element:
    """Lines over steps, with `threshold` (label to value) across them."""
    with drawing(_HEIGHT) as (figure, axis):
        scale = 100.0 if which.percent else 1.0
        for label, style, drawn in _lines(which, rows):
            axis.plot(
                [step for step, _ in drawn],
                [scale * value if _drawable(value, which.log) else np.nan for _, value in drawn],
                color=style.colour,
                ls=style.line,
                marker=style.marker,
                ms=3.5,
                markevery=max(1, len(drawn) // 12),
                lw=1.4,
                label=label,
            )
        found = np.concatenate([line.get_ydata() for line in axis.lines])
        for label, value in threshold.items():
            axis.axhline(value, color="black", lw=1, ls=(0, (1, 2)), label=f"{label} = {value:g}")
        if which.log and np.isfinite(found).any():
            _log(axis, "y")
        if not which.log:
            low, high = (min(0.0, np.nanmin(found)), max(0.0, np.nanmax(found))) if np.isfinite(found).any() else (0, 1)
            axis.set_ylim(1.06 * low, 1.06 * high or 1.0)
        axis.set(xlabel="step", ylabel=which.unit)
        _whole_steps(axis)
        if len(which.lines) > 1:
            _legend(figure, axis)
        return to_svg(figure, name)


def reasons(rows: Sequence[Row], name: str) -> Element:
    """Shares of all known tokens by `Reason` (its name), of the `NOTABLE` ones, as bars over steps."""
    with drawing(_HEIGHT) as (figure, axis):
        steps = [row.last for row in rows]
        width = 0.8 * min(np.diff(steps), default=1)
        below = np.zeros(len(steps))
        for reason in NOTABLE:
            values = np.array([100 * row.values[reason.name] for row in rows])
            axis.bar(
                steps,
                values,
                width,
                below,
                color=REASON_COLOURS[reason],
                hatch=_HATCHES[reason],
                edgecolor="white",
                lw=0,
                label=MARKS[reason].meaning,
            )
            below += values
        axis.set(xlabel="step", ylabel="% of known response tokens", ylim=(0, max(1.05 * below.max(initial=0), 1e-3)))
        _whole_steps(axis)
        _legend(figure, axis)
        return to_svg(figure, name)


def divergences(found: Digest, threshold: Mapping[str, float], unit: str, name: str) -> Element:
    """How far tokens are from the behaviour policy, by what became of them; both axes are logarithmic."""
    counts = found.divergences.numpy()
    groups = (
        (MARKS[Reason.KEPT_INSIDE].meaning, counts[Reason.KEPT_INSIDE], STYLES["green"], ""),
        (
            MARKS[Reason.KEPT_RETURNING].meaning,
            counts[Reason.KEPT_RETURNING],
            Style(REASON_COLOURS[Reason.KEPT_RETURNING], "-.", ""),
            "",
        ),
        ("dropped", counts[Reason.DROPPED_POSITIVE] + counts[Reason.DROPPED_NEGATIVE], STYLES["vermillion"], "\\\\\\"),
    )
    edges = DIVERGENCE_BINS.numpy()
    filled = np.nonzero(np.sum([group for _, group, _, _ in groups], axis=0))[0]
    with drawing(_HEIGHT) as (figure, axis):
        for label, group, style, hatch in groups:
            if group.any():
                axis.stairs(group, edges, color=style.colour, ls=style.line, lw=1.4, label=label)
                axis.stairs(group, edges, fill=True, color=style.colour, alpha=0.25, hatch=hatch, lw=0)
        for (label, value), line in zip(threshold.items(), ("-", "--"), strict=False):
            axis.axvline(value, color="black", lw=1.2, ls=line, label=f"{label} = {value:g}")
        shown = [*edges[filled], *edges[filled + 1], *threshold.values()] or [edges[0], edges[-1]]
        most = max(group.max() for _, group, _, _ in groups)
        axis.set(ylim=(0.5, max(2 * most, 2)), xlim=(min(shown) / 1.5, max(shown) * 1.5))
        _log(axis, "xy")
        axis.set(xlabel=f"divergence, {unit}", ylabel="tokens")
        _legend(figure, axis)
        return to_svg(figure, name)


def probabilities(found: Digest, which: ProbabilityMap, name: str) -> Element:
    """Where all tokens lie by mu and pi, the border of a rule's trust region, and the tokens that it drops."""
    import matplotlib
    from matplotlib.colors import ListedColormap, LogNorm

    cells = found.cells.numpy()
    edges = np.linspace(-LIMIT, LIMIT, CELLS + 1)
    low, high = _populated(found, edges)
    with drawing(3.9) as (figure, axis):
        axis.grid(False)
        axis.imshow(
            np.ma.masked_equal(cells.T, 0),
            origin="lower",
            extent=(-LIMIT, LIMIT, -LIMIT, LIMIT),
            norm=LogNorm(1, max(cells.max(initial=0), 2)),
            # A single token is seen, too.
            cmap=ListedColormap(matplotlib.colormaps["Greys"](np.linspace(0.25, 0.9, 256))),
            interpolation="nearest",
        )
        _border(axis, which.rule, low, high)
        axis.plot([low, high], [low, high], color="black", lw=0.8, ls=":", label="r = 1")
        for counts, style, label in ((which.positive, "blue", "A > 0"), (which.negative, "vermillion", "A < 0")):
            axis.plot([], [], STYLES[style].marker, color=STYLES[style].colour, ms=5, label=f"dropped, {label}")
            # Four cells share a triangle, whose size says how many tokens it stands for.
            merged = counts.numpy().reshape(CELLS // 2, 2, CELLS // 2, 2).sum((1, 3))
            for size, least, below in ((3.2, 1, 10), (4.2, 10, 100), (5.2, 100, np.inf)):
                mu, pi = np.nonzero((merged >= least) & (merged < below))
                look = {"color": STYLES[style].colour, "ms": size, "mew": 0, "alpha": 0.8}
                axis.plot(edges[1::2][mu], edges[1::2][pi], STYLES[style].marker, **look)
        axis.set(xlim=(low, high), ylim=(low, high), xlabel="mu, the behaviour policy", ylabel="pi, the policy")
        axis.set_aspect("equal")
        for one in (axis.xaxis, axis.yaxis):
            one.set_ticks(
                [float(log_odds(torch.tensor(value).log())) for value in _TICKS.values()], labels=list(_TICKS)
            )
        axis.tick_params(axis="x", rotation=45)
        axis.set(xlim=(low, high), ylim=(low, high))
        _legend(figure, axis)
        return to_svg(figure, name)


def thresholds(rule: Rule | None) -> dict[str, float]:
    """The proximity values at which a rule finds a token outside, each with its name."""
    if isinstance(rule, PPOClip | CISPO):
        return {"eps_high": rule.eps_high, "eps_low": rule.eps_low}
    if isinstance(rule, IcePop):
        return {"high - 1": rule.high - 1, "1 - low": 1 - rule.low}
    delta = getattr(rule, "delta", None)
    return {} if delta is None else {"delta": delta}


def _lines(which: Chart, rows: Sequence[Row]) -> Iterator[tuple[str, Style, list[tuple[int, float]]]]:
    """Label, style and points of each line; lines that would hide each other are one, which says so."""
    found: dict[tuple[tuple[int, float], ...], list[Line]] = {}
    for line in which.lines:
        drawn = tuple((row.last, row.values[line.figure]) for row in rows if line.figure in row.values)
        if drawn:
            found.setdefault(drawn, []).append(line)
    for drawn, lines in found.items():
        label = " and ".join(line.label for line in lines) + (" (equal)" if len(lines) > 1 else "")
        yield label, STYLES[lines[0].style], list(drawn)


_TICKS = {f"1e-{n}": 10.0**-n for n in (6, 5, 4)} | {f"{p:g}"[1:]: p for p in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)}
_TICKS |= {f"1-1e-{n}": 1 - 10.0**-n for n in (4, 5, 6)}


def _populated(found: Digest, edges: Any) -> tuple[float, float]:
    """The stretch that shows all dropped tokens, and all others but a thousandth at either end."""
    along = (found.cells.sum(0) + found.cells.sum(1)).numpy()
    below = np.cumsum(along) / max(along.sum(), 1)
    most = np.nonzero((below > 1e-3) & (below - along / max(along.sum(), 1) < 1 - 1e-3))[0]
    dropped = torch.stack([each.positive + each.negative for each in found.maps]).sum(0)
    filled = np.concatenate([most, *np.nonzero(dropped.numpy())])
    return (edges[filled.min()], edges[filled.max() + 1]) if filled.size else (-LIMIT, LIMIT)


def _border(axis: Any, rule: Rule, low: float, high: float) -> None:
    """The line where the rule's proximity criterion changes its answer."""
    from matplotlib.lines import Line2D

    odds = torch.linspace(low, high, 401, dtype=torch.float64)
    probability = 1 / (1 + 10**-odds)
    pi, mu = torch.meshgrid(probability, probability, indexing="ij")
    found = outside(rule, mu, pi).double().numpy()
    if found.any() and not found.all():
        axis.contour(odds.numpy(), odds.numpy(), found, [0.5], colors="black", linewidths=1.2)
        axis.add_line(Line2D([], [], color="black", lw=1.2, label="border"))


def _drawable(value: float, log: bool) -> bool:
    return bool(abs(value) < 1e100 and (value > 0 or not log))


def _power(value: float, _: int) -> str:
    """A tick's label: 1e-3, .01 to 100 in full, 1e3."""
    return f"{value:g}" if 0.01 <= value < 1000 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _log(axis: Any, which: str) -> None:
    """Logarithmic axes, with ticks in plain text; between the powers of ten, too, where there are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in which:
        axis.set(**{f"{name}scale": "log"})
        low, high = axis.get_xlim() if name == "x" else axis.get_ylim()
        ticks = axis.xaxis if name == "x" else axis.yaxis
        ticks.set_major_locator(LogLocator(subs=(1.0,) if high > 30 * low else (1.0, 2.0, 5.0), numticks=9))
        ticks.set_major_formatter(FuncFormatter(_power))
        ticks.set_minor_formatter(NullFormatter())


def _whole_steps(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _legend(figure: Any, axis: Any) -> None:
    """Above the axes."""
    longest = max(map(len, axis.get_legend_handles_labels()[1]), default=0)
    columns = 1 if longest > _LONG_LABEL else 2
    figure.legend(loc="outside upper left", ncols=columns, borderaxespad=0.2, columnspacing=1.2)
