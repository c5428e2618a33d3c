"""The policy's weights on their way to an engine in another process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it


def checkpoint_weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a Hugging Face model on the CPU, named as its checkpoint files name them.

    A tied head stands beside its embedding under its own name, since engines may hold it apart.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: _cast(weight, dtype) for name, weight in weights.items()}


@contextmanager
def weights_file(model: Any, dtype: torch.dtype) -> Iterator[Path]:
    """A safetensors file of the model's weights, in shared memory where they fit, until the block ends."""
    from safetensors.torch import save_file

    weights = checkpoint_weights(model, dtype)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    with tempfile.TemporaryDirectory(prefix="predmask-", dir=_directory(size)) as directory:
        path = Path(directory) / "model.safetensors"
        save_file(weights, path)
        yield path


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of its own: a safetensors file holds no tensor twice."""
    weight = weight.detach()
    return weight.to("cpu", dtype if weight.is_floating_point() else weight.dtype, copy=True).contiguous()


def _directory(size: int) -> Path | None:
    """Shared memory when it has room for `size` bytes and half as much again; else None, the usual temporary place."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 1.5 * size:
        return _SHARED_MEMORY
    return None
