"""Replay: other rules asked about recorded tokens.

A trace holds what the rule read, so any rule can be asked what it would have decided there. That says nothing of the
run that another rule would have led to: after its first step the policy would be another, and so the tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from predmask.analysis import AnalysisError
from predmask.analysis.replay.crosstab import Counts, Crosstab
from predmask.analysis.replay.estimators import Estimators, EstimatorStudy
from predmask.analysis.replay.sweep import Curve, Sweep
from predmask.core import RULES, MaskDecision, Predictive, Rule
from predmask.traces import TokenTrace, Trace, TraceError, TraceInfo, rule_settings
from predmask.traces.schema import AFTER

_UNREAD = ("entropy", *AFTER, "full_after")
_DELTAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.5, 1.0)
"""Where the sweep looks, beside the rules' own deltas."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What a rule decided on all tokens."""

    label: str
    """`recorded`, or the rule's name with the fields that tell it from others."""
    rule: Mapping[str, Any]
    """Its name and its fields."""
    trainable: int
    """Known tokens with A ≠ 0."""
    dropped_positive: int
    """Of those, dropped with A > 0."""
    dropped_negative: int
    """Of those, dropped with A < 0."""
    outside: int
    """Of those, outside the trust region."""
    unknown: int
    """Response tokens with a number that is missing or not finite."""

    @property
    def dropped(self) -> int:
        """Of the trainable tokens, dropped."""
        return self.dropped_positive + self.dropped_negative


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Whether the recorded rule, asked again, decides as it was recorded."""

    tokens: int
    reproduced: int
    """Tokens with the same `Reason`."""
    largest_difference: float
    """Of the divergence, over the tokens that were decided otherwise: tells rounding from another rule."""

    @property
    def exact(self) -> bool:
        """Every token was decided the same."""
        return self.reproduced == self.tokens


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What several rules decide on the tokens of a trace."""

    info: TraceInfo
    steps: list[int]
    tokens: int
    reproduction: Reproduction | None
    """None where the recorded rule cannot be asked; `notes` says why."""
    rules: list[Decided]
    """The recorded decisions first, then the rules that were asked."""
    overall: Crosstab
    """All tokens; rules are in the order of `rules`."""
    splits: dict[str, dict[str, Crosstab]]
    """The same by split and bucket (`predmask.analysis.replay.crosstab.SPLITS`)."""
    deltas: list[float]
    """Thresholds of the sweep, ascending."""
    sweep: list[Curve]
    """What rules that have a delta drop at each of `deltas`."""
    estimators: Estimators | None
    """None where no whole distributions were recorded."""
    notes: list[str]
    """What was left out, and why."""

    def to_json(self) -> dict[str, Any]:
        """Every number, ready for JSON."""
        found = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        splits = {
            name: {bucket: table.to_json() for bucket, table in buckets.items()}
            for name, buckets in self.splits.items()
        }
        return found | {"overall": self.overall.to_json(), "splits": splits}


def replay(
    trace: Trace,
    rules: Sequence[Rule] | None = None,
    *,
    deltas: Sequence[float] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Replay:
    """Ask rules about the tokens of a trace, in bounded memory.

    Args:
        trace: what was recorded.
        rules: by default `registered_rules`, without those that the trace holds too little for.
        deltas: thresholds of the sweep; by default a range, and the rules' own.
        progress: told how many tokens were done, a chunk at a time.

    Raises AnalysisError for a rule that reads what was not recorded, and for deltas that are no thresholds.
    """
    notes: list[str] = []
    decider = _decider(trace.info, notes)
    recorded = _recorded(trace, decider, notes)
    asked = _registered(trace, decider, notes) if rules is None else _askable(trace, rules)
    known = [*([recorded] if recorded else []), *asked]
    counts = Counts(len(asked) + 1)
    sweep = Sweep(known, _thresholds(deltas, known))
    estimators = EstimatorStudy(*_yardstick(known))
    reproduction = None
    for tokens in trace.tokens(without=_UNREAD):
        answers = {rule: tokens.decide(rule) for rule in dict.fromkeys(known)}
        counts.add(tokens, [tokens.decision, *(answers[rule] for rule in asked)])
        sweep.add(tokens)
        estimators.add(tokens)
        if recorded:
            reproduction = _compare(tokens, answers[recorded], reproduction)
        if progress:
            progress(len(tokens))
    return Replay(
        info=trace.info,
        steps=trace.steps,
        tokens=trace.size,
        reproduction=reproduction,
        rules=_rows(counts, ["recorded", *rule_labels(asked)], [trace.info.rule, *map(rule_settings, asked)]),
        overall=counts.overall,
        splits=counts.splits,
        deltas=sweep.deltas,
        sweep=sweep.curves(rule_labels(sweep.rules, but=("delta",))),
        estimators=estimators.result(),
        notes=notes,
    )


def registered_rules(recorded: Rule | None = None) -> list[Rule]:
    """Every registered rule; fields that the recorded one has too are as recorded, as `predmask train` layers them."""
    values = {} if recorded is None else vars(recorded)
    return [
        cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})
        for cls in RULES.values()
    ]


