"""Was a direction criterion right? What it predicted for tokens outside, and what the optimiser step did.

A criterion c predicts by the sign of A·rate_c whether a token's own update leads further out, and keeps the token
unless that sign is positive. What happened is the change of the token's divergence over the real optimiser step, in
which all other tokens of the minibatch, shared parameters and momentum take part. docs/direction.md has the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from predmask.bootstrap import SAMPLES, Estimate, estimate, resampled_sums
from predmask.core import TAILS, BehaviourSupport, PolicySupport, divergence_rate, get_divergence
from predmask.core.rules.base import ratio_minus_one
from predmask.traces import TokenTrace

CRITERIA = ("ratio", "aggregated", "uniform", "exact", "full")
"""By the ratio, by the top-K divergence's rate under each tail, and by the full-vocabulary rate."""
ALL_OUTSIDE = "outside"
"""All tokens outside; the other sets are called by the criterion that disagrees there with the ratio."""

Tallies = dict[str, NDArray[np.int64]]
"""[C, X] counts in each of C clusters, by what they are of."""

KL = get_divergence("kl")
"""The divergence of the study, the paper's: KL(mu‖pi)."""


@dataclass(frozen=True)
class Outside:
    """N tokens outside the trust region: what was predicted, and what happened."""

    cluster: Tensor
    """[N] int64, tokens of one cluster are not independent."""
    outward: Mapping[str, Tensor]
    """By criterion, [N] the sign of A·rate: above 0 the criterion drops the token."""
    change: Mapping[str, Tensor]
    """By divergence, `topk` and with whole distributions `full`, [N] its change over the optimiser step, in nats."""

    def __len__(self) -> int:
        return len(self.cluster)

    @staticmethod
    def cat(parts: Sequence[Outside]) -> Outside:
        """Several of the same kind, one after the other."""
        return Outside(
            torch.cat([part.cluster for part in parts]),
            {name: torch.cat([part.outward[name] for part in parts]) for name in parts[0].outward},
            {name: torch.cat([part.change[name] for part in parts]) for name in parts[0].change},
        )


def top_k_divergence(tokens: TokenTrace) -> Tensor:
    """[N] KL(mu‖pi) on the support and its tail when the token was decided on; NaN for tokens that do not train."""
    return KL(tokens.behaviour, tokens.policy).masked_fill(~tokens.decision.trainable, math.nan)


def outside_region(tokens: TokenTrace, delta: float) -> Outside:
    """The trainable tokens with top-K divergence above `delta`, clustered by optimiser step.

    A token whose divergence after the step, or whose rate, is not finite is left out. Needs `tokens.after`.
    """
    tokens = tokens[top_k_divergence(tokens) > delta]
    if tokens.after is None:
        raise ValueError("the policy after the optimiser step was not recorded")
    change = {"topk": KL(tokens.behaviour, tokens.after).double() - KL(tokens.behaviour, tokens.policy).double()}
    full = None
    if tokens.full is not None:
        full = behaviour, policy = full_support(tokens.id, tokens.full.behaviour, tokens.full.policy)
        if tokens.full.after is not None:
            after = PolicySupport.from_logits(tokens.full.after.double(), behaviour)
            change["full"] = KL(behaviour, after) - KL(behaviour, policy)
    rates = criterion_rates(tokens.behaviour, tokens.policy, full)
    known = torch.stack([torch.isfinite(value) for value in (*rates.values(), *change.values())]).all(0)
    return Outside(
        tokens.optimizer_step[known],
        {name: outward(tokens.advantage, rate)[known] for name, rate in rates.items()},
        {name: value[known] for name, value in change.items()},
    )


def tally(tokens: Outside) -> Tallies:
    """By "divergence/set/criterion", [C, 6] counts: tokens, rose, kept, kept that rose, kept that fell, sign right.

    Sets are all tokens outside, and for each criterion the tokens where it disagrees with the ratio.
    """
    clusters, index = torch.unique(tokens.cluster, return_inverse=True)
    kept = {name: sign <= 0 for name, sign in tokens.outward.items()}
    sets = {ALL_OUTSIDE: (torch.ones_like(kept["ratio"]), tuple(kept))}
    sets |= {name: (kept[name] != kept["ratio"], ("ratio", name)) for name in kept if name != "ratio"}
    counts = {}
    for divergence, change in tokens.change.items():
        for of, (within, criteria) in sets.items():
            for name in criteria:
                flags = (
                    torch.ones_like(within),
                    change > 0,
                    kept[name],
                    kept[name] & (change > 0),
                    kept[name] & (change < 0),
                    tokens.outward[name] == torch.sign(change),
                )
                counts[f"{divergence}/{of}/{name}"] = _by_cluster(
                    [flag & within for flag in flags], index, len(clusters)
                )
    return counts


