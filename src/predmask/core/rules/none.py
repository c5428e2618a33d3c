"""No mask: every update counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from predmask.core.divergences import get_divergence
from predmask.core.rules.base import Criteria, Rule
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True, kw_only=True)
class NoMask(Rule):
    """Keep every token: importance-weighted policy gradient, r · A · log pi.

    Its divergence is KL(mu‖pi) on the support, for display only.
    """

    name = "none"
    summary = "drops nothing"
    source = "importance sampling, textbook"

    @property
    def can_fire(self) -> bool:
        """Never."""
        return False

    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """KL on the support; no token is outside."""
        divergence = get_divergence("kl")(behaviour, policy)
        return Criteria(
            divergence=divergence,
            outside=torch.zeros_like(divergence, dtype=torch.bool),
            rate=torch.zeros_like(divergence),
        )
