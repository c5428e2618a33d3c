"""What a run needs besides memory: files, packages and disk space, and whether they are here; nothing is fetched.

Of a local file of data, columns and first row are read; a verifier of the user's own is imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from predmask.rollout import SGLangConfig, TransformersConfig, VLLMConfig
from predmask.tasks.math import MATH_VERIFY, Math, find_verifier
from predmask.tasks.math.collection import look_at
from predmask.tasks.reasoning_gym import ReasoningGym
from predmask.train.config import Config
from predmask.train.models import EMBEDDED, model_path
from predmask.train.plan.architectures import Architecture, cached
from predmask.train.plan.memory import checkpoint_bytes, engine_cache_bytes, longest

State = Literal["here", "in the cache", "to be downloaded", "missing", "not usable", "too small", "enough"]

_FILES = (".parquet", ".json", ".jsonl", ".csv", ".gz")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Need:
    """One thing that a run needs."""

    kind: str
    name: str
    state: State
    detail: str = ""

    @property
    def met(self) -> bool:
        """Whether the run could start, for all of this; what is to be downloaded is not here yet."""
        return self.state in ("here", "in the cache", "enough")


@dataclass(frozen=True)
class Machine:
    """The memory that is free on this machine."""

    gpu: bool
    """Whether the run is on a GPU."""
    name: str
    accelerator: int | None
    """Bytes free on that GPU; None where there is none."""
    host: int | None
    """Bytes free in main memory; None where that is not known."""

    @classmethod
    def of(cls, device: str) -> Machine:
        """This machine, for a run on the configured device."""
        gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if gpu and torch.cuda.is_available():
            return cls(True, torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0], _main_memory())
        return cls(gpu, "no GPU" if gpu else "the CPU", None, _main_memory())

    def free(self, place: str) -> int | None:
        """Bytes free in a place of a plan."""
        return self.accelerator if place == "accelerator" else self.host


def needs_of(config: Config, model: Architecture, *, gpu: bool) -> list[Need]:
    """Everything that the run needs, in the order in which it would be asked for."""
    engine = _engine(config, model, gpu=gpu)
    scoring = [*_data(config), *_verifier(config)]
    return [*_packages(config), _model(config, model), *scoring, *engine, *_disk(config, model)]


def _packages(config: Config) -> Iterator[Need]:
    wanted = {"vllm": isinstance(config.engine, VLLMConfig), "sglang": isinstance(config.engine, SGLangConfig)}
    wanted |= {"peft": config.lora.enabled, "tensorboard": config.tensorboard}
    wanted["reasoning_gym"] = isinstance(config.task, ReasoningGym)
    wanted["math_verify"] = getattr(config.task, "verifier", None) == MATH_VERIFY
    wanted["datasets"] = any(not _is_file(source) for source in _sources(config))
    for name, needed in wanted.items():
        if needed:
            yield Need("package", name, "here" if importlib.util.find_spec(name) else "missing")


def _model(config: Config, model: Architecture) -> Need:
    name, path = config.model, Path(model_path(config.model))
    if name == EMBEDDED:
        return Need("model", name, "here", "part of predmask")
    if path.is_dir():
        weights = sorted(path.glob("*.safetensors"))
        absent = [] if weights else ["*.safetensors"]
        absent += [] if any((path / file).is_file() for file in _TOKENIZERS) else ["tokenizer.json"]
        if absent:
            return Need("model", name, "missing", f"without {', '.join(absent)}")
        return Need("model", name, "here", size_text(sum(file.stat().st_size for file in weights)))
    if _is_cached(name):
        return Need("model", name, "in the cache")
    # Published in 16 bits.
    return Need("model", name, "to be downloaded", f"about {size_text(2 * model.parameters)}")


def _is_cached(name: str) -> bool:
    """Whether configuration, tokenizer and all weights of a hub repository are in the local cache."""
    index = cached(name, "model.safetensors.index.json")
    shards = (
        {"model.safetensors"} if index is None else set(re.findall(r"[\w.-]+\.safetensors", Path(index).read_text()))
    )
    present = [cached(name, file) is not None for file in ("config.json", *shards)]
    return all(present) and any(cached(name, file) is not None for file in _TOKENIZERS)


def _sources(config: Config) -> list[str]:
    sources = getattr(config.task, "sources", None)
    return list(sources()) if sources else []


def _data(config: Config) -> Iterator[Need]:
    for source in _sources(config):
        path = Path(source).expanduser()
        if path.is_file():
            wrong = _wrong_with_file(config, source)
            yield Need("data", source, "not usable", wrong) if wrong else Need("data", source, "here", _size(path))
        elif path.is_dir():
            yield Need("data", source, "here", "not looked into")
        elif _is_file(source):
            yield Need("data", source, "missing", "there is no such file")
        else:
            yield Need("data", source, "in the cache" if _data_set_is_cached(source) else "to be downloaded")


def _size(path: Path) -> str:
    return size_text(path.stat().st_size)


def _wrong_with_file(config: Config, source: str) -> str:
    """Why its first row cannot be read; "" where it can, or where the task is not known to read rows."""
    task = config.task
    if not isinstance(task, Math):
        return ""
    try:
        look_at(source, task.question_column, task.answer_column)
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def _verifier(config: Config) -> Iterator[Need]:
    """A function of the user's own, which is imported; what comes with predmask is a package's matter."""
    name = config.task.verifier if isinstance(config.task, Math) else MATH_VERIFY
    if name == MATH_VERIFY:
        return
    try:
        find_verifier(name)
    except ValueError as error:
        yield Need("verifier", name, "not usable", str(error))
    else:
        yield Need("verifier", name, "here")


def _is_file(source: str) -> bool:
    """Whether a source is a file's name, and not that of a data set on the hub."""
    path = Path(source)
    return path.expanduser().exists() or source.startswith((".", "/", "~")) or path.suffix.lower() in _FILES


