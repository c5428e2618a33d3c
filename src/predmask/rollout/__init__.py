"""Rollout engines: they sample responses and say how likely those were."""

from typing import TypeAlias

from predmask.rollout.engine import Engine, Sampling
from predmask.rollout.records import Rollout, RolloutError, rollout_from_entries
from predmask.rollout.sglang import SGLangConfig
from predmask.rollout.transformers import TransformersConfig, TransformersEngine
from predmask.rollout.vllm import VLLMConfig

EngineConfig: TypeAlias = TransformersConfig | VLLMConfig | SGLangConfig
"""The configuration of an engine: a frozen dataclass with `start(model) -> Engine`.

It has a `name`, a `summary`, what it `needs`, what a user waits for at its `startup`, the `temperatures` that it
samples at, its `numerics`, and the `mismatch_tolerance` that they explain.
"""

ENGINES: dict[str, type[EngineConfig]] = {
    engine.name: engine for engine in (TransformersConfig, VLLMConfig, SGLangConfig)
}
"""Every engine by name. To add one, write its file and add its configuration here."""

__all__ = [
    "ENGINES",
    "Engine",
    "EngineConfig",
    "Rollout",
    "RolloutError",
    "SGLangConfig",
    "Sampling",
    "TransformersConfig",
    "TransformersEngine",
    "VLLMConfig",
    "rollout_from_entries",
]
