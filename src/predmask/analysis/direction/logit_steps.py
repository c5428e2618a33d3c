"""A single token's logit step, with no other token and no shared parameter involved: there, a rate must be right."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from predmask.analysis.direction.outcomes import KL, Tallies, criterion_rates, full_support, outward, top_k_divergence
from predmask.core import BehaviourSupport, PolicySupport
from predmask.traces import TokenTrace

EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
STEP_DELTA = 1e-3
"""Steps are taken at tokens whose top-K KL is above this."""
_ROUNDING = 1e-12
"""Changes below this are float64's, in nats: where a policy is all but certain, small steps move nothing else."""


def single_steps(tokens: TokenTrace) -> Tallies:
    """By "divergence/epsilon/criterion", [1, 2] counts: tokens that moved, and those whose sign was predicted right.

    At each trainable token with top-K KL above `STEP_DELTA`, the logits move by epsilon · sign(A) · (e_k - pi), in
    float64. As epsilon falls, a divergence's own rate must become right always. Needs `tokens.full`.
    """
    tokens = tokens[top_k_divergence(tokens) > STEP_DELTA]
    if tokens.full is None:
        raise ValueError("whole distributions were not recorded")
    full = behaviour, policy = full_support(tokens.id, tokens.full.behaviour, tokens.full.policy)
    logits = tokens.full.policy.double()
    views = {"topk": _recorded_support(tokens.behaviour, tokens.full.behaviour), "full": behaviour}
    before = {"topk": PolicySupport.from_logits(logits, views["topk"]), "full": policy}
    rates = criterion_rates(views["topk"], before["topk"], full)
    step = torch.nn.functional.one_hot(tokens.id, logits.shape[-1]) - logits.softmax(-1)
    step *= torch.sign(tokens.advantage)[:, None]
    counts = {}
    for epsilon in EPSILONS:
        for name, view in views.items():
            moved = PolicySupport.from_logits(logits + epsilon * step, view)
            change = KL(view, moved) - KL(view, before[name])
            resolved = change.abs() > _ROUNDING
            for criterion, rate in rates.items():
                right = resolved & (outward(tokens.advantage, rate) == torch.sign(change))
                counts[f"{name}/{epsilon:g}/{criterion}"] = np.array([[int(resolved.sum()), int(right.sum())]])
    return counts


def _recorded_support(recorded: BehaviourSupport, mu: Tensor) -> BehaviourSupport:
    """The support of the record in float64, from whole distributions [N, V] log mu."""
    mu = mu.double().log_softmax(-1)
    logp = mu.gather(-1, recorded.ids)
    return BehaviourSupport.from_topk(recorded.ids[:, 0], logp[:, 0], recorded.ids[:, 1:], logp[:, 1:])
