"""Accuracy of a policy on held-out problems: answering them, and what the answers come to."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from predmask.bootstrap import Estimate, interval, resampled_sums
from predmask.rollout import Engine, Rollout, Sampling
from predmask.tasks import Problem
from predmask.tasks.scores import average_at_k, majority_at_k, most_given, pass_at_k
from predmask.tasks.verifier import Grade, Verifier, VerifierError
from predmask.train.config import Config, ConfigError
from predmask.train.prompts import Prompts
from predmask.train.sampling import answered, context_of

BATCH = 512
"""Answers that an engine is asked for at once: enough to keep one busy, few enough to be held as records."""


@dataclass(frozen=True, kw_only=True)
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
    pass_at_k: Mapping[int, float]
    """Mean over problems of the probability that at least one of k samples is right, by k: 1, 2, 4, ... and n."""
    majority: float | None
    """Mean over problems of the score of the most frequent answer among n (maj@n); None where no sample has an answer,
    as with a task that has no `answer`."""
    intervals: Mapping[str, tuple[float, float]]
    """95 % intervals by a bootstrap over problems, by the names of `figures`; none of fewer than ten problems, nor of
    problems that are all alike, whose resamples show no spread."""
    prompts: int
    samples: int
    truncated: float
    """Share of sampled answers that were cut at the length limit."""
    unscored: int
    """How many answers, greedy ones among them, could not be scored."""
    length: float
    """Mean length of the sampled answers, in tokens."""

    def figures(self) -> dict[str, Estimate]:
        """Each share with its interval: greedy, avg@n, pass@k by k, and maj@n where there is one."""
        shares = {"greedy": self.greedy, f"avg@{self.samples}": self.sampled}
        shares |= {f"pass@{k}": share for k, share in self.pass_at_k.items()}
        if self.majority is not None:
            shares[f"maj@{self.samples}"] = self.majority
        return {name: Estimate(share, *self.intervals.get(name, (None, None))) for name, share in shares.items()}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response to one problem, and what it earned."""

    place: int
    """Which of the evaluated problems, from 0: ids may come twice."""
    problem: Problem
    sample: int | None
    """Its number among the problem's samples, from 1; None for the greedy answer."""
    response: str
    length: int
    """In tokens."""
    truncated: bool
    """Cut at the length limit."""
    grade: Grade

    @property
    def right(self) -> bool:
        """Full reward."""
        return is_right(self.grade.score)


@dataclass(frozen=True, kw_only=True)
class ProblemResult:
    """What the n samples and the greedy answer of one problem come to."""

    problem: Problem
    greedy: Answer
    samples: Sequence[Answer]

    @property
    def hits(self) -> list[int]:
        """1 for each right sample, 0 for each other one."""
        return [int(answer.right) for answer in self.samples]

    @property
    def average(self) -> float:
        """Share of right samples."""
        return average_at_k(self.hits, len(self.samples))

    def pass_at(self, k: int) -> float:
        """See `pass_at_k`."""
        return pass_at_k(len(self.samples), sum(self.hits), k)

    @property
    def majority_answers(self) -> list[str]:
        """What most samples answer; several where they are tied, none where no sample has an answer."""
        return most_given([answer.grade.answer for answer in self.samples])

    @property
    def majority(self) -> float:
        """See `majority_at_k`."""
        return majority_at_k([answer.grade.answer for answer in self.samples], self.hits)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All answers to all problems, and their accuracy."""

    accuracy: Accuracy
    results: Sequence[ProblemResult]
    """In the problems' order."""

    @property
    def answers(self) -> list[Answer]:
        """Problem after problem, the greedy answer first."""
        return [answer for result in self.results for answer in (result.greedy, *result.samples)]

    def unscored(self) -> dict[str, int]:
        """How many answers could not be scored, by the kind of reason (see `Verifier`)."""
        return dict(Counter(answer.grade.kind for answer in self.answers if answer.grade.score is None))


Progress = Callable[[Sequence[Answer], int], object]
"""Told the answers that have come, and how many there will be in all."""


