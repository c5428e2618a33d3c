"""Loading the policy and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from predmask.rollout.weights import base_model
from predmask.train.config import Config, ConfigError
from predmask.train.lora import add_adapters, require_peft

EMBEDDED = "embedded"
"""The name of the tiny model that ships with the package."""


def model_path(name: str) -> str:
    """Where a model is loaded from: the packaged one, a directory, or a name on the Hugging Face hub.

    Raises ConfigError for a path that is no model directory.
    """
    if name == EMBEDDED:
        return str(resources.files("predmask") / "data" / "arithmetic")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = f"; did you mean {path / 'checkpoint'}?" if (path / "checkpoint").is_dir() else ""
            raise ConfigError(f"model {name!r} is a directory without config.json: no Hugging Face model{hint}")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"model {name!r} does not exist; give a model directory, a hub name such as Qwen/Qwen3-0.6B, or 'embedded'"
        )
    return name


def load_policy(name: str, device: torch.device) -> tuple[Any, Any]:
    """The causal language model in float32 on `device`, without dropout, and its tokenizer.

    Float32, because the weights are trained: a small step is lost to 16 bits. Raises ConfigError when the model
    cannot be opened.
    """
    model, tokenizer = _load(name, torch.float32)
    return model.to(device), tokenizer


def load_trained_policy(config: Config, device: torch.device) -> tuple[Any, Any]:
    """The policy that a run trains, with adapters and checkpointing as configured, and its tokenizer.

    With adapters it is a `peft.PeftModel`, whose other weights need no gradient. Raises ConfigError when that cannot be
    done with this model, and ImportError where peft is missing.
    """
    lora = config.lora
    if lora.enabled:
        require_peft()  # rather before a large model is loaded
    model, tokenizer = _load(config.model, getattr(torch, lora.base_dtype) if lora.enabled else torch.float32)
    if lora.enabled:
        model = add_adapters(model, lora, config.seed).eval()
    if config.update.gradient_checkpointing:
        recompute_layers(model)
    return model.to(device), tokenizer


def _load(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = model_path(name)
    try:
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} could not be opened: {error}") from error
    # Evaluation mode, also while training: the policy that is trained must be the one that samples.
    return model.eval(), tokenizer


def recompute_layers(model: Any) -> None:
    """Gradient checkpointing: keep each layer's input, and compute the layer again for its gradient (arXiv 1604.06174).

    Not by the switch of transformers, which works in training mode alone, where some layers drop out. Raises
    ConfigError for a model without layers that transformers would checkpoint.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in base_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"update.gradient_checkpointing is on, but {type(base_model(model)).__name__} has no layers that can be "
            "computed again; leave it out, and lower update.micro_batch_size where memory is short"
        )
    for layer in layers:
        layer.forward = MethodType(_recomputed, layer)


def _recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward pass, which keeps nothing but its input where a gradient is asked for."""
    forward = partial(type(layer).forward, layer, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without the bars that transformers draws for each file that it reads or writes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def resolve_device(name: str) -> torch.device:
    """The device of that name; 'auto' is cuda where there is one, else cpu."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = "cuda" if available["cuda"] else "cpu"
    if not available[name]:
        raise ConfigError(f"device is {name!r}, but this machine or this build of torch has none; use 'auto' or 'cpu'")
    return torch.device(name)
