"""The pass over the chunks: measure, decide, and form the gradients while the logits are there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, MaskDecision, PolicySupport, Rule
from predmask.core.loss import loss_coefficients
from predmask.core.support import first_occurrence, tensor_names
from predmask.ops.head import Head
from predmask.ops.shard import Shard
from predmask.ops.statistics import Measured
from predmask.ops.sweep import HeadGradient, MakeSweep, Slopes, Sweep

_Record = TypeVar("_Record", PolicySupport, MaskDecision)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """By hidden states, weight and bias; None where no gradient is asked for, or where it went to a buffer."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool
    buffer: Tensor | None = None
    """[V, D] where the weight's gradient is added to, instead of to one of its own."""

    @property
    def any(self) -> bool:
        """Whether gradients are to be formed at all."""
        return self.by_autograd or self.buffer is not None

    @property
    def by_autograd(self) -> bool:
        """Whether a backward pass will come."""
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True, kw_only=True)
class Fused:
    """N tokens, their support and a head; all outside the graph."""

    hidden: Tensor
    """[N, D]"""
    head: Head
    behaviour: BehaviourSupport
    shard: Shard | None
    make_sweep: MakeSweep
    """The backend."""

    def statistics(self) -> PolicySupport:
        """The policy on the support of each token."""
        sweep = self._sweep()
        everything = torch.arange(len(self.hidden), device=self.hidden.device)
        return assemble(
            [(rows, self._policy(self._measure(sweep, rows), rows)) for rows in everything.split(sweep.chunk_tokens)]
        )

    def statistics_gradient(self, by_logp: Tensor, wanted: Wanted) -> Gradients:
        """The gradients where `by_logp` [N, S] are the derivatives by log pi; the logits are formed again."""
        by_logp = by_logp.to(self._dtype).masked_fill(~self.behaviour.valid, 0.0)
        sweep = self._sweep()
        sums = _Sums(self, wanted)
        for rows in self._chunks(sweep, (by_logp != 0).any(1)):
            measured = self._measure(sweep, rows)
            known = torch.isfinite(measured.log_norm)[:, None]
            slopes = sweep.support_slopes(measured, by_logp[rows].masked_fill(~known, 0.0))
            sums.add(sweep, slopes, rows)
        return sums.finish()

    def loss(
        self, advantage: Tensor, weights: Tensor, response: Tensor, rule: Rule, ratio_cap: float | None, wanted: Wanted
    ) -> tuple[Tensor, MaskDecision, PolicySupport, Gradients]:
        """The loss, the decisions and the gradients for a loss that is not scaled any further.

        One pass: the rule decides on a chunk while its logits are there. Tokens that cannot have a gradient are
        gathered into chunks of their own, and those outside the response mask are not computed at all.
        """
        sweep = self._sweep()
        sums = _Sums(self, wanted)
        learning = response & (advantage != 0) & (weights != 0) & wanted.any
        decisions: list[tuple[Tensor, MaskDecision]] = []
        policies: list[tuple[Tensor, PolicySupport]] = []
        coefficients = self.behaviour.logp.new_zeros(
            len(self.hidden), dtype=torch.promote_types(self._dtype, self.behaviour.logp.dtype)
        )

        def decide(rows: Tensor, policy: PolicySupport) -> Tensor:
            decision = rule(self.behaviour[rows], policy, advantage[rows], response[rows])
            found = loss_coefficients(decision, advantage[rows], weights[rows], ratio_cap=ratio_cap)
            coefficients[rows] = found.to(coefficients.dtype)
            decisions.append((rows, decision))
            policies.append((rows, policy))
            return found.to(self._dtype)

        for rows in self._chunks(sweep, learning):
            measured = self._measure(sweep, rows)
            by_logp = decide(rows, self._policy(measured, rows))
            sums.add(sweep, sweep.slopes(measured, by_logp), rows)
        for rows in self._chunks(sweep, response & ~learning):
            decide(rows, self._policy(self._measure(sweep, rows), rows))
        outside = (~response).nonzero()[:, 0]
        if len(outside) or not decisions:
            decide(outside, self._not_computed(len(outside)))
        return coefficients.sum(), assemble(decisions), assemble(policies), sums.finish()

    def _sweep(self) -> Sweep:
        # Shards may differ in size, but must agree on the chunks that they exchange.
        rows = len(self.head.weight) if self.shard is None else self.shard.mean_rows
        return self.make_sweep(self.head, self.hidden, rows)

    def _measure(self, sweep: Sweep, rows: Tensor) -> Measured:
        """The logits of some tokens, over the whole vocabulary."""
        ids = self.behaviour.ids[rows]
        start = 0 if self.shard is None else self.shard.start
        measured = sweep.measure(self.hidden[rows], ids - start, first_occurrence(ids))
        return measured if self.shard is None else self.shard.merge(measured)

    def _policy(self, measured: Measured, rows: Tensor) -> PolicySupport:
        policy = measured.policy(self._vocabulary_size)
        return replace(policy, logp=policy.logp.masked_fill(~self.behaviour.valid[rows], -math.inf))

    def _not_computed(self, count: int) -> PolicySupport:
        unknown = self.hidden.new_full((count,), math.nan, dtype=self._dtype)
        return PolicySupport(
            logp=unknown[:, None].expand(count, self.behaviour.ids.shape[1]),
            log_tail=unknown,
            vocabulary_size=self._vocabulary_size,
            tail_sum_squares=unknown,
            entropy=unknown,
        )

    @staticmethod
    def _chunks(sweep: Sweep, which: Tensor) -> tuple[Tensor, ...]:
        """The tokens where `which` [N] is True, chunk by chunk."""
        rows = which.nonzero()[:, 0]
        return rows.split(sweep.chunk_tokens) if len(rows) else ()

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.accumulation(self.hidden)

    @property
    def _vocabulary_size(self) -> int:
        return len(self.head.weight) if self.shard is None else self.shard.vocabulary_size


