"""How the arrays of another trainer lie: padded or flat, with a number a token, a row or a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from predmask.traces.records import TraceError


@dataclass(frozen=True)
class Layout:
    """How the arrays of a call lie, and which of their entries are tokens of the trace."""

    shape: tuple[int, ...]
    """[B, T] or [N]; E entries in all."""
    sampled: Tensor
    """[E] bool, the response mask."""
    recorded: Tensor
    """[M] int64, the entries that are tokens of the trace."""

    @classmethod
    def of(cls, tokens: Any, response_mask: Any) -> Layout:
        """The layout of arrays that go with `tokens`."""
        ids = as_tensor("tokens", tokens)
        if ids.ndim not in (1, 2) or ids.is_floating_point():
            raise TraceError(f"tokens is {ids.dtype} {list(ids.shape)}; expected integer ids, [B, T] or flat [N]")
        layout = cls(tuple(ids.shape), torch.ones(ids.numel(), dtype=torch.bool), torch.arange(ids.numel()))
        if response_mask is None:
            return layout
        sampled = layout.each("response_mask", response_mask).cpu() != 0
        recorded = layout.recorded
        if ids.ndim == 2:
            recorded = torch.nonzero(until_last(sampled.view(ids.shape)).reshape(-1))[:, 0]
        return replace(layout, sampled=sampled, recorded=recorded)

    def each(self, name: str, value: Any, *width: int) -> Tensor:
        """[E, ...] an array with an entry for each token."""
        found, expected = as_tensor(name, value), (*self.shape, *width)
        if tuple(found.shape) != expected:
            raise TraceError(f"{name} has shape {list(found.shape)}; expected {list(expected)}")
        return found.reshape(len(self.sampled), *width)

    def spread(self, name: str, value: Any) -> Tensor:
        """[E] from one number, a number a row, or a number a token."""
        found = as_tensor(name, value).cpu()
        if found.ndim == 0:
            return found.expand(len(self.sampled))
        if len(self.shape) == 2 and found.shape == self.shape[:1]:
            return found[:, None].expand(self.shape).reshape(-1)
        return self.each(name, found)

    def row_numbers(self) -> Tensor:
        """[B] 0 to B - 1; TraceError for flat arrays, which have no rows."""
        if len(self.shape) == 1:
            raise TraceError("flat tokens need sample=, the number of each token's response")
        return torch.arange(self.shape[0])


def as_tensor(name: str, value: Any) -> Tensor:
    """An array or list as a tensor outside the graph, None as NaN; TraceError for what is none."""
    if isinstance(value, Tensor):
        return value.detach()
    import numpy as np  # whoever has tensors alone needs no NumPy

    try:
        array = np.asarray(value)
        if array.dtype == object:
            array = array.astype(np.float64)
        if array.dtype.kind == "u":
            array = array.astype(np.int64)
        # torch shares no memory that is read-only or runs backwards.
        shared = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if shared else array.copy())
    except (ValueError, TypeError) as error:
        raise TraceError(f"{name} is no array of numbers: {error}") from error


def until_last(mask: Tensor) -> Tensor:
    """[B, T] bool, each row's entries up to its last True."""
    return mask.flip(1).cumsum(1).flip(1) > 0


def ranks(sample: Tensor) -> Tensor:
    """[E] how many earlier entries belong to the same response."""
    order = torch.argsort(sample, stable=True)
    ordered = sample[order]
    start = torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) - start)
