"""What happens in the actor between logits and loss: one object for one optimiser step on one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from predmask.core import Metrics, PolicySupport, mask_metrics
from predmask.ops import Shard, logits_statistics
from predmask.plugins.verl.loss import DECIDED, Decided
from predmask.plugins.verl.packed import Packed, columns, policy_from
from predmask.plugins.verl.progress import Progress
from predmask.plugins.verl.settings import PolicyLossConfig

_APART = 0.5
"""Nats by which log-probs of the same tokens never differ on average."""
Cut = Callable[[Tensor, Any, str], Tensor]
"""From nested [B, P + T], the micro-batch and verl's format to what of the former is in this process, in the shape of
the logits' leading dimensions."""


class Hook:
    """Stands in for verl's loss function, which is called twice a micro-batch: with the logits, then for the loss.

    The logits become a few numbers a token, which verl carries on with its own outputs (and puts together where
    sequences are cut); then the rule is asked, once, and verl's loss is called with its decision at hand.
    """

    def __init__(
        self,
        loss_function: Callable[..., Any],
        settings: PolicyLossConfig,
        *,
        cut: Cut,
        shard: Callable[[Tensor], Shard | None],
        vocabulary_size: int,
        progress: Progress,
    ) -> None:
        self._loss_function = loss_function
        self._settings = settings
        self._rule = settings.make_rule()
        self._cut, self._shard = cut, shard
        self._limit = vocabulary_size
        self._vocabulary_size = 0
        self._last: tuple[Any, Packed] | None = None
        self._progress = progress
        self.metrics = Metrics()
        """What the mask did in this process's part of the optimiser step."""

    def __call__(
        self, *, data: Any, student_logits: Tensor | None = None, data_format: str = "thd", **more: Any
    ) -> Any:
        """Columns of statistics for logits; loss and metrics for a model's outputs."""
        if student_logits is not None:
            return self._measure(student_logits, data, data_format)
        return self._decide(data, **more)

    def _packed(self, data: Any) -> Packed:
        """The micro-batch's tokens, made once for its two calls."""
        if self._last is None or self._last[0] is not data:
            self._last = data, Packed.of(data, self._settings.top_k)
        return self._last[1]

    @torch.no_grad()
    def _measure(self, logits: Tensor, data: Any, data_format: str) -> dict[str, Tensor]:
        """The policy's statistics at the rows that predict response tokens; the others are not computed."""
        packed = self._packed(data)
        marks = self._cut(packed.marks, data, data_format)
        if marks.shape != logits.shape[:-1]:
            raise RuntimeError(
                f"rows of logits {tuple(logits.shape[:-1])} and of the batch {tuple(marks.shape)} do not fit: the host "
                "pads or cuts them in a way that this plug-in does not know (pad_to_length must be off)"
            )
        here = marks > 0
        shard = self._shard(logits)
        size = logits.shape[-1] if shard is None else shard.vocabulary_size
        # Of a head that is larger than the vocabulary, the server samples real tokens alone, and so does pi.
        self._vocabulary_size = min(self._limit, size)
        with torch.autocast(logits.device.type, enabled=False):
            policy = logits_statistics(
                logits.detach().reshape(-1, logits.shape[-1]),
                packed.behaviour[marks[here] - 1],
                rows=here.reshape(-1).nonzero()[:, 0],
                vocabulary_size=self._vocabulary_size,
                shard=shard,
            )
        return columns(policy, marks)

    def _decide(self, data: Any, model_output: dict[str, Any], **more: Any) -> Any:
        """The rule's decision, then verl's loss."""
        packed = self._packed(data)
        policy = policy_from(model_output, packed, self._vocabulary_size)
        _check_alignment(model_output["log_probs"].values()[packed.row], policy, packed)
        decision = self._rule(packed.behaviour, policy, packed.advantage, packed.response_mask)
        decided = Decided(packed, policy, decision)
        self.metrics = self.metrics.merge(
            mask_metrics(packed.behaviour, policy, decision, staleness=self._progress.staleness(data, decided))
        )
        self._progress.record(data, decided)
        token = DECIDED.set(decided)
        try:
            return self._loss_function(model_output=model_output, data=data, **more)
        finally:
            DECIDED.reset(token)


def _check_alignment(host: Tensor, policy: PolicySupport, packed: Packed) -> None:
    """Raise RuntimeError unless the host's log-probs of the sampled tokens and ours are those of the same tokens."""
    host, ours = host.detach().float()[packed.response_mask], policy.logp[:, 0][packed.response_mask]
    lost = torch.isfinite(host) & torch.isnan(ours)
    if lost.any():
        raise RuntimeError(
            f"{int(lost.sum())} of {len(ours)} tokens were not measured, though the host has their log-probs: it cuts "
            "the rows of the logits in a way that this plug-in does not know"
        )
    apart = (host - ours).abs().nanmean()
    # 16-bit logits round log-probs by hundredths; rows of other tokens are nats apart.
    if apart > _APART:
        raise RuntimeError(
            f"log-probs of the sampled tokens are {float(apart):.2f} nats from the host's own on average: the "
            "statistics were taken at other rows, or at another temperature"
        )
