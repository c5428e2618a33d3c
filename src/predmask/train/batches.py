"""From a rollout to the policy's log-probs on its support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, PolicySupport
from predmask.rollout import Rollout


@dataclass(frozen=True)
class Batch:
    """A rollout with the advantage of each token, and its weight in the optimiser step's loss."""

    rollout: Rollout
    advantage: Tensor
    """[N], 0 where the answer could not be scored."""
    weights: Tensor
    """[N] from `token_weights`, over the whole optimiser step."""

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of up to `size` responses, of similar lengths so that little is padded."""
        totals = self.rollout.lengths + torch.tensor([len(prompt) for prompt in self.rollout.prompts])
        return [self.select(part) for part in torch.argsort(totals, stable=True).split(size)]

    def select(self, sequences: Tensor) -> Batch:
        """The given responses, with their tokens' weights as they are."""
        index = self.rollout.token_index(sequences)
        return Batch(self.rollout.select(sequences), self.advantage[index], self.weights[index])


def response_logits(model: Any, rollout: Rollout, *, autocast: bool = False) -> Tensor:
    """[N, V] the policy's logits for each response token of the rollout, with gradient.

    One forward pass over right-padded sequences; a causal model needs no mask for that, since padding
    comes after everything it could disturb.
    """
    device = next(model.parameters()).device
    sequences = [
        torch.tensor([*prompt, *response])
        for prompt, response in zip(rollout.prompts, rollout.responses(), strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device)
    rows = torch.repeat_interleave(torch.arange(len(sequences)), rollout.lengths)
    # The logits at a position are those of the token after it.
    columns = torch.cat(
        [
            torch.arange(len(prompt) - 1, len(prompt) - 1 + length)
            for prompt, length in zip(rollout.prompts, rollout.lengths.tolist(), strict=True)
        ]
    )
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[rows.to(device), columns.to(device)].float()


def support_of(
    model: Any, rollout: Rollout, *, temperature: float, autocast: bool = False
) -> tuple[BehaviourSupport, PolicySupport]:
    """Both policies on the support of each of the rollout's N tokens, on the model's device."""
    logits = response_logits(model, rollout, autocast=autocast)
    behaviour = rollout.behaviour(logits.device)
    return behaviour, PolicySupport.from_logits(logits, behaviour, temperature=temperature)
