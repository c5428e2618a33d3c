"""The direction study as text: lines and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from predmask.analysis.direction.logit_steps import EPSILONS
from predmask.analysis.direction.outcomes import ALL_OUTSIDE, CRITERIA, Row, Tallies
from predmask.analysis.direction.study_file import pooled
from predmask.analysis.text import percent, rule_text, visible
from predmask.bootstrap import LEAST_CLUSTERS, Estimate
from predmask.traces.reader import ranges

Cells = list[list[str]]
"""The rows of a table, its heading first."""

LABELS = {"topk": "top-K KL", "full": "full-vocabulary KL"}
"""The divergences whose change is measured."""
_INDENT = 10 * " "
_ALIKE = 1e-3
"""Shares that differ by no more, .1 percentage points, look alike."""


def lines(
    counts: Tallies,
    steps: Tallies,
    rows: Sequence[Row],
    *,
    delta: float,
    trainable: int,
    clusters: str,
    brief: bool = True,
) -> Iterator[str]:
    """The tables of a run, or of a variant of the study; `clusters` is what its clusters are called.

    If `brief`, those of the full-vocabulary KL are left out where they look like those of the top-K KL.
    """
    number, tokens = len(next(iter(counts.values()))), rows[0].tokens
    few = number < LEAST_CLUSTERS
    yield f"outside   {tokens:,} of {trainable:,} trainable tokens have top-K KL above {delta:g}"
    yield f"clusters  {number:,} {clusters if number > 1 else clusters.removesuffix('s')}" + (
        f"; intervals need {LEAST_CLUSTERS} or more" if few else ""
    )
    if not tokens:
        return
    yield "figures   in %, differences in percentage points" + ("" if few else "; below them their 95 % intervals")
    one, other = (np.array(_numbers(rows, steps, divergence), dtype=np.float64) for divergence in LABELS)
    same = brief and len(one) == len(other) and np.allclose(one, other, rtol=0, atol=_ALIKE, equal_nan=True)
    for divergence in ("topk",) if same else LABELS:
        yield from _outcome_lines([row for row in rows if row.divergence == divergence], LABELS[divergence])
        cells = steps_table(steps, divergence)
        if len(cells) > 1:
            yield f"\nA single token's logit step: share of right signs of the change of its {LABELS[divergence]}:"
            yield aligned(cells)
    if same:
        yield "\nThe full-vocabulary KL gives the same figures, to within 0.1 percentage points."


def study_lines(
    study: Mapping[str, Any], summaries: Mapping[str, Sequence[Row]], *, brief: bool = True
) -> Iterator[str]:
    """The tables of every variant of a study as `study_file.load` gives it; `summaries` has its rows by variant."""
    protocol = study["protocol"]
    for number, (variant, rows) in enumerate(summaries.items()):
        config, seeds, failed = protocol["variants"][variant], study["seeds"][variant], study["failed"][variant]
        if number:
            yield ""
        yield f"study     {variant}, rule {rule_text(config['rule'])}, steps {config['steps']}"
        if failed:
            which = ranges(sorted(map(int, failed)))
            yield f"failed    {len(failed)} of {len(seeds) + len(failed)} seeds, which are left out: {which}"
            for seed, reason in failed.items():
                yield from wrap(
                    visible(f"seed {seed}: {reason}"), 98, initial_indent=_INDENT, subsequent_indent=_INDENT
                )
        counts, steps = pooled(study, variant)
        trainable = sum(seed["trainable"] for seed in seeds.values())
        yield from lines(
            counts, steps, rows, delta=protocol["delta"], trainable=trainable, clusters="seeds", brief=brief
        )


def outside_table(rows: Iterable[Row], divergence: str) -> Cells:
    """All tokens outside, the same ones for each criterion."""
    cells = _table([row for row in rows if row.divergence == divergence and row.of == ALL_OUTSIDE])
    return [[criterion, *others] for criterion, _, *others in cells]


def disagreement_table(rows: Iterable[Row], divergence: str) -> Cells:
    """The tokens where a criterion disagrees with the ratio: for each criterion a set of its own, so in pairs."""
    return _table([row for row in rows if row.divergence == divergence and row.of != ALL_OUTSIDE])


def steps_table(steps: Tallies, divergence: str) -> Cells:
    """Single logit steps: by the step's size, the tokens that moved and the share of each criterion's right signs."""
    criteria = [name for name in CRITERIA if f"{divergence}/{EPSILONS[0]:g}/{name}" in steps]
    cells = [["step", "tokens", *criteria]]
    for epsilon in EPSILONS if criteria else ():
        pooled = [steps[f"{divergence}/{epsilon:g}/{name}"].sum(0).tolist() for name in criteria]
        shares = [percent(right / tokens if tokens else None) for tokens, right in pooled]
        cells.append([f"{epsilon:g}", f"{pooled[0][0]:,}", *shares])
    return cells


def aligned(cells: Cells) -> str:
    """A table for a terminal: the first column to the left, numbers to the right."""
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in cells)


def value_text(figure: Estimate, sign: str = "") -> str:
    """A share in percent, or with `sign` + a difference in percentage points; a dash over no token."""
    return "–" if figure.value is None else f"{100 * figure.value:{sign}.1f}"


def interval_text(figure: Estimate, sign: str = "") -> str:
    """Its interval; empty where there is none."""
    if figure.low is None or figure.high is None:
        return ""
    return f"[{100 * figure.low:{sign}.1f}, {100 * figure.high:{sign}.1f}]"


def _outcome_lines(rows: Sequence[Row], label: str) -> Iterator[str]:
    """What a divergence did, on all tokens outside and on the sets of disagreement."""
    if not rows:
        return
    divergence = rows[0].divergence
    yield f"\nThe {label} rose for {rows[0].rose:.1%} of all {rows[0].tokens:,} tokens outside:"
    yield aligned(outside_table(rows, divergence))
    rose = [row.rose for row in rows if row.of != ALL_OUTSIDE and row.rose is not None]
    if rose:
        shares = " to ".join(dict.fromkeys(f"{share:.1%}" for share in (min(rose), max(rose))))
        yield f"\nWhere a criterion disagrees with the ratio, it rose for {shares}:"
        yield aligned(disagreement_table(rows, divergence))
    else:
        yield "\nNo criterion disagrees with the ratio on any of them."


def _table(rows: Sequence[Row]) -> Cells:
    """The figures of each row, and in a row below it their intervals as far as there are any."""
    cells = [["criterion", "tokens", "kept", "unsafe-keep", "vs ratio", "shrink-kept", "right", "vs ratio"]]
    for row in rows:
        is_ratio = row.criterion == "ratio"
        columns = [
            (row.figures["unsafe_keep"], ""),
            (None if is_ratio else row.to_ratio["unsafe_keep"], "+"),
            (row.figures["shrink_kept"], ""),
            (row.figures["accuracy"], ""),
            (None if is_ratio else row.to_ratio["accuracy"], "+"),
        ]
        for head, text in (
            ([row.criterion, f"{row.tokens:,}", f"{row.kept:,}"], value_text),
            (["", "", ""], interval_text),
        ):
            cells.append([*head, *("" if figure is None else text(figure, sign) for figure, sign in columns)])
        if not any(cells[-1]):
            cells.pop()
    return cells


def _numbers(rows: Iterable[Row], steps: Tallies, divergence: str) -> list[float | None]:
    """Every figure of a divergence, with the ends of its interval."""
    found: list[float | None] = []
    for row in rows:
        if row.divergence == divergence:
            found += [row.rose, *(end for figure in (*row.figures.values(), *row.to_ratio.values()) for end in figure)]
    for key, counts in steps.items():
        if key.startswith(f"{divergence}/"):
            tokens, right = counts.sum(0).tolist()
            found.append(right / tokens if tokens else None)
    return found
