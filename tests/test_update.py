"""One optimiser step against a slow, independent computation of it, and steps that must not be taken."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers_training import WrappedEngine, recorded_as, small
from predmask.rollout import Rollout, Sampling, TransformersEngine
from predmask.train import Config, Trainer
from predmask.train.trainer import TrainingError

NAN = float("nan")
LEARNING_RATE = 0.5
STRIDE = 100 * LEARNING_RATE
"""How far plain gradient steps go: so far that the weights' rounding does not show."""
TEMPERATURE = 1.3


class PatchyEngine(WrappedEngine):
    """Records noisy distributions, has tokens that the policy did not sample, and does not know every log-prob."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.rollouts: list[Rollout] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        full = self.inner.generate(prompts, dataclasses.replace(sampling, record_full=True), generator)
        assert full.full_logp is not None
        own = torch.Generator().manual_seed(len(self.rollouts))
        rows = (full.full_logp + 0.7 * torch.randn(full.full_logp.shape, generator=own)).log_softmax(-1)
        rollout = recorded_as(full, rows)
        draw = torch.rand(len(rollout.tokens), generator=own)
        logp = rollout.logp.masked_fill((draw < 0.04) | (draw > 0.85), NAN)
        wanted = rows if sampling.record_full else None
        self.rollouts.append(dataclasses.replace(rollout, sampled=draw > 0.15, logp=logp, full_logp=wanted))
        return self.rollouts[-1]


class FaintEngine(WrappedEngine):
    """From its second rollout on, calls every token all but impossible: ratios overflow."""

    def change(self, rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, logp=rollout.logp - 100) if self.calls > 1 else rollout


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def patchy(*layers: dict[str, Any], **values: Any) -> Config:
    """A run in which everything happens that an update must handle."""
    base = {
        "task": {"name": "helpers_training:Graded", "train_problems": 32},
        "steps": 1,
        "seed": 7,
        "engine": {"numerics": "float32"},
        "rollout": {"temperature": TEMPERATURE, "top_k": 8},
        "loss": {"ratio_cap": 1.2},
        # Clipping would hide the gradient's size.
        "optimizer": {"learning_rate": LEARNING_RATE, "grad_clip": 1e9},
        "update": {"steps_per_rollout": 1},
    }
    return small(base, *layers, values)


@pytest.fixture
def _plain_gradient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights move by STRIDE times the gradient: Adam would hide its size."""

    class Plain(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float, **_: Any) -> None:
            super().__init__(parameters, lr=lr)

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["lr"] *= 100
            super().step(closure)

    monkeypatch.setattr("torch.optim.AdamW", Plain)


@dataclass
class Token:
    """A response token as the oracle sees it, one at a time and in double precision."""

    id: int
    sequence: int
    advantage: float
    """NaN where the answer could not be scored."""
    sampled: bool
    log_mu: float
    log_pi: torch.Tensor
    """[], with gradient."""
    drop: bool

    @property
    def known(self) -> bool:
        return self.sampled and not math.isnan(self.log_mu)

    @property
    def ratio(self) -> float:
        return math.exp(float(self.log_pi.detach()) - self.log_mu)


def advantages_of(trainer: Trainer, rollout: Rollout) -> list[float]:
    """(R - mean) / std of each group's known rewards, 0 where they are equal, NaN where outside the loss."""
    config = trainer.config
    task, size, limit = config.task, config.rollout.group_size, config.rollout.max_new_tokens
    by_prompt = {tuple(trainer.tokenizer.encode(problem.prompt)): problem for problem in task.problems("train")}
    texts = trainer.tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
    scores = [task.score(by_prompt[prompt], text) for prompt, text in zip(rollout.prompts, texts, strict=True)]
    rewards = [NAN if score is None else score for score in scores]
    if (buffer := config.reward.overlong_buffer) is not None:
        # From limit - buffer tokens on, the reward falls by penalty / buffer a token.
        over = [max(0, length - (limit - buffer)) for length in rollout.lengths.tolist()]
        rewards = [r - config.reward.overlong_penalty * o / buffer for r, o in zip(rewards, over, strict=True)]
    advantages: list[float] = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        known = [reward for reward in group if not math.isnan(reward)]
        spread = statistics.stdev(known) if len(set(known)) > 1 else math.inf
        advantages += [(reward - statistics.mean(known or [0])) / spread for reward in group]
    if config.loss.mask_truncated:
        finished = rollout.finished.tolist()
        return [advantage if ended else NAN for advantage, ended in zip(advantages, finished, strict=True)]
    return advantages


