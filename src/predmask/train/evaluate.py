"""Accuracy of a policy on held-out problems."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from predmask.rollout import Sampling, TransformersEngine
from predmask.tasks import Problem
from predmask.tasks.scores import average_at_k, pass_at_k
from predmask.tasks.verifier import Verifier


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers, from 0 to 1; answers that could not be scored count as not right."""

    greedy: float
    """One greedy answer a problem."""
    sampled: float
    """Mean over problems of the share of right samples (avg@n)."""
    sampled_error: float | None
    """One standard error of that mean, over problems; None for a single problem."""
    pass_at_n: float
    """Share of problems with at least one right sample among n."""
    prompts: int
    samples: int
    truncated: float
    """Share of sampled answers that were cut at the length limit."""


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    verifier: Verifier,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
) -> Accuracy:
    """Answer each problem once greedily and `samples` times at `temperature`, with the policy's own weights.

    The random numbers depend on `seed` alone, so that evaluations of one run differ by the policy only.
    """
    engine = TransformersEngine(model, batch_size=batch_size)
    generator = generator_for(seed, "evaluation")

    def answer(per_problem: int, sampling: Sampling) -> tuple[list[list[int]], float]:
        """For each problem, which of its answers are right; and the share of answers that were cut."""
        repeated = repeat_each(problems, per_problem)
        rollout = engine.generate(encode(tokenizer, repeated), sampling, generator)
        scores = verifier.score(repeated, decode(tokenizer, rollout.responses()))
        hits = [int(is_right(score)) for score in scores]
        grouped = [hits[start : start + per_problem] for start in range(0, len(hits), per_problem)]
        return grouped, 1.0 - float(rollout.finished.double().mean())

    greedy, _ = answer(1, Sampling(temperature=0.0, max_new_tokens=max_new_tokens, top_k=0))
    sampled, truncated = answer(samples, Sampling(temperature=temperature, max_new_tokens=max_new_tokens, top_k=0))
    averages = [average_at_k(hits, samples) for hits in sampled]
    return Accuracy(
        greedy=fmean(hits[0] for hits in greedy),
        sampled=fmean(averages),
        sampled_error=stdev(averages) / math.sqrt(len(averages)) if len(averages) > 1 else None,
        pass_at_n=fmean(pass_at_k(samples, sum(hits), samples) for hits in sampled),
        prompts=len(problems),
        samples=samples,
        truncated=truncated,
    )


def generator_for(seed: int, purpose: str) -> torch.Generator:
    """A stream of random numbers of its own; streams of different seeds or purposes are unrelated."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def is_right(score: float | None) -> bool:
    """Whether an answer counts as right: full reward."""
    return score is not None and score >= 1.0


def repeat_each(problems: Sequence[Problem], times: int) -> list[Problem]:
    """Each problem as often as it is answered, neighbours being equal."""
    return [problem for problem in problems for _ in range(times)]


def encode(tokenizer: Any, problems: Sequence[Problem]) -> list[list[int]]:
    """The prompts as token ids."""
    return tokenizer([problem.prompt for problem in problems])["input_ids"]


def decode(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """Responses as text, for the verifier only: training uses the ids."""
    return tokenizer.batch_decode(responses, skip_special_tokens=True)
