"""Both policies on the same few tokens: the support, and one tail for everything else.

Slot 0 is the sampled token, then come the other top-K entries of the behaviour policy, and everything else
is one tail category. The support is a union: no entry is ever overwritten by the sampled token. The binary
view is K = 0, the full vocabulary is a support without a tail: one code path serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from predmask.core.precision import check_log_probs, log1mexp, log_tiny

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")

MASS_TOLERANCE = 1e-3
"""How far above 1 (`full`: from 1) the probabilities of one token may sum before the token counts as unknown."""


@dataclass(frozen=True, kw_only=True)
class BehaviourSupport:
    """The behaviour policy mu on the support of each token; leading shape [...] is any, often [N].

    Build it with `from_topk` (an engine's records) or `full` (whole distributions).
    """

    ids: Tensor
    """[..., S] int64 token ids; slot 0 is the sampled token. Where `valid` is False the id is the sampled one."""
    valid: Tensor
    """[..., S] bool, False for duplicates and for entries that the engine left out."""
    logp: Tensor
    """[..., S] log mu in nats; -inf where not valid."""
    log_tail: Tensor
    """[...] log of mu_T, the mass outside the support; -inf without a tail, NaN when the record is unusable."""
    log_kth: Tensor
    """[...] log of mu_(K), the least likely of the top-K: no token outside the support is likelier."""
    top_k: int
    """K, how many of the likeliest ids the engine recorded; 0 when it recorded the sampled token alone."""

    @classmethod
    def from_topk(
        cls, sampled: Tensor, logp: Tensor, topk_ids: Tensor | None = None, topk_logp: Tensor | None = None
    ) -> BehaviourSupport:
        """The support S = TopK(mu, K) ∪ {sampled} from an engine's records (DPPO, arXiv 2602.04879, sec. 4.4).

        Args:
            sampled: [...] ids of the sampled tokens.
            logp: [...] their log-probs at the sampling temperature, float32 or float64; NaN where unknown.
            topk_ids: [..., K] ids of the likeliest tokens, in any order; a negative id is a missing entry.
            topk_logp: [..., K] their log-probs; -inf is a missing entry, NaN makes the token unknown.

        The tail is `log(1 - sum_S mu)` in log space; a sum above 1 by rounding gives a tail of 0.
        Raises TypeError for 16-bit log-probs, ValueError for shapes that do not fit.
        """
        if (topk_ids is None) != (topk_logp is None):
            raise ValueError("topk_ids and topk_logp go together: give both or neither")
        if topk_ids is None or topk_logp is None:
            topk_ids, topk_logp = sampled.new_empty((*sampled.shape, 0)), logp.new_empty((*logp.shape, 0))
        check_log_probs("logp", logp)
        check_log_probs("topk_logp", topk_logp)
        if sampled.shape != logp.shape or topk_ids.shape != topk_logp.shape or topk_ids.shape[:-1] != logp.shape:
            raise ValueError(
                f"shapes do not fit: sampled {tuple(sampled.shape)}, logp {tuple(logp.shape)}, "
                f"topk_ids {tuple(topk_ids.shape)}, topk_logp {tuple(topk_logp.shape)}; "
                "expected [...], [...], [..., K], [..., K]"
            )
        top_ids, top_logp = topk_ids.long(), topk_logp.detach().to(logp.dtype)
        recorded = (top_ids >= 0) & (top_logp != -math.inf)
        # A missing entry, whatever its id, must not hide a recorded one.
        first = first_occurrence(top_ids.masked_fill(~recorded, -1)) & (top_ids != sampled[..., None])
        valid = torch.cat([torch.ones_like(sampled, dtype=torch.bool)[..., None], recorded & first], dim=-1)
        ids = torch.cat([sampled.long()[..., None], top_ids], dim=-1)
        slots = torch.cat([logp.detach()[..., None], top_logp], dim=-1).masked_fill(~valid, -math.inf)
        mass = torch.logsumexp(slots, dim=-1)
        usable = (mass <= MASS_TOLERANCE) & ~torch.isnan(top_logp).any(-1)
        log_tail = log1mexp(mass.clamp(max=0.0)).masked_fill(~usable, math.nan)
        if topk_ids.shape[-1]:
            log_kth = top_logp.masked_fill(~recorded, math.inf).amin(-1).clamp(max=0.0)
        else:
            log_kth = torch.zeros_like(log_tail)
        return cls(
            ids=torch.where(valid, ids, sampled.long()[..., None]),
            valid=valid,
            logp=slots,
            log_tail=log_tail,
            log_kth=log_kth,
            top_k=topk_ids.shape[-1],
        )

    @classmethod
    def full(cls, sampled: Tensor, logp: Tensor) -> BehaviourSupport:
        """The support that is the whole vocabulary: `sampled` [...], `logp` [..., V]; there is no tail.

        A row whose probabilities do not sum to 1 (NaN, or raw logits) is unusable: its token counts as unknown.
        """
        check_log_probs("logp", logp)
        vocabulary_size = logp.shape[-1]
        ids = torch.arange(vocabulary_size, device=logp.device).expand(logp.shape).clone()
        # Exchange places 0 and k, so that slot 0 is the sampled token.
        ids.scatter_(-1, sampled.long()[..., None], 0)
        ids[..., 0] = sampled
        slots = logp.detach().gather(-1, ids)
        usable = torch.logsumexp(slots, dim=-1).abs() <= MASS_TOLERANCE
        return cls(
            ids=ids,
            valid=torch.ones_like(ids, dtype=torch.bool),
            logp=slots,
            log_tail=torch.full_like(slots[..., 0], -math.inf).masked_fill(~usable, math.nan),
            log_kth=slots.amin(-1),
            top_k=vocabulary_size,
        )

    def __getitem__(self, tokens: Any) -> BehaviourSupport:
        """Some of the tokens, by any index over the leading shape: how a batch is cut into micro-batches."""
        return each_tensor(self, lambda values: values[tokens])

    def check_ids(self, vocabulary_size: int) -> None:
        """Raise ValueError for an id outside the vocabulary; padding may have any id inside it."""
        if not self.ids.numel():
            return
        low, high = int(self.ids.min()), int(self.ids.max())
        if low < 0 or high >= vocabulary_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary_size}; give padding any "
                "id inside it, and a response_mask that leaves it out"
            )

    def binary(self) -> BehaviourSupport:
        """The sampled token against everything else (K = 0)."""
        return replace(
            self,
            ids=self.ids[..., :1],
            valid=self.valid[..., :1],
            logp=self.logp[..., :1],
            log_tail=_rest(self.logp, self.log_tail),
            log_kth=torch.zeros_like(self.log_kth),
            top_k=0,
        )


@dataclass(frozen=True, kw_only=True)
class PolicySupport:
    """The policy pi being trained, on the support of a `BehaviourSupport`, with what only pi can tell of its tail."""

    logp: Tensor
    """[..., S] log pi in nats on the same ids; -inf where the behaviour support is not valid. Differentiable."""
    log_tail: Tensor
    """[...] log of pi_T, the mass outside the support."""
    vocabulary_size: int
    """V, rows of the policy's head."""
    tail_sum_squares: Tensor | None = None
    """[...] Q_T = sum of pi_i^2 over the tail; the exact tail needs it. None when it was not measured."""
    entropy: Tensor | None = None
    """[...] entropy of pi in nats; None when it was not measured."""

    @classmethod
    def from_logits(cls, logits: Tensor, behaviour: BehaviourSupport, *, temperature: float = 1.0) -> PolicySupport:
        """Log-probs, tail mass, Q_T and entropy from logits [..., V] at the sampling temperature.

        The tail is summed over the tokens outside the support themselves, not as one minus the rest, which
        would lose it to rounding. Computed in float32 (float64 for float64 logits). Only `logp` carries a
        gradient. A row of logits that has no finite norm gives NaN log-probs without a gradient.

        Raises ValueError for an id outside the vocabulary, for leading shapes that differ and for a temperature
        that is not positive.
        """
        if logits.shape[:-1] != behaviour.ids.shape[:-1]:
            raise ValueError(
                f"logits {tuple(logits.shape)} and support {tuple(behaviour.ids.shape)} must have one leading shape"
            )
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; log-probs of a policy need a temperature above 0")
        vocabulary_size = logits.shape[-1]
        behaviour.check_ids(vocabulary_size)
        scaled = logits if logits.dtype == torch.float64 else logits.float()
        if temperature != 1:
            scaled = scaled / temperature
        # Relative to the largest, so that large logits lose no digits.
        scaled = scaled - scaled.detach().amax(dim=-1, keepdim=True)
        log_norm = torch.logsumexp(scaled, dim=-1, keepdim=True)
        broken = ~torch.isfinite(log_norm.detach())
        if broken.any():
            # Such a token is unknown, and must leave the graph here: NaN times a coefficient of 0 is NaN.
            scaled = scaled.masked_fill(broken, 0.0)
            log_norm = torch.logsumexp(scaled, dim=-1, keepdim=True)
        logp = (scaled.gather(-1, behaviour.ids) - log_norm).masked_fill(broken, math.nan)
        logp = logp.masked_fill(~behaviour.valid, -math.inf)
        with torch.no_grad():
            log_all = scaled - log_norm
            entropy = -(log_all.exp() * log_all.clamp(min=log_tiny(log_all))).sum(-1)
            entropy = entropy.masked_fill(broken[..., 0], math.nan)
            tail = log_all.scatter_(-1, behaviour.ids, -math.inf)
            log_tail = torch.logsumexp(tail, dim=-1).masked_fill(broken[..., 0], math.nan)
            tail_sum_squares = (2 * tail).exp().sum(-1).masked_fill(broken[..., 0], math.nan)
        return cls(
            logp=logp,
            log_tail=log_tail,
            vocabulary_size=vocabulary_size,
            tail_sum_squares=tail_sum_squares,
            entropy=entropy,
        )

    def binary(self) -> PolicySupport:
        """The sampled token against everything else (K = 0)."""
        sum_squares = self.tail_sum_squares
        if sum_squares is not None:
            sum_squares = sum_squares + (2 * self.logp[..., 1:].detach()).exp().sum(-1)
        return replace(
            self,
            logp=self.logp[..., :1],
            log_tail=_rest(self.logp.detach(), self.log_tail),
            tail_sum_squares=sum_squares,
        )

    def detach(self) -> PolicySupport:
        """The same numbers outside the graph: a mask never carries a gradient."""
        return replace(self, logp=self.logp.detach())


def each_tensor(record: _Record, function: Callable[[Tensor], Tensor]) -> _Record:
    """The record with a function applied to each of its tensors."""
    return replace(record, **{name: function(getattr(record, name)) for name in tensor_names(record)})


def tensor_names(record: DataclassInstance) -> list[str]:
    """Names of the fields that hold a value for each token."""
    return [field.name for field in fields(record) if isinstance(getattr(record, field.name), Tensor)]


def _rest(logp: Tensor, log_tail: Tensor) -> Tensor:
    """[...] log of all mass but slot 0's, summed rather than subtracted."""
    return torch.logsumexp(torch.cat([logp[..., 1:], log_tail[..., None]], dim=-1), dim=-1)


def first_occurrence(ids: Tensor) -> Tensor:
    """[..., S] bool, False where the same id stands earlier in the row."""
    ordered, order = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ~torch.zeros_like(repeated).scatter(-1, order, repeated)
