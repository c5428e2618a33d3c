"""Small runs, faulty engines and odd tasks for the tests of the trainer."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from predmask.rollout import Rollout, Sampling, TransformersEngine
from predmask.tasks import Arithmetic, Problem
from predmask.train import PRESETS, Config
from predmask.train.options import resolve

SMALL: dict[str, Any] = {
    "steps": 2,
    "device": "cpu",
    "rollout": {"prompts": 4, "group_size": 4},
    "update": {"steps_per_rollout": 4, "micro_batch_size": 4},
    "eval": {"prompts": 4, "samples": 1, "every": 0},
}


def small(*layers: dict[str, Any], **values: Any) -> Config:
    """The preset arithmetic, cut down to a second or two."""
    return resolve(PRESETS["arithmetic"].values, SMALL, *layers, values)


@dataclass(frozen=True, kw_only=True)
class Constant(Arithmetic):
    """Arithmetic whose verifier gives every answer the same score."""

    name: ClassVar[str] = "constant"
    value: float = 1.0

    def score(self, problem: Problem, response: str) -> float:
        return self.value


@dataclass(frozen=True, kw_only=True)
class SometimesUnscored(Arithmetic):
    """Arithmetic whose verifier returns NaN for answers that contain a token, often a digit."""

    name: ClassVar[str] = "sometimes_unscored"
    token: str = "7"

    def score(self, problem: Problem, response: str) -> float:
        return float("nan") if self.token in response.split() else super().score(problem, response)


@dataclass(frozen=True, kw_only=True)
class Fickle(Arithmetic):
    """Arithmetic that rewards an even number of words: any model gets both rewards."""

    name: ClassVar[str] = "fickle"

    def score(self, problem: Problem, response: str) -> float:
        return float(len(response.split()) % 2 == 0)


@dataclass(frozen=True, kw_only=True)
class Graded(Arithmetic):
    """Arithmetic with several rewards, some unknown; where 3 divides the sum, all answers are equally good."""

    name: ClassVar[str] = "graded"

    def score(self, problem: Problem, response: str) -> float | None:
        if int(problem.reference) % 3 == 0:
            return 1.0
        return (0.0, 0.5, 1.0, None)[zlib.crc32(response.encode()) % 4]


@dataclass(frozen=True, kw_only=True)
class NoVerifier:
    """A task without a verifier."""

    def problems(self, split: str) -> Sequence[Problem]:
        return ()


def recorded_as(rollout: Rollout, logp: torch.Tensor) -> Rollout:
    """The rollout as an engine would have recorded it under other distributions [N, V]."""
    top = logp.topk(rollout.top_k)
    sampled = logp.gather(-1, rollout.tokens[:, None])[:, 0]
    return dataclasses.replace(rollout, logp=sampled, topk_ids=top.indices, topk_logp=top.values, full_logp=None)


class WrappedEngine:
    """A real engine whose rollouts are changed on their way to the trainer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = TransformersEngine(model)
        self.calls = 0

    def change(self, rollout: Rollout) -> Rollout:
        return rollout

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        self.calls += 1
        return self.change(self.inner.generate(prompts, sampling, generator))

    def update_weights(self, model: torch.nn.Module, version: int) -> None:
        self.inner.update_weights(model, version)

    def close(self) -> None:
        self.inner.close()


class ShiftedEngine(WrappedEngine):
    """Returns each token's log-prob one position early."""

    def change(self, rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, logp=rollout.logp.roll(-1))


class NoisyEngine(WrappedEngine):
    """Scores off by a nat at random: no rounding, and no fault with a name."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        full = self.inner.generate(prompts, dataclasses.replace(sampling, record_full=True), generator)
        assert full.full_logp is not None
        noise = torch.randn(full.full_logp.shape, generator=torch.Generator().manual_seed(1))
        return recorded_as(full, (full.full_logp + noise).log_softmax(-1))


class RawTemperatureEngine(WrappedEngine):
    """Samples at the temperature it is given, and records the log-probs of temperature 1."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        full = self.inner.generate(prompts, dataclasses.replace(sampling, record_full=True), generator)
        assert full.full_logp is not None
        return recorded_as(full, (full.full_logp * sampling.temperature).log_softmax(-1))


class CachingEngine(WrappedEngine):
    """Keeps answering with the weights of its last reset, as a stale prefix cache would."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.resets = 0
        self._freeze(model)

    def _freeze(self, model: torch.nn.Module) -> None:
        import copy

        self.frozen = copy.deepcopy(model)
        self.inner.update_weights(self.frozen, 0)

    def update_weights(self, model: torch.nn.Module, version: int) -> None:
        self.resets += 1
        self._freeze(model)
        self.inner.update_weights(self.frozen, version)


class SampledOnlyEngine(WrappedEngine):
    """Records the sampled token's log-prob, and no top-K whatever was asked for."""

    def change(self, rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, topk_ids=rollout.topk_ids[:, :0], topk_logp=rollout.topk_logp[:, :0])


class ShuffledEngine(WrappedEngine):
    """Answers in another order than it was asked."""

    def change(self, rollout: Rollout) -> Rollout:
        return rollout.select(torch.arange(len(rollout.prompts)).flip(0))


class TopKElsewhereEngine(WrappedEngine):
    """Returns the top-K of the position before, the sampled token's log-probs removed from doubt."""

    def change(self, rollout: Rollout) -> Rollout:
        ids, logp = rollout.topk_ids.roll(1, 0), rollout.topk_logp.roll(1, 0)
        return dataclasses.replace(rollout, topk_ids=ids, topk_logp=logp)


class ForgetfulEngine(WrappedEngine):
    """Does not know the log-prob of every third token."""

    def change(self, rollout: Rollout) -> Rollout:
        unknown = torch.arange(len(rollout.logp)) % 3 == 0
        return dataclasses.replace(rollout, logp=rollout.logp.masked_fill(unknown, torch.nan))


class InterruptedEngine(WrappedEngine):
    """Ctrl-C arrives during the second rollout."""

    def change(self, rollout: Rollout) -> Rollout:
        if self.calls == 2:
            raise KeyboardInterrupt
        return rollout
