"""Loading the policy and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from predmask.train.config import ConfigError

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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = model_path(name)
    try:
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} could not be opened: {error}") from error
    # Evaluation mode, also while training: the policy that is trained must be the one that samples.
    return model.to(device).eval(), tokenizer


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
