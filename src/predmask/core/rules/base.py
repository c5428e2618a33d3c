"""What every trust-region mask has in common: two criteria, one decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor

from predmask.core.support import BehaviourSupport, PolicySupport


class Reason(IntEnum):
    """Why a token's update counts or not."""

    NOT_TRAINABLE = 0
    """Padding, a token that the policy did not sample, or A = 0: outside loss and masks."""
    KEPT_INSIDE = 1
    """Inside the trust region."""
    KEPT_RETURNING = 2
    """Outside, but its update does not lead further out (or the rule drops nothing there)."""
    DROPPED_POSITIVE = 3
    """Dropped, A > 0."""
    DROPPED_NEGATIVE = 4
    """Dropped, A < 0."""
    UNKNOWN = 5
    """A log-prob is missing or not finite: outside loss, masks and means, and counted."""


@dataclass(frozen=True, kw_only=True)
class MaskDecision:
    """What a rule decided for each token. It is made once; loss, metrics and traces all read this."""

    keep: Tensor
    """[...] bool, whether the token's update counts."""
    divergence: Tensor
    """[...] the rule's proximity value."""
    rate: Tensor
    """[...] the rule's direction value: the update leads outward where advantage · rate > 0."""
    outside: Tensor
    """[...] bool, the proximity criterion."""
    reason: Tensor
    """[...] uint8, a `Reason`."""
    weight: Tensor
    """[...] the importance weight of the token's update, before the loss's ratio cap."""
    response_mask: Tensor
    """[...] bool, the tokens that the policy sampled: what was asked to be decided."""

    @property
    def dropped(self) -> Tensor:
        """[...] bool, masked by the rule (not: untrainable or unknown)."""
        return (self.reason == Reason.DROPPED_POSITIVE) | (self.reason == Reason.DROPPED_NEGATIVE)

    @property
    def trainable(self) -> Tensor:
        """[...] bool, known tokens with A ≠ 0, whether kept or dropped."""
        return self.keep | self.dropped


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """Both criteria of a rule, before the advantage is known."""

    divergence: Tensor
    outside: Tensor
    rate: Tensor


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """A trust-region mask: drop a token iff it is outside and its update leads further out.

    A rule is a frozen dataclass: its fields are its configuration. Subclasses say what outside and outward mean
    (`criteria`), and, where they differ, which tokens to drop (`drops`) and how to weigh the rest (`weight`).
    """

    name: ClassVar[str]
    """As configurations spell it."""
    summary: ClassVar[str]
    """The mask in one line of mathematics."""
    source: ClassVar[str]
    """Where it was published."""

    @property
    def needs_topk(self) -> bool:
        """Whether the engine must record top-K log-probs."""
        return False

    @property
    def needs_sum_squares(self) -> bool:
        """Whether the policy must measure its tail's sum of squares."""
        return False

    @property
    def can_fire(self) -> bool:
        """Whether any token could ever be dropped with these settings."""
        return True

    @abstractmethod
    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """Proximity and direction of each token."""

    def drops(self, criteria: Criteria, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """[...] bool, which trainable tokens are dropped: outside, and A · rate > 0."""
        # Signs, since the product of two small numbers may underflow.
        return criteria.outside & (torch.sign(advantage) * torch.sign(criteria.rate) > 0)

    def weight(self, log_ratio: Tensor) -> Tensor:
        """[...] the importance weight r = pi_k / mu_k."""
        return log_ratio.exp()

    @torch.no_grad()
    def __call__(
        self,
        behaviour: BehaviourSupport,
        policy: PolicySupport,
        advantage: Tensor,
        response_mask: Tensor | None = None,
    ) -> MaskDecision:
        """Decide for each token.

        Args:
            behaviour: mu on the support, leading shape [...].
            policy: pi on the same support.
            advantage: [...], of each token (or broadcastable, such as [B, 1] for tokens [B, T]).
            response_mask: [...] bool, False for padding and for tokens that the policy did not sample (tool output,
                an appended end); by default all True.

        A non-finite log-prob, divergence, rate or advantage never slips through a comparison: such a token is
        `Reason.UNKNOWN` and not kept. Raises ValueError when the rule needs top-K and the record has none, and for
        an advantage with another number of dimensions than the tokens.
        """
        if self.needs_topk and behaviour.top_k == 0:
            raise ValueError(
                f"top-K missing: rule {self.name!r} reads the engine's top-K log-probs, and the record holds only "
                "the sampled token's; record top-K, or choose a rule of the sampled token (see `predmask list`)"
            )
        policy = policy.detach()
        log_mu, log_pi = behaviour.logp[..., 0], policy.logp[..., 0]
        log_ratio = log_pi - log_mu
        advantage = per_token(advantage, log_ratio)
        criteria = self.criteria(behaviour, policy)
        known = (
            torch.isfinite(log_ratio)
            & torch.isfinite(advantage)
            & torch.isfinite(criteria.divergence)
            & torch.isfinite(criteria.rate)
            # An unusable record is unknown to the rules that read the sampled token alone, too.
            & ~torch.isnan(behaviour.log_tail)
            & ~torch.isnan(policy.log_tail)
        )
        if response_mask is None:
            response_mask = torch.ones_like(known)
        response_mask = response_mask.to(torch.bool).expand(known.shape)
        trainable = response_mask & known & (advantage != 0)
        dropped = trainable & self.drops(criteria, advantage, log_ratio)
        reason = torch.full_like(known, Reason.NOT_TRAINABLE, dtype=torch.uint8)
        reason[trainable & ~criteria.outside] = Reason.KEPT_INSIDE
        reason[trainable & criteria.outside] = Reason.KEPT_RETURNING
        reason[dropped & (advantage > 0)] = Reason.DROPPED_POSITIVE
        reason[dropped & (advantage < 0)] = Reason.DROPPED_NEGATIVE
        reason[response_mask & ~known] = Reason.UNKNOWN
        return MaskDecision(
            keep=trainable & ~dropped,
            divergence=criteria.divergence,
            rate=criteria.rate,
            outside=criteria.outside & known & response_mask,
            reason=reason,
            weight=self.weight(log_ratio),
            response_mask=response_mask,
        )


def per_token(advantage: Tensor, tokens: Tensor) -> Tensor:
    """The advantage of each token, detached; ValueError when it has another number of dimensions."""
    if advantage.ndim not in (0, tokens.ndim):
        # [B] would silently stretch along the tokens of [B, T] where both are equally long.
        raise ValueError(
            f"advantage has shape {tuple(advantage.shape)} for tokens of shape {tuple(tokens.shape)}; give advantages "
            "of sequences as advantage[:, None]"
        )
    return advantage.detach().to(tokens.dtype).expand(tokens.shape)


def ratio_minus_one(behaviour: BehaviourSupport, policy: PolicySupport) -> Tensor:
    """[...] r - 1, the direction of the ratio rules."""
    log_ratio = policy.logp[..., 0] - behaviour.logp[..., 0]
    # expm1 overflows to inf where r does; a huge finite value keeps such a token known, outside and outward.
    return torch.expm1(log_ratio).clamp(max=torch.finfo(log_ratio.dtype).max)


def ratio_criteria(behaviour: BehaviourSupport, policy: PolicySupport, low: float, high: float) -> Criteria:
    """The criteria of the ratio rules: outside [low, high], direction r - 1, distance |r - 1|."""
    moved = ratio_minus_one(behaviour, policy)
    return Criteria(divergence=moved.abs(), outside=(moved < low - 1.0) | (moved > high - 1.0), rate=moved)


def positive(rule: Rule, *fields: str) -> None:
    """Raise a ValueError for a field that is not a finite positive number."""
    for field in fields:
        value = getattr(rule, field)
        if not 0 < value < float("inf"):
            raise ValueError(f"rule.{field} is {value}; it must be a finite number above 0")
