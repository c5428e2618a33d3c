"""Runs side by side: runs that differ in their seed only are one group, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from predmask.analysis import AnalysisError
from predmask.analysis.runs import Run, read_run

IGNORED = ("seed", "output", "device", "threads", "tensorboard", "traces")
"""Options and sections that do not set two configurations apart."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figure:
    """A row of the comparison: one number a run."""

    key: str
    """As metrics.jsonl calls it."""
    label: str
    form: str
    """Format of a mean."""
    over: Literal["heldout", "last", "all"] = "last"
    """The evaluation that all runs have, the mean of the last steps, or the sum of all steps."""


FIGURES = (
    Figure("sampled", "held-out accuracy, sampled", ".1%", "heldout"),
    Figure("greedy", "held-out accuracy, greedy", ".1%", "heldout"),
    Figure("accuracy", "training accuracy", ".1%"),
    Figure("reward", "training reward", ".3f"),
    Figure("mask_frac", "masked", ".2%"),
    Figure("mask_frac_pos", "masked, A > 0", ".2%"),
    Figure("mask_frac_neg", "masked, A < 0", ".2%"),
    Figure("behaviour_kl", "KL(mu‖pi)", ".3g"),
    Figure("mismatch_kl", "mismatch KL", ".3g"),
    Figure("divergence_kept_mean", "rule's divergence, kept", ".3g"),
    Figure("divergence_masked_mean", "rule's divergence, masked", ".3g"),
    Figure("entropy", "entropy, nats", ".3f"),
    Figure("response_length", "response length", ".1f"),
    Figure("overflow_count", "overflows, in all", ".3g", "all"),
    Figure("unknown_logprob_count", "unknown log-probs, in all", ".3g", "all"),
    Figure("tokens_per_second", "tokens/s", ",.0f"),
    Figure("seconds", "seconds, in all", ",.1f", "all"),
)


@dataclass(frozen=True)
class Mean:
    """A mean over runs."""

    value: float
    half_width: float | None
    """Half the 95 % interval (see `mean_of`); None with one run."""
    runs: int


