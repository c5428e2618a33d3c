"""What a mask did, as numbers that do not depend on how a batch was split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from predmask.core.divergences import get_divergence
from predmask.core.precision import wide_dtype
from predmask.core.rules.base import MaskDecision, Reason
from predmask.core.segments import segment_index, segment_sum
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass
class Metrics:
    """Named figures kept as (sum, count), maximum or total: merging parts gives what the whole would have given.

    A figure over no token is absent, not 0.
    """

    means: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    maxima: dict[str, float] = field(default_factory=dict[str, float])
    totals: dict[str, float] = field(default_factory=dict[str, float])

    def mean(self, name: str, values: Tensor) -> None:
        """Add values to a mean."""
        if values.numel():
            total, count = self.means.get(name, (0.0, 0.0))
            self.means[name] = (total + float(values.to(wide_dtype(values.device)).sum()), count + values.numel())

    def maximum(self, name: str, values: Tensor) -> None:
        """Add values to a maximum."""
        if values.numel():
            self.maxima[name] = max(self.maxima.get(name, -torch.inf), float(values.max()))

    def total(self, name: str, value: float) -> None:
        """Add to a total."""
        self.totals[name] = self.totals.get(name, 0.0) + value

    def merge(self, other: Metrics) -> Metrics:
        """The metrics of both parts together."""
        merged = Metrics(dict(self.means), dict(self.maxima), dict(self.totals))
        for name, (total, count) in other.means.items():
            mine = merged.means.get(name, (0.0, 0.0))
            merged.means[name] = (mine[0] + total, mine[1] + count)
        for name, value in other.maxima.items():
            merged.maxima[name] = max(merged.maxima.get(name, -torch.inf), value)
        for name, value in other.totals.items():
            merged.total(name, value)
        return merged

    def compute(self) -> dict[str, float]:
        """The figures themselves."""
        return dict(self._items())

    def _items(self) -> Iterator[tuple[str, float]]:
        for name, (total, count) in self.means.items():
            yield name, total / count
        yield from self.maxima.items()
        yield from self.totals.items()


def mask_metrics(
    behaviour: BehaviourSupport,
    policy: PolicySupport,
    decision: MaskDecision,
    *,
    staleness: Tensor | None = None,
) -> Metrics:
    """The curves of a masked update, over the decision's response tokens whose log-probs are known.

    - `mask_frac`, and its parts `mask_frac_pos` and `mask_frac_neg` by the sign of the advantage;
    - `divergence_kept_*` and `divergence_masked_*`, mean and max of the rule's proximity value;
    - `behaviour_kl`, mean KL(mu‖pi) on the support, the same for every rule;
    - `mismatch_kl`, the estimate r - 1 - log r of KL(mu‖pi) (Schulman's k3) on tokens that the current policy
      sampled (staleness 0; all tokens when it is not known): what engine and trainer disagree on before any update;
    - `entropy`, where it was measured; `staleness_mean` and `_max`, in optimiser steps;
    - `unknown_logprob_count` and `overflow_count` (ratio beyond the dtype), as totals.

    Args:
        behaviour: mu, as the rule read it.
        policy: pi, as the rule read it.
        decision: the rule's decision.
        staleness: [...] optimiser steps between the sampling of a token and this update.
    """
    policy = policy.detach()
    log_ratio = policy.logp[..., 0] - behaviour.logp[..., 0]
    unknown = decision.reason == Reason.UNKNOWN
    # A token of an unscored response has no reason to be unknown, but may still lack a log-prob.
    behaviour_kl = get_divergence("kl")(behaviour, policy)
    known = decision.response_mask & ~unknown & torch.isfinite(log_ratio) & torch.isfinite(behaviour_kl)
    dropped = known & decision.dropped
    positive = decision.reason == Reason.DROPPED_POSITIVE
    metrics = Metrics()
    metrics.mean("mask_frac", dropped[known])
    metrics.mean("mask_frac_pos", (dropped & positive)[known])
    metrics.mean("mask_frac_neg", (dropped & ~positive)[known])
    for name, which in (("kept", known & decision.keep), ("masked", dropped)):
        metrics.mean(f"divergence_{name}_mean", decision.divergence[which])
        metrics.maximum(f"divergence_{name}_max", decision.divergence[which])
    metrics.mean("behaviour_kl", behaviour_kl[known])
    overflow = known & torch.isinf(log_ratio.exp())
    fresh = known & ~overflow if staleness is None else known & ~overflow & (staleness == 0)
    metrics.mean("mismatch_kl", (torch.expm1(log_ratio) - log_ratio)[fresh])
    if policy.entropy is not None:
        metrics.mean("entropy", policy.entropy[known])
    if staleness is not None:
        metrics.mean("staleness_mean", staleness[known])
        metrics.maximum("staleness_max", staleness[known])
    metrics.total("unknown_logprob_count", float((decision.response_mask & ~known).sum()))
    metrics.total("overflow_count", float(overflow.sum()))
    return metrics


@dataclass(frozen=True)
class MaskedToken:
    """How often a token id was masked."""

    id: int
    count: int
    share: float
    """Of all masked tokens."""
    positive: int
    """With A > 0."""
    negative: int
    """With A < 0."""


def masked_tokens(decision: MaskDecision, ids: Tensor) -> list[MaskedToken]:
    """Which token ids a mask hits, most often first (ties: smaller id first), with the split by sign of A.

    `ids` [...] are the sampled tokens' ids. A mask's share alone does not show that it may hit one id only.
    """
    dropped = decision.dropped
    index, size = segment_index(ids[dropped])
    counts = segment_sum(torch.ones_like(index), index, size)
    gains = segment_sum((decision.reason == Reason.DROPPED_POSITIVE)[dropped], index, size)
    found = torch.zeros(size, dtype=torch.int64, device=ids.device).scatter(0, index, ids[dropped].long())
    return _ranked(
        (token, gain, count - gain)
        for token, count, gain in zip(_integers(found), _integers(counts), _integers(gains), strict=True)
    )


def merge_masked_tokens(*tables: list[MaskedToken]) -> list[MaskedToken]:
    """The table of several batches together."""
    sums: dict[int, tuple[int, int]] = {}
    for row in (row for table in tables for row in table):
        positive, negative = sums.get(row.id, (0, 0))
        sums[row.id] = (positive + row.positive, negative + row.negative)
    return _ranked((token, positive, negative) for token, (positive, negative) in sums.items())


def _ranked(rows: Iterable[tuple[int, int, int]]) -> list[MaskedToken]:
    """Rows of (id, masked with A > 0, masked with A < 0) as a table."""
    known = list(rows)
    total = sum(positive + negative for _, positive, negative in known)
    table = [
        MaskedToken(token, positive + negative, (positive + negative) / total, positive, negative)
        for token, positive, negative in known
    ]
    return sorted(table, key=lambda row: (-row.count, row.id))


def _integers(values: Tensor) -> list[int]:
    return cast("list[int]", values.long().tolist())  # pyright: ignore[reportUnknownMemberType]
