"""Decisions of several rules on the same tokens, counted pair by pair and by the kind of token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from predmask.core import MaskDecision, Reason
from predmask.traces import TokenTrace


@dataclass(frozen=True)
class Split:
    """A partition of the tokens."""

    name: str
    buckets: tuple[str, ...]
    index: Callable[[TokenTrace], Tensor]
    """[N] int64, each token's bucket."""


def _between(values: Tensor, *edges: float) -> Tensor:
    """[N] int64, how many of the edges each value has reached."""
    return torch.bucketize(values, torch.tensor(edges, dtype=values.dtype), right=True)


SPLITS = (
    Split("advantage", ("A>0", "A<0"), lambda tokens: (tokens.advantage < 0).long()),
    Split(
        "probability",
        ("<.01", ".01-.1", ".1-.5", ".5-.9", "≥.9"),
        lambda tokens: _between(tokens.behaviour.logp[:, 0].exp(), 0.01, 0.1, 0.5, 0.9),
    ),
    Split(
        "position", ("0-3", "4-15", "16-63", "64-255", "≥256"), lambda tokens: _between(tokens.position, 4, 16, 64, 256)
    ),
    Split("staleness", ("0", "1-3", "4-15", "≥16"), lambda tokens: _between(tokens.staleness, 1, 4, 16)),
)
"""By what decisions are told apart: the advantage's sign, mu of the sampled token, its place in the response, and
staleness in optimiser steps."""


@dataclass(frozen=True)
class Crosstab:
    """Decisions of R rules on the same tokens, pair by pair; a share over no token is None."""

    trainable: Tensor
    """[R, R] int64, tokens that are trainable to both rules (known, A ≠ 0)."""
    dropped: Tensor
    """[R, R] int64, those of them that the first rule drops."""
    common: Tensor
    """[R, R] int64, those that both drop."""

    @classmethod
    def count(cls, trainable: Tensor, dropped: Tensor) -> Crosstab:
        """From what each rule says of N tokens, [R, N] float32 of 0 and 1 (N below 2^24: such sums are exact)."""
        return cls(*((a @ b.T).long() for a, b in ((trainable, trainable), (dropped, trainable), (dropped, dropped))))

    def __add__(self, other: Crosstab) -> Crosstab:
        return Crosstab(self.trainable + other.trainable, self.dropped + other.dropped, self.common + other.common)

    def dropped_share(self, rule: int) -> float | None:
        """Share of its trainable tokens that a rule drops."""
        return _share(self.dropped[rule, rule], self.trainable[rule, rule])

    def agreement(self, one: int, other: int) -> float | None:
        """Share of tokens on which two rules decide the same."""
        differing = self.dropped[one, other] + self.dropped[other, one] - 2 * self.common[one, other]
        both = self.trainable[one, other]
        return _share(both - differing, both)

    def jaccard(self, one: int, other: int) -> float | None:
        """Of the tokens that at least one of two rules drops, the share that both drop."""
        either = self.dropped[one, other] + self.dropped[other, one] - self.common[one, other]
        return _share(self.common[one, other], either)

    def to_json(self) -> dict[str, Any]:
        """Counts and shares."""
        rules = range(len(self.trainable))
        return {
            "trainable": self.trainable.tolist(),
            "dropped": self.dropped.tolist(),
            "dropped_by_both": self.common.tolist(),
            "dropped_share": [self.dropped_share(rule) for rule in rules],
            "agreement": [[self.agreement(one, other) for other in rules] for one in rules],
            "jaccard": [[self.jaccard(one, other) for other in rules] for one in rules],
        }


class Counts:
    """What R rules decided on the tokens so far."""

    def __init__(self, rules: int) -> None:
        nothing = Crosstab(*torch.zeros(3, rules, rules, dtype=torch.int64))
        self._tables = {split.name: dict.fromkeys(split.buckets, nothing) for split in SPLITS}
        self.outside = torch.zeros(rules, dtype=torch.int64)
        """[R] trainable tokens outside each rule's trust region."""
        self.unknown = torch.zeros(rules, dtype=torch.int64)
        """[R] tokens that are unknown to each rule."""

    def add(self, tokens: TokenTrace, decisions: Sequence[MaskDecision]) -> None:
        """Count some tokens, as each rule decided them."""
        trainable = torch.stack([decision.trainable for decision in decisions])
        outside = torch.stack([decision.outside for decision in decisions]) & trainable
        unknown = torch.stack([decision.reason == Reason.UNKNOWN for decision in decisions])
        self.outside += outside.sum(1)
        self.unknown += unknown.sum(1)
        known, dropped = trainable.float(), torch.stack([decision.dropped for decision in decisions]).float()
        for split in SPLITS:
            index, tables = split.index(tokens), self._tables[split.name]
            for number, bucket in enumerate(split.buckets):
                inside = index == number
                tables[bucket] += Crosstab.count(known[:, inside], dropped[:, inside])

    @property
    def overall(self) -> Crosstab:
        """All tokens: each of them is in one bucket of any split."""
        first, *others = self._tables[SPLITS[0].name].values()
        return sum(others, first)

    @property
    def splits(self) -> dict[str, dict[str, Crosstab]]:
        """By split and bucket; buckets without a trainable token are left out."""
        return {
            name: {bucket: table for bucket, table in tables.items() if table.trainable.any()}
            for name, tables in self._tables.items()
        }


def _share(part: Tensor, whole: Tensor) -> float | None:
    return float(part) / float(whole) if int(whole) else None