@dataclass(frozen=True)
class Group:
    """Runs of one configuration."""

    label: str
    """What sets it apart from the other groups."""
    options: Mapping[str, Any]
    """The configuration, flat, without what is ignored; empty where a run has none."""
    runs: tuple[Run, ...]
    values: Mapping[str, tuple[float | None, ...]]
    """By figure: each run's number; None where it has none."""

    @property
    def seeds(self) -> tuple[Any, ...]:
        """Each run's seed; None where its configuration has none."""
        return tuple(run.config.get("seed") for run in self.runs)

    def mean(self, figure: Figure) -> Mean | None:
        """The figure over the group's runs; None where no run has it."""
        return mean_of([value for value in self.values[figure.key] if value is not None])


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, over steps that all of them have."""

    groups: tuple[Group, ...]
    differing: tuple[str, ...]
    """Options in which groups differ."""
    first: int
    """The first step whose figures count."""
    last: int
    """The last one: the last that every run has."""
    evaluated: int | None
    """The last step at which every run was evaluated; None where there is none after training began."""
    notes: tuple[str, ...]
    """What to know before reading the numbers."""

    def pairs(self) -> Iterator[tuple[Group, list[Any]]]:
        """The groups that share two seeds or more with the first one, and these seeds."""
        reference, *others = self.groups
        for group in others:
            seeds = [seed for seed in reference.seeds if seed is not None and seed in group.seeds]
            if len(seeds) > 1:
                yield group, seeds

    def difference(self, group: Group, seeds: Sequence[Any], figure: Figure) -> Mean | None:
        """A group's figure minus the first group's, paired by seed."""
        of, to = (dict(zip(one.seeds, one.values[figure.key], strict=True)) for one in (group, self.groups[0]))
        pairs = [(of[seed], to[seed]) for seed in seeds]
        return mean_of([one - other for one, other in pairs if one is not None and other is not None])


def compare(paths: Sequence[Path | str], *, last: int = 10) -> Comparison:
    """Compare run directories over the `last` steps up to the last one that every run has.

    Raises AnalysisError for fewer than two runs, a run that is named twice or repeats another's configuration and
    seed, a directory that is no run, and a run without metrics.
    """
    if len(paths) < 2:
        raise AnalysisError("compare needs two runs or more: predmask compare RUN_A RUN_B")
    runs = [read_run(path) for path in paths]
    _check(runs)
    end = min(run.steps[-1]["step"] for run in runs)
    begin = max(1, end - last + 1)
    shared = set.intersection(*({evaluation["step"] for evaluation in run.evaluations} for run in runs))
    evaluated = max((step for step in shared if step > 0), default=None)
    pools: dict[Any, list[Run]] = {}
    for run in runs:
        # Without a configuration nobody knows whether two runs are repetitions: each stands alone.
        key = repr(sorted(_options(run).items())) if run.config else run.path
        pools.setdefault(key, []).append(run)
    found = [tuple(pool) for pool in pools.values()]
    for pool in found:
        _refuse_repeated(pool)
    options = [_options(pool[0]) for pool in found]
    differing = _differing([one for one in options if one])
    telling = _telling(options, differing)
    left_out: list[str] = []
    groups = tuple(
        Group(
            label=_label(pool, one, telling),
            options=one,
            runs=pool,
            values={
                figure.key: tuple(_value(run, figure, (begin, end), evaluated, left_out) for run in pool)
                for figure in FIGURES
            },
        )
        for pool, one in zip(found, options, strict=True)
    )
    return Comparison(groups, tuple(differing), begin, end, evaluated, (*_notes(runs, end), *left_out))


def mean_of(values: Sequence[float]) -> Mean | None:
    """Mean over independent runs, with Student's 95 % interval t(n-1) · s / √n; None of no values."""
    if not values:
        return None
    n = len(values)
    half_width = student_t(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Mean(fmean(values), half_width, n)


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `confidence` for T of Student's distribution with `degrees` of freedom.

    Bisection of the closed form in θ = arctan(t/√degrees) (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """

    def within(theta: float) -> float:
        odd = degrees % 2
        term = total = math.cos(theta) if odd else 1.0
        for i in range(2 + odd, degrees, 2):
            term *= math.cos(theta) ** 2 * (i - 1) / i
            total += term
        if not odd:
            return math.sin(theta) * total
        return 2 / math.pi * (theta + math.sin(theta) * (total if degrees > 1 else 0.0))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _check(runs: Sequence[Run]) -> None:
    seen: set[Path] = set()
    for run in runs:
        if (path := run.path.resolve()) in seen:
            raise AnalysisError(f"{str(run.path)!r} is named twice; name each run once")
        seen.add(path)
        if not (run.path / "metrics.jsonl").is_file():
            raise AnalysisError(
                f"{str(run.path)!r} has no metrics.jsonl, which compare reads; of a trace alone there are `predmask "
                "report` and `predmask replay`"
            )
        if not run.steps:
            raise AnalysisError(f"{str(run.path)!r} has no training step in its metrics.jsonl yet; leave it out")


def _refuse_repeated(pool: Sequence[Run]) -> None:
    """Repetitions with one seed are no independent runs: they would make an interval too narrow."""
    seen: dict[Any, Run] = {}
    for run in pool:
        other = seen.setdefault(run.config.get("seed"), run)
        if other is not run:
            raise AnalysisError(
                f"{str(other.path)!r} and {str(run.path)!r} have the same configuration and the same seed "
                f"{run.config.get('seed')} (compare ignores {', '.join(IGNORED[1:])}); leave one out, "
                "for it would count twice"
            )


def _options(run: Run) -> dict[str, Any]:
    """The configuration that counts, flat, in its order: `rule.delta` and so on."""

    def flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(flat({name: value for name, value in run.config.items() if name not in IGNORED}, ""))


def _differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for one in options for name in one))
    sections = [name.partition(".")[0] for name in names]
    names.sort(key=lambda name: sections.index(name.partition(".")[0]))
    return [name for name in names if len({repr(one.get(name)) for one in options}) > 1]


def _telling(options: Sequence[Mapping[str, Any]], differing: Sequence[str]) -> list[str]:
    """A few of the differing options, which tell all groups apart."""

    def kinds(names: Sequence[str]) -> int:
        return len({tuple(repr(one.get(name)) for name in names) for one in options})

    for name in differing:
        if kinds([name]) == len(options) and all(name in one for one in options):
            return [name]
    chosen: list[str] = []
    for name in differing:
        if kinds([*chosen, name]) > kinds(chosen):
            chosen.append(name)
    return chosen


def _label(pool: Sequence[Run], options: Mapping[str, Any], telling: Sequence[str]) -> str:
    """`rule=dppo rule.delta=0.05`"""
    names = [name for name in telling or ["rule.name"] if name in options]
    parts = [f"{name.removesuffix('.name')}={show_option(options[name])}" for name in names]
    return " ".join(parts) or pool[0].name


def show_option(value: Any) -> str:
    """A value as TOML writes it, without quotes; a dash for an option that a configuration does not have."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(
    run: Run, figure: Figure, steps: tuple[int, int], evaluated: int | None, left_out: list[str]
) -> float | None:
    """A run's number; None where it has none. What is left out for not being finite is noted."""
    if figure.over == "heldout":
        records = [record for record in run.evaluations if record["step"] == evaluated]
    else:
        begin = steps[0] if figure.over == "last" else 1
        records = [record for record in run.steps if begin <= record["step"] <= steps[1]]
    found = [record[figure.key] for record in records if isinstance(record.get(figure.key), int | float)]
    finite = [float(value) for value in found if math.isfinite(value)]
    if len(finite) < len(found):
        left_out.append(f"{run.name}: {figure.key} is not finite in {len(found) - len(finite)} of {len(found)} steps")
    if not finite:
        return None
    return math.fsum(finite) if figure.over == "all" else fmean(finite)


def _notes(runs: Sequence[Run], end: int) -> Iterator[str]:
    for run in runs:
        steps, planned = run.steps[-1]["step"], run.config.get("steps", "?")
        if run.status != "finished":
            status = " ".join(run.status.split())
            yield f"{run.name}: {status}, with {steps} of {planned} steps"
        if steps > end:
            yield f"{run.name}: its steps after {end} are left out, since another run does not have them"
        if not run.config:
            yield f"{run.name}: has no config.toml, and stands alone"
