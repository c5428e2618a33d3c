"""Named starting points: what each changes against the configuration's defaults, and where its values come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Preset:
    """A named configuration, as a layer over the defaults."""

    summary: str
    values: dict[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of each value, by its path such as `rule.delta`: where it comes from. Empty where all values are our own."""


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


class _Row(NamedTuple):
    path: str
    value: Any
    source: str


# The phrases that sources begin with.
_PAPER = "paper, by summaries"
_FOLLOWED = "independent implementation of the paper"
_NEAREST = "nearest known recipe"
_DPPO = "paper of DPPO"
_DRPO = "paper of DRPO, by summaries"
_CHOICE = "our choice"

LEGEND = {
    _PAPER: "reported of arXiv 2607.10848 by readers of it. Its text was not at hand, and the full set of its "
    "hyper-parameters is not public. It trained with verl and Megatron-LM on several GPUs.",
    _FOLLOWED: "a public reimplementation of the mask in a fork of slime, on another task, which calls this the "
    "paper's setting.",
    _NEAREST: "not known of the paper. The recipe of the sibling method DRPO (arXiv 2606.09821) for Qwen3-4B-Base, as "
    "published in Tencent-Hunyuan/UniRL.",
    _DPPO: "not known of the paper. The table of settings in arXiv 2602.04879, whose method the paper builds on.",
    _DRPO: "a baseline in arXiv 2606.09821, by summaries of it.",
    _CHOICE: "neither; the reason stands beside it.",
}
"""What the words mean by which a source begins."""

_DAPO = (
    _Row("steps", 800, _NEAREST),
    _Row("task.name", "math", f"{_NEAREST}: math-verify scores"),
    _Row("task.data", ["BytedTsinghua-SIA/DAPO-Math-17k@train"], f"{_PAPER}, of which it used about 13k"),
    _Row(
        "task.heldout_data",
        ["HuggingFaceH4/aime_2024@train", "math-ai/aime25@test"],
        f"{_PAPER}; of the copies on the hub: {_CHOICE}",
    ),
    _Row("prompt.chat", True, _NEAREST),
    _Row("prompt.max_tokens", 1024, _DPPO),
    _Row("engine.name", "vllm", _PAPER),
    _Row("engine.max_length", 9216, f"{_CHOICE}: prompt.max_tokens + rollout.max_new_tokens"),
    _Row("rollout.prompts", 64, _NEAREST),
    _Row("rollout.group_size", 8, _NEAREST),
    _Row("rollout.max_new_tokens", 8192, _NEAREST),
    _Row("rollout.temperature", 1.0, _FOLLOWED),
    _Row("rollout.top_k", 20, _PAPER),
    _Row("advantage.scale_by_std", False, _NEAREST),
    _Row("loss.aggregation", "seq_mean_token_sum_norm", _NEAREST),
    _Row("loss.horizon", 8192, _NEAREST),
    _Row("loss.ratio_cap", 5.0, _FOLLOWED),
    _Row("loss.mask_truncated", False, f"{_NEAREST}: scored as they are"),
    _Row("optimizer.learning_rate", 1e-6, _NEAREST),
    _Row("optimizer.beta2", 0.999, _NEAREST),
    _Row("optimizer.weight_decay", 0.01, _NEAREST),
    _Row("optimizer.grad_clip", 1.0, _NEAREST),
    _Row("update.steps_per_rollout", 4, _NEAREST),
    _Row("update.micro_batch_size", 128, f"{_CHOICE}: micro_batch_tokens is the limit"),
    _Row("update.micro_batch_tokens", 10240, _NEAREST),
    _Row("update.gradient_checkpointing", True, _NEAREST),
    _Row("update.autocast", True, _NEAREST),
    _Row("eval.every", 10, _NEAREST),
    _Row("eval.prompts", 60, f"{_CHOICE}: all of AIME24 and AIME25"),
    _Row("eval.samples", 16, f"{_PAPER}: avg@16"),
    _Row("eval.engine", "rollout", f"{_CHOICE}: fast"),
)

_RULES = {
    "": (
        "predictive mask",
        (
            _Row("rule.name", "predictive", _PAPER),
            _Row("rule.divergence", "kl", _PAPER),
            _Row("rule.tail", "aggregated", f"{_PAPER}: one of its two, with like results"),
            _Row("rule.delta", 0.15, _PAPER),
        ),
    ),
    "-dppo": (
        "mask of DPPO, TopK-KL",
        (
            _Row("rule.name", "dppo", _PAPER),
            _Row("rule.divergence", "kl", _PAPER),
            _Row("rule.support", "topk", _PAPER),
            _Row("rule.delta", 0.15, f"{_CHOICE}: that of the recipe (paper of DPPO: .05)"),
        ),
    ),
    "-grpo": (
        "clip-higher of GRPO",
        (
            _Row("rule.name", "ppo_clip", _PAPER),
            _Row("rule.eps_low", 0.2, _DRPO),
            _Row("rule.eps_high", 0.28, _DRPO),
        ),
    ),
}
"""By the ending of a preset's name: a mask in words, and its settings. Nothing else differs between the three."""

_FP8 = (
    _Row(
        "engine.quantization",
        "fp8_per_block",
        f"{_PAPER}: FP8; the form: {_CHOICE}, as vLLM has it for experts",
    ),
)


def _models() -> dict[str, tuple[str, tuple[_Row, ...]]]:
    """By the beginning of a preset's name: a setting in words, and what is its own."""

    def rows(model: str, kv_cache_gb: float) -> tuple[_Row, ...]:
        return _Row("model", model, _PAPER), _Row("engine.kv_cache_gb", kv_cache_gb, f"{_CHOICE}: for one GPU")

    moe = rows("Qwen/Qwen3-30B-A3B-Base", 12.0)
    return {
        "qwen3-4b-dapo": ("Qwen3-4B-Base", rows("Qwen/Qwen3-4B-Base", 24.0)),
        "qwen3-8b-dapo": ("Qwen3-8B-Base", rows("Qwen/Qwen3-8B-Base", 24.0)),
        "qwen3-30b-a3b-dapo": ("Qwen3-30B-A3B-Base", moe),
        "qwen3-30b-a3b-dapo-fp8": ("Qwen3-30B-A3B-Base, FP8 rollouts,", (*moe, *_FP8)),
    }


def _recipes() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for beginning, (setting, of_model) in _models().items():
        for ending, (mask, of_rule) in _RULES.items():
            rows = (*of_model, *_DAPO, *of_rule)
            found[beginning + ending] = Preset(
                f"{setting} on DAPO-Math-17k: {mask}", _nested(rows), {row.path: row.source for row in rows}
            )
    return found


def _nested(rows: Iterable[_Row]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value, _ in rows:
        section, dot, key = path.rpartition(".")
        (values.setdefault(section, {}) if dot else values)[key] = value
    return values


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
    **_recipes(),
}
"""Every preset by name."""