def _data_set_is_cached(source: str) -> bool:
    """Whether the datasets package has prepared that data set before."""
    from huggingface_hub.constants import HF_HOME

    name = re.split("[:@]", source)[0].replace("/", "___")
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    # datasets writes names in its own way: DAPO-Math-17k is dapo-math-17k there.
    return folder.is_dir() and any(_letters(found.name) == _letters(name) for found in folder.iterdir())


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _engine(config: Config, model: Architecture, *, gpu: bool) -> Iterator[Need]:
    rollout, full = config.rollout, longest(config, model)
    if not gpu and isinstance(config.engine, SGLangConfig):
        yield Need("engine", "a GPU", "missing", "engine sglang has no other")
    if not gpu and getattr(config.engine, "quantization", None) not in (None, "fp8_per_channel"):
        yield Need("engine", "a GPU", "missing", "a CPU has engine.quantization fp8_per_channel only")
    asked = (config.prompt.max_tokens or 0) + rollout.max_new_tokens
    if asked > full:
        detail = f"prompt.max_tokens + rollout.max_new_tokens are {asked:,} tokens, and engine or model hold {full:,}"
        yield Need("engine", "context", "too small", detail)
    engine = config.engine
    if isinstance(engine, VLLMConfig):
        held = engine.max_length or model.context or full
        response, cache = engine_cache_bytes(engine, model) * held, engine.kv_cache_gb * 1e9
        detail = f"engine.kv_cache_gb = {engine.kv_cache_gb:g}, {held:,} tokens are {size_text(response)}"
        yield Need("engine", "key-value cache", "enough" if response <= cache else "too small", detail)


def _disk(config: Config, model: Architecture) -> Iterator[Need]:
    traces = config.traces.max_mb * 10**6 if config.traces.enabled else 0
    yield _space("run directory", Path(config.output or "runs"), checkpoint_bytes(config, model) + traces)
    if not isinstance(config.engine, TransformersConfig):
        each = 4 if getattr(config.engine, "dtype", None) == "float32" else 2
        places = [Path(place) for place in ("/dev/shm", tempfile.gettempdir()) if Path(place).is_dir()]  # noqa: S108
        size = each * model.parameters
        roomy = max(places, key=lambda place: shutil.disk_usage(place).free)
        yield _space("file of weights to the engine", roomy, int(1.5 * size))


def _space(name: str, path: Path, wanted: int) -> Need:
    path = path.expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{size_text(wanted)} of {size_text(free)} free in {there}"
    return Need("disk", name, "enough" if wanted <= free else "too small", detail)


def _main_memory() -> int | None:
    """Bytes that Linux could still give this process, within its control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or one without a limit
        return free
    return min(free, limit)


def size_text(size: int) -> str:
    """A size in GB of 10^9 bytes, or where that is little, in MB or kB."""
    if size >= 1e8:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
