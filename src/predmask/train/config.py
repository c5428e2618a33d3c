"""The configuration of a run: frozen dataclasses, the one home of every default.

Each field carries its meaning as a `Doc` annotation, from which `--help` and `predmask config` are made.
`task`, `engine` and `rule` are chosen by name from their tables; their fields are those of the chosen class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from typing_extensions import Doc

from predmask.core import Predictive, Rule
from predmask.core.advantages import Baseline
from predmask.core.loss import Aggregation
from predmask.rollout import EngineConfig, Sampling, TransformersConfig
from predmask.tasks import Arithmetic, Task


class ConfigError(ValueError):
    """A configuration that cannot be run; the text names the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is sampled at each step."""

    prompts: Annotated[int, Doc("prompts a step")] = 16
    group_size: Annotated[int, Doc("responses a prompt; their rewards are compared with each other")] = 16
    temperature: Annotated[float, Doc("sampling temperature of both policies")] = 1.0
    max_new_tokens: Annotated[int, Doc("length at which a response is cut")] = 256
    top_k: Annotated[
        int, Doc("K: likeliest tokens recorded (not a truncation) at each position; 0: the sampled token alone")
    ] = 20

    def __post_init__(self) -> None:
        _at_least(self, "rollout", prompts=1, group_size=2, max_new_tokens=1, top_k=0)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"rollout.temperature is {self.temperature}; training needs samples: choose a value above 0, such as 1"
            )

    def sampling(self) -> Sampling:
        """These settings as the engine takes them."""
        return Sampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    baseline: Annotated[Baseline, Doc("the group's mean, or the mean of the group's other members")] = "mean"
    scale_by_std: Annotated[bool, Doc("divide by the group's standard deviation (GRPO); off in Dr. GRPO")] = False


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How token losses are weighed and averaged."""

    aggregation: Annotated[Aggregation, Doc("how tokens are averaged (DAPO, GRPO, Dr. GRPO)")] = "token_mean"
    horizon: Annotated[int | None, Doc("constant length of seq_mean_token_sum_norm; none: max_new_tokens")] = None
    ratio_cap: Annotated[float | None, Doc("C: cap of the detached importance weight; none: no cap")] = 5.0
    count_zero_advantage: Annotated[
        bool, Doc("count tokens with A = 0 (groups of equal rewards) in the loss's denominator")
    ] = False

    def __post_init__(self) -> None:
        if self.ratio_cap is not None and not self.ratio_cap >= 1:
            raise ConfigError(f"loss.ratio_cap is {self.ratio_cap}; a cap below 1 would cap on-policy tokens: use 5")
        if self.horizon is not None:
            _at_least(self, "loss", horizon=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: Annotated[float, Doc("constant learning rate")] = 1e-6
    beta1: Annotated[float, Doc("decay of the gradient's mean")] = 0.9
    beta2: Annotated[float, Doc("decay of the gradient's square")] = 0.95
    weight_decay: Annotated[float, Doc("decoupled weight decay")] = 0.0
    grad_clip: Annotated[float, Doc("largest norm of the gradient")] = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < 1:
            raise ConfigError(
                f"optimizer.learning_rate is {self.learning_rate}; it must be between 0 and 1, such as 1e-6"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}; it must be in [0, 1)")
        if not self.weight_decay >= 0:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}; it must be 0 or more")
        if not self.grad_clip > 0:
            raise ConfigError(f"optimizer.grad_clip is {self.grad_clip}; it must be above 0, such as 1")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How one rollout is trained on."""

    steps_per_rollout: Annotated[int, Doc("minibatches that a rollout is split into: optimiser steps an epoch")] = 4
    epochs: Annotated[int, Doc("passes over each rollout")] = 1
    micro_batch_size: Annotated[int, Doc("responses in one forward pass; changes memory, not the result")] = 16
    autocast: Annotated[bool, Doc("compute the forward pass in bfloat16 (weights stay float32)")] = False
    head: Annotated[
        Literal["auto", "fused", "dense"],
        Doc("how hidden states become the loss: fused (chunk by chunk), dense (all logits), auto (fused where it can)"),
    ] = "auto"

    def __post_init__(self) -> None:
        _at_least(self, "update", steps_per_rollout=1, epochs=1, micro_batch_size=1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out problems, measured on the trained policy itself."""

    every: Annotated[int, Doc("steps between evaluations; 0: only before and after")] = 5
    prompts: Annotated[int, Doc("held-out problems")] = 128
    samples: Annotated[int, Doc("sampled responses a problem (besides one greedy response)")] = 2
    batch_size: Annotated[int, Doc("responses sampled at once")] = 256

    def __post_init__(self) -> None:
        _at_least(self, "eval", every=0, prompts=1, samples=1, batch_size=1)


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What a run records token by token."""

    enabled: Annotated[bool, Doc("record token traces; so does any option of this section")] = False
    every: Annotated[int, Doc("steps from one recorded step to the next")] = 1
    responses: Annotated[int | None, Doc("responses recorded a step, spread over its prompts; none: all")] = None
    max_mb: Annotated[
        int, Doc("about the most that traces take on disk; when full, every second recorded step is deleted")
    ] = 1000
    after: Annotated[
        bool, Doc("measure each token again after its optimiser step: one more forward pass (predmask direction)")
    ] = False
    full: Annotated[
        bool, Doc("record whole distributions of both policies: for small vocabularies (predmask direction, replay)")
    ] = False

    def __post_init__(self) -> None:
        _at_least(self, "traces", every=1, max_mb=1)
        if self.responses is not None:
            _at_least(self, "traces", responses=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: Annotated[str, Doc("'embedded', a model directory, or a name on the Hugging Face hub")] = "embedded"
    steps: Annotated[int, Doc("rollouts, each followed by its optimiser steps")] = 30
    seed: Annotated[int, Doc("seed of everything random; same seed, same machine: same run")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], Doc("auto: cuda, else cpu; mps is untested")] = "auto"
    threads: Annotated[int, Doc("CPU threads; 0: as torch chooses (OMP_NUM_THREADS, else one a core)")] = 0
    output: Annotated[str | None, Doc("run directory; none: a new one under runs/")] = None
    tensorboard: Annotated[bool, Doc("write TensorBoard files too (extra 'tensorboard')")] = False
    task: Annotated[Task, Doc("what is learned: a name, reasoning_gym:NAME, or your own package.module:Class")] = field(
        default_factory=Arithmetic
    )
    rule: Annotated[Rule, Doc("the trust-region mask")] = field(default_factory=Predictive)
    engine: Annotated[EngineConfig, Doc("what samples the responses")] = field(default_factory=TransformersConfig)
    rollout: Annotated[RolloutConfig, Doc("sampling")] = field(default_factory=RolloutConfig)
    advantage: Annotated[AdvantageConfig, Doc("rewards to advantages")] = field(default_factory=AdvantageConfig)
    loss: Annotated[LossConfig, Doc("weights and averages")] = field(default_factory=LossConfig)
    optimizer: Annotated[OptimizerConfig, Doc("AdamW")] = field(default_factory=OptimizerConfig)
    update: Annotated[UpdateConfig, Doc("optimiser steps on each rollout")] = field(default_factory=UpdateConfig)
    eval: Annotated[EvalConfig, Doc("held-out accuracy")] = field(default_factory=EvalConfig)
    traces: Annotated[TraceConfig, Doc("--traces: tokens, into the run directory")] = field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        _at_least(self, "", steps=1, seed=0, threads=0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2^63")
        responses = self.rollout.prompts * self.rollout.group_size
        if responses % self.update.steps_per_rollout:
            raise ConfigError(
                f"update.steps_per_rollout is {self.update.steps_per_rollout}, which does not divide the "
                f"{responses} responses of a step (rollout.prompts · rollout.group_size)"
            )
        low, high = self.engine.temperatures
        if not low <= self.rollout.temperature <= high:
            raise ConfigError(
                f"rollout.temperature is {self.rollout.temperature}, but engine {self.engine.name!r} samples at "
                f"{low:g} to {high:g}"
            )
        if self.rule.needs_topk and self.rollout.top_k == 0:
            raise ConfigError(
                f"rule {self.rule.name!r} needs top-K log-probs, but rollout.top_k is 0; set rollout.top_k to 20, or "
                "choose a rule of the sampled token, such as ppo_clip"
            )

    @property
    def mismatch_tolerance(self) -> float:
        """Mean |Δ log-prob| that the numerics of engine and trainer explain, in nats."""
        return self.engine.mismatch_tolerance + (0.1 if self.update.autocast else 0.0)


def _at_least(section: Any, prefix: str, **bounds: int) -> None:
    for name, bound in bounds.items():
        value = getattr(section, name)
        if value < bound:
            path = f"{prefix}.{name}" if prefix else name
            raise ConfigError(f"{path} is {value}; it must be {bound} or more")
