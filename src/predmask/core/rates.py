"""Direction: the rate at which a divergence moves along a token's own policy-gradient step.

The step on a sampled token k with unit advantage moves the logits along e_k - pi. With g_j = dD/dpi_j and
ḡ = sum_j pi_j g_j, on the support S and its tail T,

    Ḋ = sum_{j in S} pi_j (g_j - ḡ)(1[j=k] - pi_j) - (g_T - ḡ) Q_T,    Q_T = sum_{i in T} pi_i²

A tail estimator is a choice of Q_T, and nothing else. For KL this is the closed form of arXiv 2607.10848:
Ḋ = (pi_k - mu_k) + sum_S pi (mu - pi) + (Q_T / pi_T)(mu_T - pi_T).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from predmask.core.divergences import categories, get_divergence
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True)
class Tail:
    """An estimator of Q_T; it gives the tail's concentration Q_T / pi_T, which lies in [pi_T / (V - |S|), pi_T]."""

    name: str
    formula: str
    source: str
    needs_sum_squares: bool
    """Whether the policy must have measured Q_T (`PolicySupport.tail_sum_squares`)."""
    concentration: Callable[[PolicySupport, Tensor], Tensor]
    """(policy, [...] number of tokens in the tail, at least 1) -> [...] Q_T / pi_T."""


def _exact(policy: PolicySupport, tail_tokens: Tensor) -> Tensor:
    if policy.tail_sum_squares is None:
        raise ValueError(
            "the exact tail needs Q_T, the tail's sum of squared probabilities: build the PolicySupport from "
            "logits, or choose tail 'uniform' or 'aggregated'"
        )
    mass = policy.log_tail.exp()
    concentration = policy.tail_sum_squares / mass.clamp(min=torch.finfo(mass.dtype).tiny)
    # Rounding cannot push it beyond what any tail of that mass and size can have.
    return torch.clamp(concentration, min=mass / tail_tokens, max=mass)


TAILS: dict[str, Tail] = {
    tail.name: tail
    for tail in (
        Tail(
            name="exact",
            formula="Q_T = sum_i pi_i² - sum_S pi_i²",
            source="this project: the trainer holds all of pi, so the top-K divergence's rate is known exactly",
            needs_sum_squares=True,
            concentration=_exact,
        ),
        Tail(
            name="aggregated",
            formula="Q_T = pi_T² (the tail is one token: the upper bound)",
            source="arXiv 2607.10848",
            needs_sum_squares=False,
            concentration=lambda policy, tail_tokens: policy.log_tail.exp(),
        ),
        Tail(
            name="uniform",
            formula="Q_T = pi_T² / (V - |S|) (the tail is flat: the lower bound)",
            source="arXiv 2607.10848",
            needs_sum_squares=False,
            concentration=lambda policy, tail_tokens: policy.log_tail.exp() / tail_tokens,
        ),
    )
}
"""Every tail estimator by name. On a support without a tail they agree: that is the full-vocabulary rate."""


def get_tail(name: str) -> Tail:
    """The tail estimator of that name, or a ValueError that lists the names."""
    if name not in TAILS:
        raise ValueError(f"unknown tail {name!r}; choose one of {', '.join(TAILS)}")
    return TAILS[name]


def divergence_rate(
    behaviour: BehaviourSupport, policy: PolicySupport, *, divergence: str = "kl", tail: str = "exact"
) -> Tensor:
    """[...] Ḋ, the rate of the divergence along the unit-advantage step of the sampled token (see the module).

    Units: nats (total variation: probability) per unit of logit step. The update of a token with advantage A
    moves the divergence by a positive multiple of A·Ḋ. Identities: E over k~pi of Ḋ is 0; for KL, E over
    k~mu is -‖pi - mu‖².
    """
    log_mu, log_pi = categories(behaviour, policy)
    pi = log_pi.exp()
    weighted = get_divergence(divergence).weighted_derivative(log_mu, log_pi)
    # pi_j (g_j - ḡ): where the step pushes the divergence, per unit of logit j.
    push = weighted - pi * weighted.sum(-1, keepdim=True)
    inside = push[..., 0] - (push[..., :-1] * pi[..., :-1]).sum(-1)
    tail_tokens = policy.vocabulary_size - behaviour.valid.sum(-1)
    concentration = get_tail(tail).concentration(policy, tail_tokens.clamp(min=1))
    return inside - torch.where(tail_tokens > 0, push[..., -1] * concentration, 0.0)


def full_kl_rate_bracket(behaviour: BehaviourSupport, policy: PolicySupport) -> tuple[Tensor, Tensor]:
    """[...] certified lower and upper bounds of the full-vocabulary KL rate, from the top-K view alone.

    The full rate is (pi_k - mu_k) + sum_S pi (mu - pi) - Q_T + X with X = sum_{i in T} pi_i mu_i, and only X is
    unknown: 0 <= X <= min(pi_T·m, sqrt(Q_T·mu_T·m)), m = min(mu_T, mu_(K)), since no unseen token is likelier
    than the K-th, and by Cauchy-Schwarz. A direction is certified where both bounds have the same sign.
    Source: this project. Needs `tail_sum_squares`; the top-K must be the K likeliest tokens.
    """
    if policy.tail_sum_squares is None:
        raise ValueError("the bracket needs Q_T: build the PolicySupport from logits")
    log_mu, log_pi = categories(behaviour, policy)
    mu, pi = log_mu.exp(), log_pi.exp()
    slots = slice(None, -1)
    certain = pi[..., 0] - mu[..., 0] + (pi[..., slots] * (mu[..., slots] - pi[..., slots])).sum(-1)
    low = certain - policy.tail_sum_squares
    mu_tail, pi_tail = mu[..., -1], pi[..., -1]
    likeliest = torch.minimum(mu_tail, behaviour.log_kth.exp())
    by_mass = pi_tail * likeliest
    by_squares = (policy.tail_sum_squares * mu_tail * likeliest).sqrt()
    # Rounding of the sums, so that a certified sign is one.
    slack = 8 * torch.finfo(low.dtype).eps
    return low - slack, low + torch.minimum(by_mass, by_squares) + slack
