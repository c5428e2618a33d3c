"""A model or checkpoint evaluated by itself, outside training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

import torch

from predmask.rollout import TransformersConfig
from predmask.tasks import Problem
from predmask.tasks.verifier import Verifier
from predmask.train.config import Config, ConfigError
from predmask.train.evaluate import BATCH, Answer, Evaluation, evaluate, within_context
from predmask.train.models import load_policy, resolve_device
from predmask.train.prompts import Prompts
from predmask.train.sampling import start_engine
from predmask.train.trainer import problems_of

Progress = Callable[[str, Sequence[Answer], int], object]
"""Told what is being done, which answers have come, and how many there will be in all (0: not known yet)."""


@dataclass(frozen=True, kw_only=True)
class ModelEvaluation:
    """An evaluation, and under which settings it was made."""

    config: Config
    """As it was used: `engine` is the one that answered, `rollout.max_new_tokens` fits into its context."""
    evaluation: Evaluation
    temperature: float
    """Of the samples."""
    available: int
    """Held-out problems of the task, of which the first `eval.prompts` that are not too long were answered."""
    notes: Sequence[str]
    """What a user should know: what was left out, and what is other than asked."""
    seconds: float
    """For answering and scoring, without loading."""


def evaluate_model(config: Config, *, progress: Progress = lambda stage, answers, total: None) -> ModelEvaluation:
    """Answer the first `eval.prompts` held-out problems of `task` with `model`, `eval.samples` times each and greedily.

    What answers is the rollout engine where `eval.engine` says so, else the policy itself. Responses that would not fit
    into its context are cut earlier than at `rollout.max_new_tokens`.

    Raises ConfigError for what cannot be run, RolloutError for what the engine refuses, VerifierError where nothing of
    a batch could be scored.
    """
    if config.eval.engine == "policy":
        config = replace(config, engine=TransformersConfig(batch_size=config.eval.batch_size))
    if config.threads:
        torch.set_num_threads(config.threads)
    # An engine in a process of its own has its own copy of the weights, and the device's memory for itself.
    here = isinstance(config.engine, TransformersConfig)
    device = resolve_device(config.device) if here else torch.device("cpu")
    problems = problems_of(config.task, "heldout")
    notes = list(config.task.notes()) if hasattr(config.task, "notes") else []  # pyright: ignore[reportAttributeAccessIssue]
    progress(f"loading {config.model}", (), 0)
    model, tokenizer = load_policy(config.model, device)
    prompts = Prompts(tokenizer, config.prompt)
    chosen = _chosen(config, problems, prompts, notes)
    asked = config.rollout.max_new_tokens
    config = within_context(config, [model], prompts.encode(chosen))
    if config.rollout.max_new_tokens < asked:
        notes.append(
            f"answers end after {config.rollout.max_new_tokens} tokens, not {asked}: with the longest prompt they fill "
            "the context of model and engine"
        )
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    progress(f"starting engine {config.engine.name}", (), 0)
    engine = start_engine(config, model)
    scoring = config.verifier
    try:
        with Verifier(
            config.task, workers=scoring.workers, deadline=scoring.deadline, batch_deadline=scoring.batch_deadline
        ) as verifier:
            progress("answering", (), len(chosen) * (1 + config.eval.samples))
            started = time.perf_counter()
            evaluation = evaluate(
                engine,
                prompts,
                chosen,
                verifier,
                samples=config.eval.samples,
                temperature=temperature,
                max_new_tokens=config.rollout.max_new_tokens,
                seed=config.seed,
                batch_size=getattr(config.engine, "batch_size", BATCH) if here else BATCH,
                progress=lambda answers, total: progress("answering", answers, total),
            )
            seconds = time.perf_counter() - started
    finally:
        engine.close()
    return ModelEvaluation(
        config=config,
        evaluation=evaluation,
        temperature=temperature,
        available=len(problems),
        notes=notes,
        seconds=seconds,
    )


def _chosen(config: Config, problems: Sequence[Problem], prompts: Prompts, notes: list[str]) -> list[Problem]:
    """The first problems whose prompts are not too long; what is left out goes into the notes."""
    fitting = prompts.fitting(problems)
    limit = config.prompt.max_tokens
    if not fitting:
        lengths = [len(ids) for ids in prompts.encode(problems)]
        raise ConfigError(
            f"every prompt has more than prompt.max_tokens = {limit} tokens; raise it: the shortest has "
            f"{min(lengths)}, half of them have up to {median_high(lengths)}, the longest has {max(lengths)}"
        )
    if len(fitting) < len(problems):
        notes.append(
            f"left out: {len(problems) - len(fitting)} of {len(problems)} problems, for their prompts have more than "
            f"{limit} tokens (prompt.max_tokens)"
        )
    return fitting[: config.eval.prompts]
