"""A sweep for GPUs: one Triton kernel measures a chunk of logits, another turns it into slopes; cuBLAS multiplies.

Only this module imports triton, and nothing imports it before its backend is asked for. With TRITON_INTERPRET=1, set
before triton is imported, the same kernels run on a CPU: for tests, not for work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

from predmask.ops.head import Head
from predmask.ops.statistics import Measured, Tail
from predmask.ops.sweep import HeadGradient, Slopes

_jit: Any = triton.jit  # to a type checker without triton, a kernel takes options too

WORKSPACE_BYTES = 3 * 2**29
"""Float32 logits of one chunk, and their slopes: 1,664 tokens at V = 152k in 16 bits."""
_WIDENED_ROWS = 8192
"""Rows of the weight that are widened to float32 at once, where 16 bits cannot be multiplied into float32."""
_LIFT = 2.0**14
"""The largest slope, in a unit of each chunk's own: float16 then keeps probabilities down to 1e-11."""
_SLOPES_TILE = 4096
_SMALLEST_UNIT = 1e-30


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How `_measure_kernel` is cut into programs."""

    rows: int
    """Tokens of a program."""
    columns: int
    """Logits of a token that are held at once; a program goes over several such tiles."""
    depth: int
    """Hidden dimensions that are multiplied at once, where the kernel forms the product."""
    warps: int
    stages: int
    programs: int = 2048
    """How many programs there should be: enough that the last ones to run leave few processors idle."""

    def splits(self, tokens: int, size: int) -> tuple[int, int]:
        """Into how many parts the vocabulary is split, and how many tiles a part has."""
        tiles = max(1, triton.cdiv(size, self.columns))
        wanted = triton.cdiv(self.programs, triton.cdiv(max(tokens, 1), self.rows))
        each = triton.cdiv(tiles, min(tiles, wanted))
        return triton.cdiv(tiles, each), each


def _tiling(operand: torch.dtype, form_product: bool) -> Tiling:
    """A tiling without spilled registers to speak of, for GPUs with 96 KiB of shared memory."""
    if not form_product:
        return Tiling(rows=4, columns=1024, depth=16, warps=8, stages=1)
    if operand == torch.float32:
        return Tiling(rows=64, columns=64, depth=16, warps=8, stages=3)
    return Tiling(rows=128, columns=128, depth=64, warps=8, stages=3)


@_jit
def _measure_kernel(
    hidden,
    weight,
    bias,
    logits,
    excluded,
    top,
    log_mass,
    mean,
    collision,
    count,
    size,
    dimensions,
    stride,
    gain,
    ceiling,
    tiles_each,
    form_product: tl.constexpr,
    with_bias: tl.constexpr,
    with_cap: tl.constexpr,
    widen: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Logits z of some tokens in one part of the vocabulary, and their tail in brief, in one pass.

    z = gain · (hidden · weightᵀ + bias), or ceiling · tanh of it; without `form_product`, `logits` holds
    gain · hidden · weightᵀ already. z is written to `logits` where it is not there yet. Of the ids that are not in
    the bitmap `excluded`, with m their largest z, it gives m, log sum exp(z - m), the mean of z - m and the sum of
    squares, both under the distribution of these ids alone. NaN among them makes the sums NaN.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < count
    cells = row.to(tl.int64)[:, None] * stride
    words = row.to(tl.int64)[:, None] * (stride // 32)
    # Loads of tokens and ids beyond the end read the last one again: no masks in the product's loop.
    hidden_row = hidden + tl.minimum(row, count - 1).to(tl.int64)[:, None] * dimensions
    highest = tl.full([rows], float("-inf"), tl.float32)
    mass = tl.zeros([rows], tl.float32)
    moment = tl.zeros([rows], tl.float32)
    squares = tl.zeros([rows], tl.float32)
    first = tl.program_id(1) * tiles_each
    for tile in range(first, tl.minimum(first + tiles_each, tl.cdiv(size, columns))):
        column = tile * columns + tl.arange(0, columns)
        stored = inside[:, None] & (column < stride)[None, :]
        if form_product:
            weight_row = weight + tl.minimum(column, size - 1).to(tl.int64)[None, :] * dimensions
            z = tl.zeros([rows, columns], tl.float32)
            for start in range(0, dimensions, depth):
                d = start + tl.arange(0, depth)
                a = tl.load(hidden_row + d[None, :], mask=(d < dimensions)[None, :], other=0.0)
                b = tl.load(weight_row + d[:, None], mask=(d < dimensions)[:, None], other=0.0).to(a.dtype)
                if widen:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                z = tl.dot(a, b, z, input_precision="ieee")
            z *= gain
        else:
            # Loaded up to the stride, so that addresses stay aligned for any vocabulary.
            z = tl.load(logits + cells + column[None, :], mask=stored, other=0.0)
            z = tl.where((column < size)[None, :], z, 0.0)
        if with_bias:
            z += gain * tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
        if with_cap:
            decay = tl.exp(-2.0 * tl.abs(z))
            bounded = ceiling * (1.0 - decay) / (1.0 + decay)
            z = tl.where(z < 0, -bounded, bounded)
        if form_product or with_bias or with_cap:
            tl.store(logits + cells + column[None, :], z, mask=stored)
        word = tl.load(excluded + words + column[None, :] // 32, mask=stored, other=0)
        member = stored & (column < size)[None, :] & (((word >> (column % 32)[None, :]) & 1) == 0)
        z = tl.where(member, z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z, 1))
        # As long as there is no finite logit, nothing was summed: any base and any step will do.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        step = tl.where(highest == float("-inf"), 0.0, highest - base)
        z -= base[:, None]
        e = tl.exp(z)
        fade = tl.exp(step)
        moment = fade * (moment + step * mass) + tl.sum(e * tl.where(e > 0, z, 0.0), 1)
        mass = fade * mass + tl.sum(e, 1)
        squares = fade * fade * squares + tl.sum(e * e, 1)
        highest = higher
    empty = mass == 0
    mass = tl.where(empty, 1.0, mass)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(top + out, highest, mask=inside)
    tl.store(log_mass + out, tl.where(empty, float("-inf"), tl.log(mass)), mask=inside)
    tl.store(mean + out, moment / mass, mask=inside)
    tl.store(collision + out, squares / (mass * mass), mask=inside)


@_jit
def _slopes_kernel(
    logits,
    values,
    tokens,
    shift,
    log_norm,
    coefficient,
    size,
    stride,
    inverse_ceiling,
    with_cap: tl.constexpr,
    columns: tl.constexpr,
):
    """One token's slopes: coefficient · pi · (1 - tanh²), pi = exp(z - shift - log_norm)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    stored = column < stride
    origin = tl.load(shift + row)
    z = tl.load(logits + tl.load(tokens + row) * stride + column, mask=stored, other=0.0)
    z = tl.where(column < size, z, origin)
    value = tl.load(coefficient + row) * tl.exp(z - origin - tl.load(log_norm + row))
    if with_cap:
        bounded = z * inverse_ceiling
        value *= 1.0 - bounded * bounded
    tl.store(values + row.to(tl.int64) * stride + column, value.to(values.dtype.element_ty), mask=stored)


