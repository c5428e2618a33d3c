"""Sample with an engine as a run would, and score the very same tokens as its trainer would, before any update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from predmask.core import Rule
from predmask.core.support import each_tensor
from predmask.rollout import Engine, Rollout
from predmask.traces import TokenTrace, token_texts
from predmask.train.agreement import Agreement, AgreementError, check_agreement
from predmask.train.batches import Batch
from predmask.train.config import Config, ConfigError
from predmask.train.evaluate import generator_for, repeat_each, within_context
from predmask.train.forward import Forward, forward_of
from predmask.train.models import load_policy, resolve_device
from predmask.train.prompts import Prompts
from predmask.train.sampling import sample_responses, start_engine
from predmask.train.trainer import problems_of

Progress = Callable[[str, int, int], object]
"""Told what is being done, and how many of how many responses are done."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the engine's numerics explain how far engine and trainer are apart."""

    tolerance: float
    """Mean disagreement that they explain, in nats."""
    agreement: Agreement | None
    """What was found; None where a fault was."""
    fault: str | None
    """The fault that explains the disagreement, with its remedy."""

    @property
    def passed(self) -> bool:
        """No fault, and not more than the numerics explain."""
        return self.agreement is not None and self.agreement.mean <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Tokens that an engine sampled, with what it and the trainer say of them."""

    config: Config
    """As asked, with `rollout.max_new_tokens` as the contexts of models and engine allow."""
    other: str | None
    """The model whose weights the engine had; None: those of `config.model`."""
    tokens: TokenTrace
    """Response after response; every advantage is 1, and the rule has decided."""
    texts: Mapping[int, str]
    """What token ids look like."""
    verdict: Verdict | None
    """None where two models were compared, which are meant to differ."""


def sample(
    config: Config,
    *,
    other: str | None = None,
    engine: Engine | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Sample:
    """Sample `rollout.prompts` · `rollout.group_size` responses to held-out prompts, and score them.

    Args:
        config: the run that is looked into; its model scores.
        other: a second model, whose weights sample.
        engine: an engine of your own for the model that samples, instead of the configuration's; it is closed.
        progress: see `Progress`.

    Raises ConfigError for what cannot be run, RolloutError for an engine's records that cannot be trained on.
    """
    device = resolve_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    progress(f"loading {config.model}", 0, 0)
    model, tokenizer = load_policy(config.model, device)
    forward, _ = forward_of(config, model)
    sampling_model = model if other is None else _other_model(other, config.model, model, tokenizer, device)
    prompts = _prompts(config, tokenizer)
    config = within_context(config, [model, sampling_model], prompts)
    rollout = _rollout(config, sampling_model, prompts, engine, progress)
    tokens = _score(rollout, forward, config, progress)
    return Sample(
        config=config,
        other=other,
        tokens=tokens,
        texts=token_texts(tokenizer, model.config.vocab_size),
        verdict=judge(tokens, config.mismatch_tolerance) if other is None else None,
    )


def judge(tokens: TokenTrace, tolerance: float) -> Verdict:
    """What `check_agreement` says of tokens that both sides computed with the same weights."""
    try:
        found = check_agreement(
            tokens.behaviour, tokens.policy, tokens.sample, tokens.decision.response_mask, tolerance=tolerance
        )
    except AgreementError as error:
        return Verdict(tolerance=tolerance, agreement=None, fault=str(error))
    return Verdict(tolerance=tolerance, agreement=found, fault=None)


def _other_model(name: str, scoring: str, model: Any, tokenizer: Any, device: torch.device) -> Any:
    """The model that samples; ConfigError where its token ids are not those of the one that scores."""
    other, other_tokenizer = load_policy(name, device)
    sizes = model.config.vocab_size, other.config.vocab_size
    if sizes[0] != sizes[1] or tokenizer.get_vocab() != other_tokenizer.get_vocab():
        raise ConfigError(
            f"model {scoring!r} ({sizes[0]} ids) and model {name!r} ({sizes[1]} ids) have other vocabularies; only "
            "models whose token ids mean the same can be compared"
        )
    return other


def _prompts(config: Config, tokenizer: Any) -> list[list[int]]:
    """Those of the first held-out problems, each as often as it is answered."""
    problems = problems_of(config.task, "heldout")[: config.rollout.prompts]
    return Prompts(tokenizer, config.prompt).encode(repeat_each(problems, config.rollout.group_size))


def _rollout(
    config: Config, model: Any, prompts: list[list[int]], engine: Engine | None, progress: Progress
) -> Rollout:
    """What the engine sampled, checked as training checks it; the engine is closed."""
    if engine is None:
        progress(f"starting engine {config.engine.name}", 0, 0)
        engine = start_engine(config, model)
    try:
        progress("sampling", 0, len(prompts))
        generator = generator_for(config.seed, "mismatch")
        return sample_responses(
            engine, prompts, config.rollout.sampling(), generator, vocabulary_size=model.config.vocab_size
        )
    finally:
        engine.close()


@torch.no_grad()
def _score(rollout: Rollout, forward: Forward, config: Config, progress: Progress) -> TokenTrace:
    """Both policies on every token, a micro-batch at a time, response after response."""
    responses = len(rollout.prompts)
    ones = torch.ones(len(rollout.tokens))
    parts: list[TokenTrace] = []
    done = 0
    update = config.update
    batches = Batch(rollout, torch.arange(responses), ones, ones).split(
        update.micro_batch_size, update.micro_batch_tokens
    )
    for batch in batches:
        parts.append(_scored(batch, forward, config.rule, config.rollout.group_size))
        done += len(batch.sample)
        progress("scoring", done, responses)
    tokens = TokenTrace.cat(parts)
    return tokens[tokens.sample.argsort(stable=True)]


def _scored(batch: Batch, forward: Forward, rule: Rule, group_size: int) -> TokenTrace:
    """The tokens of a micro-batch, on the CPU."""
    rollout = batch.rollout
    behaviour, policy = forward.support(rollout)
    behaviour, policy = each_tensor(behaviour, lambda values: values.cpu()), each_tensor(policy, lambda v: v.cpu())
    sample = batch.sample[rollout.sequence]
    none = torch.zeros_like(sample)
    return TokenTrace(
        step=none + 1,
        epoch=none,
        minibatch=none,
        optimizer_step=rollout.version,
        version=rollout.version,
        sample=sample,
        group=sample // group_size,
        position=rollout.position,
        advantage=batch.advantage,
        behaviour=behaviour,
        policy=policy,
        decision=rule(behaviour, policy, batch.advantage, rollout.sampled),
    )
