"""Real training runs: learning, reproducibility, and every rule, engine and task through one trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers_training import (
    CachingEngine,
    Constant,
    ForgetfulEngine,
    NoisyEngine,
    RawTemperatureEngine,
    SampledOnlyEngine,
    ShiftedEngine,
    ShuffledEngine,
    TopKElsewhereEngine,
    small,
)
from predmask.core import RULES
from predmask.rollout import RolloutError
from predmask.tasks.verifier import VerifierError
from predmask.train import PRESETS, AgreementError, Config, ConfigError, Trainer
from predmask.train.models import load_policy
from predmask.train.options import resolve


def train(config: Config, engine_class: Any = None) -> tuple[Trainer, list[dict[str, float]]]:
    """Run all steps; the engine, where one is named, samples from the trainer's own model."""
    trainer = Trainer(config)
    if engine_class is not None:
        trainer.engine = engine_class(trainer.model)
    figures = [result.metrics for result in trainer.steps()]
    trainer.close()
    return trainer, figures


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.slow
def test_the_embedded_preset_learns() -> None:
    config = resolve(PRESETS["arithmetic"].values, {"steps": 8, "eval": {"every": 0}})
    trainer = Trainer(config)
    before = trainer.evaluate()
    results = list(trainer.steps())
    after = results[-1].accuracy
    assert after is not None
    assert before.greedy < 0.05
    assert 0.1 < before.sampled < 0.3
    assert after.greedy > 0.9
    assert after.sampled > 0.7
    assert results[-1].metrics["accuracy"] > results[0].metrics["accuracy"] + 0.4


def test_one_seed_gives_identical_runs_and_another_seed_does_not() -> None:
    (first, figures), (again, same), (_, others) = (train(small(seed=seed)) for seed in (3, 3, 4))
    timings = {"seconds", "tokens_per_second"}
    for one, two in zip(figures, same, strict=True):
        assert {k: v for k, v in one.items() if k not in timings} == {k: v for k, v in two.items() if k not in timings}
    assert torch.equal(weights(first), weights(again))
    assert others[0]["tokens"] != figures[0]["tokens"]


def test_training_leaves_the_global_random_numbers_alone() -> None:
    trainer = Trainer(small(steps=1))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    trainer.evaluate()
    list(trainer.steps())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains(rule: str) -> None:
    config = small(rule=rule)
    before, _ = load_policy(config.model, torch.device("cpu"))
    trainer, figures = train(config)
    moved = weights(trainer) - torch.cat([p.detach().flatten() for p in before.parameters()])
    # A minibatch of equal rewards is no optimiser step.
    empty = sum(record.get("empty_updates", 0) for record in figures)
    assert trainer.version == 8 - empty > 0
    assert 0 < float(moved.abs().max()) < 0.01
    assert 0 < figures[0]["staleness_max"] <= 3
    assert all(np.isfinite(value) for record in figures for value in record.values())


@pytest.mark.parametrize("numerics", ["float32", "bfloat16", "fp8", "int8", "int4"])
def test_every_numerics_trains_and_shows_its_mismatch(numerics: str) -> None:
    _, figures = train(small({"engine": {"numerics": numerics}}, steps=1))
    mismatch = figures[0]["mismatch_kl"]
    assert mismatch < 1e-10 if numerics == "float32" else 1e-8 < mismatch < 0.2


@pytest.mark.slow
def test_a_reasoning_gym_task_trains() -> None:
    config = small({"task": {"name": "reasoning_gym:chain_sum", "train_problems": 16, "heldout_problems": 4}}, steps=1)
    _, figures = train(config)
    assert figures[0]["unscored_count"] == 0
    assert 0 <= figures[0]["reward"] <= 1


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_micro_batches_change_nothing_but_memory(aggregation: str) -> None:
    def once(size: int) -> tuple[torch.Tensor, dict[str, float]]:
        layer = {"update": {"steps_per_rollout": 1, "micro_batch_size": size}, "loss": {"aggregation": aggregation}}
        # Plain gradient steps: Adam's first step is the gradient's sign, which hides its size.
        trainer = Trainer(small(layer, steps=1))
        trainer._optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        (result,) = trainer.steps()
        return weights(trainer), result.metrics

    whole, figures = once(16)
    for size in (1, 2, 4, 5):
        split, parts = once(size)
        torch.testing.assert_close(split, whole, rtol=0, atol=2e-6)
        for name in ("mask_frac", "behaviour_kl", "entropy", "divergence_kept_max", "loss"):
            assert parts[name] == pytest.approx(figures[name], rel=1e-3, abs=1e-6)


def test_equal_rewards_move_nothing() -> None:
    config = small(steps=1)
    trainer = Trainer(config)
    object.__setattr__(trainer.verifier, "_task", Constant())
    before = weights(trainer).clone()
    (result,) = trainer.steps()
    assert torch.equal(weights(trainer), before)
    assert result.metrics["empty_updates"] == 4
    assert result.metrics["equal_groups_frac"] == 1
    assert "divergence_kept_mean" not in result.metrics


