"""The top-K view against whole distributions: how much of the divergence it sees, and how far off its rates are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from predmask.core import TAILS, BehaviourSupport, Metrics, PolicySupport, divergence_rate, get_divergence
from predmask.core.support import MASS_TOLERANCE
from predmask.traces import TokenTrace

_TOP_K = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_BLOCK = 2**21
"""Entries of whole distributions that are looked at together."""
RATE_FLOOR = 1e-6
"""Below it, the sign of a rate is that of its rounding."""


@dataclass(frozen=True, kw_only=True)
class EstimatorError:
    """What the view of the K likeliest tokens misses; a figure over no token is absent."""

    top_k: int
    """0: the sampled token alone, whose rate has the sign of r - 1."""
    divergence_share: float | None
    """The sum of the divergence on this view over that of the full one; None where the full one is 0."""
    error: dict[str, float] = field(default_factory=dict[str, float])
    """By tail: mean |rate - full rate|."""
    right_outside: dict[str, float] = field(default_factory=dict[str, float])
    """By tail: share of right signs, of the tokens whose full divergence exceeds delta."""
    right: dict[str, float] = field(default_factory=dict[str, float])
    """By tail: share of right signs, of all tokens whose full rate is above `RATE_FLOOR` in size."""


@dataclass(frozen=True, kw_only=True)
class Estimators:
    """Divergence and rate on the top-K view against the full vocabulary's."""

    divergence: str
    delta: float
    tokens: int
    """Response tokens whose distributions are known."""
    outside: int
    """Those of them whose full divergence exceeds delta."""
    unknown: int
    """Response tokens that are left out: a distribution is not finite, or does not sum to 1."""
    rows: list[EstimatorError]
    """By K, ascending."""


class EstimatorStudy:
    """Compares the top-K view with whole distributions, where those were recorded."""

    def __init__(self, divergence: str, delta: float) -> None:
        self._divergence, self._delta = divergence, delta
        self._figures: dict[int, Metrics] = {}
        self._tokens = self._outside = self._unknown = 0

    def add(self, tokens: TokenTrace) -> None:
        """Compare on some tokens."""
        if tokens.full is None:
            return
        size = max(1, _BLOCK // tokens.policy.vocabulary_size)
        for some in torch.nonzero(tokens.decision.response_mask)[:, 0].split(size):
            self._compare(tokens.id[some], tokens.full.behaviour[some], tokens.full.policy[some])

    def result(self) -> Estimators | None:
        """What was found; None where no whole distributions were recorded."""
        if not self._tokens + self._unknown:
            return None
        return Estimators(
            divergence=self._divergence,
            delta=self._delta,
            tokens=self._tokens,
            outside=self._outside,
            unknown=self._unknown,
            rows=[_row(top_k, metrics.compute()) for top_k, metrics in self._figures.items()],
        )

    def _compare(self, sampled: Tensor, mu: Tensor, pi: Tensor) -> None:
        """Sampled ids [N] and both policies' whole distributions [N, V]."""
        whole = BehaviourSupport.full(sampled, mu)
        full = PolicySupport.from_logits(pi, whole)
        value, rate = get_divergence(self._divergence)(whole, full), self._rate(whole, full, "uniform")
        # A support from logits is normalised; what was recorded must have been.
        normal = torch.logsumexp(pi, dim=-1).abs() <= MASS_TOLERANCE
        known = torch.isfinite(value) & torch.isfinite(rate) & normal
        self._unknown += int((~known).sum())
        mu, pi, sampled, value, rate = (values[known] for values in (mu, pi, sampled, value, rate))
        outside, sizeable = value > self._delta, rate.abs() > RATE_FLOOR
        self._tokens += len(value)
        self._outside += int(outside.sum())
        for top_k, behaviour in _views(sampled, mu):
            policy = PolicySupport.from_logits(pi, behaviour)
            figures = self._figures.setdefault(top_k, Metrics())
            figures.mean("divergence", get_divergence(self._divergence)(behaviour, policy))
            figures.mean("full", value)
            for tail in TAILS:
                estimate = self._rate(behaviour, policy, tail)
                right = torch.sign(estimate) == torch.sign(rate)
                figures.mean(f"error {tail}", (estimate - rate).abs())
                figures.mean(f"right_outside {tail}", right[outside])
                figures.mean(f"right {tail}", right[sizeable])

    def _rate(self, behaviour: BehaviourSupport, policy: PolicySupport, tail: str) -> Tensor:
        return divergence_rate(behaviour, policy, divergence=self._divergence, tail=tail)


def _views(sampled: Tensor, mu: Tensor) -> Iterator[tuple[int, BehaviourSupport]]:
    """What an engine would have recorded with each K below V."""
    own = mu.gather(-1, sampled[:, None])[:, 0]
    for top_k in (top_k for top_k in _TOP_K if top_k < mu.shape[-1]):
        top = mu.topk(top_k)
        yield top_k, BehaviourSupport.from_topk(sampled, own, top.indices, top.values)


def _row(top_k: int, figures: Mapping[str, float]) -> EstimatorError:
    def by_tail(name: str) -> dict[str, float]:
        return {tail: figures[f"{name} {tail}"] for tail in TAILS if f"{name} {tail}" in figures}

    return EstimatorError(
        top_k=top_k,
        divergence_share=figures["divergence"] / figures["full"] if figures.get("full") else None,
        error=by_tail("error"),
        right_outside=by_tail("right_outside"),
        right=by_tail("right"),
    )
