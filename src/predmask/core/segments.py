"""Sums over tokens or responses that share an id."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from predmask.core.precision import wide_dtype


def segment_index(ids: Tensor) -> tuple[Tensor, int]:
    """Number arbitrary ids 0, 1, ...: the [...] index of each entry's id, and how many ids there are."""
    _, index = cast("tuple[Tensor, Tensor]", torch.unique(ids, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
    return index, int(index.max()) + 1 if index.numel() else 0


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size] wide sums of the values with the same index."""
    wide = wide_dtype(values.device)
    sums = torch.zeros(size, dtype=wide, device=values.device)
    return sums.index_add(0, index.flatten(), values.to(wide).flatten())
