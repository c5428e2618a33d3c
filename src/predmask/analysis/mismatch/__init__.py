"""Mismatch: what an engine says of the tokens that it sampled (mu), against what the trainer computes for them (pi)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from predmask.analysis.replay.crosstab import SPLITS
from predmask.core import get_divergence
from predmask.core.segments import segment_index, segment_sum
from predmask.traces import TokenTrace

GROUPINGS = tuple(split for split in SPLITS if split.name in ("probability", "position"))
"""By what tokens are told apart: mu of the sampled token, and its place in the response."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a figure is spread over tokens."""

    mean: float
    median: float
    p99: float
    """Its 99th percentile."""
    largest: float


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The tokens of one kind."""

    tokens: int
    gap: float
    """Mean |log mu - log pi|, in nats."""
    outside: float
    """Share outside the rule's trust region."""


@dataclass(frozen=True, kw_only=True)
class WorstToken:
    """A token that the two sides see differently."""

    response: int
    position: int
    """Place in the response, from 0."""
    id: int
    mu: float
    pi: float
    difference: float
    """log mu - log pi, in nats."""
    divergence: float
    """The rule's proximity value."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far mu and pi are apart on the same tokens; a figure over no token is None."""

    responses: int
    """Responses with a known token: the independent units."""
    tokens: int
    """Response tokens whose log-probs are known to both sides; every figure is over them."""
    unknown: int
    """The other response tokens: a log-prob is missing or not finite."""
    top_k: int
    """K, how many of the likeliest tokens the engine recorded."""
    gap: Spread | None
    """|log mu - log pi| of the sampled tokens, in nats."""
    signed: float | None
    """Mean log mu - log pi of the sampled tokens, in nats: tokens that mu sampled estimate KL(mu‖pi) by it."""
    signed_error: float | None
    """Its standard error over responses; None for a single one."""
    kl: Spread | None
    """KL(mu‖pi) of the top-K tokens and their tail, in nats; None where K = 0."""
    outside: float | None
    """Share of tokens outside the rule's trust region."""
    groups: dict[str, dict[str, Bucket]]
    """By grouping (`GROUPINGS`) and bucket; buckets without a token are left out."""
    worst: list[WorstToken]
    """By |log mu - log pi|, largest first."""


def measure(tokens: TokenTrace, *, worst: int = 10) -> Mismatch:
    """Compare both policies on tokens that a rule has decided about.

    `worst` is how many of the tokens that differ most are listed.
    """
    known = known_tokens(tokens)
    difference = differences(known)
    signed, error = _mean_over_clusters(difference, known.sample)
    top_k = tokens.behaviour.top_k
    return Mismatch(
        responses=len(known.sample.unique()),
        tokens=len(known),
        unknown=int(tokens.decision.response_mask.sum()) - len(known),
        top_k=top_k,
        gap=_spread(difference.abs()),
        signed=signed,
        signed_error=error,
        kl=_spread(get_divergence("kl")(known.behaviour, known.policy)) if top_k else None,
        outside=_mean(known.decision.outside),
        groups=_groups(known, difference.abs()),
        worst=_worst(known, difference, worst),
    )


def known_tokens(tokens: TokenTrace) -> TokenTrace:
    """The response tokens of which every figure is formed: both policies' log-probs and KL(mu‖pi) are finite."""
    return tokens[tokens.known & torch.isfinite(get_divergence("kl")(tokens.behaviour, tokens.policy))]


def differences(tokens: TokenTrace) -> Tensor:
    """[N] log mu - log pi of the sampled tokens, in nats."""
    return tokens.behaviour.logp[:, 0] - tokens.policy.logp[:, 0]


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _spread(values: Tensor) -> Spread | None:
    if not len(values):
        return None
    ordered = values.double().sort().values
    return Spread(
        mean=float(ordered.mean()),
        median=_quantile(ordered, 0.5),
        p99=_quantile(ordered, 0.99),
        largest=float(ordered[-1]),
    )


def _quantile(ordered: Tensor, share: float) -> float:
    """Interpolated between the two nearest values (torch.quantile stops at 16 million)."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    return low + (place - below) * (high - low)


def _mean_over_clusters(values: Tensor, cluster: Tensor) -> tuple[float | None, float | None]:
    """The mean over all values, and its standard error where values of one cluster depend on each other.

    A ratio of two sums over R clusters: sqrt(R/(R-1) · sum_r (sum of the values - mean · their number)^2) / N
    (Cochran, "Sampling Techniques", 1977, sec. 6.5).
    """
    mean = _mean(values)
    index, clusters = segment_index(cluster)
    if mean is None or clusters < 2:
        return mean, None
    residual = segment_sum(values.double() - mean, index, clusters)
    return mean, math.sqrt(clusters / (clusters - 1) * float(residual.square().sum())) / len(values)


def _groups(known: TokenTrace, gap: Tensor) -> dict[str, dict[str, Bucket]]:
    groups: dict[str, dict[str, Bucket]] = {}
    for grouping in GROUPINGS:
        index = grouping.index(known)
        buckets = groups.setdefault(grouping.name, {})
        for number, name in enumerate(grouping.buckets):
            inside = index == number
            mean, outside = _mean(gap[inside]), _mean(known.decision.outside[inside])
            if mean is not None and outside is not None:
                buckets[name] = Bucket(tokens=int(inside.sum()), gap=mean, outside=outside)
    return groups


def _worst(known: TokenTrace, difference: Tensor, count: int) -> list[WorstToken]:
    order = difference.abs().argsort(descending=True, stable=True)[:count]
    some = known[order]
    return [
        WorstToken(
            response=response, position=position, id=token, mu=mu, pi=pi, difference=moved, divergence=divergence
        )
        for response, position, token, mu, pi, moved, divergence in zip(
            some.sample.tolist(),
            some.position.tolist(),
            some.id.tolist(),
            some.behaviour.logp[:, 0].exp().tolist(),
            some.policy.logp[:, 0].exp().tolist(),
            difference[order].tolist(),
            some.decision.divergence.tolist(),
            strict=True,
        )
    ]