def rule_labels(rules: Sequence[Rule], but: Sequence[str] = ()) -> list[str]:
    """Rules' names, with the fields (`but` for some) that are not the default or differ among rules of one name."""
    return [_label(rule, [other for other in rules if other.name == rule.name], but) for rule in rules]


def _label(rule: Rule, kin: Sequence[Rule], but: Sequence[str]) -> str:
    told = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        usual = value == field.default and all(getattr(other, field.name) == value for other in kin)
        if field.name not in but and not usual:
            told.append(f"{field.name} {value}")
    return f"{rule.name} ({', '.join(told)})" if told else rule.name


def missing(rule: Rule, trace: Trace) -> str | None:
    """What a rule reads and the trace does not hold, with the remedy; None when it can be asked."""
    if rule.needs_topk and trace.info.top_k == 0:
        return (
            f"top-K missing: rule {rule.name!r} reads the engine's top-K log-probs, and this trace holds only the "
            "sampled tokens'; record top-K (rollout.top_k), or ask a rule of the sampled token, such as --rule "
            "ppo_clip or --rule dppo --rule.support binary"
        )
    if rule.needs_sum_squares and "tail_sum_squares" not in trace.columns:
        return (
            f"rule {rule.name!r} reads the column tail_sum_squares, which this trace does not have; record it, or "
            " choose --rule.tail uniform or --rule.tail aggregated"
        )
    return None


def _decider(info: TraceInfo, notes: list[str]) -> Rule | None:
    """The rule that decided, or None and a note where this version does not know it."""
    try:
        return info.make_rule()
    except TraceError as error:
        notes.append(str(error))
        return None


def _recorded(trace: Trace, decider: Rule | None, notes: list[str]) -> Rule | None:
    """The rule that decided where it can be asked again, otherwise None and a note."""
    lacks = None if decider is None else missing(decider, trace)
    if lacks is None:
        return decider
    notes.append(f"the recorded rule cannot be asked again: {lacks}")
    return None


def _registered(trace: Trace, decider: Rule | None, notes: list[str]) -> list[Rule]:
    """The registered rules that the trace holds enough for, and a note on each of the others."""
    lacking = {rule: missing(rule, trace) for rule in registered_rules(decider)}
    notes += [f"left out: {lacks}" for lacks in lacking.values() if lacks is not None]
    return [rule for rule, lacks in lacking.items() if lacks is None]


def _askable(trace: Trace, rules: Sequence[Rule]) -> list[Rule]:
    """The rules, each once; AnalysisError where the trace holds too little for one."""
    for rule in rules:
        if (lacks := missing(rule, trace)) is not None:
            raise AnalysisError(lacks)
    return list(dict.fromkeys(rules))


def _thresholds(deltas: Sequence[float] | None, rules: Sequence[Rule]) -> list[float]:
    if deltas is None:
        deltas = [*_DELTAS, *(vars(rule)["delta"] for rule in rules if "delta" in vars(rule))]
    for delta in deltas:
        if not 0 < delta < math.inf:
            raise AnalysisError(f"delta {delta} is no threshold; it must be a finite number above 0")
    return sorted(set(deltas))


def _yardstick(rules: Sequence[Rule]) -> tuple[str, float]:
    """Divergence and delta that estimators are judged by: those of the first rule that has both."""
    having = (vars(rule) for rule in [*rules, Predictive()] if {"divergence", "delta"} <= vars(rule).keys())
    fields = next(having)
    return fields["divergence"], fields["delta"]


def _compare(tokens: TokenTrace, again: MaskDecision, before: Reproduction | None) -> Reproduction:
    """What came before and these tokens together."""
    same = again.reason == tokens.decision.reason
    distances = (again.divergence - tokens.decision.divergence).abs()
    distances = distances[~same & torch.isfinite(distances)].tolist()
    before = before or Reproduction(tokens=0, reproduced=0, largest_difference=0.0)
    return Reproduction(
        tokens=before.tokens + len(tokens),
        reproduced=before.reproduced + int(same.sum()),
        largest_difference=max(before.largest_difference, *distances, 0.0),
    )


def _rows(counts: Counts, labels: Sequence[str], rules: Sequence[Mapping[str, Any]]) -> list[Decided]:
    signs = counts.splits["advantage"]

    def dropped(sign: str, number: int) -> int:
        return int(signs[sign].dropped[number, number]) if sign in signs else 0

    return [
        Decided(
            label=label,
            rule=rule,
            trainable=int(counts.overall.trainable[number, number]),
            dropped_positive=dropped("A>0", number),
            dropped_negative=dropped("A<0", number),
            outside=int(counts.outside[number]),
            unknown=int(counts.unknown[number]),
        )
        for number, (label, rule) in enumerate(zip(labels, rules, strict=True))
    ]


def _plain(value: Any) -> Any:
    """Records as dicts, also in lists."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