@dataclass(frozen=True)
class Row:
    """A criterion on a set of tokens, and its distance to the ratio on that set."""

    divergence: str
    of: str
    """The set: `outside`, or the criterion that disagrees with the ratio."""
    criterion: str
    tokens: int
    kept: int
    rose: float | None
    """Share of the set's tokens whose divergence rose, whatever any criterion said."""
    figures: Mapping[str, Estimate]
    """`unsafe_keep`: share of the kept tokens whose divergence rose; `shrink_kept`: that fell; `accuracy`: share of
    all tokens whose change has the predicted sign."""
    to_ratio: Mapping[str, Estimate]
    """The same, minus the ratio's in the same resamples of clusters, so that its interval is that of the difference.

    Only `accuracy` is paired token by token: what the two criteria keep differs, and where they disagree has no token
    in common."""


def summarise(counts: Tallies, *, samples: int = SAMPLES, seed: int = 0) -> list[Row]:
    """The rows of a table, pooled over clusters, with cluster-bootstrap intervals."""
    clusters = len(next(iter(counts.values())))
    stacked = np.concatenate(list(counts.values()), axis=1)
    pooled = dict(zip(counts, np.split(stacked.sum(0, keepdims=True), len(counts), axis=1), strict=True))
    drawn = dict(
        zip(counts, np.split(resampled_sums(stacked, samples=samples, seed=seed), len(counts), 1), strict=True)
    )
    rows = []
    for key in counts:
        divergence, of, criterion = key.split("/")
        ratio = f"{divergence}/{of}/ratio"
        value, values = _shares(pooled[key]), _shares(drawn[key])
        reference, references = _shares(pooled[ratio]), _shares(drawn[ratio])
        tokens, rose, kept = (int(count) for count in pooled[key][0, :3])
        rows.append(
            Row(
                divergence=divergence,
                of=of,
                criterion=criterion,
                tokens=tokens,
                kept=kept,
                rose=rose / tokens if tokens else None,
                figures={name: estimate(value[name][0], values[name], clusters) for name in value},
                to_ratio={
                    name: estimate(value[name][0] - reference[name][0], values[name] - references[name], clusters)
                    for name in value
                },
            )
        )
    return rows


def add(parts: Iterable[Tallies]) -> Tallies:
    """Tallies of the same clusters, summed."""
    total: Tallies = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total[key] + value if key in total else value
    return total


def criterion_rates(
    behaviour: BehaviourSupport, policy: PolicySupport, full: tuple[BehaviourSupport, PolicySupport] | None
) -> dict[str, Tensor]:
    """By criterion, [N] the rate that it reads; without the criteria whose numbers were not recorded."""
    rates = {"ratio": ratio_minus_one(behaviour, policy)}
    for name in CRITERIA:
        if name in TAILS and (policy.tail_sum_squares is not None or not TAILS[name].needs_sum_squares):
            rates[name] = divergence_rate(behaviour, policy, tail=name)
    if full is not None:
        rates["full"] = divergence_rate(*full)
    return rates


def outward(advantage: Tensor, rate: Tensor) -> Tensor:
    """[N] int8, the sign of A·rate."""
    return (torch.sign(advantage) * torch.sign(rate)).to(torch.int8)


def full_support(sampled: Tensor, mu: Tensor, pi: Tensor) -> tuple[BehaviourSupport, PolicySupport]:
    """Both policies on the whole vocabulary, in float64."""
    behaviour = BehaviourSupport.full(sampled, mu.double())
    return behaviour, PolicySupport.from_logits(pi.double(), behaviour)


def _by_cluster(flags: Sequence[Tensor], index: Tensor, clusters: int) -> NDArray[np.int64]:
    """[C, X] how often each of X flags [N] is set in each cluster."""
    columns = [torch.bincount(index[flag], minlength=clusters) for flag in flags]
    return torch.stack(columns, -1).numpy()


def _shares(counts: NDArray[np.floating | np.integer]) -> dict[str, NDArray[np.float64]]:
    """[samples] figures from [samples, 6] counts as in `tally`; NaN over no token."""
    tokens, _, kept, kept_rose, kept_fell, right = counts.astype(np.float64).T
    with np.errstate(invalid="ignore"):
        return {"unsafe_keep": kept_rose / kept, "shrink_kept": kept_fell / kept, "accuracy": right / tokens}
