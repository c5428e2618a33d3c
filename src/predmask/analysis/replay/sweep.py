"""Recorded tokens under other thresholds: what a rule would drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from predmask.core import (
    Rule,
)
from predmask.traces import TokenTrace, rule_settings

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a rule drops at each threshold."""

    label: str
    rule: Mapping[str, Any]
    """Its name and its fields but delta."""
    trainable: int
    dropped: list[int]

    @property
    def shares(self) -> list[float | None]:
        """Of the trainable tokens; None where there are none."""
        return [count / self.trainable if self.trainable else None for count in self.dropped]


class Sweep:
    """Counts what rules would drop at any of some thresholds; rules without a delta have no part in it."""

    def __init__(self, rules: Sequence[Rule], deltas: Sequence[float]) -> None:
        # Asked with a delta that all divergences exceed, a rule drops all that leads outward. With another delta it
        # drops those of them whose divergence exceeds that one.
        self.rules = list(dict.fromkeys(replace(rule, delta=_SMALLEST) for rule in rules if "delta" in vars(rule)))
        self.deltas = list(deltas)
        # As a rule compares them: in the divergence's own precision.
        self._edges = torch.tensor(self.deltas, dtype=torch.float32)
        self._exceeded = torch.zeros(len(self.rules), len(self.deltas) + 1, dtype=torch.int64)
        self._trainable = [0] * len(self.rules)

    def add(self, tokens: TokenTrace) -> None:
        """Count some tokens."""
        for number, rule in enumerate(self.rules):
            decision = tokens.decide(rule)
            outward = decision.divergence[decision.dropped]
            exceeded = torch.bucketize(outward, self._edges)  # how many deltas are smaller
            self._exceeded[number] += torch.bincount(exceeded, minlength=len(self.deltas) + 1)
            self._trainable[number] += int(decision.trainable.sum())

    def curves(self, labels: Sequence[str]) -> list[Curve]:
        """What was counted, under these names."""
        dropped = self._exceeded.flip(1).cumsum(1).flip(1)[:, 1:]
        return [
            Curve(label=label, rule=_but_delta(rule), trainable=trainable, dropped=counts.tolist())
            for label, rule, trainable, counts in zip(labels, self.rules, self._trainable, dropped, strict=True)
        ]


def _but_delta(rule: Rule) -> dict[str, Any]:
    return {name: value for name, value in rule_settings(rule).items() if name != "delta"}
