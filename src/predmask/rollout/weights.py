"""The policy's weights on their way to an engine in another process, a rounded copy or a file."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def base_model(model: Any) -> Any:
    """The Hugging Face model of a policy: itself, or what peft put its adapters into, which computes with them."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def merged_state(model: Any, move: Callable[[Tensor], Tensor] = lambda weight: weight) -> dict[str, Tensor]:
    """The state dict that the policy would have without adapters (LoRA), whose products are in their layers' weights.

    The model is left as it is, to the bit. Each weight goes through `move` before the next merged one is computed, and
    weights that are tied stay one. Raises ValueError for adapters that `merged_weight` refuses, and for one on a tied
    weight.
    """
    base = base_model(model)
    adapted = dict(_adapted_layers(base))
    state: dict[str, Tensor] = base.state_dict(keep_vars=True)
    for name, layer in adapted.items():
        for key in layer.state_dict():
            del state[f"{name}.{key}"]
        state.update({f"{name}.{key}": value for key, value in layer.base_layer.state_dict(keep_vars=True).items()})
        del state[f"{name}.weight"]
    moved = {id(weight): move(weight.detach()) for weight in state.values()}
    merged = {f"{name}.weight": move(merged_weight(layer).detach()) for name, layer in adapted.items()}
    return {name: moved[id(weight)] for name, weight in state.items()} | merged


def merged_weight(layer: Any) -> Tensor:
    """The matrix of a layer with adapters of peft: W + alpha / r · B A for each active one (LoRA, arXiv 2106.09685).

    It is float32 where the adapters are, in any precision of W, and gradients flow to B and A. Raises ValueError for
    adapters of another kind.
    """
    weight: Tensor = layer.base_layer.weight
    for name in _adapters(layer):
        weight = weight + layer.get_delta_weight(name)
    return weight


def check_adapters(model: Any) -> None:
    """Raise ValueError where `merged_state` would."""
    for _ in _adapted_layers(base_model(model)):
        pass


def tied_weights(model: nn.Module) -> set[int]:
    """The `id` of each parameter that several layers share, such as a head that is the embedding, too."""
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {key for key, count in names.items() if count > 1}


def checkpoint_weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The policy's weights on the CPU, adapters merged, named as the checkpoint files of its Hugging Face model are.

    A tied head stands beside its embedding under its own name, since engines may hold it apart. Raises ValueError as
    `merged_state` does.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # On the CPU first: the conversion takes experts apart, which would be a second copy of them on a GPU.
    state = merged_state(model, lambda weight: _cast(weight, dtype))
    weights = revert_weight_conversion(base_model(model), state)
    # A copy of its own for what is tied: a safetensors file holds no tensor twice.
    names = {weight.data_ptr(): name for name, weight in weights.items()}
    return {
        name: weight.contiguous() if names[weight.data_ptr()] == name else weight.clone()
        for name, weight in weights.items()
    }


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


def _adapted_layers(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that peft wrapped, by name; ValueError for one that cannot be merged into a matrix of its own."""
    tied = tied_weights(base)
    layer: Any
    for name, layer in base.named_modules():
        if hasattr(layer, "base_layer"):
            try:
                _adapters(layer)
            except ValueError as error:
                raise ValueError(f"the adapters of {name} cannot be merged: {error}") from error
            if id(layer.base_layer.weight) in tied:
                raise ValueError(
                    f"the adapters of {name} cannot be merged: its weight is that of another layer, too (tied), which "
                    "must stay as it is"
                )
            yield name, layer


def _adapters(layer: Any) -> list[str]:
    """Names of the adapters that a wrapped layer computes with."""
    wrapped = type(layer.base_layer).__name__
    if wrapped not in ("Linear", "Conv1D") or not hasattr(layer, "lora_A"):
        raise ValueError(f"{type(layer).__name__} around {wrapped} is not LoRA on a linear layer")
    active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
    adapters = [name for name in active if name in layer.lora_A]
    if any(name in layer.lora_variant or layer.lora_bias[name] for name in adapters):
        # Such as DoRA: the same at first, and something else after the first step.
        raise ValueError("LoRA of a variant (such as DoRA), or with a bias, is more than a matrix")
    return adapters


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU; integers stay what they are."""
    return weight.to("cpu", dtype if weight.is_floating_point() else weight.dtype, copy=True)
