"""What a step trains on: dynamic sampling, penalties for length, prompts as tokens, micro-batches."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_math import tiny_tokenizer
from helpers_training import WrappedEngine, small
from predmask.core import Metrics
from predmask.rollout import Rollout
from predmask.tasks import Arithmetic, Problem, Split
from predmask.tasks.sampling import PromptSampler
from predmask.tasks.verifier import Verifier
from predmask.train import Config, ConfigError, Trainer
from predmask.train.batches import Batch
from predmask.train.config import PromptConfig, RewardConfig
from predmask.train.experience import Collector, Experience, length_penalty
from predmask.train.models import load_policy
from predmask.train.prompts import Prompts


@dataclass(frozen=True, kw_only=True)
class Lottery(Arithmetic):
    """Groups of sums that `every` divides have different scores (by a hash of the response), others equal."""

    name: ClassVar[str] = "lottery"
    every: int = 2

    def score(self, problem: Problem, response: str) -> float | None:
        if int(problem.reference) % self.every:
            return None if int(problem.reference) % 5 == 0 else 1.0
        return float(zlib.crc32(response.encode()) % 2)


class CountingEngine(WrappedEngine):
    """Remembers the prompts of each call."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.asked: list[int] = []

    def change(self, rollout: Rollout) -> Rollout:
        self.asked.append(len(rollout.prompts))
        return rollout


def collected(config: Config) -> tuple[Experience, dict[str, float], CountingEngine, list[Problem]]:
    """A step's experience, its figures, the engine that was asked, and the problems in the order of training."""
    model, tokenizer = load_policy("embedded", torch.device("cpu"))
    problems = config.task.problems("train")
    metrics, engine = Metrics(), CountingEngine(model)
    with Verifier(config.task) as verifier:
        sampler = PromptSampler(problems, config.seed)
        prompts = Prompts(tokenizer, config.prompt)
        collector = Collector(config, sampler, prompts, verifier, vocabulary_size=model.config.vocab_size)
        found = collector.collect(engine, metrics, full=False)
    order = PromptSampler(problems, config.seed).take(sampler.position)
    return found, metrics.compute(), engine, order


def lottery(every: int, **rollout: object) -> Config:
    settings = {"prompts": 6, "group_size": 8, "max_new_tokens": 40, **rollout}
    task = {"name": "test_experience:Lottery", "every": every, "train_problems": 40}
    return small({"task": task, "rollout": settings})


@pytest.mark.parametrize("reward", [{}, {"overlong_buffer": 30}])
def test_dynamic_sampling_replaces_groups_that_teach_nothing(reward: dict[str, int]) -> None:
    # A penalty for length makes the rewards of a group differ whose scores are equal: it teaches no answer.
    config = lottery(2, dynamic_sampling=True)
    found, figures, engine, order = collected(replace(config, reward=RewardConfig(**reward)))
    groups = found.scores.reshape(-1, 8)
    assert len(groups) == 6
    assert ((groups.amax(-1) == 1) & (groups.amin(-1) == 0)).all()
    # Each round asks for what is missing, and the problems come in the order of training, each once.
    assert engine.asked[0] == 48
    assert figures["sampling_rounds"] == len(engine.asked) > 1
    assert sum(engine.asked) == 8 * len(order)
    kept = [problem.id for problem in found.problems[::8]]
    assert kept == [problem.id for problem in order if int(problem.reference) % 2 == 0][:6]
    assert [problem.id for problem in found.problems] == [each for each in kept for _ in range(8)]
    assert figures["missing_groups"] == 0
    # Figures are those of all that was sampled.
    assert figures["accuracy"] > float((found.scores == 1).double().mean())
    assert figures["tokens"] > len(found.rollout.tokens)
    # Advantages are those of the kept groups by themselves.
    torch.testing.assert_close(found.advantage.reshape(-1, 8).sum(-1), torch.zeros(6), atol=1e-5, rtol=0)
    assert (found.advantage != 0).all()


def test_dynamic_sampling_goes_on_with_what_it_has_after_its_last_round() -> None:
    found, figures, engine, _ = collected(lottery(4, dynamic_sampling=True, max_rounds=2))
    groups = len(found.scores) // 8
    assert 0 < groups < 6
    assert len(engine.asked) == figures["sampling_rounds"] == 2
    assert figures["missing_groups"] == 6 - groups
    config = lottery(4, dynamic_sampling=True, max_rounds=2)
    trainer = Trainer(config)
    figures = next(trainer.steps()).metrics
    assert figures["missing_groups"] > 0
    assert trainer.version > 0


