"""The policy's weights on their way to an engine in another process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def checkpoint_weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a Hugging Face model on the CPU, named as its checkpoint files name them.

    A tied head stands beside its embedding under its own name, since engines may hold it apart.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: _cast(weight, dtype) for name, weight in weights.items()}


@contextmanager
def weights_file(model: Any, dtype: torch.dtype, directories: Sequence[Path]) -> Iterator[Path]:
    """A safetensors file of the model's weights, until the block ends.

    It lies in the first of the directories that has room, else in the last.
    """
    from safetensors.torch import save_file

    weights = checkpoint_weights(model, dtype)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    roomy = (place for place in directories if shutil.disk_usage(place).free > 1.5 * size)
    path = next(roomy, directories[-1]) / "model.safetensors"
    try:
        save_file(weights, path)
        del weights
        yield path
    finally:
        path.unlink(missing_ok=True)


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of its own: a safetensors file holds no tensor twice."""
    weight = weight.detach()
    return weight.to("cpu", dtype if weight.is_floating_point() else weight.dtype, copy=True).contiguous()
