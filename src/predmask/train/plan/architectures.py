"""Sizes of a model, from its configuration alone: nothing is loaded or downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from predmask.train.config import ConfigError
from predmask.train.models import model_path

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B-Base": {
        **_QWEN3,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B-Base": {
        **_QWEN3,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B-Base": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
}
"""The shapes of the recipes' models, as their config.json on the hub has them. They give 4.0, 8.2 and 30.5 billion
parameters, as the models' cards say."""


@dataclass(frozen=True)
class Architecture:
    """A causal language model without weights; ConfigError for one that is none."""

    config: Any
    """The text model's transformers configuration."""
    source: str
    """Where the configuration was found, in words."""

    @classmethod
    def of(cls, name: str) -> Architecture:
        """The model of that name: of a directory, the hub's cache, or the table `KNOWN`.

        Raises ConfigError for a model that is in none of them.
        """
        path = model_path(name)
        config, source = _config(name, path)
        return cls(config.get_text_config(), source)

    @cached_property
    def model(self) -> Any:
        """The model with weights that have shapes and no memory."""
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(self.config)
        except ValueError as error:
            raise ConfigError(
                f"the model is of type {self.config.model_type!r}, which is no causal language model; give one that is"
            ) from error

    @cached_property
    def parameters(self) -> int:
        """How many weights it has; a tied head counts once."""
        return sum(weight.numel() for weight in self.model.parameters())

    @cached_property
    def linear(self) -> int:
        """How many of them are in linear layers, which autocast rounds; experts kept as one tensor are not."""
        layers = (module for module in self.model.modules() if isinstance(module, torch.nn.Linear))
        return sum(layer.weight.numel() for layer in layers)

    @property
    def vocabulary(self) -> int:
        """V"""
        return self.config.vocab_size

    @property
    def context(self) -> int | None:
        """Tokens that prompt and response may come to, if that is limited."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def layers(self) -> int:
        """L"""
        return self.config.num_hidden_layers

    @property
    def hidden(self) -> int:
        """D, the width of a layer's input."""
        return self.config.hidden_size

    @property
    def queries(self) -> int:
        """Q, the width of all attention heads together."""
        return self.config.num_attention_heads * self._head_dim

    @property
    def keys(self) -> int:
        """K, the width of the keys, and of the values."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        return heads * self._head_dim

    @property
    def intermediate(self) -> int:
        """F, the width inside the feed-forward layer (of one expert)."""
        expert = getattr(self.config, "moe_intermediate_size", None) if self.experts_per_token else None
        return expert or getattr(self.config, "intermediate_size", None) or 4 * self.hidden

    @property
    def experts_per_token(self) -> int:
        """How many experts a token passes through; 0 without experts."""
        experts = getattr(self.config, "num_experts", None) or getattr(self.config, "num_local_experts", None)
        return self.config.num_experts_per_tok if experts else 0

    @property
    def _head_dim(self) -> int:
        return getattr(self.config, "head_dim", None) or self.hidden // self.config.num_attention_heads


def _config(name: str, path: str) -> tuple[Any, str]:
    from transformers import AutoConfig

    if Path(path).is_dir():
        return _load(name, path), "those of its config.json"
    file = cached(name, "config.json")
    if file is not None:
        return _load(name, str(Path(file).parent)), "those in the hub's cache"
    if name in KNOWN:
        settings = dict(KNOWN[name])
        return AutoConfig.for_model(settings.pop("model_type"), **settings), "those that predmask knows"
    raise ConfigError(
        f"model {name!r} is not in the hub's cache, and predmask does not know its sizes: check the name, and fetch "
        f"its configuration (hf download {name} config.json), or give a model directory"
    )


def _load(name: str, directory: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} could not be opened: {error}") from error


def cached(name: str, file: str) -> str | None:
    """Where a file of a hub repository lies in the local cache; None when it does not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return found if isinstance(found, str) else None
