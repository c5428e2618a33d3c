"""The masked policy loss, and the weights by which tokens are averaged."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from predmask.core.precision import wide_dtype
from predmask.core.rules.base import MaskDecision, per_token
from predmask.core.segments import segment_index, segment_sum

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def token_weights(
    counted: Tensor,
    sequence: Tensor,
    aggregation: Aggregation = "token_mean",
    *,
    horizon: int | None = None,
    denominator: float | None = None,
) -> Tensor:
    """[...] the weight of each token in the loss of one whole optimiser step; sum of (weight · loss) is the loss.

    Weights belong to the global batch: compute them once for all tokens of the step and slice them for
    micro-batches, and any split gives the same loss and gradient.

    Args:
        counted: [...] bool, tokens that the average runs over; the others weigh 0.
        sequence: [...] ids of the response that each token belongs to, in the same shape.
        aggregation: `token_mean`, 1 / tokens (DAPO, arXiv 2503.14476); `seq_mean_token_mean`,
            1 / (sequences · tokens of the sequence) (GRPO, arXiv 2402.03300); `seq_mean_token_sum_norm`,
            1 / (sequences · horizon) (Dr. GRPO, arXiv 2503.20783).
        horizon: the constant length of `seq_mean_token_sum_norm`.
        denominator: tokens (token_mean) or sequences (the others) of the global batch, where that is larger
            than what is given here (several processes); by default what is counted here.

    Sequences without a counted token do not count. No counted token at all gives zeros.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"unknown aggregation {aggregation!r}; choose one of {', '.join(get_args(Aggregation))}")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator is {denominator}; it must be above 0")
    if counted.shape != sequence.shape:
        raise ValueError(f"counted {tuple(counted.shape)} and sequence {tuple(sequence.shape)} must have one shape")
    weights = counted.to(wide_dtype(counted.device))
    if aggregation == "token_mean":
        return (weights / (denominator or weights.sum().clamp(min=1))).float()
    index, size = segment_index(sequence)
    lengths = segment_sum(weights, index, size)
    weights = weights / (denominator or (lengths > 0).sum().clamp(min=1))
    if aggregation == "seq_mean_token_mean":
        return (weights / lengths.clamp(min=1)[index]).float()
    if horizon is None or horizon < 1:
        raise ValueError(f"aggregation 'seq_mean_token_sum_norm' needs a horizon of 1 or more, not {horizon}")
    return (weights / horizon).float()


def policy_loss(
    logp: Tensor,
    decision: MaskDecision,
    advantage: Tensor,
    weights: Tensor,
    *,
    ratio_cap: float | None = None,
) -> Tensor:
    """Scalar loss: the sum over tokens of -weights · keep · min(r, C) · A, with the gradient of log pi_k.

    Its gradient is that of -sum weights · keep · min(r, C).detach() · A · log pi_k (arXiv 2602.04879); its value
    is the objective itself, so that it can be read. Tokens that are not kept leave the graph; with no kept
    token the loss is 0, still connected to `logp`.

    Args:
        logp: [...] log pi_k of the sampled tokens, with gradient.
        decision: what the rule decided for them.
        advantage: [...], or broadcastable with as many dimensions.
        weights: [...] from `token_weights`.
        ratio_cap: C, the cap of the detached importance weight; None for no cap.
    """
    return token_losses(logp, decision, advantage, weights, ratio_cap=ratio_cap).sum()


def token_losses(
    logp: Tensor,
    decision: MaskDecision,
    advantage: Tensor,
    weights: Tensor,
    *,
    ratio_cap: float | None = None,
) -> Tensor:
    """[...] what each token adds to `policy_loss`, which takes the same; for a trainer that averages in its own way."""
    coefficients = loss_coefficients(decision, advantage, weights, ratio_cap=ratio_cap)
    kept = torch.where(decision.keep, logp, 0.0)
    return coefficients * (kept - kept.detach() + 1.0)


def loss_coefficients(
    decision: MaskDecision, advantage: Tensor, weights: Tensor, *, ratio_cap: float | None = None
) -> Tensor:
    """[...] -weights · keep · min(r, C) · A: what a token adds to `policy_loss`, and the loss's derivative by log pi_k.

    Takes what `policy_loss` takes; tokens that are not kept have 0.
    """
    if ratio_cap is not None and not ratio_cap > 0:
        raise ValueError(f"ratio_cap is {ratio_cap}; it must be above 0 (None for no cap)")
    importance = decision.weight if ratio_cap is None else decision.weight.clamp(max=ratio_cap)
    return -torch.where(decision.keep, weights * importance * per_token(advantage, decision.weight), 0.0).detach()