def kl_and_rate(mu: dict[int, float], pi: list[float], token: int) -> tuple[float, float]:
    """KL(mu‖pi) on the support of mu, the rest as one category; and its rate by the closed form of the paper."""
    tail = [p for i, p in enumerate(pi) if i not in mu]
    mu_tail, pi_tail = max(1 - sum(mu.values()), 1e-12), sum(tail)
    kl = sum(m * math.log(m / pi[i]) for i, m in mu.items()) + mu_tail * math.log(mu_tail / pi_tail)
    rate = pi[token] - mu[token] + sum(pi[i] * (m - pi[i]) for i, m in mu.items())
    return kl, rate + sum(p * p for p in tail) / pi_tail * (mu_tail - pi_tail)


def drops(config: Config, rollout: Rollout, row: int, pi: list[float], advantage: float) -> bool:
    """What the rule says of a token whose log-prob is known."""
    token, log_mu = int(rollout.tokens[row]), float(rollout.logp[row])
    if config.rule.name == "ppo_clip":
        ratio = pi[token] / math.exp(log_mu)
        return not 0.8 <= ratio <= 1.28 and advantage * (ratio - 1) > 0
    entries = zip(rollout.topk_ids[row].tolist(), rollout.topk_logp[row].tolist(), strict=True)
    kl, rate = kl_and_rate({i: math.exp(v) for i, v in entries} | {token: math.exp(log_mu)}, pi, token)
    return kl > 0.05 and advantage * rate > 0


def tokens_of(trainer: Trainer, model: torch.nn.Module, rollout: Rollout) -> list[Token]:
    """Every token of a rollout under the weights of `model`, sequence by sequence without padding."""
    tokens: list[Token] = []
    advantages = advantages_of(trainer, rollout)
    for sequence, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses(), strict=True)):
        logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_pi = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
        for position, token in enumerate(response):
            row, advantage = len(tokens), advantages[sequence]
            log_mu, sampled = float(rollout.logp[row]), bool(rollout.sampled[row])
            pi = log_pi[position].detach().exp().tolist()
            drop = sampled and not math.isnan(log_mu) and drops(trainer.config, rollout, row, pi, advantage)
            tokens.append(Token(token, sequence, advantage, sampled, log_mu, log_pi[position, token], drop))
    return tokens


def loss_of(config: Config, tokens: list[Token]) -> tuple[float, torch.Tensor]:
    """The loss of one optimiser step on these tokens, and what to differentiate for its gradient."""
    settings = config.loss
    counted = [
        token
        for token in tokens
        if token.known and not math.isnan(token.advantage) and (settings.count_zero_advantage or token.advantage != 0)
    ]
    lengths = Counter(token.sequence for token in counted)
    value, surrogate = 0.0, torch.zeros((), dtype=torch.float64)
    for token in counted:
        denominator = {
            "token_mean": len(counted),
            "seq_mean_token_mean": len(lengths) * lengths[token.sequence],
            "seq_mean_token_sum_norm": len(lengths) * (settings.horizon or config.rollout.max_new_tokens),
        }[settings.aggregation]
        if not token.drop:
            assert settings.ratio_cap is not None
            coefficient = min(token.ratio, settings.ratio_cap) * token.advantage / denominator
            value -= coefficient
            surrogate = surrogate - coefficient * token.log_pi
    return value, surrogate


