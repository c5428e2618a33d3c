"""Rollout engines: they sample responses and say how likely those were."""

from typing import TypeAlias

from predmask.rollout.engine import Engine, Sampling
from predmask.rollout.records import Rollout, RolloutError, rollout_from_entries
from predmask.rollout.transformers import TransformersConfig, TransformersEngine
from predmask.rollout.vllm import VLLMConfig

EngineConfig: TypeAlias = TransformersConfig | VLLMConfig
"""The configuration of an engine: a frozen dataclass with a `name` and `start(model) -> Engine`."""

ENGINES: dict[str, type[EngineConfig]] = {engine.name: engine for engine in (TransformersConfig, VLLMConfig)}
"""Every engine by name. To add one, write its file and add its configuration here."""

__all__ = [
    "ENGINES",
    "Engine",
    "EngineConfig",
    "Rollout",
    "RolloutError",
    "Sampling",
    "TransformersConfig",
    "TransformersEngine",
    "VLLMConfig",
    "rollout_from_entries",
]
