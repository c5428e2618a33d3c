"""Group-relative advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from predmask.core.precision import wide_dtype
from predmask.core.segments import segment_index, segment_sum

Baseline = Literal["mean", "leave_one_out"]


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of B responses."""

    values: Tensor
    """[B] float32; exactly 0 where all rewards of the group are equal, and where the reward is unknown."""
    scored: Tensor
    """[B] bool, whether the reward was known; an unscored response is outside loss and denominators."""
    equal_groups: int
    """Groups whose known rewards are all equal: they teach nothing."""
    groups: int
    """All groups with a known reward."""


def group_advantages(
    rewards: Tensor, groups: Tensor, *, baseline: Baseline = "mean", scale_by_std: bool = False
) -> Advantages:
    """A_i = R_i - baseline of its group, over the group's known rewards (GRPO, arXiv 2402.03300, sec. 4.1).

    Args:
        rewards: [B]; NaN is a reward that could not be scored: it leaves its group.
        groups: [B] integer ids; responses with equal ids form a group, in any order.
        baseline: the group's mean, or the mean of the *other* members (RLOO, arXiv 2402.14740).
        scale_by_std: divide by the group's standard deviation (sample, n - 1), as GRPO does; Dr. GRPO
            (arXiv 2503.20783) and the predictive mask's paper leave it out.

    Equal rewards give exactly 0, whatever the rounding. Raises ValueError for infinite rewards, an unknown
    baseline and shapes that differ.
    """
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [B]")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite; a reward that could not be scored is NaN")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"unknown baseline {baseline!r}; choose 'mean' or 'leave_one_out'")
    scored = ~torch.isnan(rewards)
    known = rewards.to(wide_dtype(rewards.device)).nan_to_num(0.0)
    index, size = segment_index(groups)
    count = segment_sum(scored, index, size)
    mean = segment_sum(known, index, size) / count.clamp(min=1)
    deviation = torch.where(scored, known - mean[index], 0.0)
    high = torch.full_like(mean, -torch.inf).scatter_reduce(0, index[scored], known[scored], "amax")
    low = torch.full_like(mean, torch.inf).scatter_reduce(0, index[scored], known[scored], "amin")
    equal = high <= low
    values = deviation
    if baseline == "leave_one_out":
        values = values * (count / (count - 1).clamp(min=1))[index]
    if scale_by_std:
        std = (segment_sum(deviation**2, index, size) / (count - 1).clamp(min=1)).sqrt()
        values = values / torch.where(equal, 1.0, std)[index]
    values = torch.where(equal[index] | ~scored, 0.0, values)
    return Advantages(
        values=values.float(),
        scored=scored,
        equal_groups=int((equal & (count > 0)).sum()),
        groups=int((count > 0).sum()),
    )
