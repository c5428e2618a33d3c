"""The loss, its gradient, and its denominators: whatever the split, the padding and the masks."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask import (
    CISPO,
    DPPO,
    RULES,
    BehaviourSupport,
    NoMask,
    PolicySupport,
    PPOClip,
    Predictive,
    group_advantages,
    policy_loss,
    token_weights,
)
from reference import random_case, ratios, stack

AGGREGATIONS = {"token_mean": None, "seq_mean_token_mean": None, "seq_mean_token_sum_norm": 16}


def losses(per_token, counted, sequence, **options):
    """The loss of tokens whose own loss is given: ratio 1, advantage minus the loss."""
    counted, sequence = torch.tensor(counted), torch.tensor(sequence)
    advantage = -torch.tensor(per_token)
    decision = NoMask()(*ratios([1.0] * len(per_token)), advantage, counted)
    weights = token_weights(counted, sequence, **options)
    return policy_loss(torch.zeros(len(per_token)), decision, advantage, weights).item()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_gradient_is_the_capped_importance_weighted_policy_gradient(name, cap):
    """d loss / d logits = -weight · keep · min(r, C) · A · (e_k - pi) on each token."""
    generator = np.random.default_rng(12)
    tokens = [random_case(generator, size=8) for _ in range(40)]
    behaviour, logits = stack(tokens)
    logits = torch.tensor(logits, requires_grad=True)
    advantage = torch.tensor(generator.normal(0, 1, 40))
    policy = PolicySupport.from_logits(logits, behaviour)
    decision = RULES[name]()(behaviour, policy, advantage)
    weights = torch.tensor(generator.uniform(0, 1, 40))
    loss = policy_loss(policy.logp[:, 0], decision, advantage, weights, ratio_cap=cap)
    loss.backward()
    ratio = np.array([t.pi[t.sampled] / t.mu[t.sampled] for t in tokens])
    if name == "cispo":
        ratio = ratio.clip(0.0, 1.2)
    coefficient = (weights * advantage * decision.keep).numpy() * np.minimum(ratio, cap or math.inf)
    expected = -coefficient[:, None] * np.stack([t.step for t in tokens])
    assert np.abs(logits.grad.numpy() - expected).max() < 1e-12
    assert loss.item() == pytest.approx(-coefficient.sum())
    assert decision.keep.sum() > 10


def test_large_ratio_with_negative_advantage_and_the_cap():
    """TRL 3435: A = -1, r = 8: the objective is -8, and -3 with a ratio cap of 3."""
    advantage, weights = torch.tensor([-1.0]), torch.ones(1)
    decision = PPOClip(eps_low=0.2, eps_high=0.2)(*ratios([8.0]), advantage)
    assert -policy_loss(torch.zeros(1), decision, advantage, weights).item() == pytest.approx(-8)
    assert -policy_loss(torch.zeros(1), decision, advantage, weights, ratio_cap=3).item() == pytest.approx(-3)


def test_no_gradient_reaches_the_advantage():
    advantage = torch.tensor([-1.0], requires_grad=True)
    decision = NoMask()(*ratios([2.0]), advantage)
    policy_loss(torch.zeros(1, requires_grad=True), decision, advantage, torch.ones(1)).backward()
    assert advantage.grad is None


def test_cap_is_checked():
    decision = NoMask()(*ratios([1.0]), torch.ones(1))
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="ratio_cap"):
            policy_loss(torch.zeros(1), decision, torch.ones(1), torch.ones(1), ratio_cap=cap)


def test_cispo_weight_reaches_the_loss():
    advantage = torch.tensor([1.0])
    decision = CISPO(eps_high=0.2)(*ratios([4.0]), advantage)
    logp = torch.zeros(1, requires_grad=True)
    policy_loss(logp, decision, advantage, torch.ones(1)).backward()
    assert logp.grad.item() == pytest.approx(-1.2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    seed=st.integers(0, 999),
)
def test_any_split_gives_the_loss_and_gradient_of_the_whole(aggregation, lengths, cuts, seed):
    """verl 5625, open-instruct 1161: one denominator, that of the global batch."""
    generator = np.random.default_rng(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    count = len(sequence)
    ratio = np.exp(generator.normal(0, 0.5, count)).tolist()
    advantage = torch.tensor(generator.normal(0, 1, count))
    counted = torch.tensor(generator.uniform(size=count) < 0.8)
    weights = token_weights(counted, sequence, aggregation, horizon=AGGREGATIONS[aggregation])

    def run(parts):
        logp = torch.zeros(count, dtype=torch.float64, requires_grad=True)
        total = 0.0
        for part in parts:
            behaviour, policy = ratios([ratio[i] for i in part])
            decision = PPOClip()(behaviour, policy, advantage[part], counted[part])
            loss = policy_loss(logp[part], decision, advantage[part], weights[part])
            loss.backward()
            total += loss.item()
        return total, logp.grad

    edges = [0, *sorted(cut % count for cut in cuts), count]
    order = generator.permutation(count)
    parts = [order[a:b].tolist() for a, b in pairwise(edges) if b > a]
    whole, split = run([list(range(count))]), run(parts)
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(split[1], whole[1])


def test_one_denominator_for_short_and_long_responses():
    """verl 5625: 2 tokens of loss 1 and 8 tokens of loss 3."""
    per_token, sequence = [1.0] * 2 + [3.0] * 8, [0] * 2 + [1] * 8
    everything = [True] * 10
    assert losses(per_token, everything, sequence) == pytest.approx(2.6)
    assert losses(per_token, everything, sequence, aggregation="seq_mean_token_mean") == pytest.approx(2.0)
    options = {"aggregation": "seq_mean_token_sum_norm", "horizon": 16}
    assert losses(per_token, everything, sequence, **options) == pytest.approx((2 + 24) / (2 * 16))


@pytest.mark.parametrize(("aggregation", "denominator"), [("token_mean", 10), ("seq_mean_token_mean", 2)])
def test_denominator_of_several_processes(aggregation, denominator):
    """Each process gives the global count, and the sum over processes is the loss of the whole."""
    options = {"aggregation": aggregation}
    whole = losses([1.0] * 2 + [3.0] * 8, [True] * 10, [0] * 2 + [1] * 8, **options)
    first = losses([1.0] * 2, [True] * 2, [0] * 2, **options, denominator=denominator)
    second = losses([3.0] * 8, [True] * 8, [0] * 8, **options, denominator=denominator)
    assert first + second == pytest.approx(whole)


def test_equal_groups_in_the_denominator_are_a_choice():
    """TRL 6365: two groups of 2 x 5 tokens, the second with equal rewards: .5 or 1.0, by what is counted."""
    result = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert (result.equal_groups, result.groups) == (1, 2)
    sequence = torch.arange(4).repeat_interleave(5)
    teaches = (result.values != 0)[sequence]
    per_token = teaches.float().tolist()
    assert losses(per_token, [True] * 20, sequence.tolist()) == pytest.approx(0.5)
    assert losses(per_token, teaches.tolist(), sequence.tolist()) == pytest.approx(1.0)


@pytest.mark.parametrize("counts", [(10, 10, 10, 10), (4, 16, 10, 10), (1, 9, 29, 1)])
def test_each_optimiser_step_has_its_own_denominator(counts):
    """TRL 5619: 40 generated tokens in 4 micro-steps, two optimiser steps: each step's loss is 1.0."""
    for micro in (counts[:2], counts[2:]):
        weights = token_weights(torch.ones(sum(micro), dtype=torch.bool), torch.zeros(sum(micro), dtype=torch.int64))
        total = 0.0
        for part in weights.split(list(micro)):
            advantage = -torch.ones(len(part))
            decision = NoMask()(*ratios([1.0] * len(part)), advantage)
            total += policy_loss(torch.zeros(len(part)), decision, advantage, part).item()
        assert total == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_masked_truncated_completions_leave_the_denominator(aggregation):
    """TRL 6369: 6 tokens finished, 4 truncated and masked, loss 1: 1.0, not .6."""
    counted, sequence = [True] * 6 + [False] * 4, [0] * 6 + [1] * 4
    assert losses([1.0] * 10, counted, sequence, aggregation=aggregation) == pytest.approx(1.0)