def evaluate(
    engine: Engine,
    prompts: Prompts,
    problems: Sequence[Problem],
    verifier: Verifier,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    batch_size: int = BATCH,
    progress: Progress = lambda answers, total: None,
) -> Evaluation:
    """Answer each problem once greedily and `samples` times at `temperature`, and score the answers.

    The random numbers depend on `seed` alone, so that evaluations of one run differ by the policy only. The engine is
    asked for about `batch_size` answers at once.

    Raises RolloutError for what the engine refuses, VerifierError for a batch without a single score (see `Verifier`),
    after `progress` was told its answers.
    """
    ids = prompts.encode(problems)
    generator = generator_for(seed, "evaluation")
    greedy = [(place, None) for place in range(len(problems))]
    sampled = [(place, sample) for place in range(len(problems)) for sample in range(1, samples + 1)]
    answers: list[Answer] = []
    for asked, at in ((greedy, 0.0), (sampled, temperature)):
        sampling = Sampling(temperature=at, max_new_tokens=max_new_tokens, top_k=0)
        for part in np.array_split(np.arange(len(asked)), math.ceil(len(asked) / batch_size)):
            batch = [asked[index] for index in part]
            rollout = answered(engine, [ids[place] for place, _ in batch], sampling, generator)
            responses = prompts.decode(rollout.responses())
            try:
                grades, broken = verifier.grade([problems[place] for place, _ in batch], responses), None
            except VerifierError as error:
                grades, broken = error.grades, error
            found = _answers(problems, batch, rollout, responses, grades) if grades else []
            answers += found
            progress(found, len(greedy) + len(sampled))
            if broken:
                raise broken
    results = [
        ProblemResult(
            problem=problem,
            greedy=answers[place],
            samples=answers[len(problems) + place * samples : len(problems) + (place + 1) * samples],
        )
        for place, problem in enumerate(problems)
    ]
    return Evaluation(accuracy=summarise(results), results=results)


def _answers(
    problems: Sequence[Problem],
    batch: Sequence[tuple[int, int | None]],
    rollout: Rollout,
    responses: Sequence[str],
    grades: Sequence[Grade],
) -> list[Answer]:
    """The answers of a batch, whose problems and samples are given by number."""
    return [
        Answer(
            place=place,
            problem=problems[place],
            sample=sample,
            response=response,
            length=length,
            truncated=not finished,
            grade=grade,
        )
        for (place, sample), response, length, finished, grade in zip(
            batch, responses, rollout.lengths.tolist(), rollout.finished.tolist(), grades, strict=True
        )
    ]


def summarise(results: Sequence[ProblemResult]) -> Accuracy:
    """The accuracy over problems, each answered by as many samples as the others."""
    samples = len(results[0].samples)
    sampled = [answer for result in results for answer in result.samples]
    answered = any(answer.grade.answer is not None for answer in sampled)
    averages = [result.average for result in results]
    passes = {k: [result.pass_at(k) for result in results] for k in ks(samples)}
    accuracy = Accuracy(
        greedy=fmean(result.greedy.right for result in results),
        sampled=fmean(averages),
        sampled_error=stdev(averages) / math.sqrt(len(averages)) if len(averages) > 1 else None,
        pass_at_n=fmean(passes[samples]),
        pass_at_k={k: fmean(values) for k, values in passes.items()},
        majority=fmean(result.majority for result in results) if answered else None,
        intervals={},
        prompts=len(results),
        samples=samples,
        truncated=fmean(answer.truncated for answer in sampled),
        unscored=sum(answer.grade.score is None for result in results for answer in (result.greedy, *result.samples)),
        length=fmean(answer.length for answer in sampled),
    )
    # In the order of `figures`.
    columns = [[float(result.greedy.right) for result in results], averages, *passes.values()]
    if answered:
        columns.append([result.majority for result in results])
    return replace(accuracy, intervals=_intervals(list(accuracy.figures()), np.array(columns).T))


def ks(samples: int) -> list[int]:
    """The k of which pass@k is shown: powers of two up to the number of samples, and that number."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def _intervals(names: Sequence[str], values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, tuple[float, float]]:
    """Of the mean of each column of [P, X] values; problems are the clusters."""
    means = resampled_sums(values) / len(values)
    found: dict[str, tuple[float, float]] = {}
    for name, column, resampled in zip(names, values.T, means.T, strict=True):
        low, high = interval(resampled, len(values))
        if low is not None and high is not None and column.min() < column.max():
            found[name] = low, high
    return found


def within_context(config: Config, models: Sequence[Any], prompts: Sequence[Sequence[int]]) -> Config:
    """With responses that fit in the context of models and engine, where nothing needs them to be longer.

    Raises ConfigError where a prompt alone fills the context.
    """
    longest = max(map(len, prompts))
    context = context_of(config, *models)
    if longest >= context:
        raise ConfigError(
            f"a prompt has {longest} tokens, but the context of model and engine is {context}; leave long prompts out "
            f"by prompt.max_tokens, at most {context - 1}"
        )
    room = int(min(context - longest, 2**31))
    if room >= config.rollout.max_new_tokens:
        return config
    return replace(config, rollout=replace(config.rollout, max_new_tokens=room))


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
