"""What a step trains on: sampled responses, their scores, rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from predmask.core import Metrics, group_advantages
from predmask.rollout import Engine, Rollout
from predmask.tasks import Problem
from predmask.tasks.sampling import PromptSampler
from predmask.tasks.verifier import Unscored, Verifier
from predmask.train.config import Config, RewardConfig
from predmask.train.evaluate import generator_for, is_right, repeat_each
from predmask.train.prompts import Prompts
from predmask.train.sampling import sample_responses


@dataclass(frozen=True)
class Experience:
    """B responses, group after group, with what they earned."""

    problems: tuple[Problem, ...]
    """[B] what each response answers."""
    rollout: Rollout
    scores: Tensor
    """[B] as the verifier gives them, NaN where an answer could not be scored."""
    rewards: Tensor
    """[B] scores less the penalty for length, NaN where there is no score."""
    advantage: Tensor
    """[B] group-relative advantages, NaN where a response is outside the loss."""

    def select(self, responses: Tensor) -> Experience:
        """The given responses, in the given order."""
        return Experience(
            problems=tuple(self.problems[index] for index in responses.tolist()),
            rollout=self.rollout.select(responses),
            scores=self.scores[responses],
            rewards=self.rewards[responses],
            advantage=self.advantage[responses],
        )

    @classmethod
    def cat(cls, parts: Sequence[Experience]) -> Experience:
        """All responses of one or more parts."""
        return cls(
            problems=tuple(problem for part in parts for problem in part.problems),
            rollout=Rollout.cat([part.rollout for part in parts]),
            scores=torch.cat([part.scores for part in parts]),
            rewards=torch.cat([part.rewards for part in parts]),
            advantage=torch.cat([part.advantage for part in parts]),
        )


class Collector:
    """Makes a step's experience: samples, scores, and with dynamic sampling drops groups and samples again."""

    def __init__(
        self, config: Config, problems: PromptSampler, prompts: Prompts, verifier: Verifier, *, vocabulary_size: int
    ) -> None:
        self._config = config
        self._problems = problems
        self._prompts = prompts
        self._verifier = verifier
        self._vocabulary_size = vocabulary_size
        self.unscored: dict[str, Unscored] = {}
        """How many answers could not be scored so far, by kind, and the first of each."""
        # A stream of its own: what is sampled does not depend on how minibatches are drawn.
        self._generator = generator_for(config.seed, "sampling")

    def collect(self, engine: Engine, metrics: Metrics, *, full: bool) -> Experience:
        """`rollout.prompts` groups, or fewer where dynamic sampling ran out of rounds; `full` records distributions.

        Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2) drops the groups whose scores are all equal, and answers
        further problems in their place. Where no group at all is left, the last round is returned as it is.
        """
        settings = self._config.rollout
        found = self._round(engine, settings.prompts, metrics, full=full)
        if not settings.dynamic_sampling:
            return found
        kept = [found.select(_telling(found.scores, settings.group_size))]
        rounds, missing = 1, settings.prompts - len(kept[0].problems) // settings.group_size
        while missing and rounds < settings.max_rounds:
            found = self._round(engine, missing, metrics, full=full)
            kept.append(found.select(_telling(found.scores, settings.group_size)))
            rounds, missing = rounds + 1, missing - len(kept[-1].problems) // settings.group_size
        metrics.total("sampling_rounds", rounds)
        metrics.total("missing_groups", missing)
        return Experience.cat(kept) if missing < settings.prompts else found

    def _round(self, engine: Engine, count: int, metrics: Metrics, *, full: bool) -> Experience:
        """The next `count` problems, each answered by a group."""
        settings = self._config.rollout
        problems = repeat_each(self._problems.take(count), settings.group_size)
        rollout = sample_responses(
            engine,
            self._prompts.encode(problems),
            replace(settings.sampling(), record_full=full),
            self._generator,
            vocabulary_size=self._vocabulary_size,
        )
        metrics.mean("response_length", rollout.lengths)
        metrics.mean("truncated_frac", ~rollout.finished)
        metrics.total("tokens", len(rollout.tokens))
        scores = self._score(problems, rollout, metrics)
        rewards = scores - length_penalty(rollout.lengths, settings.max_new_tokens, self._config.reward)
        metrics.mean("reward", rewards[~rewards.isnan()])
        return Experience(tuple(problems), rollout, scores, rewards, self._advantage(rewards, rollout, metrics))

    def _score(self, problems: list[Problem], rollout: Rollout, metrics: Metrics) -> Tensor:
        """[B] scores, NaN where an answer could not be scored."""
        scores = self._verifier.score(problems, self._prompts.decode(rollout.responses()))
        metrics.mean("accuracy", torch.tensor([is_right(score) for score in scores if score is not None]))
        metrics.total("unscored_count", sum(score is None for score in scores))
        for kind, found in self._verifier.unscored.items():
            first = self.unscored.get(kind, replace(found, count=0))
            self.unscored[kind] = replace(first, count=first.count + found.count)
        return torch.tensor([math.nan if score is None else score for score in scores])

    def _advantage(self, rewards: Tensor, rollout: Rollout, metrics: Metrics) -> Tensor:
        """[B] see `Experience.advantage`."""
        groups = torch.arange(len(rewards)) // self._config.rollout.group_size
        settings = self._config.advantage
        found = group_advantages(rewards, groups, baseline=settings.baseline, scale_by_std=settings.scale_by_std)
        if found.groups:
            metrics.mean("equal_groups_frac", torch.arange(found.groups) < found.equal_groups)
        counted = found.scored
        if self._config.loss.mask_truncated:
            counted = counted & rollout.finished
        return torch.where(counted, found.values, math.nan)


def length_penalty(lengths: Tensor, limit: int, settings: RewardConfig) -> Tensor:
    """[B] what a response of that length loses: p · clamp((length - (limit - buffer)) / buffer, 0, 1).

    The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), with p = `overlong_penalty` where it has 1; 0
    without a buffer.
    """
    buffer = settings.overlong_buffer
    if buffer is None:
        return torch.zeros(len(lengths))
    return settings.overlong_penalty * ((lengths - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def _telling(scores: Tensor, group_size: int) -> Tensor:
    """[M] the responses of groups with two or more different known scores."""
    grouped = scores.reshape(-1, group_size)
    highest = grouped.nan_to_num(-math.inf).amax(-1)
    lowest = grouped.nan_to_num(math.inf).amin(-1)
    return torch.nonzero((highest > lowest).repeat_interleave(group_size))[:, 0]
