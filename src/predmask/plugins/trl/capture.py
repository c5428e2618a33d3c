"""What completions were sampled from: recorded while transformers generates, or read from vLLM's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from predmask.rollout import Rollout, RolloutError, rollout_from_entries
from predmask.rollout.weights import base_model


class Recorder(LogitsProcessor):
    """Records, at each position, log-probs of the K likeliest ids and of the one that was sampled.

    As a logits processor of `generate` it runs before the temperature, which it therefore applies itself, and must run
    alone (no truncation of the distribution).
    """

    def __init__(self, top_k: int, temperature: float) -> None:
        self._top_k, self._temperature = top_k, temperature
        self._last = torch.empty(0)
        self._logp: list[Tensor] = []
        self._topk_ids: list[Tensor] = []
        self._topk_logp: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        if len(self._last):
            self._logp.append(self._of(input_ids[:, -1]))
        self._last = (scores.float() / self._temperature).log_softmax(-1)
        top = self._last.topk(min(self._top_k, scores.shape[-1]), dim=-1)
        self._topk_ids.append(top.indices)
        self._topk_logp.append(top.values)
        return scores

    def rollout(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], version: int) -> Rollout:
        """The record of the completions, each cut at its end."""
        steps = len(self._topk_ids)
        lengths = torch.tensor([len(completion) for completion in completions])
        device = self._topk_ids[0].device
        # The last token of the longest completion was not seen.
        last = [completion[-1] if len(completion) == steps else 0 for completion in completions]
        logp = torch.stack([*self._logp, self._of(torch.tensor(last, device=device))], dim=1).cpu()
        there = torch.arange(steps) < lengths[:, None]
        tokens = torch.tensor([token for completion in completions for token in completion])
        return Rollout(
            prompts=tuple(map(tuple, prompts)),
            lengths=lengths,
            tokens=tokens,
            logp=logp[there],
            topk_ids=torch.stack(self._topk_ids, dim=1).cpu()[there],
            topk_logp=torch.stack(self._topk_logp, dim=1).cpu()[there],
            sampled=torch.ones_like(tokens, dtype=torch.bool),
            version=torch.full_like(tokens, version),
            finished=lengths < steps,
        )

    def _of(self, tokens: Tensor) -> Tensor:
        return self._last.gather(1, tokens[:, None])[:, 0]


@contextmanager
def recorded(model: Any, recorder: Recorder) -> Iterator[None]:
    """In here, whatever calls the model's `generate` is recorded."""
    inner = base_model(model)
    inner.generate = partial(inner.generate, logits_processor=[recorder])
    try:
        yield
    finally:
        del inner.generate


def rollout_from_vllm_lists(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Sequence[float | None]]] | None,
    ids: Sequence[Sequence[Sequence[int]]] | None,
    *,
    top_k: int,
    version: int,
) -> Rollout:
    """The record of what TRL's vLLM generation returned: for each token, log-probs and the ids that they belong to.

    The sampled token is found by its id, wherever it stands. Raises RolloutError where it is missing, or K is.
    """
    if logprobs is None or ids is None:
        raise RolloutError("vLLM returned no log-probs with their ids; restart the server with TRL 1.16")
    entries = [
        [dict(zip(row_ids, row, strict=True)) for row_ids, row in zip(of_ids, of, strict=True)]
        for of_ids, of in zip(ids, logprobs, strict=True)
    ]
    return rollout_from_entries(prompts, completions, entries, top_k=top_k, version=version)


def padded(rollout: Rollout, width: int, device: Any) -> dict[str, Tensor]:
    """The record as fields of TRL's batch, [B, T] and [B, T, K]; unknown behind each completion."""
    there = torch.arange(width) < rollout.lengths[:, None]

    def spread(values: Tensor, blank: float) -> Tensor:
        whole = torch.full((*there.shape, *values.shape[1:]), blank, dtype=values.dtype)
        whole[there] = values
        return whole.to(device)

    return {
        LOGP: spread(rollout.logp, torch.nan),
        TOPK_IDS: spread(rollout.topk_ids, -1),
        TOPK_LOGP: spread(rollout.topk_logp, torch.nan),
    }


LOGP, TOPK_IDS, TOPK_LOGP = "predmask_logp", "predmask_topk_ids", "predmask_topk_logp"
"""Fields of TRL's batch, which it shuffles and cuts with its own."""
