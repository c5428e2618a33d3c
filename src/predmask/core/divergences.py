"""Divergences between the behaviour policy mu and the policy pi, on any support.

A divergence is a sum over categories (the support's slots and the tail), so the full vocabulary, the top-K
view and the binary view are one code path. The value on fewer categories is a true divergence and a lower
bound of the one on more (data processing).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from predmask.core.precision import log_tiny
from predmask.core.support import BehaviourSupport, PolicySupport


@dataclass(frozen=True)
class Divergence:
    """A divergence D(mu, pi) = sum_j d(mu_j, pi_j), with the derivative that its rate needs.

    Both functions take log-probs (log mu, log pi) of any shape, floored so that they are finite.
    """

    name: str
    formula: str
    derivative: str
    """g_j = dD/dpi_j, as text."""
    source: str
    upper_bound: float
    """The largest value it can take; a threshold above it never masks anything."""
    term: Callable[[Tensor, Tensor], Tensor]
    """d(mu_j, pi_j)."""
    weighted_derivative: Callable[[Tensor, Tensor], Tensor]
    """pi_j g_j: finite where g_j alone is not."""

    def __call__(self, behaviour: BehaviourSupport, policy: PolicySupport) -> Tensor:
        """[...] the divergence in nats (total variation: probability) on the support's slots and the tail."""
        log_mu, log_pi = categories(behaviour, policy)
        return self.term(log_mu, log_pi).sum(-1).clamp(min=0.0)


def categories(behaviour: BehaviourSupport, policy: PolicySupport) -> tuple[Tensor, Tensor]:
    """[..., S+1] floored log mu and log pi of the support's slots and, last, of the tail.

    The floor is the log of the smallest normal number: 0·log 0 is then 0 in value and in gradient, and a
    category that only one policy can reach weighs much, but not infinitely. NaN passes through.

    mu's tail is one minus the rest, so below the rounding of that sum it is not known. Any mass in there is possible;
    the one nearest to pi's is taken, which keeps the divergence a lower bound.
    """
    rounding = math.log(behaviour.logp.shape[-1] * torch.finfo(behaviour.logp.dtype).eps)
    nearest = policy.log_tail.to(behaviour.log_tail.dtype).clamp(max=rounding)
    mu_tail = torch.where(behaviour.log_tail < rounding, nearest, behaviour.log_tail)
    log_mu = torch.cat([behaviour.logp, mu_tail[..., None]], dim=-1)
    log_pi = torch.cat([policy.logp, policy.log_tail[..., None]], dim=-1)
    # Where the support is the whole vocabulary, a tail is rounding only.
    has_tail = behaviour.valid.sum(-1) < policy.vocabulary_size
    exists = torch.cat([behaviour.valid, has_tail[..., None]], dim=-1)
    log_mu = torch.where(exists | torch.isnan(log_mu), log_mu, -math.inf)
    log_pi = torch.where(exists | torch.isnan(log_pi), log_pi, -math.inf)
    return log_mu.clamp(min=log_tiny(log_mu)), log_pi.clamp(min=log_tiny(log_pi))


def _log_mean(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    # As torch.logaddexp, whose last bit depends on where in a batch a token stands.
    return torch.maximum(log_mu, log_pi) + torch.log1p(torch.exp(-(log_mu - log_pi).abs())) - math.log(2.0)


DIVERGENCES: dict[str, Divergence] = {
    divergence.name: divergence
    for divergence in (
        Divergence(
            name="kl",
            formula="KL(mu‖pi) = sum_j mu_j log(mu_j / pi_j)",
            derivative="g_j = -mu_j / pi_j",
            source="arXiv 2607.10848; arXiv 2602.04879, eq. 16",
            upper_bound=math.inf,
            term=lambda log_mu, log_pi: log_mu.exp() * (log_mu - log_pi),
            weighted_derivative=lambda log_mu, log_pi: -log_mu.exp(),
        ),
        Divergence(
            name="reverse_kl",
            formula="KL(pi‖mu) = sum_j pi_j log(pi_j / mu_j)",
            derivative="g_j = log(pi_j / mu_j) + 1",
            source="textbook",
            upper_bound=math.inf,
            term=lambda log_mu, log_pi: log_pi.exp() * (log_pi - log_mu),
            weighted_derivative=lambda log_mu, log_pi: log_pi.exp() * (log_pi - log_mu + 1.0),
        ),
        Divergence(
            name="tv",
            formula="TV(mu, pi) = 1/2 sum_j |mu_j - pi_j|",
            derivative="g_j = sign(pi_j - mu_j) / 2",
            source="arXiv 2602.04879",
            upper_bound=1.0,
            term=lambda log_mu, log_pi: 0.5 * (log_mu.exp() - log_pi.exp()).abs(),
            weighted_derivative=lambda log_mu, log_pi: 0.5 * log_pi.exp() * torch.sign(log_pi - log_mu),
        ),
        Divergence(
            name="js",
            formula="JS(mu, pi) = KL(mu‖m)/2 + KL(pi‖m)/2, m = (mu + pi)/2",
            derivative="g_j = log(2 pi_j / (mu_j + pi_j)) / 2",
            source="textbook (Lin 1991)",
            upper_bound=math.log(2.0),
            term=lambda log_mu, log_pi: (
                0.5 * log_mu.exp() * (log_mu - _log_mean(log_mu, log_pi))
                + 0.5 * log_pi.exp() * (log_pi - _log_mean(log_mu, log_pi))
            ),
            weighted_derivative=lambda log_mu, log_pi: 0.5 * log_pi.exp() * (log_pi - _log_mean(log_mu, log_pi)),
        ),
    )
}
"""Every divergence by name. To add one, add it here; the property tests run over this table."""


def get_divergence(name: str) -> Divergence:
    """The divergence of that name, or a ValueError that lists the names."""
    if name not in DIVERGENCES:
        raise ValueError(f"unknown divergence {name!r}; choose one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]