def test_constant_horizon_ignores_padding():
    """verl 3741: padding to 10 or to 16 gives the same loss."""
    results = []
    for padded in (10, 16):
        lengths = [3, 7]
        counted = [t < n for n in lengths for t in range(padded)]
        sequence = [i for i in range(2) for _ in range(padded)]
        per_token = [float(c) for c in counted]
        results.append(losses(per_token, counted, sequence, aggregation="seq_mean_token_sum_norm", horizon=12))
    assert results == pytest.approx([10 / (2 * 12)] * 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("why", ["padding", "rule", "unknown", "advantage"])
def test_everything_masked(aggregation, why):
    """unsloth-zoo 1286: loss 0, still connected, gradient 0, no NaN."""
    ratio = {"rule": 3.0, "unknown": math.nan}.get(why, 1.0)
    advantage = torch.full((3,), 0.0 if why == "advantage" else 1.0)
    counted = torch.full((3,), why == "rule")
    decision = PPOClip()(*ratios([ratio] * 3), advantage, counted if why == "padding" else None)
    weights = token_weights(counted, torch.arange(3), aggregation, horizon=AGGREGATIONS[aggregation])
    logp = torch.full((3,), math.nan if why == "unknown" else -1.0, requires_grad=True)
    loss = policy_loss(logp, decision, advantage, weights)
    loss.backward()
    assert loss.item() == 0
    assert logp.grad.tolist() == [0.0] * 3


def test_masked_tokens_count_in_the_denominator():
    """A dropped token is a token of the batch: the mask changes the sum, not the mean's length."""
    advantage = torch.tensor([1.0, 1.0])
    decision = PPOClip()(*ratios([3.0, 1.0]), advantage)
    weights = token_weights(decision.trainable, torch.zeros(2, dtype=torch.int64))
    assert policy_loss(torch.zeros(2), decision, advantage, weights).item() == pytest.approx(-0.5)


def test_weights_of_each_token():
    counted = torch.tensor([True, True, True, True, False, False])
    sequence = torch.tensor([7, 7, 7, 2, 5, 2])
    assert token_weights(counted, sequence).tolist() == pytest.approx([1 / 4] * 4 + [0, 0])
    by_sequence = token_weights(counted, sequence, "seq_mean_token_mean")
    assert by_sequence.tolist() == pytest.approx([1 / 6] * 3 + [1 / 2, 0, 0])
    by_horizon = token_weights(counted, sequence, "seq_mean_token_sum_norm", horizon=10)
    assert by_horizon.tolist() == pytest.approx([1 / 20] * 4 + [0, 0])


def test_weight_settings_are_checked():
    counted, sequence = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="token_mean, seq_mean_token_mean"):
        token_weights(counted, sequence, "mean")
    for horizon in (None, 0):
        with pytest.raises(ValueError, match="horizon"):
            token_weights(counted, sequence, "seq_mean_token_sum_norm", horizon=horizon)
    for denominator in (0.0, -1.0):
        with pytest.raises(ValueError, match="denominator"):
            token_weights(counted, sequence, denominator=denominator)