@pytest.mark.usefixtures("_plain_gradient_steps")
@pytest.mark.parametrize("rule", ["ppo_clip", "predictive"])
@pytest.mark.parametrize(
    "loss",
    [
        {"aggregation": "token_mean"},
        {"aggregation": "token_mean", "count_zero_advantage": True},
        {"aggregation": "seq_mean_token_mean"},
        {"aggregation": "seq_mean_token_mean", "count_zero_advantage": True},
        {"aggregation": "seq_mean_token_sum_norm"},
        {"aggregation": "seq_mean_token_sum_norm", "horizon": 17},
    ],
    ids=lambda loss: "-".join(map(str, loss.values())),
)
def test_a_step_moves_the_weights_along_the_gradient_of_the_loss(rule: str, loss: dict[str, Any]) -> None:
    config = patchy({"rule": rule, "loss": loss})
    trainer = Trainer(config)
    trainer.engine = engine = PatchyEngine(trainer.model)
    model = copy.deepcopy(trainer.model)
    (result,) = trainer.steps()
    tokens = tokens_of(trainer, model, engine.rollouts[0])
    value, surrogate = loss_of(config, tokens)
    surrogate.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    # All that could be overlooked is there.
    assert {token.sampled for token in tokens} == {True, False}
    assert any(token.sampled and not token.known for token in tokens)
    assert any(token.known and math.isnan(token.advantage) for token in tokens)
    assert any(token.known and token.advantage == 0 for token in tokens)
    assert any(token.known and token.advantage < 0 and not token.drop and token.ratio > 1.2 for token in tokens)
    assert {token.advantage > 0 for token in tokens if token.drop} == {True, False}

    moved = (weights(trainer.model) - weights(model)) / STRIDE
    assert float((moved + gradient).double().norm() / gradient.double().norm()) < 1e-5
    assert result.metrics["grad_norm"] == pytest.approx(float(gradient.double().norm()), rel=1e-5)
    assert result.metrics["loss"] == pytest.approx(value, rel=1e-5)
    dropped = Counter(token.id for token in tokens if token.drop)
    assert {row.id: row.count for row in trainer.masked_tokens()} == dropped
    known = sum(token.known for token in tokens)
    assert result.metrics["mask_frac"] == pytest.approx(dropped.total() / known)
    assert result.metrics["unknown_logprob_count"] == sum(token.sampled for token in tokens) - known


@pytest.mark.usefixtures("_plain_gradient_steps")
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("buffer", [None, 18])
def test_responses_that_are_cut_or_long_count_as_asked(
    aggregation: str, mask_truncated: bool, buffer: int | None
) -> None:
    config = patchy(
        {"loss": {"aggregation": aggregation, "mask_truncated": mask_truncated}},
        {"rollout": {"max_new_tokens": 24}, "reward": {"overlong_buffer": buffer or "none", "overlong_penalty": 0.5}},
    )
    trainer = Trainer(config)
    trainer.engine = engine = PatchyEngine(trainer.model)
    model = copy.deepcopy(trainer.model)
    (result,) = trainer.steps()
    (rollout,) = engine.rollouts
    value, surrogate = loss_of(config, tokens_of(trainer, model, rollout))
    surrogate.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    moved = (weights(trainer.model) - weights(model)) / STRIDE
    assert 0 < result.metrics["truncated_frac"] == 1 - rollout.finished.double().mean() < 1
    # Some of those that ended are longer than 24 - 18.
    assert int((rollout.lengths > 6).sum()) > int((~rollout.finished).sum())
    assert float((moved + gradient).double().norm() / gradient.double().norm()) < 1e-5
    assert result.metrics["loss"] == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.usefixtures("_plain_gradient_steps")
@pytest.mark.parametrize("tokens", [1, 40, 130, 10_000])
def test_a_budget_of_tokens_changes_memory_and_not_the_result(tokens: int) -> None:
    moved = []
    for budget in ("none", tokens):
        trainer = Trainer(patchy({"update": {"micro_batch_size": 16, "micro_batch_tokens": budget}}))
        trainer.engine = PatchyEngine(trainer.model)
        before = weights(trainer.model)
        assert len(list(trainer.steps())) == 1
        moved.append((weights(trainer.model) - before).double())
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 1e-5


@pytest.mark.usefixtures("_plain_gradient_steps")
def test_the_learning_rate_rises_linearly_over_the_warm_up() -> None:
    rates, moved = [], []
    layer = {"optimizer": {"warmup_steps": 4, "learning_rate": 1e-6}, "update": {"steps_per_rollout": 1}}
    trainer = Trainer(patchy(layer, steps=6))
    before = weights(trainer.model)
    for result in trainer.steps():
        rates.append(result.metrics["learning_rate"])
        moved.append(float((weights(trainer.model) - before).double().norm()) / result.metrics["grad_norm"])
        before = weights(trainer.model)
    expected = [1e-6 * share for share in (0.25, 0.5, 0.75, 1, 1, 1)]
    assert rates == pytest.approx(expected)
    assert moved == pytest.approx([100 * rate for rate in expected], rel=0.05)


