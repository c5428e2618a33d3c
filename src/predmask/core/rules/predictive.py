"""The predictive divergence mask: proximity and direction from one divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typing_extensions import Doc

from predmask.core.divergences import get_divergence
from predmask.core.rates import divergence_rate, get_tail
from predmask.core.rules.base import Criteria, Rule, positive
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True, kw_only=True)
class Predictive(Rule):
    """Drop iff D(mu, pi) > delta and A·Ḋ > 0: the next gradient step would raise that same divergence.

    arXiv 2607.10848. For KL, Ḋ = (pi_k - mu_k) + sum_S pi (mu - pi) + (Q_T/pi_T)(mu_T - pi_T), with the tail's Q_T
    by `tail`: exact (this project's default), aggregated or uniform (the paper's). On a full-vocabulary support
    there is no tail, and the rate is the paper's full one. The other divergences follow the same general rate.
    """

    name = "predictive"
    summary = "drop iff D(mu, pi) > delta and A·Ḋ > 0"
    source = "arXiv 2607.10848"

    divergence: Annotated[Literal["kl", "reverse_kl", "tv", "js"], Doc("which divergence")] = "kl"
    tail: Annotated[
        Literal["exact", "aggregated", "uniform"],
        Doc("how the tail's sum of squares Q_T is known or estimated"),
    ] = "exact"
    delta: Annotated[float, Doc("threshold of the divergence, in nats (tv: probability)")] = 0.15

    def __post_init__(self) -> None:
        positive(self, "delta")
        get_divergence(self.divergence)
        get_tail(self.tail)

    @property
    def needs_topk(self) -> bool:
        """Always: on the sampled token alone the ratio's direction is already exact (rule dppo, binary)."""
        return True

    @property
    def needs_sum_squares(self) -> bool:
        """With the exact tail."""
        return get_tail(self.tail).needs_sum_squares

    @property
    def can_fire(self) -> bool:
        """Not when delta is at or above the divergence's largest value."""
        return self.delta < get_divergence(self.divergence).upper_bound

    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """D and Ḋ on the support and its tail."""
        divergence = get_divergence(self.divergence)(behaviour, policy)
        rate = divergence_rate(behaviour, policy, divergence=self.divergence, tail=self.tail)
        return Criteria(divergence=divergence, outside=divergence > self.delta, rate=rate)