def test_a_step_in_which_no_group_teaches_anything_moves_nothing() -> None:
    trainer = Trainer(lottery(10**6, dynamic_sampling=True, max_rounds=3))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    figures = next(trainer.steps()).metrics
    assert figures["sampling_rounds"] == 3
    assert figures["missing_groups"] == 6
    assert figures["empty_updates"] == 4
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_step_with_fewer_responses_than_optimiser_steps_takes_one_for_each() -> None:
    config = small(
        {"task": {"name": "test_experience:Lottery", "every": 7, "train_problems": 40}},
        {"rollout": {"prompts": 8, "group_size": 2, "dynamic_sampling": True, "max_rounds": 3}},
        {"update": {"steps_per_rollout": 16}},
        steps=1,
    )
    trainer = Trainer(config)
    (result,) = trainer.steps()
    assert 0 < trainer.version <= 2 * (8 - result.metrics["missing_groups"]) < 16


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    found, figures, engine, order = collected(lottery(2))
    assert engine.asked == [48]
    assert [problem.id for problem in found.problems[::8]] == [problem.id for problem in order]
    assert "sampling_rounds" not in figures
    assert 0 < figures["equal_groups_frac"] < 1


def test_the_penalty_for_length_by_hand() -> None:
    # DAPO, eq. 13, with L_max = 20 and L_cache = 4.
    lengths = torch.tensor([1, 16, 17, 18, 20])
    settings = RewardConfig(overlong_buffer=4)
    assert length_penalty(lengths, 20, settings).tolist() == [0, 0, 0.25, 0.5, 1]
    settings = RewardConfig(overlong_buffer=4, overlong_penalty=0.5)
    assert length_penalty(lengths, 20, settings).tolist() == [0, 0, 0.125, 0.25, 0.5]
    assert length_penalty(lengths, 20, RewardConfig()).tolist() == [0] * 5


def test_the_penalty_changes_the_reward_and_not_the_accuracy() -> None:
    plain = collected(lottery(1))
    found, figures, *_ = collected(
        small(
            {"task": {"name": "test_experience:Lottery", "every": 1, "train_problems": 40}},
            {"rollout": {"prompts": 6, "group_size": 8, "max_new_tokens": 40}, "reward": {"overlong_buffer": 20}},
        )
    )
    penalty = ((found.rollout.lengths - 20) / 20).clamp(0, 1)
    torch.testing.assert_close(found.rewards, found.scores - penalty)
    assert figures["accuracy"] == plain[1]["accuracy"]
    assert figures["reward"] == pytest.approx(plain[1]["reward"] - float(penalty.mean()))


# --- prompts ----------------------------------------------------------------------------------------------------


def test_a_chat_prompt_is_the_tokenizers_own() -> None:
    tokenizer = tiny_tokenizer()
    template = "{question} Put it in \\boxed{}: {x}"
    problem = Problem("1", "What is {1}?", "1", system="Be brief.")
    (ids,) = Prompts(tokenizer, PromptConfig(chat=True, template=template)).encode([problem])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is {1}? Put it in \\boxed{}: {x}<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is {1}? Put it in \\boxed{}: {x}"},
    ]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_prompt_without_chat_is_the_text_in_its_template() -> None:
    tokenizer = tiny_tokenizer()
    prompts = Prompts(tokenizer, PromptConfig(template="Q: {question}\nA:"))
    found = prompts.encode([Problem("1", "1 + 1", "2"), Problem("2", "2 + 2", "4", system="Be brief.")])
    assert [tokenizer.decode(ids) for ids in found] == ["Q: 1 + 1\nA:", "Be brief.\n\nQ: 2 + 2\nA:"]
    assert prompts.encode([]) == []


def test_long_prompts_are_left_out_by_their_tokens() -> None:
    problems = [Problem(str(n), "x" * n, "") for n in (3, 9, 4, 5)]
    prompts = Prompts(tiny_tokenizer(), PromptConfig(template="a{question}", max_tokens=5))
    assert [problem.id for problem in prompts.fitting(problems)] == ["3", "4"]
    assert len(Prompts(tiny_tokenizer(), PromptConfig()).fitting(problems)) == 4


