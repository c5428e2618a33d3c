"""Every option of a run does something: two runs that differ in it alone come out differently."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers_training import WrappedEngine, small
from predmask.rollout import Rollout, Sampling, TransformersEngine
from predmask.train import Config, Trainer

BASE: dict[str, Any] = {
    "task": {"name": "helpers_training:Graded", "train_problems": 16},
    "steps": 2,
    "seed": 1,
    "engine": {"numerics": "int4"},
    "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 28, "top_k": 8},
    "advantage": {"scale_by_std": False},
    # Often outside, and often capped.
    "rule": {"delta": 0.003},
    "loss": {"ratio_cap": 1.0},
    "update": {"steps_per_rollout": 2},
    "eval": {"prompts": 1},
}

CHANGES: dict[str, Any] = {
    "rollout.prompts": 6,
    "rollout.group_size": 3,
    "rollout.temperature": 1.3,
    "rollout.max_new_tokens": 24,
    "rollout.top_k": 3,
    "rollout.dynamic_sampling": True,
    "rollout.max_rounds": 1,
    "reward.overlong_buffer": 6,
    "reward.overlong_penalty": 0.3,
    "advantage.baseline": "leave_one_out",
    "advantage.scale_by_std": True,
    "loss.aggregation": "seq_mean_token_mean",
    "loss.horizon": 7,
    "loss.ratio_cap": "none",
    "loss.count_zero_advantage": True,
    "loss.mask_truncated": True,
    "optimizer.learning_rate": 2e-4,
    "optimizer.warmup_steps": 3,
    "optimizer.beta1": 0.5,
    "optimizer.beta2": 0.5,
    "optimizer.weight_decay": 0.5,
    "optimizer.grad_clip": 0.05,
    "update.steps_per_rollout": 4,
    "update.epochs": 2,
    "update.autocast": True,
    "rule.delta": 0.1,
    "rule.divergence": "tv",
    "rule.tail": "aggregated",
    "engine.numerics": "float32",
    "seed": 2,
    "steps": 3,
}
"""By option, another value than that of the base run."""

EVERYTHING_IS_OUTSIDE = {"rule": {"delta": 1e-7}}

TOGETHER: dict[str, dict[str, Any]] = {
    "loss.horizon": {"loss": {"aggregation": "seq_mean_token_sum_norm"}},
    "rollout.top_k": EVERYTHING_IS_OUTSIDE,
    "loss.mask_truncated": {"rollout": {"max_new_tokens": 24}},
    "rollout.max_rounds": {"rollout": {"dynamic_sampling": True}},
    "reward.overlong_penalty": {"reward": {"overlong_buffer": 6}},
    "rule.tail": EVERYTHING_IS_OUTSIDE | {"rollout": {"top_k": 1}},
}
"""By option, what both runs have set for it to matter."""


def layer(path: str, value: Any) -> dict[str, Any]:
    section, dot, key = path.partition(".")
    return {section: {key: value}} if dot else {path: value}


def run(config: Config) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """The weights that a run comes to, and its figures."""
    trainer = Trainer(config)
    figures = [result.metrics for result in trainer.steps()]
    trainer.close()
    assert trainer.version > 2
    for record in figures:
        del record["seconds"], record["tokens_per_second"]
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]), figures


@functools.cache
def base_run(path: str) -> tuple[torch.Tensor, list[dict[str, float]]]:
    return run(small(BASE, TOGETHER.get(path, {})))


def test_the_base_run_has_equal_groups_beside_others() -> None:
    _, figures = base_run("")
    assert all(0 < record["equal_groups_frac"] < 1 for record in figures)


def test_no_option_is_left_out() -> None:
    sections = ("rollout", "reward", "advantage", "loss", "optimizer", "update")
    known = {
        f"{section}.{field.name}" for section in sections for field in dataclasses.fields(getattr(small(), section))
    }
    # These change memory and speed, not the result: test_update, test_forward and test_checkpointing say so.
    assert known - CHANGES.keys() == {
        "update.micro_batch_size",
        "update.micro_batch_tokens",
        "update.gradient_checkpointing",
        "update.head",
    }


@pytest.mark.parametrize("path", CHANGES)
def test_an_option_changes_the_run_and_repeats_exactly(path: str) -> None:
    weights, _ = base_run(path if path in TOGETHER else "")
    config = small(BASE, TOGETHER.get(path, {}), layer(path, CHANGES[path]))
    (changed, figures), (again, same) = run(config), run(config)
    assert torch.equal(changed, again)
    assert figures == same
    assert not torch.equal(changed, weights)


@pytest.mark.parametrize(("every", "measured"), [(0, [3]), (1, [1, 2, 3]), (2, [2, 3])])
def test_accuracy_is_measured_as_often_as_asked(every: int, measured: list[int]) -> None:
    trainer = Trainer(small(BASE, {"steps": 3, "eval": {"every": every, "prompts": 2}}))
    assert [result.step for result in trainer.steps() if result.accuracy is not None] == measured


class ListeningEngine(WrappedEngine):
    """Remembers what it was asked, and samples with random numbers of its own: always the same."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.asked: list[tuple[list[list[int]], int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        self.asked.append(([list(prompt) for prompt in prompts], generator.initial_seed()))
        return super().generate(prompts, sampling, torch.Generator().manual_seed(0))


