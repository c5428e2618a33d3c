"""IcePop: drop every token whose ratio leaves a band, whatever the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from predmask.core.rules.base import Criteria, Rule, positive, ratio_criteria
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True, kw_only=True)
class IcePop(Rule):
    """Drop iff r is outside [low, high]: proximity alone, no direction criterion.

    The double-sided calibration of IcePop (Ring-1T, arXiv 2510.18855), against the behaviour policy.
    """

    name = "icepop"
    summary = "drop iff r ∉ [low, high]"
    source = "IcePop; Ring-1T, arXiv 2510.18855"

    low: Annotated[float, Doc("smallest ratio that is kept; in (0, 1)")] = 0.5
    high: Annotated[float, Doc("largest ratio that is kept; above 1")] = 5.0

    def __post_init__(self) -> None:
        positive(self, "low", "high")
        if not self.low < 1 < self.high:
            raise ValueError(f"rule.low is {self.low} and rule.high {self.high}; 1 must lie between them")

    def criteria(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Criteria:
        """|r - 1|; the direction r - 1 is for display only."""
        return ratio_criteria(behaviour, policy, self.low, self.high)

    def drops(self, criteria: Criteria, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """[...] bool, all that is outside."""
        return criteria.outside