def test_a_chat_prompt_needs_a_chat_template_and_a_template_its_question() -> None:
    with pytest.raises(ConfigError, match=r"prompt\.chat is on, but the model's tokenizer has no chat template"):
        Trainer(small({"prompt": {"chat": True}}))
    with pytest.raises(ConfigError, match="without a place for the question"):
        small({"prompt": {"template": "Q: {quesiton}"}})


@dataclass(frozen=True, kw_only=True)
class TwoLengths(Arithmetic):
    """Half of the problems have one more token."""

    name: ClassVar[str] = "two_lengths"

    def problems(self, split: Split) -> list[Problem]:
        found = super().problems(split)
        return [
            replace(problem, prompt=problem.prompt + " ="[: 2 * (place % 2)]) for place, problem in enumerate(found)
        ]


def test_a_run_says_how_many_problems_were_too_long() -> None:
    # A prompt of arithmetic has 10 tokens.
    task = {"name": "test_experience:TwoLengths", "train_problems": 40, "heldout_problems": 6}
    with pytest.raises(ConfigError, match=r"every train prompt has over prompt\.max_tokens = 9 tokens"):
        Trainer(small({"task": task, "prompt": {"max_tokens": 9}}))
    trainer = Trainer(small({"task": task, "prompt": {"max_tokens": 10}}))
    left_out = [note for note in trainer.notes if "left out" in note]
    assert [note.split(" are left out")[0] for note in left_out] == [
        "20 of 40 train problems",
        "3 of 6 held-out problems",
    ]
    assert len(trainer.heldout) == 3
    assert not [note for note in Trainer(small({"task": task, "prompt": {"max_tokens": 11}})).notes if "left" in note]


# --- records ----------------------------------------------------------------------------------------------------


def rollout_of(lengths: list[int], prompts: list[int], *, full: bool = False) -> Rollout:
    tokens = sum(lengths)
    return Rollout(
        prompts=tuple((1,) * prompt for prompt in prompts),
        lengths=torch.tensor(lengths),
        tokens=torch.arange(tokens),
        logp=torch.zeros(tokens),
        topk_ids=torch.arange(tokens)[:, None],
        topk_logp=torch.zeros(tokens, 1),
        sampled=torch.ones(tokens, dtype=torch.bool),
        version=torch.zeros(tokens, dtype=torch.int64),
        finished=torch.ones(len(lengths), dtype=torch.bool),
        full_logp=torch.zeros(tokens, 2) if full else None,
    )


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=30), st.data())
def test_micro_batches_are_within_their_budget_and_lose_nothing(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    rollout = rollout_of([length for length, _ in sizes], [prompt for _, prompt in sizes])
    batch = Batch(rollout, torch.arange(len(sizes)), torch.arange(len(rollout.tokens)), rollout.logp)
    size, budget = data.draw(st.integers(1, 8)), data.draw(st.none() | st.integers(1, 200))
    parts = batch.split(size, budget)
    assert sorted(index for part in parts for index in part.sample.tolist()) == list(range(len(sizes)))
    assert torch.equal(torch.cat([part.advantage for part in parts]).sort().values, torch.arange(len(rollout.tokens)))
    for part in parts:
        padded = len(part.sample) * int(part.rollout.totals.max())
        assert len(part.sample) <= size
        assert budget is None or padded <= budget or len(part.sample) == 1
    longest = [int(part.rollout.totals.max()) for part in parts]
    assert longest == sorted(longest)
    if budget is None:
        assert len(parts) == -(-len(sizes) // size)


@pytest.mark.parametrize("full", [False, True])
def test_joined_rollouts_are_taken_apart_again(full: bool) -> None:
    parts = [rollout_of([3, 1], [2, 4], full=full), rollout_of([2], [1], full=full)]
    joined = Rollout.cat(parts)
    assert joined.prompts == ((1, 1), (1, 1, 1, 1), (1,))
    assert joined.responses() == [[0, 1, 2], [3], [0, 1]]
    again = joined.select(torch.tensor([2]))
    assert again.prompts == parts[1].prompts
    assert torch.equal(again.topk_ids, parts[1].topk_ids)
    assert (again.full_logp is None) is not full
    assert Rollout.cat(parts[:1]).responses() == parts[0].responses()