def test_problems_random_numbers_and_minibatches_depend_on_the_seed() -> None:
    def listened(seed: int, problems: int) -> tuple[torch.Tensor, list[list[int]], int]:
        trainer = Trainer(small(BASE, {"steps": 1, "seed": seed, "task": {"train_problems": problems}}))
        trainer.engine = engine = ListeningEngine(trainer.model)
        assert len(list(trainer.steps())) == 1
        ((prompts, sampling_seed),) = engine.asked
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), prompts, sampling_seed

    _, prompts, sampling_seed = listened(1, 16)
    _, other_prompts, other_sampling_seed = listened(2, 16)
    assert prompts != other_prompts
    assert sampling_seed != other_sampling_seed
    # With one problem the rollouts are the same, and only the minibatches differ.
    weights, prompts, _ = listened(1, 1)
    other_weights, other_prompts, _ = listened(2, 1)
    assert prompts == other_prompts
    assert not torch.equal(weights, other_weights)
    assert torch.equal(weights, listened(1, 1)[0])


@dataclass
class Asked:
    """One call of the engine that evaluates."""

    batch_size: int
    prompts: list[list[int]]
    sampling: Sampling
    seed: int


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What evaluations ask of their engine."""
    calls: list[Asked] = []

    class Recording(TransformersEngine):
        def __init__(self, model: torch.nn.Module, *, batch_size: int) -> None:
            super().__init__(model, batch_size=batch_size)
            self.size = batch_size

        def generate(self, prompts: Any, sampling: Sampling, generator: torch.Generator) -> Rollout:
            calls.append(Asked(self.size, [list(prompt) for prompt in prompts], sampling, generator.initial_seed()))
            return super().generate(prompts, sampling, generator)

    monkeypatch.setattr("predmask.train.trainer.TransformersEngine", Recording)
    return calls


def test_an_evaluation_answers_the_held_out_problems_as_configured(asked: list[Asked]) -> None:
    config = small(BASE, {"rollout": {"temperature": 1.3}, "eval": {"prompts": 3, "samples": 2, "batch_size": 5}})
    trainer = Trainer(config)
    ids = [problem.id for problem in trainer.heldout]
    assert ids == [problem.id for problem in config.task.problems("heldout")[:3]]
    assert not set(ids) & {problem.id for problem in config.task.problems("train")}
    trainer.evaluate()
    prompts = [trainer.tokenizer.encode(problem.prompt) for problem in trainer.heldout]
    assert [call.prompts for call in asked] == [prompts, [prompt for prompt in prompts for _ in range(2)]]
    assert [call.sampling.temperature for call in asked] == [0, 1.3]
    assert {call.sampling.max_new_tokens for call in asked} == {28}
    assert {call.batch_size for call in asked} == {5}


def test_evaluations_of_one_seed_draw_the_same_numbers(asked: list[Asked]) -> None:
    for seed in (1, 2):
        trainer = Trainer(small(BASE, seed=seed))
        trainer.evaluate()
        trainer.evaluate()
    first, second = {call.seed for call in asked[:4]}, {call.seed for call in asked[4:]}
    assert len(first) == len(second) == 1
    assert first != second
