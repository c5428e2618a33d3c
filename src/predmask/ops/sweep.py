"""One chunk of tokens at a time: its logits in a reused workspace, measured while hot, then turned into slopes.

A sweep is what a backend consists of. `TorchSweep` is plain torch, for any device.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from predmask.ops.head import Head
from predmask.ops.statistics import Measured, Tail

WORKSPACE_ELEMENTS = 80_000_000
"""Logits of one chunk: 512 tokens at V = 152k."""
HOT_ELEMENTS = 2**20
"""Logits that are measured at once, few enough to stay in a CPU's cache."""
_WIDENED_ROWS = 8192
"""Rows of a 16-bit weight that are widened at once."""
_FAINT = 1e-30
"""Below this share of the largest probability, a tail is measured again relative to its own largest logit."""


@dataclass(frozen=True)
class Slopes:
    """Derivatives of the loss by the raw logits hidden · weightᵀ + bias of some tokens: scale · values."""

    tokens: Tensor
    """[m] their places in the chunk; the other tokens have no slope"""
    values: Tensor
    """[m, V]"""
    scale: Tensor
    """[m]"""


@dataclass
class HeadGradient:
    """Where the gradients of the head's parameters are summed; None for a parameter that is frozen."""

    weight: Tensor | None
    """[V, D]"""
    bias: Tensor | None
    """[V]"""
    blank: bool
    """Whether the buffers hold no numbers yet."""


class Sweep(Protocol):
    """The logits of one chunk of tokens after the other."""

    chunk_tokens: int
    """How many tokens a chunk may have."""

    def measure(self, hidden: Tensor, ids: Tensor, distinct: Tensor) -> Measured:
        """Form the logits of n tokens and measure them.

        `hidden` is [n, D]. `ids` [n, S] are rows of this sweep's weight; what is outside them belongs to another part
        of the vocabulary. `distinct` [n, S] is False for an id that stands in an earlier slot.
        """
        ...

    def slopes(self, measured: Measured, by_logp: Tensor) -> Slopes:
        """The slopes of the chunk just measured; `by_logp` [n] is the loss's derivative by log pi of slot 0.

        d log pi_k / dz = e_k - pi. Tokens where it is 0 have no slope. `measured` may be relative to another shift by
        now. Once a chunk, since it may consume the logits.
        """
        ...

    def support_slopes(self, measured: Measured, by_logp: Tensor) -> Slopes:
        """Likewise, where `by_logp` [n, S] are derivatives by log pi of every slot."""
        ...

    def hidden_gradient(self, slopes: Slopes) -> Tensor:
        """[m, D] the gradient of the tokens' hidden states."""
        ...

    def add_head_gradient(self, slopes: Slopes, hidden: Tensor, gradient: HeadGradient) -> None:
        """Add the head's gradient, where the tokens' hidden states are `hidden` [m, D]."""
        ...


MakeSweep = Callable[[Head, Tensor, int], Sweep]
"""A backend: from head, hidden states, and how many rows of the vocabulary a chunk is sized for."""


