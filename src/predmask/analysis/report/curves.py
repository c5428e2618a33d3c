"""The curves of a run: few, well named, from its metrics or, for a trace of another trainer, from the trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from predmask.analysis.report.digest import Digest
from predmask.analysis.runs import Run

Points = dict[str, list[tuple[int, float]]]
"""(step, value) of each figure, by its name in docs/method.md."""

MOST_POINTS = 300
"""Of longer runs, neighbouring steps are drawn as one point."""


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
        unit="% of response tokens",
        lines=(
            Line(figure="mask_frac_pos", label="A > 0", style="blue"),
            Line(figure="mask_frac_neg", label="A < 0", style="vermillion"),
        ),
        note="Healthy: a few percent at most, without a trend. A share that climbs says that the policy leaves the "
        "rollouts behind faster than new ones come; one sign alone often means a few token ids.",
        percent=True,
    ),
    Chart(
        title="Divergence of kept and of masked tokens",
        unit="mean divergence",
        lines=(
            Line(figure="divergence_kept_mean", label="kept", style="green"),
            Line(figure="divergence_masked_mean", label="masked", style="vermillion"),
        ),
        note="The rule's own proximity value. Healthy: kept tokens far below the threshold. Where their mean nears it, "
        "most updates are about to be masked.",
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


def thinned(curve: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most `most` points: the means of neighbouring steps, each at the last of them."""
    size = math.ceil(len(curve) / most)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)] if curve else []
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _add(curves: Points, step: int, figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, int | float):
            curves.setdefault(name, []).append((step, float(value)))
