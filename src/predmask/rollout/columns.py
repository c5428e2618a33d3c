"""Rollouts from engines that answer in columns: at each position the sampled id, then the likeliest ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from predmask.rollout.records import Rollout, RolloutError


class Response(NamedTuple):
    """What an engine said of one response of n tokens; column 0 is the sampled one, C more are the likeliest."""

    tokens: Tensor
    """[n] int64."""
    ids: Tensor
    """[n, 1 + C] int64."""
    logp: Tensor
    """[n, 1 + C] float32, NaN where unknown."""
    finished: bool


def paired(
    engine: str, prompts: Sequence[Sequence[int]], outputs: Sequence[Any]
) -> Iterator[tuple[Sequence[int], Any]]:
    """Each prompt with its answer; RolloutError where there are more or fewer of these."""
    if len(outputs) != len(prompts):
        raise RolloutError(f"{engine} returned {len(outputs)} answers to {len(prompts)} prompts")
    return zip(prompts, outputs, strict=True)


def certain(tokens: Tensor, *, finished: bool) -> Response:
    """A response of greedy decoding, whose tokens were certain."""
    return Response(tokens, tokens[:, None], torch.zeros(len(tokens), 1), finished)


def scored(
    engine: str,
    tokens: Tensor,
    ids: Sequence[int],
    logp: Sequence[float | None],
    *,
    columns: int,
    finished: bool,
) -> Response:
    """A response of n tokens from n · (1 + `columns`) ids and as many log-probs, row after row; None is unknown.

    Raises RolloutError where the first of a row is not the sampled token.
    """
    table = torch.from_numpy(np.array(ids, dtype=np.int64)).reshape(len(tokens), 1 + columns)
    other = torch.nonzero(table[:, 0] != tokens)
    if other.numel():
        place = int(other[0])
        raise RolloutError(
            f"{engine} sampled id {int(tokens[place])} at token {place}, but the log-prob it returned there is that of "
            f"id {int(table[place, 0])}"
        )
    # NumPy reads None as NaN.
    return Response(tokens, table, torch.from_numpy(np.array(logp, dtype=np.float32)).reshape(table.shape), finished)


def rollout_from_columns(
    prompts: Sequence[Sequence[int]], responses: Sequence[Response], *, top_k: int, full: bool
) -> Rollout:
    """The rollout of B responses, in the order of their prompts.

    `top_k` of the likeliest are kept; with `full` they are the whole vocabulary, which is kept, too.
    """
    tokens = torch.cat([response.tokens for response in responses])
    ids = torch.cat([response.ids for response in responses])[:, 1:]
    logp = torch.cat([response.logp for response in responses])
    sampled, likeliest = logp[:, 0], logp[:, 1:]
    return Rollout(
        prompts=tuple(map(tuple, prompts)),
        lengths=torch.tensor([len(response.tokens) for response in responses]),
        tokens=tokens,
        logp=sampled,
        topk_ids=ids[:, :top_k],
        topk_logp=likeliest[:, :top_k],
        sampled=torch.ones_like(tokens, dtype=torch.bool),
        version=torch.zeros_like(tokens),
        finished=torch.tensor([response.finished for response in responses]),
        full_logp=torch.full_like(likeliest, torch.nan).scatter_(1, ids, likeliest) if full else None,
    )
