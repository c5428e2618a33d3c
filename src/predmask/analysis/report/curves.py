"""The curves of a run: few, well named, from its metrics or, for a trace of another trainer, from the trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from predmask.analysis.report.digest import Digest
from predmask.analysis.runs import Run

Points = dict[str, list[tuple[int, float]]]
"""(step, value) of each figure, by its name in docs/method.md."""

MOST_POINTS = 300
"""Of longer runs, neighbouring steps are one point of a line, and one row of its table."""


@dataclass(frozen=True)
class Row:
    """The figures of a step, or of neighbouring steps together."""

    first: int
    last: int
    together: int
    """Steps that have figures, from `first` to `last`."""
    values: Mapping[str, float]
    """By their names; absent where no step has one."""

    @property
    def name(self) -> str:
        """Which steps."""
        return f"{self.first} to {self.last}" if self.together > 1 else f"{self.last}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure of a chart."""

    figure: str
    """Its name in metrics.jsonl."""
    label: str
    style: str
    """Colour, line style and marker: a name in `predmask.analysis.report.figures.STYLES`."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines that are drawn together, and what to look at."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    note: str
    percent: bool = False
    log: bool = False


CHARTS = (
    Chart(
        title="Reward and accuracy",
        unit="reward, accuracy",
        lines=(
            Line(figure="reward", label="reward", style="purple"),
            Line(figure="accuracy", label="accuracy, training", style="grey"),
            Line(figure="heldout_sampled", label="held-out, sampled", style="blue"),
            Line(figure="heldout_greedy", label="held-out, greedy", style="vermillion"),
        ),
        note="Healthy: it rises, and held-out accuracy follows. A fall that does not recover is a collapse; look at "
        "the divergences of the steps before it.",
    ),
    Chart(
        title="Masked tokens by sign",
        unit="% of known response tokens",
        lines=(
            Line(figure="mask_frac_pos", label="A > 0", style="blue"),
            Line(figure="mask_frac_neg", label="A < 0", style="vermillion"),
        ),
        note="Healthy: a few percent at most, without a trend (0, where the rule drops nothing). A share that climbs "
        "says that the policy leaves the rollouts behind faster than new ones come; one sign alone often means a few "
        "token ids.",
        percent=True,
    ),
    Chart(
        title="Divergence of kept and of masked tokens",
        unit="mean divergence",
        lines=(
            Line(figure="divergence_kept_mean", label="kept", style="green"),
            Line(figure="divergence_masked_mean", label="masked", style="vermillion"),
        ),
        note="The rule's own proximity value (rule none: KL). Healthy: kept tokens far below the threshold, if there "
        "is one. Where their mean nears it, most updates are about to be masked.",
        log=True,
    ),
    Chart(
        title="Mismatch",
        unit="nats per token",
        lines=(
            Line(figure="mismatch_kl", label="engine alone", style="grey"),
            Line(figure="behaviour_kl", label="KL(mu‖pi)", style="blue"),
        ),
        note="Engine alone: mean r - 1 - log r of tokens that the current weights sampled, which engine and trainer "
        "should agree on. KL(mu‖pi): the whole distance, with the updates since the sampling. Healthy: both level, the "
        "first below the second. A first curve that grows points at the engine: its numerics, old weights, or a stale "
        "prefix cache.",
        log=True,
    ),
    Chart(
        title="Entropy",
        unit="nats per token",
        lines=(Line(figure="entropy", label="entropy of the policy", style="green"),),
        note="Healthy: a slow decline. Near 0 nothing is explored any more; a sudden rise often comes before a "
        "collapse.",
    ),
    Chart(
        title="Staleness",
        unit="optimiser steps",
        lines=(
            Line(figure="staleness_mean", label="mean", style="blue"),
            Line(figure="staleness_max", label="largest", style="grey"),
        ),
        note="Optimiser steps between the sampling of a token and its update. Healthy: level; with n optimiser steps "
        "on each rollout, the largest is n - 1. Growth means that old rollouts queue up.",
    ),
    Chart(
        title="Response length",
        unit="tokens",
        lines=(Line(figure="response_length", label="mean length", style="green"),),
        note="Healthy: it drifts slowly. A climb to the length limit means responses that never end.",
    ),
)
"""Every chart of the report, in its order; one without points is left out."""

_NAMES = tuple(line.figure for chart in CHARTS for line in chart.lines)


def points(run: Run, found: Digest | None) -> Points:
    """The curves of a run; those of the trace where it has no metrics."""
    records: Iterable[Mapping[str, Any]] = run.steps
    if not run.steps and found is not None:
        records = ({"step": number, **step.metrics.compute()} for number, step in found.steps.items())
    curves: Points = {}
    for record in records:
        _add(curves, record["step"], {name: record.get(name) for name in _NAMES})
    for record in run.evaluations:
        _add(curves, record["step"], {f"heldout_{name}": record.get(name) for name in ("sampled", "greedy")})
    return curves


def thinned(curves: Points, most: int = MOST_POINTS) -> list[Row]:
    """A row a step; where there are more than `most` steps, neighbouring ones are together.

    Together they have the mean of their values, and of maxima (`*_max`) the largest; values that are not finite count
    only where there are no others.
    """
    figures: dict[int, list[tuple[str, float]]] = {}
    for name, curve in curves.items():
        for step, value in curve:
            figures.setdefault(step, []).append((name, value))
    steps = sorted(figures)
    size = max(1, math.ceil(len(steps) / most))
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [Row(part[0], part[-1], len(part), _together(figures[step] for step in part)) for part in parts]


def thinning(rows: Sequence[Row], lines: Sequence[Line] = ()) -> str:
    """A sentence on what a point stands for, where that is more than a step."""
    together = max((row.together for row in rows), default=1)
    if together == 1:
        return ""
    maxima = [line.label for line in lines if line.figure.endswith("_max")]
    largest = f", of {' and '.join(repr(label) for label in maxima)} their largest value" if maxima else ""
    return f" A point is the mean of {together} neighbouring steps{largest}."


def _together(figures: Iterable[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """One value of each figure."""
    values: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(figures):
        values.setdefault(name, []).append(value)
    finite = {name: [value for value in found if math.isfinite(value)] or found for name, found in values.items()}
    return {name: max(found) if name.endswith("_max") else sum(found) / len(found) for name, found in finite.items()}


def _add(curves: Points, step: int, figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, int | float):
            curves.setdefault(name, []).append((step, float(value)))
