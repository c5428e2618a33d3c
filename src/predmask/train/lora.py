"""Low-rank adapters (LoRA, arXiv 2106.09685) on the policy, through peft."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from predmask.rollout.weights import check_adapters, tied_weights
from predmask.train.config import ConfigError, LoraConfig

_ALL = "all-linear"


def require_peft() -> None:
    """Raise ImportError, which says what to install, where peft is missing."""
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            "adapters need peft: install predmask[lora] (in a clone: pip install -e '.[lora]')", name=error.name
        ) from error


def add_adapters(model: Any, config: LoraConfig, seed: int) -> Any:
    """The Hugging Face model as a `peft.PeftModel` whose float32 adapters alone are trained.

    They change nothing at first, and depend on `seed` alone; the model must be on the CPU, where they are drawn. Raises
    ConfigError for targets that the model does not have, or whose adapters could not be merged for an engine.
    """
    import peft

    targets = _targets(model, config)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        # Without dropout: the policy that is trained must be the one that samples.
        lora_dropout=0.0,
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in _chosen(model, targets)),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft asks transformers for a property by the name that transformers deprecates.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
    try:
        check_adapters(adapted)
    except ValueError as error:
        # With the names of fused experts, peft adapts these, too.
        raise ConfigError(
            f"lora.targets is {', '.join(config.targets)}: {error}; name other layers, such as q_proj,k_proj,v_proj,"
            "o_proj"
        ) from error
    return adapted


def adapted_layers(model: Any, config: LoraConfig) -> list[Any]:
    """The layers of a Hugging Face model that `add_adapters` would put adapters on; ConfigError where it refuses."""
    return _chosen(model, _targets(model, config))


def _targets(model: Any, config: LoraConfig) -> list[str]:
    """The names of the layers to adapt, as peft takes them: each stands for all whose name ends with it."""
    layers = _linear_layers(model)
    head = model.get_output_embeddings()
    body = sorted({name.rpartition(".")[2] for name, layer in layers.items() if layer is not head})
    unknown = [name for name in config.targets if name != _ALL and not _chosen(model, [name])]
    if unknown:
        names = sorted({name.rpartition(".")[2] for name in layers})
        raise ConfigError(
            f"lora.targets names {', '.join(unknown)}, but {type(model).__name__} has no linear layer of that name; it "
            f"has {', '.join(names)} ({_ALL}: {', '.join(body)})"
        )
    targets = [name for target in config.targets for name in (body if target == _ALL else [target])]
    tied = tied_weights(model)
    if any(id(layer.weight) in tied for layer in _chosen(model, targets)):
        raise ConfigError(
            f"lora.targets is {', '.join(config.targets)}, which includes the head, but in {type(model).__name__} it "
            "shares its weight with the embedding (tied): adapters would untie them; leave the head out"
        )
    return sorted(set(targets))


def _chosen(model: Any, targets: list[str]) -> list[Any]:
    return [
        layer for name, layer in _linear_layers(model).items() if f".{name}".endswith(tuple(f".{t}" for t in targets))
    ]


def _linear_layers(model: Any) -> dict[str, Any]:
    """By name; GPT-2's are of transformers' class Conv1D."""
    return {name: layer for name, layer in model.named_modules() if type(layer).__name__ in ("Linear", "Conv1D")}
