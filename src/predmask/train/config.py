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
class PromptConfig:
    """How a question becomes the tokens of a prompt."""

    template: Annotated[str, Doc("text around each question, which takes the place of {question}")] = "{question}"
    chat: Annotated[bool, Doc("wrap it as a user's message, by the chat template of the model's tokenizer")] = False
    max_tokens: Annotated[int | None, Doc("problems with a longer prompt are left out; none: all must fit")] = None

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ConfigError(
                f"prompt.template is {self.template!r}, without a place for the question: write {{question}} there"
            )
        if self.max_tokens is not None:
            _at_least(self, "prompt", max_tokens=1)


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
    dynamic_sampling: Annotated[
        bool, Doc("drop groups whose scores are all equal, and sample further prompts in their place (DAPO)")
    ] = False
    max_rounds: Annotated[int, Doc("rounds of dynamic sampling in a step; then it goes on with the groups it has")] = 10

    def __post_init__(self) -> None:
        _at_least(self, "rollout", prompts=1, group_size=2, max_new_tokens=1, top_k=0, max_rounds=1)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"rollout.temperature is {self.temperature}; training needs samples: choose a value above 0, such as 1"
            )

    def sampling(self) -> Sampling:
        """These settings as the engine takes them."""
        return Sampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """How long scoring may take; for a task whose verifier runs in processes of its own."""

    workers: Annotated[int, Doc("processes that score")] = 2
    deadline: Annotated[float, Doc("seconds that one answer may take")] = 10.0
    batch_deadline: Annotated[float, Doc("seconds that a batch of answers may take; the rest is not scored")] = 600.0

    def __post_init__(self) -> None:
        _at_least(self, "verifier", workers=1)
        for name in ("deadline", "batch_deadline"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"verifier.{name} is {getattr(self, name)}; it must be a number of seconds above 0")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """From the verifier's score to the reward."""

    overlong_buffer: Annotated[
        int | None, Doc("tokens before max_new_tokens over which a penalty for length grows (DAPO); none: no penalty")
    ] = None
    overlong_penalty: Annotated[float, Doc("that penalty at max_new_tokens")] = 1.0

    def __post_init__(self) -> None:
        if self.overlong_buffer is not None:
            _at_least(self, "reward", overlong_buffer=1)
        if not 0 <= self.overlong_penalty < math.inf:
            raise ConfigError(f"reward.overlong_penalty is {self.overlong_penalty}; it must be 0 or more, such as 1")


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
    mask_truncated: Annotated[
        bool, Doc("leave responses that were cut at max_new_tokens out of the loss and its denominator")
    ] = False

    def __post_init__(self) -> None:
        if self.ratio_cap is not None and not self.ratio_cap >= 1:
            raise ConfigError(f"loss.ratio_cap is {self.ratio_cap}; a cap below 1 would cap on-policy tokens: use 5")
        if self.horizon is not None:
            _at_least(self, "loss", horizon=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: Annotated[float, Doc("learning rate, constant after warm-up")] = 1e-6
    warmup_steps: Annotated[int, Doc("optimiser steps over which the learning rate rises linearly from 0")] = 0
    beta1: Annotated[float, Doc("decay of the gradient's mean")] = 0.9
    beta2: Annotated[float, Doc("decay of the gradient's square")] = 0.95
    weight_decay: Annotated[float, Doc("decoupled weight decay")] = 0.0
    grad_clip: Annotated[float, Doc("largest norm of the gradient")] = 1.0

    def __post_init__(self) -> None:
        _at_least(self, "optimizer", warmup_steps=0)
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
    micro_batch_tokens: Annotated[
        int | None, Doc("padded tokens in one forward pass, of responses of like length; none: no limit")
    ] = None
    gradient_checkpointing: Annotated[
        bool, Doc("keep each layer's input alone and compute the layer again: less memory, a third more time")
    ] = False
    autocast: Annotated[bool, Doc("compute the forward pass in bfloat16 (weights stay float32)")] = False
    head: Annotated[
        Literal["auto", "fused", "dense"],
        Doc("how hidden states become the loss: fused (chunk by chunk), dense (all logits), auto (fused where it can)"),
    ] = "auto"

    def __post_init__(self) -> None:
        _at_least(self, "update", steps_per_rollout=1, epochs=1, micro_batch_size=1)
        if self.micro_batch_tokens is not None:
            _at_least(self, "update", micro_batch_tokens=1)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA) are trained, and the model's own weights stay."""

    enabled: Annotated[bool, Doc("train adapters alone; so does any option of this section")] = False
    rank: Annotated[int, Doc("rank of each adapter")] = 32
    alpha: Annotated[int, Doc("an adapter's product is scaled by alpha / rank")] = 64
    targets: Annotated[tuple[str, ...], Doc("names of the layers that have one; all-linear: all but the head")] = (
        "all-linear",
    )
    base_dtype: Annotated[
        Literal["float32", "bfloat16"], Doc("of the model's own weights; adapters are always float32")
    ] = "float32"

    def __post_init__(self) -> None:
        _at_least(self, "lora", rank=1, alpha=1)
        if not self.targets:
            raise ConfigError("lora.targets is empty: name layers, such as q_proj,v_proj, or all-linear")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out problems."""

    every: Annotated[int, Doc("steps between evaluations; 0: only before and after")] = 5
    prompts: Annotated[int, Doc("held-out problems")] = 128
    samples: Annotated[int, Doc("sampled responses a problem (besides one greedy response)")] = 2
    temperature: Annotated[float | None, Doc("sampling temperature; none: that of the rollout")] = None
    engine: Annotated[
        Literal["policy", "rollout"],
        Doc("what answers: the trained weights themselves, or the rollout engine, which is fast for large models"),
    ] = "policy"
    batch_size: Annotated[int, Doc("responses that the policy samples at once")] = 256

    def __post_init__(self) -> None:
        _at_least(self, "eval", every=0, prompts=1, samples=1, batch_size=1)
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"eval.temperature is {self.temperature}; it must be above 0 (a greedy answer is measured anyway)"
            )


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
    prompt: Annotated[PromptConfig, Doc("questions to prompts")] = field(default_factory=PromptConfig)
    rule: Annotated[Rule, Doc("the trust-region mask")] = field(default_factory=Predictive)
    engine: Annotated[EngineConfig, Doc("what samples the responses")] = field(default_factory=TransformersConfig)
    rollout: Annotated[RolloutConfig, Doc("sampling")] = field(default_factory=RolloutConfig)
    verifier: Annotated[VerifierConfig, Doc("scoring of answers")] = field(default_factory=VerifierConfig)
    reward: Annotated[RewardConfig, Doc("scores to rewards")] = field(default_factory=RewardConfig)
    advantage: Annotated[AdvantageConfig, Doc("rewards to advantages")] = field(default_factory=AdvantageConfig)
    loss: Annotated[LossConfig, Doc("weights and averages")] = field(default_factory=LossConfig)
    optimizer: Annotated[OptimizerConfig, Doc("AdamW")] = field(default_factory=OptimizerConfig)
    update: Annotated[UpdateConfig, Doc("optimiser steps on each rollout")] = field(default_factory=UpdateConfig)
    lora: Annotated[LoraConfig, Doc("--lora: train adapters in place of all weights")] = field(
        default_factory=LoraConfig
    )
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
        asked = {"rollout.temperature": self.rollout.temperature}
        if self.eval.engine == "rollout" and self.eval.temperature is not None:
            asked["eval.temperature"] = self.eval.temperature
        for path, temperature in asked.items():
            if not low <= temperature <= high:
                raise ConfigError(
                    f"{path} is {temperature}, but engine {self.engine.name!r} samples at {low:g} to {high:g}"
                )
        buffer = self.reward.overlong_buffer
        if buffer is not None and buffer > self.rollout.max_new_tokens:
            raise ConfigError(
                f"reward.overlong_buffer is {buffer}, more than rollout.max_new_tokens, {self.rollout.max_new_tokens}"
            )
        if self.lora.enabled and self.lora.base_dtype == "bfloat16" and not self.update.autocast:
            raise ConfigError(
                "lora.base_dtype is bfloat16, whose layers compute in bfloat16: say so with --update.autocast"
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
