"""From what a sweep over logits measures to the policy's statistics: small tensors, the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from predmask.core import PolicySupport


@dataclass(frozen=True, kw_only=True)
class Tail:
    """All logits outside the support, as three numbers that can be merged from parts of the vocabulary.

    Each has shape [n] (or [n, parts] before `merge`); an empty tail has log mass -inf, and 0 for the others.
    """

    log_mass: Tensor
    """log sum of exp(z)"""
    mean: Tensor
    """mean of z under the tail's own distribution"""
    collision: Tensor
    """sum of the squared probabilities of the tail's own distribution"""

    @classmethod
    def of(cls, logits: Tensor) -> Tail:
        """The tail that consists of logits [n, V], where -inf stands for an id that is not in it."""
        log_mass = torch.logsumexp(logits, dim=-1)
        share = (logits - log_mass[:, None]).exp().nan_to_num(0.0)
        return cls(
            log_mass=log_mass, mean=(share * logits).nansum(-1), collision=torch.linalg.vector_norm(share, dim=-1) ** 2
        )

    def merge(self) -> Tail:
        """[n] from [n, parts]."""
        log_mass = torch.logsumexp(self.log_mass, dim=-1)
        share = (self.log_mass - log_mass[:, None]).exp().masked_fill(self.log_mass == -math.inf, 0.0)
        return Tail(
            log_mass=log_mass, mean=(share * self.mean).sum(-1), collision=(share.square() * self.collision).sum(-1)
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The logits of n tokens, in brief; all relative to `shift`, so that large logits lose no digits."""

    shift: Tensor
    """[n] the largest logit"""
    support: Tensor
    """[n, S] logits of the support's ids; -inf where another part of the vocabulary holds the id"""
    distinct: Tensor
    """[n, S] bool, slots whose id stands in no earlier slot"""
    tail: Tail

    def relative_to(self, shift: Tensor) -> Measured:
        """The same logits relative to another shift [n]."""
        moved = self.shift - shift
        return replace(
            self,
            shift=shift,
            support=self.support + moved[:, None],
            tail=replace(self.tail, log_mass=self.tail.log_mass + moved, mean=self.tail.mean + moved),
        )

    @staticmethod
    def merge(parts: Sequence[Measured]) -> Measured:
        """The whole from parts of the vocabulary."""
        # A part without a finite logit has no say in the shift.
        shift = torch.stack([part.shift.masked_fill(part.log_norm == -math.inf, -math.inf) for part in parts]).amax(0)
        moved = [part.relative_to(shift) for part in parts]
        tails = Tail(
            log_mass=torch.stack([part.tail.log_mass for part in moved], dim=-1),
            mean=torch.stack([part.tail.mean for part in moved], dim=-1),
            collision=torch.stack([part.tail.collision for part in moved], dim=-1),
        )
        support = torch.stack([part.support for part in moved]).amax(0)
        return Measured(shift=shift, support=support, distinct=parts[0].distinct, tail=tails.merge())

    def pack(self) -> Tensor:
        """[n, S + 4] all numbers in one tensor, to be sent."""
        tail = self.tail
        return torch.cat([torch.stack([self.shift, tail.log_mass, tail.mean, tail.collision], -1), self.support], -1)

    @classmethod
    def unpack(cls, packed: Tensor, distinct: Tensor) -> Measured:
        """What `pack` packed."""
        shift, log_mass, mean, collision = packed[:, :4].unbind(-1)
        tail = Tail(log_mass=log_mass, mean=mean, collision=collision)
        return cls(shift=shift, support=packed[:, 4:], distinct=distinct, tail=tail)

    @property
    def log_norm(self) -> Tensor:
        """[n] log sum of exp over the whole vocabulary."""
        return torch.logsumexp(self._categories(), dim=-1)

    @property
    def log_others(self) -> Tensor:
        """[n] log sum of exp over everything but slot 0: summed, since 1 - pi_k would lose it to rounding."""
        return torch.logsumexp(self._categories()[:, 1:], dim=-1)

    def policy(self, vocabulary_size: int) -> PolicySupport:
        """The policy's statistics; NaN in rows whose logits have no finite norm."""
        log_norm = self.log_norm
        broken = ~torch.isfinite(log_norm)
        logp = self.support - log_norm[:, None]
        log_tail = self.tail.log_mass - log_norm
        distinct = logp.masked_fill(~self.distinct, -math.inf).exp()
        mean = (distinct * self.support).nansum(-1) + log_tail.exp() * self.tail.mean
        return PolicySupport(
            logp=logp.masked_fill(broken[:, None], math.nan),
            log_tail=log_tail.masked_fill(broken, math.nan),
            vocabulary_size=vocabulary_size,
            tail_sum_squares=((2 * log_tail).exp() * self.tail.collision).masked_fill(broken, math.nan),
            entropy=(log_norm - mean).masked_fill(broken, math.nan),
        )

    def _categories(self) -> Tensor:
        """[n, S + 1] logits of the support, each id once, and of the tail."""
        return torch.cat([self.support.masked_fill(~self.distinct, -math.inf), self.tail.log_mass[:, None]], dim=-1)
