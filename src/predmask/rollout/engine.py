"""The contract of a rollout engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from predmask.rollout.records import Rollout, RolloutError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are sampled.

    Truncated sampling (top-p, top-k, min-p) is left out on purpose: it changes the support of the behaviour
    policy, and a mask that compares with the whole policy would then see a mismatch that is not there.
    """

    temperature: float
    """0 is greedy: the likeliest token, recorded with log-prob 0 (it was certain)."""
    max_new_tokens: int
    top_k: int
    """How many of the likeliest ids are recorded at each position."""
    record_full: bool = False
    """Record the whole distribution too (studies on small vocabularies)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a number above")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (sampled token only) or more")
        if self.temperature == 0 and (self.top_k or self.record_full):
            raise ValueError("greedy decoding (temperature 0) records no distribution: set top_k to 0")


class Engine(Protocol):
    """Samples responses and says how likely they were.

    The log-probs are float32 and those of the distribution that was really sampled from, temperature
    included; token ids go in and come out; each token carries the policy version that sampled it.
    """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        """Sample one response a prompt (repeat a prompt for a group of responses)."""
        ...

    def update_weights(self, model: torch.nn.Module, version: int) -> None:
        """Answer with the weights of `model` from now on, and label tokens with `version`.

        Whatever the engine cached under the old weights is forgotten.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds; calling it twice is allowed."""
        ...


ANY_TEMPERATURE = (0.0, math.inf)
"""The temperatures above 0 that an engine without limits samples at."""


def check_request(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocabulary_size: int,
    context: int | None,
    temperatures: tuple[float, float] = ANY_TEMPERATURE,
) -> None:
    """Refuse what an engine cannot answer, before anything is computed.

    Raises RolloutError for no prompts, an empty prompt, an id or a K above the vocabulary, a length above the
    model's context (None: without limit), and a temperature outside the range that the engine samples at.
    """
    low, high = temperatures
    if sampling.temperature > 0 and not low <= sampling.temperature <= high:
        raise RolloutError(
            f"temperature is {sampling.temperature:g}, but the engine samples at {low:g} to {high:g}; take one of "
            "these, or 0 for greedy decoding"
        )
    if not prompts:
        raise RolloutError("there are no prompts to answer")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RolloutError(f"prompt {index} is empty; a prompt needs at least one token")
        unknown = next((token for token in prompt if not 0 <= token < vocabulary_size), None)
        if unknown is not None:
            raise RolloutError(
                f"prompt {index} holds id {unknown}, but the model has ids 0 to {vocabulary_size - 1}; do "
                "tokenizer and model belong together?"
            )
    if sampling.top_k > vocabulary_size:
        raise RolloutError(
            f"top_k is {sampling.top_k}, but the model's vocabulary has {vocabulary_size} tokens; lower rollout.top_k"
        )
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    if context is not None and longest > context:
        raise RolloutError(
            f"the longest prompt and max_new_tokens ({sampling.max_new_tokens}) come to {longest} tokens, but the "
            f"engine takes {context}; lower rollout.max_new_tokens"
        )


def check_counts(config: Any, *names: str) -> None:
    """ValueError where one of these fields of an engine's configuration is below 1; None is no limit."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"engine.{name} is {value}; it must be 1 or more")


def context_within(model: Any, max_length: int | None) -> int:
    """Tokens that an engine takes: `max_length`, or the model's context; ValueError for more than that."""
    context: int = model.config.max_position_embeddings
    if max_length is None:
        return context
    if max_length > context:
        raise ValueError(f"engine.max_length is {max_length}, but the model's context is {context}")
    return max_length


def end_token_ids(model: Any) -> frozenset[int]:
    """The token ids that end a response, by the model's generation settings."""
    value = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if value is None:
        value = model.config.eos_token_id
    if value is None:
        raise ValueError("the model names no end-of-sequence token: set eos_token_id in its generation_config.json")
    return frozenset([value] if isinstance(value, int) else value)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout in here; each module goes back to its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
