"""Group-relative advantages: equal groups, unknown rewards, baselines."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask import NoMask, group_advantages, policy_loss, token_weights
from reference import ratios

NAN = math.nan


def advantages(rewards, groups, **options):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), **options)


def test_mean_baseline_in_any_order():
    result = advantages([1.0, 5.0, 0.0, 7.0, 0.0], [3, 9, 3, 9, 3])
    assert result.values.tolist() == pytest.approx([2 / 3, -1.0, -1 / 3, 1.0, -1 / 3])
    assert (result.groups, result.equal_groups, result.scored.all().item()) == (2, 0, True)


def test_leave_one_out_baseline():
    result = advantages([1.0, 0.0, 0.0, 3.0], [0, 0, 0, 1], baseline="leave_one_out")
    assert result.values.tolist() == pytest.approx([1.0, -0.5, -0.5, 0.0])


def test_scale_by_std():
    rewards = [1.0, 0.0, 0.0, 4.0]
    expected = (np.array(rewards) - 1.25) / np.std(rewards, ddof=1)
    assert advantages(rewards, [0] * 4, scale_by_std=True).values.tolist() == pytest.approx(expected.tolist())


def test_integer_rewards():
    assert advantages([1, 0], [0, 0]).values.tolist() == [0.5, -0.5]


@given(
    reward=st.floats(-3, 3) | st.just(0.1),
    size=st.integers(1, 9),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    scale=st.booleans(),
)
def test_equal_rewards_give_exactly_zero(reward, size, baseline, scale):
    """Whatever the rounding of the mean: .1 three times does not sum to .3."""
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=torch.float64)
    result = group_advantages(rewards, torch.tensor([0] * size + [1, 1]), baseline=baseline, scale_by_std=scale)
    assert result.values[:size].tolist() == [0.0] * size
    assert result.values[size:].all()
    assert (result.groups, result.equal_groups) == (2, 1)


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=1, max_size=12),
    data=st.data(),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
)
def test_against_a_loop_over_groups(rewards, data, baseline):
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    result = advantages(rewards, groups, baseline=baseline)
    expected = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        known = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i and r == r]
        base = known if baseline == "mean" else others
        expected.append(reward - np.mean(base) if reward == reward and base else 0.0)
    assert result.values.tolist() == pytest.approx(expected)
    assert result.scored.tolist() == [not math.isnan(r) for r in rewards]
    assert result.groups == len({g for r, g in zip(rewards, groups, strict=True) if r == r})


def test_a_reward_that_cannot_be_scored_is_not_a_wrong_answer():
    """ms-swift 8123: the mean is over the three known rewards, and sample 2 is out of the loss."""
    result = advantages([1.0, NAN, 0.0, 0.0], [0] * 4)
    assert result.values.tolist() == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])
    assert result.scored.tolist() == [True, False, True, True]
    assert token_weights(result.scored, torch.arange(4)).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_nothing_scored_gives_no_gradient():
    """ms-swift 8123: four unknown rewards are counted, and nothing else happens."""
    result = advantages([NAN] * 4, [0, 0, 1, 1])
    assert (~result.scored).sum() == 4
    assert (result.groups, result.equal_groups) == (0, 0)
    decision = NoMask()(*ratios([1.0] * 4), result.values, result.scored)
    logp = torch.zeros(4, requires_grad=True)
    loss = policy_loss(logp, decision, result.values, token_weights(result.scored, torch.arange(4)))
    loss.backward()
    assert loss.item() == 0
    assert logp.grad.tolist() == [0.0] * 4


def test_no_response_at_all():
    result = group_advantages(torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert (result.values.numel(), result.groups, result.equal_groups) == (0, 0, 0)


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match="infinite"):
        advantages([1.0, math.inf], [0, 0])
    with pytest.raises(ValueError, match="median"):
        advantages([1.0, 0.0], [0, 0], baseline="median")
    with pytest.raises(ValueError, match=r"\[B\]"):
        advantages([1.0, 0.0], [0])
    with pytest.raises(ValueError, match=r"\[B\]"):
        advantages([[1.0, 0.0]], [[0, 0]])
