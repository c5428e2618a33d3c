"""What would make a run take less memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from predmask.rollout import VLLMConfig
from predmask.train.config import Config
from predmask.train.plan.architectures import Architecture
from predmask.train.plan.memory import MemoryPlan, Place, engine_cache_bytes, longest, micro_batch_tokens, plan_memory


@dataclass(frozen=True)
class Remedy:
    """A change of the configuration that lowers the plan."""

    options: str
    """As the command line spells it."""
    effect: str
    """What it costs."""
    config: Config
    plan: MemoryPlan


def remedies(config: Config, model: Architecture, *, gpu: bool) -> list[Remedy]:
    """Changes that lower the peak where the model is trained, each alone and then all together."""
    place: Place = "accelerator" if gpu else "host"
    found: list[Remedy] = []
    together, spelled = config, []
    before = plan_memory(config, model, gpu=gpu).peak(place)
    for options, effect, change in _changes(config, model):
        changed = _change(config, change)
        plan = plan_memory(changed, model, gpu=gpu)
        if plan.peak(place) < before:
            found.append(Remedy(options, effect, changed, plan))
            together = _change(together, change)
            spelled.append(options)
    if len(found) > 1:
        plan = plan_memory(together, model, gpu=gpu)
        found.append(Remedy(" ".join(spelled), "all of these", together, plan))
    return found


def _changes(config: Config, model: Architecture) -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Options, what they cost, and the fields that they set; a later one goes over an earlier one."""
    update, engine, lora = config.update, config.engine, config.lora
    full = longest(config, model)
    if not update.gradient_checkpointing:
        changed = {"update": {"gradient_checkpointing": True}}
        yield "--update.gradient_checkpointing", "a third more time in training", changed
    if micro_batch_tokens(config, model) > full:
        changed = {"update": {"micro_batch_tokens": full}}
        yield f"--update.micro_batch_tokens {full}", "one full response at a time", changed
    if isinstance(engine, VLLMConfig):
        least = math.ceil(4 * engine_cache_bytes(engine, model) * full / 1e9)
        if least < engine.kv_cache_gb:
            changed = {"engine": {"kv_cache_gb": float(least)}}
            yield f"--engine.kv_cache_gb {least}", "four full responses at once: slower sampling", changed
        if engine.quantization is None and engine.dtype == "bfloat16":
            changed = {"engine": {"quantization": "fp8_per_channel"}}
            yield "--engine.quantization fp8_per_channel", "rollouts in other numerics than without it", changed
    if not (lora.enabled and lora.base_dtype == "bfloat16"):
        changed = {"lora": {"enabled": True, "base_dtype": "bfloat16"}, "update": {"autocast": True}}
        options = "--lora.base_dtype bfloat16" + ("" if update.autocast else " --update.autocast")
        effect = "adapters are trained, not all weights: a higher learning rate, such as 1e-5"
        yield options, "the weights under the adapters in 16 bits" if lora.enabled else effect, changed


def _change(config: Config, fields: dict[str, dict[str, Any]]) -> Config:
    parts = {section: dataclasses.replace(getattr(config, section), **values) for section, values in fields.items()}
    return dataclasses.replace(config, **parts)
