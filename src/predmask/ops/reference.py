"""The operator in plain torch with all logits at once: the specification that the other backends are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, MaskDecision, PolicySupport, Rule, policy_loss
from predmask.ops.head import Head


def dense_statistics(hidden: Tensor, head: Head, behaviour: BehaviourSupport) -> PolicySupport:
    """The policy on the support of N tokens, from hidden states [N, D]; differentiable."""
    # NaN times a slope of 0 is NaN: a spoilt hidden state must not meet the weight.
    spoilt = ~torch.isfinite(hidden).all(-1, keepdim=True)
    logits = head.logits(hidden.masked_fill(spoilt, 0.0)).masked_fill(spoilt, torch.nan)
    return PolicySupport.from_logits(logits, behaviour)


def dense_loss(
    hidden: Tensor,
    head: Head,
    behaviour: BehaviourSupport,
    advantage: Tensor,
    weights: Tensor,
    response_mask: Tensor,
    rule: Rule,
    ratio_cap: float | None,
) -> tuple[Tensor, MaskDecision, PolicySupport]:
    """Loss, decision and statistics of N tokens, from hidden states [N, D]; the loss is differentiable."""
    policy = dense_statistics(hidden, head, behaviour)
    return loss_of(policy, behaviour, advantage, weights, response_mask, rule, ratio_cap)


def loss_of(
    policy: PolicySupport,
    behaviour: BehaviourSupport,
    advantage: Tensor,
    weights: Tensor,
    response_mask: Tensor,
    rule: Rule,
    ratio_cap: float | None,
) -> tuple[Tensor, MaskDecision, PolicySupport]:
    """Likewise, from statistics that are there already."""
    decision = rule(behaviour, policy, advantage, response_mask)
    loss = policy_loss(policy.logp[:, 0], decision, advantage, weights, ratio_cap=ratio_cap)
    return loss, decision, policy.detach()
