"""A key-value cache that is written in place; imported late, because it needs transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE_TOKENS = 128
"""By how many tokens a full layer is enlarged."""


def in_place_cache(config: Any) -> DynamicCache:
    """The cache for a model of that configuration, whose plain layers are written in place.

    Layers with a sliding window or a recurrent state stay those of transformers.
    """
    cache = DynamicCache(config=config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class InPlaceLayer(DynamicLayer):
    """Keys and values are the used part of larger tensors.

    The `DynamicLayer` of transformers copies everything for each token, and whenever a row leaves the batch.
    """

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor] | None = None
        """[rows, heads, tokens, head_dim] keys and values, larger than what is used."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one or more tokens; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            used = self.get_seq_length()
            total = used + key_states.shape[-2]
            if self._room is None or total > self._room[0].shape[-2]:
                self._room = _enlarged(self.keys, total), _enlarged(self.values, total)
            self.keys, self.values = (room[: len(key_states), :, :total] for room in self._room)
            self.keys[:, :, used:] = key_states
            self.values[:, :, used:] = value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows; one that stays in its place is not copied."""
        if self._room is None:  # nothing was decoded yet: prompts may be repeated here
            super().batch_select_indices(indices)
            return
        moved = torch.nonzero(indices != torch.arange(len(indices), device=indices.device))[:, 0]
        for states in (self.keys, self.values):
            states[moved] = states[indices[moved]]
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]


def _enlarged(states: Tensor, tokens: int) -> Tensor:
    rows, heads, used, head_dim = states.shape
    room = states.new_empty(rows, heads, tokens + SPARE_TOKENS, head_dim)
    room[:, :, :used] = states
    return room