def test_answers_that_cannot_be_scored_are_counted_and_left_out() -> None:
    _, figures = train(small({"task": "helpers_training:SometimesUnscored"}, steps=1))
    assert 0 < figures[0]["unscored_count"] < 16
    assert 0 <= figures[0]["reward"] <= 1


def test_a_verifier_that_scores_nothing_stops_the_run() -> None:
    config = small({"task": {"name": "helpers_training:Constant", "value": float("nan")}}, steps=1)
    with pytest.raises(VerifierError, match="none of the 16 answers"):
        train(config)


def test_unknown_behaviour_log_probs_are_counted_and_left_out() -> None:
    _, figures = train(small(steps=1), ForgetfulEngine)
    assert figures[0]["unknown_logprob_count"] == pytest.approx(figures[0]["tokens"] / 3, abs=1)
    assert figures[0]["mismatch_kl"] < 1e-10


def test_the_first_rollout_agrees_with_the_first_forward_pass() -> None:
    trainer, _ = train(small({"engine": {"numerics": "float32"}}, steps=1))
    assert trainer.agreement is not None
    assert trainer.agreement.largest < 1e-4


def test_log_probs_that_are_shifted_by_one_are_refused() -> None:
    layer = {"engine": {"numerics": "float32"}, "rule": "ppo_clip", "rollout": {"top_k": 0}}
    with pytest.raises(AgreementError, match="shifted by one position"):
        train(small(layer), ShiftedEngine)


@pytest.mark.parametrize("engine", [ShiftedEngine, TopKElsewhereEngine])
def test_top_k_of_another_position_is_refused(engine: Any) -> None:
    with pytest.raises(RolloutError, match="one position and one temperature"):
        train(small({"engine": {"numerics": "float32"}}), engine)


def test_answers_in_another_order_are_refused() -> None:
    with pytest.raises(RolloutError, match="in another order"):
        train(small(), ShuffledEngine)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.6])
def test_log_probs_of_another_temperature_are_refused(temperature: float) -> None:
    layer = {"engine": {"numerics": "float32"}, "rollout": {"temperature": temperature}}
    with pytest.raises(AgreementError, match=f"a temperature {1 / temperature:.3g} times the trainer's"):
        train(small(layer), RawTemperatureEngine)


def test_an_unexplained_mismatch_is_measured_and_trained_on() -> None:
    trainer, _ = train(small({"engine": {"numerics": "float32"}}, steps=1), NoisyEngine)
    assert trainer.agreement is not None
    assert 0.05 < trainer.agreement.mean < 1.5
    assert trainer.agreement.mean > trainer.config.mismatch_tolerance


def test_weights_reach_an_engine_that_caches() -> None:
    trainer, figures = train(small({"engine": {"numerics": "float32"}}), CachingEngine)
    assert [record["mismatch_kl"] < 1e-10 for record in figures] == [True, True]
    assert trainer.engine.resets == 2  # type: ignore[attr-defined]


def test_top_k_that_the_engine_did_not_return_is_missed_at_once() -> None:
    with pytest.raises(RolloutError, match="top-K missing"):
        train(small(), SampledOnlyEngine)


def test_an_engine_without_top_k_serves_a_rule_of_the_sampled_token() -> None:
    _, figures = train(small({"rule": "ppo_clip", "rollout": {"top_k": 0}}, steps=1), SampledOnlyEngine)
    assert figures[0]["mask_frac"] >= 0


def test_autocast_trains_with_a_small_mismatch() -> None:
    trainer, figures = train(small({"engine": {"numerics": "float32"}, "update": {"autocast": True}}, steps=1))
    assert trainer.agreement is not None
    assert 1e-5 < trainer.agreement.mean < 0.1
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert figures[0]["mismatch_kl"] > 0


def test_top_k_above_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_k is 65.*vocabulary of 64"):
        Trainer(small({"rollout": {"top_k": 65}}))
    assert Trainer(small({"rollout": {"top_k": 64}})).config.rollout.top_k == 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_used_where_there_is_one() -> None:
    trainer, figures = train(small({"device": "auto"}, steps=1))
    assert trainer.device.type == "cuda"
    assert figures[0]["tokens"] > 0


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """A tiny random model with dropout, which knows no quantised numerics."""
    settings = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=1)
    assert settings.resid_pdrop == 0.1
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path)
    load_policy("embedded", torch.device("cpu"))[1].save_pretrained(tmp_path)
    return str(tmp_path)


def test_numerics_that_a_model_cannot_have_are_named(gpt2: str) -> None:
    with pytest.raises(ConfigError, match="engine: numerics 'fp8'"):
        Trainer(small(model=gpt2))


def test_dropout_does_not_come_between_engine_and_trainer(gpt2: str) -> None:
    config = small({"engine": {"numerics": "float32"}}, task="helpers_training:Fickle", model=gpt2)
    trainer, figures = train(config)
    assert trainer.agreement is not None
    assert trainer.agreement.largest < 1e-4
    assert trainer.version > 0
    assert all(record["mismatch_kl"] < 1e-10 for record in figures)
