"""Megatron. Its cuts and shards are tested with Megatron's own groups over gloo; no whole training was run with it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
from torch import Tensor
from verl.models.mcore.util import (  # pyright: ignore[reportMissingImports]
    preprocess_bshd_engine,
    preprocess_thd_engine,
)
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.workers.engine import MegatronEngineWithLMHead  # pyright: ignore[reportMissingImports]

from predmask.ops import Shard
from predmask.plugins.verl.engine import MaskedEngine


class MaskedMegatronEngine(MaskedEngine, MegatronEngineWithLMHead):
    """This process's columns of the vocabulary, and rows that are padded, and cut by context parallelism."""

    def _predmask_check(self) -> None:
        if self.engine_config.dynamic_context_parallel or _contiguous(self.tf_config):
            # Rows would lie elsewhere than the default cut puts them.
            raise ValueError(
                "predmask knows Megatron's zigzag context parallelism alone; set dynamic_context_parallel=False, and "
                "another attention variant than dsv4_hybrid"
            )

    def _predmask_cut(self, values: Tensor, data: Any, data_format: str) -> Tensor:
        fp8 = self.tf_config.fp8 in ("e4m3", "hybrid")
        if data_format == "thd":
            return preprocess_thd_engine(values, pre_process=True, use_fp8_padding=fp8)[0]
        longest = tu.get_non_tensor_data(data, key="forced_max_seqlen", default=None)
        return preprocess_bshd_engine(values, pre_process=True, use_fp8_padding=fp8, forced_max_seqlen=longest)[0]

    def _predmask_shard(self, logits: Tensor) -> Shard | None:
        group = parallel_state.get_tensor_model_parallel_group()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if size == 1:
            return None
        # Megatron pads the vocabulary to equal parts.
        return Shard(start=rank * logits.shape[-1], vocabulary_size=size * logits.shape[-1], group=group)


def _contiguous(tf_config: Any) -> bool:
    return getattr(tf_config, "experimental_attention_variant", None) == "dsv4_hybrid"
