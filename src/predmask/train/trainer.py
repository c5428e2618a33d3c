"""The training loop, from top to bottom like the algorithm."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from predmask.core import (
    MaskedToken,
    Metrics,
    group_advantages,
    mask_metrics,
    masked_tokens,
    merge_masked_tokens,
    token_weights,
)
from predmask.rollout import Engine, Rollout
from predmask.tasks import Problem, Split, Task
from predmask.tasks.sampling import PromptSampler
from predmask.tasks.verifier import Verifier
from predmask.train.agreement import Agreement, check_agreement
from predmask.train.batches import Batch
from predmask.train.config import Config, ConfigError
from predmask.train.evaluate import Accuracy, decode, encode, evaluate, generator_for, is_right, repeat_each
from predmask.train.forward import forward_of
from predmask.train.models import load_policy, resolve_device
from predmask.train.sampling import context_of, sample_responses, start_engine
from predmask.train.tracing import LARGEST_FULL, MinibatchTrace, Recorder, StepTrace


class TrainingError(RuntimeError):
    """Training cannot go on; the text says why and what to change."""


@dataclass(frozen=True)
class StepResult:
    """What one step of a run came to."""

    step: int
    metrics: dict[str, float]
    accuracy: Accuracy | None
    """Held-out accuracy, where it was measured after this step."""


class Trainer:
    """One run: rollout, reward, advantage, masked update, weights to the engine.

    `steps()` yields a `StepResult` after each step; the policy is `model`, `tokenizer`. An engine of your own
    may be given, made for the same model; otherwise the configuration's is started.
    """

    def __init__(self, config: Config, *, engine: Engine | None = None) -> None:
        self.config = config
        self.recorder: Recorder | None = None
        """What the run's tokens are recorded with; `traces` in the configuration says what is recorded."""
        self.device = resolve_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.model, self.tokenizer = load_policy(config.model, self.device)
        self._problems = problems_of(config.task, "train")
        self.prompts = PromptSampler(self._problems, config.seed)
        self.heldout = problems_of(config.task, "heldout")[: config.eval.prompts]
        self.notes: list[str] = []
        """What a user should know before the run starts."""
        self._check_model()
        self._forward, reason = forward_of(config, self.model)
        if reason is not None:
            self.notes.append(f"all logits are formed (update.head = dense): the model cannot be taken apart, {reason}")
        self.verifier = Verifier(config.task)
        self.engine = start_engine(config, self.model) if engine is None else engine
        self.version = 0
        """Optimiser steps so far."""
        self.agreement: Agreement | None = None
        """How far engine and trainer were apart before any update."""
        self._masked: list[MaskedToken] = []
        # Two streams: what is sampled does not depend on how minibatches are drawn.
        self._sampling = generator_for(config.seed, "sampling")
        self._shuffling = generator_for(config.seed, "minibatches")
        settings = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )

    def close(self) -> None:
        """End the engine and the verifier's processes."""
        self.engine.close()
        self.verifier.close()

    def evaluate(self) -> Accuracy:
        """Held-out accuracy of the policy as it is now."""
        return evaluate(
            self.model,
            self.tokenizer,
            self.heldout,
            self.verifier,
            samples=self.config.eval.samples,
            temperature=self.config.rollout.temperature,
            max_new_tokens=self.config.rollout.max_new_tokens,
            seed=self.config.seed,
            batch_size=self.config.eval.batch_size,
        )

    def masked_tokens(self) -> list[MaskedToken]:
        """Which token ids were masked so far, most often first."""
        return self._masked

    def steps(self) -> Iterator[StepResult]:
        """Train, one result a step."""
        every = self.config.eval.every
        for step in range(1, self.config.steps + 1):
            metrics = self._step(step)
            due = step == self.config.steps or (every > 0 and step % every == 0)
            yield StepResult(step, metrics.compute(), self.evaluate() if due else None)

    def _step(self, step: int) -> Metrics:
        started = time.perf_counter()
        metrics = Metrics()
        settings = self.config.rollout
        problems = repeat_each(self.prompts.take(settings.prompts), settings.group_size)
        trace = StepTrace(self.recorder, self.config, self._forward, step)
        rollout = self._sample(problems, full=trace.full)
        rewards = self._reward(problems, rollout, metrics)
        advantage = self._advantage(rewards, metrics)
        if step == 1:
            self._check_agreement(rollout)
        trace.responses(problems, rollout, rewards, advantage)
        for number, minibatch in enumerate(self._minibatches(rollout, advantage)):
            epoch, within = divmod(number, self.config.update.steps_per_rollout)
            with trace.minibatch(epoch, within, self.version) as recording:
                metrics = metrics.merge(self._update(minibatch, step, recording))
                recording.applied(moved=self.version > recording.optimizer_step)
        trace.commit()
        self.engine.update_weights(self.model, self.version)
        seconds = time.perf_counter() - started
        metrics.mean("response_length", rollout.lengths)
        metrics.mean("truncated_frac", ~rollout.finished)
        metrics.total("tokens", len(rollout.tokens))
        metrics.total("seconds", seconds)
        metrics.total("tokens_per_second", len(rollout.tokens) / seconds)
        return metrics

    def _sample(self, problems: list[Problem], *, full: bool) -> Rollout:
        """[B] responses, one to each of the problems; `full` records whole distributions."""
        prompts = encode(self.tokenizer, problems)
        sampling = replace(self.config.rollout.sampling(), record_full=full)
        return sample_responses(
            self.engine, prompts, sampling, self._sampling, vocabulary_size=self.model.config.vocab_size
        )

    def _reward(self, problems: list[Problem], rollout: Rollout, metrics: Metrics) -> torch.Tensor:
        """[B] rewards, NaN where an answer could not be scored."""
        scores = self.verifier.score(problems, decode(self.tokenizer, rollout.responses()))
        rewards = torch.tensor([math.nan if score is None else score for score in scores])
        metrics.mean("reward", rewards[~rewards.isnan()])
        metrics.mean("accuracy", torch.tensor([is_right(score) for score in scores if score is not None]))
        metrics.total("unscored_count", float(rewards.isnan().sum()))
        return rewards

    def _advantage(self, rewards: torch.Tensor, metrics: Metrics) -> torch.Tensor:
        """[B] group-relative advantages, NaN where an answer could not be scored."""
        groups = torch.arange(len(rewards)) // self.config.rollout.group_size
        settings = self.config.advantage
        found = group_advantages(rewards, groups, baseline=settings.baseline, scale_by_std=settings.scale_by_std)
        if found.groups:
            metrics.mean("equal_groups_frac", torch.arange(found.groups) < found.equal_groups)
        return torch.where(found.scored, found.values, math.nan)

    def _minibatches(self, rollout: Rollout, advantage: torch.Tensor) -> Iterator[Batch]:
        """The optimiser steps of a rollout: `steps_per_rollout` minibatches, in a new order each epoch."""
        update, loss = self.config.update, self.config.loss
        size = len(rollout.prompts) // update.steps_per_rollout
        for _ in range(update.epochs):
            for sequences in torch.randperm(len(rollout.prompts), generator=self._shuffling).split(size):
                part = rollout.select(sequences)
                per_token = advantage[sequences].repeat_interleave(part.lengths)
                counted = part.sampled & ~per_token.isnan() & torch.isfinite(part.logp)
                if not loss.count_zero_advantage:
                    counted &= per_token != 0
                weights = token_weights(
                    counted,
                    part.sequence,
                    loss.aggregation,
                    horizon=loss.horizon or self.config.rollout.max_new_tokens,
                )
                yield Batch(part, sequences, per_token.nan_to_num(0.0), weights)

    def _update(self, minibatch: Batch, step: int, recording: MinibatchTrace) -> Metrics:
        """One optimiser step: the rule decides once, and loss and metrics read that decision."""
        config = self.config
        metrics = Metrics()
        self._optimizer.zero_grad(set_to_none=True)
        loss_value, kept = 0.0, 0
        masked = [self._masked]
        for micro in minibatch.split(config.update.micro_batch_size):
            result = self._forward.loss(micro, config.rule, config.loss.ratio_cap)
            recording.add(micro, result)
            if not torch.isfinite(result.loss):
                raise TrainingError(
                    f"the loss is {result.loss.item()} at step {step}, optimiser step {self.version}; nothing was "
                    "updated. Lower optimizer.learning_rate, or set loss.ratio_cap"
                )
            result.loss.backward()
            loss_value += result.loss.item()
            kept += int(result.decision.keep.sum())
            staleness = (self.version - micro.rollout.version).to(self.device)
            metrics = metrics.merge(mask_metrics(result.behaviour, result.policy, result.decision, staleness=staleness))
            masked.append(masked_tokens(result.decision, result.behaviour.ids[:, 0]))
        self._masked = merge_masked_tokens(*masked)
        metrics.mean("loss", torch.tensor([loss_value]))
        self._apply(metrics, step, kept)
        return metrics

    def _apply(self, metrics: Metrics, step: int, kept: int) -> None:
        """Move the weights; without a kept token there is no gradient, and momentum alone must not move them."""
        if not kept:
            metrics.total("empty_updates", 1)
            return
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.grad_clip)
        if not torch.isfinite(norm):
            raise TrainingError(
                f"the gradient is not finite at step {step}, optimiser step {self.version}; nothing was updated. "
                "Lower optimizer.learning_rate"
            )
        metrics.mean("grad_norm", norm[None])
        self._optimizer.step()
        self.version += 1

    @torch.no_grad()
    def _check_agreement(self, rollout: Rollout) -> None:
        """On one micro-batch, spread over the rollout's prompts."""
        responses = len(rollout.prompts)
        size = min(self.config.update.micro_batch_size, responses)
        first = rollout.select(torch.arange(size) * responses // size)
        behaviour, policy = self._forward.support(first)
        self.agreement = check_agreement(
            behaviour, policy, first.sequence, first.sampled, tolerance=self.config.mismatch_tolerance
        )

    def _check_model(self) -> None:
        """What the configuration asks of the model and the task, before anything is sampled."""
        name, settings, rollout = self.config.model, self.model.config, self.config.rollout
        if rollout.top_k > settings.vocab_size:
            raise ConfigError(
                f"rollout.top_k is {rollout.top_k}, but model {name!r} has a vocabulary of {settings.vocab_size}; "
                "choose at most that"
            )
        if self.config.traces.full and settings.vocab_size > LARGEST_FULL:
            raise ConfigError(
                f"traces.full records whole distributions, but model {name!r} has a vocabulary of "
                f"{settings.vocab_size}, more than {LARGEST_FULL}; leave it out (traces.after works with any)"
            )
        prompts = encode(self.tokenizer, (*self._problems, *self.heldout))
        context = context_of(self.config, self.model)
        longest = max(map(len, prompts))
        if longest + rollout.max_new_tokens > context:
            limit = f"the context of model {name!r}"
            if getattr(self.config.engine, "max_length", None) == context:
                limit = "engine.max_length"
            room = context - longest
            raise ConfigError(
                f"rollout.max_new_tokens is {rollout.max_new_tokens}, which with prompts of up to {longest} tokens is "
                f"more than {limit}, {context}; "
                + (f"choose at most {room}" if room > 0 else "the prompts alone are longer")
            )
        ids = [token for prompt in prompts for token in prompt]
        unknown = ids.count(self.tokenizer.unk_token_id) / max(len(ids), 1)
        if unknown:
            self.notes.append(
                f"{unknown:.0%} of the prompts' tokens are unknown to the model's tokenizer; do model and task fit?"
            )
        if len(self.heldout) < self.config.eval.prompts:
            self.notes.append(
                f"eval.prompts is {self.config.eval.prompts}, but the task has {len(self.heldout)} held-out problems"
            )
        reason = mask_cannot_fire(self.config)
        if reason is not None:
            self.notes.append(reason)


def problems_of(task: Task, split: Split) -> Sequence[Problem]:
    """The problems of a split; ConfigError when the task cannot give any."""
    try:
        problems = task.problems(split)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from error
    if not problems:
        raise ConfigError(f"task {type(task).__name__} has no problems in its split {split!r}")
    return problems


def mask_cannot_fire(config: Config) -> str | None:
    """Why the mask of this configuration can never drop a token, or None when it can."""
    rule = config.rule
    if not rule.can_fire:
        return f"rule {rule.name} never drops a token with these settings"
    exact = config.mismatch_tolerance <= 1e-3
    if exact and config.update.steps_per_rollout * config.update.epochs == 1:
        return (
            "the mask can never drop a token: every rollout is used for one optimiser step, and its engine computes as "
            "the trainer does, so both policies are equal; raise update.steps_per_rollout, or let the engine compute "
            "in other numerics"
        )
    return None
