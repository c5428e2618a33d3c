"""The contract of a rollout engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from predmask.rollout.records import Rollout


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
