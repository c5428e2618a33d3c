"""Batches of a rollout, and the model's forward pass over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from predmask.rollout import Rollout


@dataclass(frozen=True)
class Batch:
    """A rollout with the advantage of each token, and its weight in the optimiser step's loss."""

    rollout: Rollout
    sample: Tensor
    """[B] int64, the responses' numbers in the step's rollout."""
    advantage: Tensor
    """[N], 0 where the answer could not be scored."""
    weights: Tensor
    """[N] from `token_weights`, over the whole optimiser step."""

    def split(self, size: int, tokens: int | None = None) -> list[Batch]:
        """Micro-batches of up to `size` responses of similar lengths, so that little is padded.

        With `tokens`, the padded tokens of a micro-batch, prompts included, stay within it; a response that is longer
        by itself is a micro-batch of its own.
        """
        totals = self.rollout.totals
        parts: list[list[int]] = [[]]
        for sequence in torch.argsort(totals, stable=True).tolist():
            count = len(parts[-1]) + 1
            # The longest comes last, so that the micro-batch is padded to its length.
            over = tokens is not None and count * int(totals[sequence]) > tokens
            if parts[-1] and (count > size or over):
                parts.append([])
            parts[-1].append(sequence)
        return [self.select(torch.tensor(part)) for part in parts]

    def select(self, sequences: Tensor) -> Batch:
        """The given responses, with their tokens' weights as they are."""
        index = self.rollout.token_index(sequences)
        return Batch(self.rollout.select(sequences), self.sample[sequences], self.advantage[index], self.weights[index])

    def per_token(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """[N] advantages, weights, and whether the policy sampled the token, on a device."""
        return self.advantage.to(device), self.weights.to(device), self.rollout.sampled.to(device)


def response_rows(
    compute: Callable[[Tensor], Tensor], rollout: Rollout, device: torch.device, *, autocast: bool
) -> Tensor:
    """[N, X] what `compute` gives, from ids [B, T] to [B, T, X], at the positions that predict the rollout's tokens.

    One forward pass over right-padded sequences; a causal model needs no mask for that, since padding
    comes after everything it could disturb.
    """
    sequences = [
        torch.tensor([*prompt, *response])
        for prompt, response in zip(rollout.prompts, rollout.responses(), strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device)
    rows = torch.repeat_interleave(torch.arange(len(sequences)), rollout.lengths)
    # What stands at a position is about the token after it.
    columns = torch.cat(
        [
            torch.arange(len(prompt) - 1, len(prompt) - 1 + length)
            for prompt, length in zip(rollout.prompts, rollout.lengths.tolist(), strict=True)
        ]
    )
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        values = compute(ids)
    return values[rows.to(device), columns.to(device)]
