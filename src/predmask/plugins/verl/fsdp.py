"""FSDP and FSDP2."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.utils.ulysses import (  # pyright: ignore[reportMissingImports]
    get_ulysses_sequence_parallel_world_size,
    slice_input_tensor,
)
from verl.workers.engine import FSDPEngineWithLMHead  # pyright: ignore[reportMissingImports]

from predmask.ops import Shard
from predmask.plugins.verl.engine import MaskedEngine


class MaskedFSDPEngine(MaskedEngine, FSDPEngineWithLMHead):
    """Whole vocabularies; with Ulysses sequence parallelism, a slice of the packed rows."""

    def _predmask_cut(self, values: Tensor, data: Any, data_format: str) -> Tensor:
        packed = values.values().unsqueeze(0)
        return slice_input_tensor(packed, dim=1) if get_ulysses_sequence_parallel_world_size() > 1 else packed

    def _predmask_shard(self, logits: Tensor) -> Shard | None:
        return None
