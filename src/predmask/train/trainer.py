"""The training loop, from top to bottom like the algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from predmask.core import MaskedToken, Metrics, mask_metrics, masked_tokens, merge_masked_tokens, token_weights
from predmask.rollout import Engine, Rollout, TransformersEngine
from predmask.tasks import Problem, Split, Task
from predmask.tasks.sampling import PromptSampler
from predmask.tasks.verifier import Unscored, Verifier
from predmask.train.agreement import Agreement, check_agreement
from predmask.train.batches import Batch
from predmask.train.config import Config, ConfigError
from predmask.train.evaluate import Accuracy, evaluate, generator_for
from predmask.train.experience import Collector, Experience
from predmask.train.forward import forward_of
from predmask.train.models import load_trained_policy, resolve_device
from predmask.train.prompts import Prompts
from predmask.train.sampling import context_of, start_engine
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
        # Data first: reading them is quick, and what is wrong with them is known before a large model is loaded.
        train, heldout = problems_of(config.task, "train"), problems_of(config.task, "heldout")
        self.notes: list[str] = list(notes() if (notes := getattr(config.task, "notes", None)) else ())
        """What a user should know before the run starts."""
        self.model, self.tokenizer = load_trained_policy(config, self.device)
        self._prompts = Prompts(self.tokenizer, config.prompt)
        self._problems = self._fitting(train, "train")
        self.heldout = self._fitting(heldout, "held-out")[: config.eval.prompts]
        self._check_model()
        self._forward, reason = forward_of(config, self.model)
        if reason is not None:
            self.notes.append(f"all logits are formed (update.head = dense): the model cannot be taken apart, {reason}")
        scoring = config.verifier
        self.verifier = Verifier(
            config.task,
            workers=scoring.workers,
            deadline=scoring.deadline,
            batch_deadline=scoring.batch_deadline,
        )
        self.engine = start_engine(config, self.model) if engine is None else engine
        self.version = 0
        """Optimiser steps so far."""
        self.agreement: Agreement | None = None
        """How far engine and trainer were apart before any update."""
        self._masked: list[MaskedToken] = []
        self._collector = Collector(
            config,
            PromptSampler(self._problems, config.seed),
            self._prompts,
            self.verifier,
            vocabulary_size=self.model.config.vocab_size,
        )
        self._shuffling = generator_for(config.seed, "minibatches")
        settings = config.optimizer
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            # In one kernel; torch's own choice on a GPU holds four more bytes a weight while it steps.
            fused=self.device.type == "cuda",
        )

    def close(self) -> None:
        """End the engine and the verifier's processes."""
        self.engine.close()
        self.verifier.close()

    def evaluate(self) -> Accuracy:
        """Held-out accuracy of the policy as it is now."""
        settings, rollout = self.config.eval, self.config.rollout
        engine = self.engine
        if settings.engine == "policy":
            engine = TransformersEngine(self.model, batch_size=settings.batch_size)
        return evaluate(
            engine,
            self._prompts,
            self.heldout,
            self.verifier,
            samples=settings.samples,
            temperature=rollout.temperature if settings.temperature is None else settings.temperature,
            max_new_tokens=rollout.max_new_tokens,
            seed=self.config.seed,
        ).accuracy

    def masked_tokens(self) -> list[MaskedToken]:
        """Which token ids were masked so far, most often first."""
        return self._masked

    def unscored(self) -> dict[str, Unscored]:
        """How many sampled answers could not be scored so far, by kind (see `Verifier`), and the first of each."""
        return self._collector.unscored

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
        trace = StepTrace(self.recorder, self.config, self._forward, step)
        experience = self._collector.collect(self.engine, metrics, full=trace.full)
        if step == 1:
            self._check_agreement(experience.rollout)
        trace.responses(experience.problems, experience.rollout, experience.rewards, experience.advantage)
        for epoch, number, minibatch in self._minibatches(experience):
            with trace.minibatch(epoch, number, self.version) as recording:
                metrics = metrics.merge(self._update(minibatch, step, recording))
                recording.applied(moved=self.version > recording.optimizer_step)
        trace.commit()
        self.engine.update_weights(self.model, self.version)
        seconds = time.perf_counter() - started
        metrics.total("seconds", seconds)
        metrics.total("tokens_per_second", metrics.compute()["tokens"] / seconds)
        return metrics

    def _minibatches(self, experience: Experience) -> Iterator[tuple[int, int, Batch]]:
        """The optimiser steps of an experience with their epoch and number: in a new order each epoch."""
        update, loss, rollout = self.config.update, self.config.loss, experience.rollout
        for epoch in range(update.epochs):
            order = torch.randperm(len(rollout.prompts), generator=self._shuffling)
            for number, sequences in enumerate(order.tensor_split(update.steps_per_rollout)):
                if not len(sequences):  # dynamic sampling found too few
                    continue
                part = rollout.select(sequences)
                per_token = experience.advantage[sequences].repeat_interleave(part.lengths)
                counted = part.sampled & ~per_token.isnan() & torch.isfinite(part.logp)
                if not loss.count_zero_advantage:
                    counted &= per_token != 0
                weights = token_weights(
                    counted,
                    part.sequence,
                    loss.aggregation,
                    horizon=loss.horizon or self.config.rollout.max_new_tokens,
                )
                yield epoch, number, Batch(part, sequences, per_token.nan_to_num(0.0), weights)

    def _update(self, minibatch: Batch, step: int, recording: MinibatchTrace) -> Metrics:
        """One optimiser step: the rule decides once, and loss and metrics read that decision."""
        config = self.config
        metrics = Metrics()
        self._optimizer.zero_grad(set_to_none=True)
        loss_value, kept = 0.0, 0
        masked = [self._masked]
        for micro in minibatch.split(config.update.micro_batch_size, config.update.micro_batch_tokens):
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
        settings = self.config.optimizer
        norm = torch.nn.utils.clip_grad_norm_(self._trained, settings.grad_clip)
        if not torch.isfinite(norm):
            raise TrainingError(
                f"the gradient is not finite at step {step}, optimiser step {self.version}; nothing was updated. "
                "Lower optimizer.learning_rate"
            )
        rate = settings.learning_rate * min(1.0, (self.version + 1) / max(settings.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        metrics.mean("grad_norm", norm[None])
        metrics.mean("learning_rate", torch.tensor([rate], dtype=torch.float64))
        self._optimizer.step()
        self.version += 1

    @torch.no_grad()
    def _check_agreement(self, rollout: Rollout) -> None:
        """On one micro-batch, spread over the rollout's prompts."""
        update, responses = self.config.update, len(rollout.prompts)
        size = min(update.micro_batch_size, responses)
        if update.micro_batch_tokens is not None:
            size = min(size, max(1, update.micro_batch_tokens // int(rollout.totals.max())))
        first = rollout.select(torch.arange(size) * responses // size)
        behaviour, policy = self._forward.support(first)
        self.agreement = check_agreement(
            behaviour, policy, first.sequence, first.sampled, tolerance=self.config.mismatch_tolerance
        )

    def _fitting(self, problems: Sequence[Problem], name: str) -> Sequence[Problem]:
        """Those that are not too long; ConfigError where none is left."""
        kept = self._prompts.fitting(problems)
        if not kept:
            shortest = min(map(len, self._prompts.encode(problems)))
            raise ConfigError(
                f"every {name} prompt has over prompt.max_tokens = {self.config.prompt.max_tokens} tokens; the "
                f"shortest has {shortest}"
            )
        if len(kept) < len(problems):
            self.notes.append(
                f"{len(problems) - len(kept)} of {len(problems)} {name} problems are left out: their prompts have more "
                f"than {self.config.prompt.max_tokens} tokens (prompt.max_tokens)"
            )
        return kept

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
        prompts = self._prompts.encode((*self._problems, *self.heldout))
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
                + ", or leave long prompts out by prompt.max_tokens"
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