class _Sums:
    """The gradients, chunk after chunk."""

    def __init__(self, fused: Fused, wanted: Wanted) -> None:
        self._fused, self._wanted = fused, wanted
        head, dtype = fused.head, fused.head.accumulation(fused.hidden)
        # What is still to be summed over shards, or in float16 to be multiplied by a loss scale, is not rounded before.
        wide = fused.shard is not None or fused.hidden.dtype == torch.float16
        kept = dtype if wide else fused.hidden.dtype
        self._hidden = torch.zeros_like(fused.hidden, dtype=kept) if wanted.hidden else None
        weight, blank = None, True
        if wanted.buffer is not None:
            weight, blank = wanted.buffer, False
        elif wanted.weight:
            weight = torch.empty_like(head.weight, dtype=dtype)
        bias = torch.zeros_like(head.bias, dtype=dtype) if wanted.bias and head.bias is not None else None
        self._head = HeadGradient(weight=weight, bias=bias, blank=blank)

    def add(self, sweep: Sweep, slopes: Slopes, rows: Tensor) -> None:
        """Add the gradients of a chunk whose tokens are `rows`."""
        if not len(slopes.tokens):
            return
        tokens = rows[slopes.tokens]
        if self._hidden is not None:
            self._hidden[tokens] = sweep.hidden_gradient(slopes).to(self._hidden.dtype)
        sweep.add_head_gradient(slopes, self._fused.hidden[tokens], self._head)

    def finish(self) -> Gradients:
        """All of it, in the dtypes of the inputs; not yet in float16, which has no room for what a loss scale lifts."""
        fused, head = self._fused, self._head
        if head.weight is not None and head.blank:
            head.weight.zero_()
        if self._hidden is not None and fused.shard is not None:
            fused.shard.sum(self._hidden)
        return Gradients(
            hidden=_as(self._hidden, fused.hidden),
            weight=_as(head.weight if self._wanted.buffer is None else None, fused.head.weight),
            bias=_as(head.bias, fused.head.bias),
        )


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient in the dtype of its input, or as it is where that is float16."""
    if gradient is None or like is None or like.dtype == torch.float16:
        return gradient
    return gradient.to(like.dtype)


def assemble(parts: list[tuple[Tensor, _Record]]) -> _Record:
    """The record of all tokens, in order, from parts with their places."""
    order = torch.cat([rows for rows, _ in parts]).argsort()
    some = parts[0][1]
    return replace(
        some, **{name: torch.cat([getattr(part, name) for _, part in parts])[order] for name in tensor_names(some)}
    )