def test_dropped_tokens_have_no_gradient():
    generator = np.random.default_rng(13)
    behaviour, logits = stack([random_case(generator, drift=2.0) for _ in range(60)])
    advantage = torch.tensor(generator.choice([-1.0, 1.0], 60))
    for rule in (DPPO(), Predictive()):
        scores = torch.tensor(logits, requires_grad=True)
        policy = PolicySupport.from_logits(scores, behaviour)
        decision = rule(behaviour, policy, advantage)
        policy_loss(policy.logp[:, 0], decision, advantage, torch.ones(60)).backward()
        assert torch.equal(scores.grad.abs().sum(-1) > 0, decision.keep)
        assert decision.dropped.any()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_padded_batches_weigh_like_flat_ones(aggregation: Any) -> None:
    counted = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    sequence = torch.arange(3)[:, None].expand(3, 4)
    padded = token_weights(counted, sequence, aggregation, horizon=4)
    flat = token_weights(counted[counted], sequence[counted], aggregation, horizon=4)
    assert torch.equal(padded[counted], flat)
    assert not padded[~counted].any()


def test_advantages_of_sequences_do_not_stretch_along_tokens() -> None:
    logp = torch.zeros(3, 3)
    support = BehaviourSupport.from_topk(torch.zeros(3, 3, dtype=torch.int64), logp - 1)
    policy = PolicySupport.from_logits(torch.zeros(3, 3, 4), support)
    with pytest.raises(ValueError, match=r"advantage\[:, None\]"):
        PPOClip()(support, policy, torch.ones(3))
    decision = PPOClip()(support, policy, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"advantage\[:, None\]"):
        policy_loss(logp, decision, torch.ones(3), torch.ones(3, 3))