def chunk_tokens(vocabulary_size: int, tokens: int) -> int:
    """How many of the tokens a chunk has: a multiple of 64, unless all fit."""
    return max(1, min(tokens, max(64, WORKSPACE_ELEMENTS // vocabulary_size // 64 * 64)))


def tail_of_sums(logits: Tensor, weights: Tensor, remeasure: Callable[[Tensor], Tail]) -> Tail:
    """The tail of logits [n, V], relative to the largest of each row, in few passes; the logits are consumed.

    `weights` are their exponentials, with 0 for what is not in the tail. `remeasure` gives the tail of the rows [n] in
    which that is too faint for sums relative to the largest logit.
    """
    mass = weights.sum(1)
    faint = mass < _FAINT
    remeasured = remeasure(faint) if faint.any() else None
    collision = (torch.linalg.vector_norm(weights, dim=1) / mass).square()
    # nansum: an id whose logit is -inf has no share in the mean.
    tail = Tail(log_mass=mass.log(), mean=logits.mul_(weights).nansum(1) / mass, collision=collision)
    if remeasured is not None:
        for name in ("log_mass", "mean", "collision"):
            getattr(tail, name)[faint] = getattr(remeasured, name)
    return tail


_spaces = threading.local()


def _workspace(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one sweep at a time. On a CPU the thread keeps it: fresh pages cost more than what is done on them."""
    if device.type != "cpu":
        return torch.empty(elements, dtype=dtype, device=device)
    kept: Tensor | None = _spaces.__dict__.pop(str(dtype), None)
    if kept is None or len(kept) < elements:
        with torch.inference_mode(False):  # or it could not be used for training afterwards
            kept = torch.empty(elements, dtype=dtype, device=device)
    return kept


class TorchSweep:
    """A `Sweep` in plain torch.

    Logits are read from memory once: a few rows at a time, shift, exponential, sums and support are taken while they
    are in the cache. What remains in the workspace is exp(z - shift), from which the slopes are made in place.
    """

    def __init__(self, head: Head, hidden: Tensor, rows: int) -> None:
        self._head = head
        self._dtype = dtype = head.accumulation(hidden)
        self._size = size = len(head.weight)
        self.chunk_tokens = chunk_tokens(rows, len(hidden))
        # One cell more than there are logits: ids of other parts of the vocabulary read and write there.
        self._spare = self.chunk_tokens * size
        hot = max(1, HOT_ELEMENTS // size) if hidden.device.type == "cpu" else self.chunk_tokens
        hot = min(hot, self.chunk_tokens)
        needed = self._spare + 1 + hot * size
        space = _workspace(needed, dtype, hidden.device)
        if space.device.type == "cpu":
            # Left to the next sweep; one that starts before that, as within a rule, has its own.
            weakref.finalize(self, setattr, _spaces, str(dtype), space)
        self._cells = space[: self._spare + 1]
        self._hot = space[self._spare + 1 : needed].view(hot, size)
        self._bias = None if head.bias is None else head.bias.to(dtype)
        self._widened: Tensor | None = None
        if head.weight.dtype != dtype:
            self._widened = head.weight.new_empty((_WIDENED_ROWS, head.weight.shape[1]), dtype=dtype)

    def measure(self, hidden: Tensor, ids: Tensor, distinct: Tensor) -> Measured:
        """Form the logits and measure them (see `Sweep`)."""
        head, count = self._head, len(hidden)
        self._rows = self._cells[: count * self._size].view(count, self._size)
        self._owned = (ids >= 0) & (ids < self._size)
        self._ids = ids
        places = torch.arange(count, device=ids.device)[:, None] * self._size + ids
        self._places = places.masked_fill(~self._owned, self._spare)
        # Where an id stands twice, its first slot writes.
        self._distinct_places = self._places.masked_fill(~distinct, self._spare)
        # The factors before the cap (or all of them) go with the small operand.
        gain = head.scale / (head.temperature if head.softcap is None else head.softcap)
        scaled = hidden.to(self._dtype) * gain
        for columns, weight in self._weight_blocks():
            torch.mm(scaled, weight.T, out=self._rows[:, columns])
        self._shift = scaled.new_empty(count)
        support = scaled.new_empty(ids.shape)
        tail = Tail(log_mass=scaled.new_empty(count), mean=scaled.new_empty(count), collision=scaled.new_empty(count))
        for part in self._parts():
            self._measure_part(part, gain, support, tail)
        return Measured(
            shift=self._shift,
            support=(support - self._shift[:, None]).masked_fill(~self._owned, -math.inf),
            distinct=distinct,
            tail=tail,
        )

    def slopes(self, measured: Measured, by_logp: Tensor) -> Slopes:
        """The slopes by slot 0 (see `Sweep`): values are (pi - e_k) · norm, and pi_k - 1 is summed, not subtracted."""
        support = measured.support.exp()
        support[:, 0] = -measured.log_others.exp()
        support.mul_(self._prepare(measured))
        self._write(self._distinct_places, support)
        tokens = self._compact(by_logp != 0)
        scale = -by_logp[tokens] * (-measured.log_norm[tokens]).exp()
        return Slopes(tokens, self._rows[: len(tokens)], scale * self._gain)

    def support_slopes(self, measured: Measured, by_logp: Tensor) -> Slopes:
        """The slopes by all slots (see `Sweep`)."""
        bend = self._prepare(measured)
        self._write(self._distinct_places, measured.support.exp() * bend)
        self._rows.mul_((-by_logp.sum(1) * (-measured.log_norm).exp())[:, None])
        self._cells.scatter_add_(0, self._places.flatten(), (by_logp * bend).flatten())
        tokens = self._compact((by_logp != 0).any(1))
        return Slopes(tokens, self._rows[: len(tokens)], by_logp.new_full((len(tokens),), self._gain))

    def hidden_gradient(self, slopes: Slopes) -> Tensor:
        """[m, D] slopes times weight (see `Sweep`)."""
        product = slopes.values.new_zeros(len(slopes.tokens), self._head.weight.shape[1])
        for columns, weight in self._weight_blocks():
            product.addmm_(slopes.values[:, columns], weight)
        return product.mul_(slopes.scale[:, None])

    def add_head_gradient(self, slopes: Slopes, hidden: Tensor, gradient: HeadGradient) -> None:
        """Slopes times hidden states (see `Sweep`)."""
        beta = 0 if gradient.blank else 1
        if gradient.weight is not None:
            # Each token's scale goes with the small operand: no pass over the logits for it.
            gradient.weight.addmm_(slopes.values.T, hidden.to(self._dtype) * slopes.scale[:, None], beta=beta)
        if gradient.bias is not None:
            gradient.bias.addmv_(slopes.values.T, slopes.scale, beta=beta)
        gradient.blank = False

    def _measure_part(self, part: slice, gain: float, support: Tensor, tail: Tail) -> None:
        """A few rows: raw logits become exp(z - shift), and 0 at the support."""
        rows = self._rows[part]
        if self._bias is not None:
            rows.add_(self._bias, alpha=gain)
        if self._head.softcap is not None:
            rows.tanh_().mul_(self._head.softcap / self._head.temperature)
        # Of a part of the vocabulary, all logits may be -inf.
        largest = rows.amax(1)
        largest.masked_fill_(largest == -math.inf, 0.0)
        self._shift[part] = largest
        support[part] = self._cells.take(self._places[part])
        logits = torch.sub(rows, largest[:, None], out=self._hot[: len(rows)])
        torch.exp(logits, out=rows)
        places = self._distinct_places[part]
        self._write(places, rows.new_zeros(places.shape))
        found = tail_of_sums(logits, rows, lambda faint: self._tail_of(logits[faint], part, faint))
        tail.log_mass[part], tail.mean[part], tail.collision[part] = found.log_mass, found.mean, found.collision

    def _tail_of(self, logits: Tensor, part: slice, which: Tensor) -> Tail:
        """The tail of a few rows that are too faint for the sums of a chunk."""
        columns = self._ids[part][which].masked_fill(~self._owned[part][which], self._size)
        padded = torch.nn.functional.pad(logits, (0, 1)).scatter_(1, columns, -math.inf)
        return Tail.of(padded[:, :-1])

    def _prepare(self, measured: Measured) -> Tensor | float:
        """Bring the tail's cells to the shift that `measured` has now, and through the soft-cap.

        Returns what the support's cells must be multiplied by for the latter: 1 - (cap(z) / softcap)².
        """
        if measured.shift is not self._shift:
            # Where all logits here are -inf, the shift here is 0 and may lie above the other.
            self._rows.mul_((self._shift - measured.shift).clamp(max=0.0).exp()[:, None])
        if self._head.softcap is None:
            return 1.0
        inverse = self._head.temperature / self._head.softcap
        tiny = torch.finfo(self._dtype).tiny
        for part in self._parts():
            rows = self._rows[part]
            logits = torch.clamp(rows, min=tiny, out=self._hot[: len(rows)]).log_().add_(measured.shift[part, None])
            rows.mul_(logits.mul_(inverse).square_().neg_().add_(1.0))
        return 1.0 - ((measured.support + measured.shift[:, None]) * inverse).square()

    def _write(self, places: Tensor, values: Tensor) -> None:
        self._cells.scatter_(0, places.flatten(), values.flatten())

    def _compact(self, which: Tensor) -> Tensor:
        """Move the rows of the given tokens to the front; returns which token stands where.

        Rows that are not wanted are overwritten by wanted ones from the end, so that the products run over whole rows
        without a copy of the chunk.
        """
        count = int(which.sum())
        tokens = torch.arange(count, device=which.device)
        holes = (~which[:count]).nonzero()[:, 0]
        donors = which[count:].nonzero()[:, 0] + count
        for to, source in zip(holes.split(len(self._hot)), donors.split(len(self._hot)), strict=True):
            self._rows[to] = self._rows[source]
        tokens[holes] = donors
        return tokens

    @property
    def _gain(self) -> float:
        """d logit / d raw logit, but for the soft-cap's part."""
        return self._head.scale / self._head.temperature

    def _parts(self) -> Iterator[slice]:
        """A few rows of the chunk after the other."""
        for start in range(0, len(self._rows), len(self._hot)):
            yield slice(start, start + len(self._hot))

    def _weight_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The weight in the accumulation type: as it is, or widened by blocks of rows."""
        weight = self._head.weight
        if self._widened is None:
            yield slice(None), weight
            return
        for start in range(0, self._size, _WIDENED_ROWS):
            columns = slice(start, min(start + _WIDENED_ROWS, self._size))
            block = self._widened[: columns.stop - start]
            yield columns, block.copy_(weight[columns])
