"""Named starting points: what each changes against the defaults of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named configuration, as a layer over the defaults."""

    summary: str
    values: dict[str, Any]


_ARITHMETIC: dict[str, Any] = {
    "model": "embedded",
    "task": {"name": "arithmetic"},
    "engine": {"name": "transformers", "numerics": "fp8"},
    "rule": {"name": "predictive", "delta": 0.05},
    "steps": 30,
    "rollout": {"prompts": 16, "group_size": 16, "max_new_tokens": 48},
    "advantage": {"scale_by_std": True},
    "loss": {"ratio_cap": 10.0},
    "optimizer": {"learning_rate": 1e-4},
    "update": {"steps_per_rollout": 16},
}

PRESETS: dict[str, Preset] = {
    "arithmetic": Preset(
        "learn 4-digit addition with the tiny embedded model; about a minute on two CPU cores", _ARITHMETIC
    ),
    "arithmetic-stress": Preset(
        "the same at five times the learning rate and with int4 rollouts: without a mask it collapses",
        {
            **_ARITHMETIC,
            "engine": {"name": "transformers", "numerics": "int4"},
            "optimizer": {"learning_rate": 5e-4},
            "steps": 36,
        },
    ),
}
"""Every preset by name."""
