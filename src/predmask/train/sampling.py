"""The trainer's side of an engine: starting it, and taking nothing from it that could not be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from predmask.rollout import Engine, Rollout, RolloutError, Sampling
from predmask.train.config import Config, ConfigError


def start_engine(config: Config, model: Any) -> Engine:
    """The configured engine with the weights of `model`; ConfigError when it cannot serve this model."""
    try:
        return config.engine.start(model)
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from error


def context_of(config: Config, *models: Any) -> float:
    """Tokens that prompt and response may come to, for engine and models alike; infinite where nothing limits them."""
    limits = [getattr(config.engine, "max_length", None), *(_context(model) for model in models)]
    return min((limit for limit in limits if limit is not None), default=math.inf)


def _context(model: Any) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


def answered(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator
) -> Rollout:
    """One response to each prompt; RolloutError for answers to others."""
    rollout = engine.generate(prompts, sampling, generator)
    if [list(prompt) for prompt in rollout.prompts] != [list(prompt) for prompt in prompts]:
        raise RolloutError("the engine answered other prompts than it was given, or in another order")
    return rollout


def sample_responses(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
    *,
    vocabulary_size: int,
) -> Rollout:
    """See `answered`; RolloutError for responses, too, that could not be trained on."""
    rollout = answered(engine, prompts, sampling, generator)
    return rollout.check(top_k=sampling.top_k, vocabulary_size=vocabulary_size)
