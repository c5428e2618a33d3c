"""PPO / GRPO clipping, written as a mask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from predmask.core.rules.base import Criteria, Rule, positive, ratio_criteria
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True, kw_only=True)
class PPOClip(Rule):
    """Drop iff r is outside [1 - eps_low, 1 + eps_high] and A (r - 1) > 0.

    The tokens where min(r A, clip(r) A) of PPO (arXiv 1707.06347, eq. 7) has no gradient; unequal ends are
    DAPO's clip-higher (arXiv 2503.14476). A < 0 is clipped on one side only: a large ratio passes, unless
    `dual_clip` c (arXiv 1912.09729) drops A < 0 with r > c too. The anchor is the behaviour policy.
    """

    name = "ppo_clip"
    summary = "drop iff r ∉ [1-eps_low, 1+eps_high] and A·(r-1) > 0"
    source = "arXiv 1707.06347; clip-higher: arXiv 2503.14476; dual clip: arXiv 1912.09729"

    eps_low: Annotated[float, Doc("how far the ratio may fall below 1; in (0, 1)")] = 0.2
    eps_high: Annotated[float, Doc("how far the ratio may rise above 1")] = 0.28
    dual_clip: Annotated[float | None, Doc("drop A < 0 above this ratio too; none: off")] = None

    def __post_init__(self) -> None:
        positive(self, "eps_low", "eps_high")
        if self.eps_low > 1:
            raise ValueError(f"rule.eps_low is {self.eps_low}; a ratio cannot fall below 0: choose at most 1")
        if self.dual_clip is not None and not self.dual_clip > 1 + self.eps_high:
            raise ValueError(f"rule.dual_clip is {self.dual_clip}; it must be above 1 + eps_high, often 3")

    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """|r - 1|, and the direction r - 1."""
        return ratio_criteria(behaviour, policy, 1.0 - self.eps_low, 1.0 + self.eps_high)

    def drops(self, criteria: Criteria, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """[...] bool; with dual clip, A < 0 with r > c as well."""
        outward = super().drops(criteria, advantage, log_ratio)
        if self.dual_clip is None:
            return outward
        return outward | ((advantage < 0) & (log_ratio > math.log(self.dual_clip)))
