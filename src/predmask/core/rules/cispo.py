"""CISPO: the importance weight is clipped, no token is dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Doc

from predmask.core.rules.base import Criteria, Rule, positive, ratio_criteria
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True, kw_only=True)
class CISPO(Rule):
    """Keep every token, with the detached weight clip(r, 1 - eps_low, 1 + eps_high).

    MiniMax-M1 (arXiv 2506.13585, eqs. 4-5); without a lower end, as there, `eps_low` is 1. A token whose weight
    was clipped counts as outside.
    """

    name = "cispo"
    summary = "drops nothing; weight clip(r, 1-eps_low, 1+eps_high)"
    source = "arXiv 2506.13585"

    eps_low: Annotated[float, Doc("how far the weight may fall below 1; 1: no lower end")] = 1.0
    eps_high: Annotated[float, Doc("how far the weight may rise above 1")] = 0.2

    def __post_init__(self) -> None:
        positive(self, "eps_low", "eps_high")
        if self.eps_low > 1:
            raise ValueError(f"rule.eps_low is {self.eps_low}; a weight cannot fall below 0: choose at most 1")

    @property
    def can_fire(self) -> bool:
        """Never: it clips weights and drops no token."""
        return False

    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """|r - 1|, outside where the weight is clipped."""
        return ratio_criteria(behaviour, policy, 1.0 - self.eps_low, 1.0 + self.eps_high)

    def drops(self, criteria: Criteria, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """[...] bool, all False."""
        return torch.zeros_like(criteria.outside)

    def weight(self, log_ratio: Tensor) -> Tensor:
        """[...] clip(r, 1 - eps_low, 1 + eps_high)."""
        return log_ratio.clamp(max=math.log1p(self.eps_high)).exp().clamp(min=1.0 - self.eps_low)
