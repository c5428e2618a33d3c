"""The statistics of logits that are there already, for a trainer that forms them itself."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, PolicySupport
from predmask.core.support import first_occurrence
from predmask.ops.fused import assemble
from predmask.ops.shard import Shard
from predmask.ops.statistics import Measured, Tail
from predmask.ops.sweep import HOT_ELEMENTS, chunk_tokens, tail_of_sums


@torch.no_grad()
def logits_statistics(
    logits: Tensor,
    behaviour: BehaviourSupport,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    vocabulary_size: int | None = None,
    shard: Shard | None = None,
) -> PolicySupport:
    """Log-probs of each token's support, log tail mass, sum of squares and entropy, from logits; without gradient.

    The numbers are those of `PolicySupport.from_logits`, formed a chunk of tokens at a time: beyond the logits, memory
    does not grow with the number of tokens. Everything is summed in float32 (float64 for float64 logits).

    Args:
        logits: [M, V] of any float type, or this process's columns of them (`shard`); they are not changed.
        behaviour: [N] mu on the support of each token.
        rows: [N] int64, the row of `logits` that predicts each token; by default row i predicts token i.
        temperature: what the logits are still to be divided by.
        vocabulary_size: ids from here on are no tokens, and have no share in pi: the rows by which a head is larger
            than the vocabulary. By default there are none.
        shard: which columns `logits` are, if they are only a part of the vocabulary. Then behaviour and rows are the
            same in all processes of the group, and so is what is returned.

    Raises ValueError for shapes, ids or settings that do not fit.
    """
    width = logits.shape[-1]
    start, size = (0, width) if shard is None else (shard.start, shard.vocabulary_size)
    used = size if vocabulary_size is None else vocabulary_size
    _check(logits, behaviour, rows, temperature, used, size)
    behaviour.check_ids(used)
    tokens = torch.arange(len(behaviour.ids), device=logits.device)
    rows = tokens if rows is None else rows
    # Processes may hold parts of different size, but must agree on the chunks that they exchange.
    columns = width if shard is None else shard.mean_rows
    few = chunk_tokens(columns, max(1, len(tokens)))
    if logits.device.type == "cpu":
        few = min(few, max(1, HOT_ELEMENTS // columns))
    parts: list[tuple[Tensor, PolicySupport]] = []
    for some in tokens.split(few):
        part = behaviour[some]
        wide = logits[rows[some]].to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            wide = wide / temperature
        wide[:, max(0, used - start) :] = -math.inf
        measured = _measure(wide, part.ids - start, first_occurrence(part.ids))
        policy = (measured if shard is None else shard.merge(measured)).policy(used)
        parts.append((some, replace(policy, logp=policy.logp.masked_fill(~part.valid, -math.inf))))
    return assemble(parts)


def _measure(logits: Tensor, ids: Tensor, distinct: Tensor) -> Measured:
    """The logits [n, V] in brief; an id outside 0 to V - 1 belongs to another part of the vocabulary."""
    shift = logits.amax(1)
    shift = shift.masked_fill(shift == -math.inf, 0.0)
    logits = logits.sub_(shift[:, None])
    owned = (ids >= 0) & (ids < logits.shape[1])
    places = ids.masked_fill(~owned, 0)
    support = logits.gather(1, places).masked_fill(~owned, -math.inf)
    # What this part does not own, or has taken already, takes nothing.
    weights = logits.exp()
    weights.scatter_add_(1, places, -weights.gather(1, places).masked_fill(~(owned & distinct), 0.0))

    def remeasure(faint: Tensor) -> Tail:
        taken = torch.zeros_like(support).masked_fill(owned & distinct, -math.inf)
        return Tail.of(logits[faint].scatter_add_(1, places[faint], taken[faint]))

    tail = tail_of_sums(logits, weights, remeasure)
    return Measured(shift=shift, support=support, distinct=distinct, tail=tail)


def _check(
    logits: Tensor, behaviour: BehaviourSupport, rows: Tensor | None, temperature: float, used: int, size: int
) -> None:
    tokens = behaviour.ids.shape[:-1]
    if logits.ndim != 2 or len(tokens) != 1 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)} and the support is {tuple(behaviour.ids.shape)}; "
            "expected floating point [M, V] and [N, S]"
        )
    if (len(logits),) != tokens if rows is None else rows.shape != tokens:
        given = f"rows {tuple(rows.shape)}" if rows is not None else f"logits {tuple(logits.shape)}"
        raise ValueError(f"{given} and support {tuple(behaviour.ids.shape)} do not fit: one row for each token")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; log-probs of a policy need a finite temperature above 0")
    if not 0 < used <= size:
        raise ValueError(f"vocabulary_size is {used}, and the logits have {size} columns; it must be 1 to {size}")