_INTERPRETED = not isinstance(_measure_kernel, JITFunction)


def hindrance(head: Head, hidden: Tensor) -> str | None:
    """Why these inputs cannot be swept by `TritonSweep`, or None."""
    if head.accumulation(hidden) == torch.float64:
        return "computes in float32, and an input is float64"
    if not (hidden.is_cuda or _INTERPRETED):
        return (
            f"needs a GPU, and hidden is on {hidden.device} (tests: set TRITON_INTERPRET=1 before triton is imported)"
        )
    if hidden.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return f"needs compute capability 8.0, and {torch.cuda.get_device_name(hidden.device)} has less"
    return None


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float) -> None:
    """total = beta · total + alpha · a · b, where total is float32, and a and b have one dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha, beta=beta)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, alpha=alpha, beta=beta, out=total)


@lru_cache
def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch adds products of this dtype to float32 sums; 16 bits need a GPU and a recent torch (2.10)."""
    ones, total = (torch.ones((16, 16), dtype=kind, device=device) for kind in (dtype, torch.float32))
    try:
        _add_product(total, ones, ones, alpha=1.0, beta=1.0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


class TritonSweep:
    """A `Sweep` for GPUs.

    Logits are formed by cuBLAS, or tile by tile in the kernel that measures them, and a chunk of them is kept in
    float32: reading them again costs less than forming them again. The slopes of the tokens that have any are written
    next to each other, in the dtype of the operands, and multiplied into float32 sums.

    Args:
        head: the head; of 16 or 32 bits.
        hidden: [N, D] hidden states; of 16 or 32 bits. With a weight of another dtype, products are float32.
        rows: how many rows of the vocabulary a chunk is sized for.
        form_product: whether the kernel forms the product, instead of cuBLAS. By default only where torch cannot
            multiply these dtypes into float32.
        tiling: how the kernel is cut.

    Raises ValueError where it cannot run, and says why.
    """

    def __init__(
        self, head: Head, hidden: Tensor, rows: int, *, form_product: bool | None = None, tiling: Tiling | None = None
    ) -> None:
        reason = hindrance(head, hidden)
        if reason is not None:
            raise ValueError(f"backend 'triton' {reason}; use 'chunked', or 'auto', which chooses")
        self._head = head
        self._size, self._dimensions = head.weight.shape
        self._operand = torch.promote_types(head.weight.dtype, hidden.dtype)
        self._direct = head.weight.dtype == self._operand and _multiplies(self._operand, head.weight.device)
        self._form_product = not self._direct if form_product is None else form_product
        self._rows = head.weight.contiguous() if self._form_product else head.weight
        self._tiling = tiling or _tiling(self._operand, self._form_product)
        # At least one column more than there are logits: ids of other parts of the vocabulary read and write there.
        self._stride = (self._size // 64 + 1) * 64
        fitting = WORKSPACE_BYTES // (rows * (4 + self._operand.itemsize))
        self.chunk_tokens = max(1, min(len(hidden), max(128, fitting // 128 * 128)))
        self._logits = self._workspace(torch.float32)

    def measure(self, hidden: Tensor, ids: Tensor, distinct: Tensor) -> Measured:
        """Form the logits and measure them (see `Sweep`)."""
        head, count = self._head, len(hidden)
        owned = (ids >= 0) & (ids < self._size)
        self._columns = ids.masked_fill(~owned, self._size)
        logits, hidden = self._logits[:count], hidden.to(self._operand).contiguous()
        gain = head.scale / (head.temperature if head.softcap is None else head.softcap)
        if not self._form_product:
            for columns, weight in self._weight_blocks():
                _add_product(logits[:, columns], hidden.to(weight.dtype), weight.T, alpha=gain, beta=0.0)
        splits, tiles_each = self._tiling.splits(count, self._size)
        top, log_mass, mean, collision = logits.new_empty((4, count, splits))
        if count:
            weight = self._rows if self._form_product else logits
            with torch.cuda.device_of(hidden):
                _measure_kernel[(triton.cdiv(count, self._tiling.rows), splits)](
                    hidden,
                    weight,
                    logits if head.bias is None else head.bias.contiguous(),
                    logits,
                    self._bitmap(owned & distinct),
                    top,
                    log_mass,
                    mean,
                    collision,
                    count,
                    self._size,
                    self._dimensions,
                    self._stride,
                    gain,
                    1.0 / self._inverse_ceiling if head.softcap is not None else 1.0,
                    tiles_each,
                    form_product=self._form_product,
                    with_bias=head.bias is not None,
                    with_cap=head.softcap is not None,
                    widen=_INTERPRETED,  # whose products of 16 bits are wrong
                    rows=self._tiling.rows,
                    columns=self._tiling.columns,
                    depth=self._tiling.depth,
                    num_warps=self._tiling.warps,
                    num_stages=self._tiling.stages,
                )
        support = logits.gather(1, self._columns).masked_fill(~owned, -math.inf)
        shift = torch.cat([top, support], dim=1).amax(1)
        # Of a part of the vocabulary, all logits may be -inf.
        shift = shift.masked_fill(shift == -math.inf, 0.0)
        moved = (top - shift[:, None]).masked_fill(top == -math.inf, 0.0)
        tail = Tail(log_mass=log_mass + moved, mean=mean + moved, collision=collision).merge()
        return Measured(shift=shift, support=support - shift[:, None], distinct=distinct, tail=tail)

    def slopes(self, measured: Measured, by_logp: Tensor) -> Slopes:
        """The slopes by slot 0 (see `Sweep`); 1 - pi_k is summed, not subtracted."""
        tokens = by_logp.nonzero()[:, 0]
        total = by_logp[tokens]
        slopes, unit = self._turn(measured, tokens, total, total.abs())
        cells = total * (measured.log_others - measured.log_norm)[tokens].exp() / unit
        self._put(slopes, self._columns[tokens, :1], cells[:, None], measured.support[tokens, :1], measured.shift)
        return slopes

    def support_slopes(self, measured: Measured, by_logp: Tensor) -> Slopes:
        """The slopes by all slots (see `Sweep`)."""
        tokens = (by_logp != 0).any(1).nonzero()[:, 0]
        by_logp, columns, support = by_logp[tokens], self._columns[tokens], measured.support[tokens]
        total = by_logp.sum(1)
        slopes, unit = self._turn(measured, tokens, total, by_logp.abs().sum(1))
        # The logits were read for the last time: their cells add up what several slots say about one id.
        cells = self._logits[: len(tokens)].scatter_(1, columns, 0.0).scatter_add_(1, columns, by_logp)
        policy = (support - measured.log_norm[tokens, None]).exp()
        self._put(slopes, columns, (cells.gather(1, columns) - total[:, None] * policy) / unit, support, measured.shift)
        return slopes

    def hidden_gradient(self, slopes: Slopes) -> Tensor:
        """[m, D] slopes times weight (see `Sweep`)."""
        product = slopes.values.new_zeros((len(slopes.tokens), self._dimensions), dtype=torch.float32)
        for columns, weight in self._weight_blocks():
            values = slopes.values[:, columns].to(weight.dtype)
            _add_product(product, values, weight, alpha=float(slopes.scale[0]), beta=1.0)
        return product

    def add_head_gradient(self, slopes: Slopes, hidden: Tensor, gradient: HeadGradient) -> None:
        """Slopes times hidden states (see `Sweep`)."""
        unit, beta = float(slopes.scale[0]), 0.0 if gradient.blank else 1.0
        if gradient.weight is not None:
            for columns, dtype in self._blocks():
                values, states = slopes.values[:, columns].to(dtype), hidden.to(dtype)
                _add_product(gradient.weight[columns], values.T, states, alpha=unit, beta=beta)
        if gradient.bias is not None:
            summed = slopes.values.sum(0, dtype=torch.float32).mul_(unit)
            gradient.bias.copy_(summed if gradient.blank else gradient.bias + summed)
        gradient.blank = False

    def _turn(self, measured: Measured, tokens: Tensor, total: Tensor, bound: Tensor) -> tuple[Slopes, float]:
        """The slopes -total · pi [m, V], and their unit.

        No slope will be larger than twice the `bound` [m] of its token. The unit is one number for the chunk, so that
        it can be a factor of the products, and on the CPU, so that they need not wait for it.
        """
        unit = max(float(bound.max()), _SMALLEST_UNIT) / _LIFT if len(tokens) else 1.0
        values = self._values[: len(tokens)]
        if len(tokens):
            with torch.cuda.device_of(values):
                _slopes_kernel[(len(tokens), triton.cdiv(self._stride, _SLOPES_TILE))](
                    self._logits,
                    values,
                    tokens,
                    measured.shift[tokens],
                    measured.log_norm[tokens],
                    -total / unit,
                    self._size,
                    self._stride,
                    self._inverse_ceiling,
                    with_cap=self._head.softcap is not None,
                    columns=_SLOPES_TILE,
                    num_warps=8,
                )
        factor = unit * self._head.scale / self._head.temperature
        scale = torch.full((len(tokens),), factor, dtype=torch.float32, device="cpu")
        return Slopes(tokens, values[:, : self._size], scale), unit

    def _put(self, slopes: Slopes, columns: Tensor, cells: Tensor, support: Tensor, shift: Tensor) -> None:
        """Put the support's slopes in their places, through the soft-cap."""
        if self._head.softcap is not None:
            cells = cells * (1.0 - ((support + shift[slopes.tokens, None]) * self._inverse_ceiling).square())
        values = self._values[: len(slopes.tokens)]
        values.scatter_(1, columns, cells.to(values.dtype))

    def _bitmap(self, which: Tensor) -> Tensor:
        """[n, stride / 32] int32, where bit i % 32 of word i // 32 says whether id i is among the slots [n, S]."""
        bits = torch.ones_like(self._columns, dtype=torch.int32) << (self._columns % 32).int()
        words = bits.new_zeros((len(which), self._stride // 32))
        return words.scatter_add_(1, self._columns // 32, bits.masked_fill(~which, 0))

    def _workspace(self, dtype: torch.dtype) -> Tensor:
        """[chunk_tokens, stride] uninitialised."""
        return torch.empty((self.chunk_tokens, self._stride), dtype=dtype, device=self._head.weight.device)

    @cached_property
    def _values(self) -> Tensor:
        """Where the slopes are written."""
        return self._workspace(self._operand)

    @property
    def _inverse_ceiling(self) -> float:
        """One over the largest logit that the soft-cap lets through."""
        return 1.0 if self._head.softcap is None else self._head.temperature / self._head.softcap

    def _blocks(self) -> Iterator[tuple[slice, torch.dtype]]:
        """The vocabulary as the products take it, and in which dtype: as it is, or widened by blocks of rows."""
        if self._direct:
            yield slice(0, self._size), self._operand
            return
        for start in range(0, self._size, _WIDENED_ROWS):
            yield slice(start, min(start + _WIDENED_ROWS, self._size)), torch.float32

    def _weight_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for columns, dtype in self._blocks():
            yield columns, self._head.weight[columns].to(dtype)
