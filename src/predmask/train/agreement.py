"""Do engine and trainer agree before any update? Faults that would otherwise be trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, PolicySupport
from predmask.core.precision import wide_dtype

_FAULT_EXPLAINS = 0.25
"""A suspected fault is reported when undoing it leaves less than this share of the disagreement."""
_SLOPE_TOLERANCE = 1.05
"""Ratio of temperatures that rounding could still explain."""


class AgreementError(RuntimeError):
    """Engine and trainer disagree in a way that is a fault, not rounding."""


@dataclass(frozen=True)
class Agreement:
    """How far the behaviour log-probs are from the first forward pass of the trainer, in nats."""

    mean: float
    """Mean |log mu - log pi| of the sampled tokens, or, where that is more, its expectation under mu on the support."""
    largest: float
    """Largest of the sampled tokens."""
    tokens: int
    """Tokens whose log-probs are known to both."""
    unknown: int
    """The others."""

    def __str__(self) -> str:
        text = f"mean |Δ log-prob| {self.mean:.2g}, largest {self.largest:.2g} over {self.tokens} tokens"
        return f"{text}, {self.unknown} more unknown" if self.unknown else text


def check_agreement(
    behaviour: BehaviourSupport,
    policy: PolicySupport,
    sequence: Tensor,
    response_mask: Tensor,
    *,
    tolerance: float,
) -> Agreement:
    """Compare both policies before any update.

    Args:
        behaviour: mu as the engine reported it, N tokens.
        policy: pi by the trainer's forward pass with the same weights.
        sequence: [N] the response that each token belongs to; tokens in order.
        response_mask: [N] bool, False for tokens that the policy did not sample.
        tolerance: mean disagreement that the engine's numerics explain, in nats.

    Raises AgreementError when the disagreement is above the tolerance and one of two faults explains it:
    log-probs shifted by one position, or another temperature.
    """
    policy = policy.detach()
    response_mask = response_mask.to(behaviour.logp.device)
    behaviour = replace(behaviour, logp=behaviour.logp.masked_fill(~response_mask[:, None], math.nan))
    mu, pi = behaviour.logp[:, 0], policy.logp[:, 0]
    known = torch.isfinite(mu) & torch.isfinite(pi)
    gap = (mu - pi)[known].abs()
    if not gap.numel():
        raise AgreementError("the engine returned no known log-prob of any sampled token; nothing could be trained on")
    mean = max(float(gap.mean()), _support_gap(behaviour, policy))
    unknown = int((response_mask & ~known).sum())
    found = Agreement(mean=mean, largest=float(gap.max()), tokens=gap.numel(), unknown=unknown)
    if found.mean <= tolerance:
        return found
    explained = _FAULT_EXPLAINS * found.mean
    for shift in (1, -1):
        if _shifted_gap(mu, pi, sequence.to(mu.device), shift) < explained:
            raise AgreementError(
                f"the engine's log-probs are shifted by one position against the trainer's ({found}): log-prob t of "
                f"the engine is that of token t{shift:+d}; align them where the rollout is recorded"
            )
    ratio, remaining = _temperature_ratio(behaviour, policy)
    if max(ratio, 1 / ratio) > _SLOPE_TOLERANCE and remaining < explained:
        raise AgreementError(
            f"the engine's log-probs belong to a temperature {ratio:.3g} times the trainer's ({found}); record the "
            "log-probs of the distribution that was sampled from (vLLM: logprobs_mode='processed_logprobs'), and use "
            "one temperature for both"
        )
    return found


def _support_gap(behaviour: BehaviourSupport, policy: PolicySupport) -> float:
    """Mean over tokens of sum_S mu |log mu - log pi|: the top-K entries must agree, too."""
    known = behaviour.valid & torch.isfinite(behaviour.logp) & torch.isfinite(policy.logp)
    gap = torch.where(known, behaviour.logp.exp() * (behaviour.logp - policy.logp).abs(), 0.0)
    return float(gap[known[:, 0]].sum(-1).mean())


def _shifted_gap(mu: Tensor, pi: Tensor, sequence: Tensor, shift: int) -> float:
    """Mean |mu_t - pi_(t + shift)| within sequences."""
    here, there = (slice(None, -1), slice(1, None)) if shift == 1 else (slice(1, None), slice(None, -1))
    gap = (mu[here] - pi[there]).abs()[sequence[here] == sequence[there]]
    gap = gap[torch.isfinite(gap)]
    return float(gap.mean()) if gap.numel() else math.inf


def _temperature_ratio(behaviour: BehaviourSupport, policy: PolicySupport) -> tuple[float, float]:
    """Engine temperature over the trainer's, by least squares on top-K log-prob differences, and what remains.

    log mu - its mean over the support is (logits - mean) / T_mu, and likewise for pi: their slope is T_pi / T_mu.
    The remainder is the mean distance from that line, in nats.
    """
    valid = behaviour.valid & torch.isfinite(behaviour.logp) & torch.isfinite(policy.logp)
    count = valid.sum(-1, keepdim=True).clamp(min=1)
    valid &= count > 1  # the sampled token alone has no slope
    centred: list[Tensor] = []
    for logp in (behaviour.logp, policy.logp):
        slots = torch.where(valid, logp, 0.0).to(wide_dtype(logp.device))
        centred.append(torch.where(valid, slots - slots.sum(-1, keepdim=True) / count, 0.0))
    mu, pi = centred
    slope = float((mu * pi).sum() / (pi * pi).sum().clamp(min=1e-12))
    remaining = float((mu - slope * pi).abs()[valid].mean()) if valid.any() else math.inf
    return (1 / slope if slope > 0 else math.inf), remaining