@pytest.mark.usefixtures("_plain_gradient_steps")
def test_the_gradient_is_clipped_to_its_largest_norm() -> None:
    moved = []
    for clip in (1e9, 0.01):
        trainer = Trainer(patchy({"optimizer": {"grad_clip": clip}}))
        before = weights(trainer.model)
        (result,) = trainer.steps()
        moved.append((weights(trainer.model) - before).double() / STRIDE)
        # The figure is the norm before clipping.
        assert result.metrics["grad_norm"] == pytest.approx(float(moved[0].norm()), rel=1e-4)
    assert float(moved[0].norm()) > 0.1
    torch.testing.assert_close(moved[1], moved[0] * 0.01 / moved[0].norm(), rtol=1e-3, atol=3e-7)


@pytest.mark.usefixtures("_plain_gradient_steps")
def test_masked_tokens_are_counted_over_all_updates() -> None:
    # The weights stay where they are, so that every update of a rollout drops the same tokens.
    layer = {"optimizer": {"learning_rate": 1e-30}, "update": {"steps_per_rollout": 4, "epochs": 2}}
    trainer = Trainer(patchy(layer, steps=2))
    trainer.engine = engine = PatchyEngine(trainer.model)
    assert len(list(trainer.steps())) == 2
    with torch.no_grad():
        found = [token for rollout in engine.rollouts for token in tokens_of(trainer, trainer.model, rollout)]
    dropped = [token for token in found if token.drop] * 2
    table = trainer.masked_tokens()
    assert {row.id: row.count for row in table} == Counter(token.id for token in dropped)
    assert {row.id: row.positive for row in table if row.positive} == Counter(t.id for t in dropped if t.advantage > 0)
    assert {row.id: row.share for row in table} == pytest.approx({row.id: row.count / len(dropped) for row in table})


@pytest.mark.usefixtures("_plain_gradient_steps")
def test_an_update_has_the_gradient_of_its_own_minibatch_alone() -> None:
    norms = []
    for epochs in (1, 3):
        # The weights stay where they are, so that every epoch has the same gradient.
        layer = {"optimizer": {"learning_rate": 1e-30}, "update": {"epochs": epochs}}
        norms += [result.metrics["grad_norm"] for result in Trainer(patchy(layer)).steps()]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def broken_in_step_2(config: Config, fault: str, engine_class: Any = TransformersEngine, hook: Any = None) -> None:
    """The second step ends with a TrainingError and moves nothing."""
    trainer = Trainer(config)
    trainer.engine = engine_class(trainer.model)
    steps = trainer.steps()
    next(steps)
    before, version = weights(trainer.model).clone(), trainer.version
    assert version > 0
    if hook is not None:
        list(trainer.model.parameters())[-1].register_hook(hook)
    with pytest.raises(TrainingError, match=f"{fault} at step 2, optimiser step {version}; nothing was updated"):
        next(steps)
    assert torch.equal(weights(trainer.model), before)
    assert trainer.version == version


def test_a_loss_that_is_not_finite_stops_the_run_and_moves_nothing() -> None:
    layer = {
        "rule": "none",
        "rollout": {"top_k": 0},
        "loss": {"ratio_cap": "none"},
        "optimizer": {"learning_rate": 1e-4},
    }
    broken_in_step_2(patchy(layer, steps=2), "the loss is (nan|inf|-inf)", FaintEngine)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run_and_moves_nothing(value: float) -> None:
    layer = {"optimizer": {"learning_rate": 1e-4}}
    broken_in_step_2(patchy(layer, steps=2), "the gradient is not finite", hook=lambda gradient: gradient * value)


@pytest.mark.parametrize("rule", ["ppo_clip", "none"])
def test_a_mismatch_without_top_k_is_not_taken_for_a_temperature(rule: str) -> None:
    trainer = Trainer(patchy({"rule": rule, "rollout": {"top_k": 0}}))
    trainer.engine = PatchyEngine(trainer.model)
    assert len(list(trainer.steps())) == 1
    assert trainer.agreement is not None
    assert trainer.agreement.mean > trainer.config.mismatch_tolerance
