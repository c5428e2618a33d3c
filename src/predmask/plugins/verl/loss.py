"""The policy loss that is registered with verl: one decision, averaged as verl averages."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from predmask.core import MaskDecision, PolicySupport, token_losses
from predmask.plugins.verl.packed import Packed


@dataclass(frozen=True)
class Decided:
    """A micro-batch, and what the rule decided."""

    packed: Packed
    policy: PolicySupport
    decision: MaskDecision


DECIDED: ContextVar[Decided | None] = ContextVar("predmask_decided", default=None)
"""The micro-batch whose loss is being computed: the engine decides, and verl calls the loss with other arguments."""


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """-keep · min(r, C) · A · log pi_k, averaged by verl's `agg_loss`: its denominators count all response tokens.

    The signature is verl's (`register_policy_loss`), with tensors [B, T]. Ratio and decision are those of the float32
    statistics that the engine took from the logits; the gradient goes through `log_prob`. Raises RuntimeError where no
    engine of this plug-in ran, and ValueError for a second importance weight.
    """
    from verl.trainer.ppo.core_algos import agg_loss  # pyright: ignore[reportMissingImports]

    decided = DECIDED.get()
    if decided is None:
        raise RuntimeError(
            "the loss 'predmask' was asked without a decision: the actor's engine is not predmask's, or its loss "
            "function is not verl's ppo_loss. Is predmask installed on every node, and policy_loss._target_ "
            "predmask's? `predmask verl doctor` looks"
        )
    if rollout_is_weights is not None:
        raise ValueError(
            "rollout importance weights are a second ratio on one that is taken against the rollout policy already; "
            "set algorithm.rollout_correction.rollout_is=null"
        )
    packed = decided.packed
    advantage = packed.advantage
    losses = token_losses(
        packed.flat(log_prob),
        decided.decision,
        advantage,
        torch.ones_like(advantage),
        ratio_cap=config.policy_loss.ratio_cap,
    )
    loss = agg_loss(
        loss_mat=packed.padded(losses, log_prob.shape[1]),
        loss_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )
    return loss, {}
