"""DPPO: proximity from a divergence, direction from the sampled token's ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typing_extensions import Doc

from predmask.core.divergences import get_divergence
from predmask.core.rules.base import Criteria, Rule, positive, ratio_minus_one
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True, kw_only=True)
class DPPO(Rule):
    """Drop iff D(mu, pi) > delta and A (r - 1) > 0.

    Divergence PPO (arXiv 2602.04879, sec. 4): D over the engine's top-K tokens and their tail, or over the
    sampled token against the rest (`support = "binary"`). delta .15 is the setting of arXiv 2607.10848 for
    top-K KL; DPPO's own paper has .05 for KL and .2 for total variation.
    """

    name = "dppo"
    summary = "drop iff D(mu, pi) > delta and A·(r-1) > 0"
    source = "arXiv 2602.04879"

    divergence: Annotated[Literal["kl", "reverse_kl", "tv", "js"], Doc("which divergence")] = "kl"
    support: Annotated[
        Literal["topk", "binary"],
        Doc("over the engine's top-K tokens and their tail, or sampled against rest"),
    ] = "topk"
    delta: Annotated[float, Doc("threshold of the divergence, in nats (tv: probability)")] = 0.15

    def __post_init__(self) -> None:
        positive(self, "delta")
        get_divergence(self.divergence)
        if self.support not in ("topk", "binary"):
            raise ValueError(f"rule.support is {self.support!r}; choose 'topk' or 'binary'")

    @property
    def needs_topk(self) -> bool:
        """Only on the top-K support."""
        return self.support == "topk"

    @property
    def can_fire(self) -> bool:
        """Not when delta is at or above the divergence's largest value."""
        return self.delta < get_divergence(self.divergence).upper_bound

    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """D on the support, and the direction r - 1."""
        if self.support == "binary":
            behaviour, policy = behaviour.binary(), policy.binary()
        divergence = get_divergence(self.divergence)(behaviour, policy)
        outside = divergence > self.delta
        return Criteria(divergence=divergence, outside=outside, rate=ratio_minus_one(behaviour, policy))
