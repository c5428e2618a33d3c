"""Which numbers are precise enough, and how small ones are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """In what sums are formed: float64, or float32 on devices that have no float64 (mps)."""
    return torch.float32 if device.type == "mps" else torch.float64


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, accurate at both ends (Mächler 2012, `log1mexp`)."""
    near_zero = x > -math.log(2.0)
    return torch.where(near_zero, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def log_tiny(like: Tensor) -> float:
    """Log of the smallest normal number of the dtype: the floor of log-probs (-87.3 for float32)."""
    return math.log(torch.finfo(like.dtype).tiny)


def check_log_probs(name: str, value: Tensor) -> None:
    """Raise TypeError for log-probs of 16 bits."""
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} is {value.dtype}; log-probs need float32 or float64 (in 16 bits a ratio of 1.01 reads 1.06)"
        )
