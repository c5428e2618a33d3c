"""A head whose vocabulary is spread over the processes of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from predmask.ops.statistics import Measured


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which rows of the vocabulary this process holds. Shards may differ in size."""

    start: int
    """The id of the first row here."""
    vocabulary_size: int
    """V, the rows of all processes together."""
    group: Any = None
    """The process group; None is the default one."""

    @classmethod
    def of(cls, weight: Tensor, group: Any = None) -> Shard:
        """The shard that holds `weight` [rows, D], in the order of ranks. Every process of the group calls it."""
        sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=weight.device)
        rank = dist.get_rank(group)
        sizes[rank] = len(weight)
        dist.all_reduce(sizes, group=group)
        return cls(start=int(sizes[:rank].sum()), vocabulary_size=int(sizes.sum()), group=group)

    @property
    def mean_rows(self) -> int:
        """How many rows a process holds on average, rounded up: the same number in all of them."""
        return -(-self.vocabulary_size // dist.get_world_size(self.group))

    def merge(self, local: Measured) -> Measured:
        """The logits of the whole vocabulary in brief: one exchange of S + 4 numbers a token."""
        packed = local.pack()
        parts = [torch.empty_like(packed) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, packed, group=self.group)
        return Measured.merge([Measured.unpack(part, local.distinct) for part in parts])

    def sum(self, partial: Tensor) -> None:
        """Add up, in place, what each shard contributes."""
        dist.all_reduce(partial, group=self.group)
