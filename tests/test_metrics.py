"""Figures of a mask: over valid tokens only, by sign, absent without tokens, and the same for any split."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask import (
    DPPO,
    RULES,
    BehaviourSupport,
    MaskedToken,
    Metrics,
    NoMask,
    PolicySupport,
    PPOClip,
    mask_metrics,
    masked_tokens,
    merge_masked_tokens,
    policy_loss,
    token_weights,
)
from reference import log_softmax, random_case, ratios, sampled_only, stack


def figures(rule, supports, advantage, mask=None, staleness=None):
    """The rule's computed metrics."""
    decision = rule(*supports, torch.tensor(advantage), mask)
    return mask_metrics(*supports, decision, staleness=staleness).compute()


def test_mask_fraction_by_the_sign_of_the_advantage():
    """TRL 3144, 3032: clipped high 1/5, low 1/5, total 2/5; the token with A = 0 is a token."""
    result = figures(PPOClip(), ratios([1.5, 1.5, 0.5, 0.5, 1.5]), [1.0, -1.0, 1.0, -1.0, 0.0])
    assert result["mask_frac_pos"] == pytest.approx(1 / 5)
    assert result["mask_frac_neg"] == pytest.approx(1 / 5)
    assert result["mask_frac"] == pytest.approx(2 / 5)


def test_mask_fraction_is_over_valid_tokens():
    """RLinf 1529: both tokens are clipped, and two pad positions change nothing."""
    mask = torch.tensor([True, True, False, False])
    result = figures(PPOClip(eps_high=0.2), ratios([0.1, 5.0, 1.0, 1.0]), [-1.0, 1.0, 1.0, 1.0], mask)
    assert result["mask_frac"] == 1.0
    assert result["divergence_masked_max"] == pytest.approx(4.0)
    assert result["divergence_masked_mean"] == pytest.approx((4.0 + 0.9) / 2)
    assert "divergence_kept_mean" not in result


def test_unknown_log_prob_is_not_probability_one():
    """TRL 6166: ratios 1 and 1, mismatch over two tokens 0, one unknown, in no mean."""
    behaviour = BehaviourSupport.from_topk(torch.zeros(3, dtype=torch.int64), torch.tensor([-0.2, math.nan, -1.1]))
    p = torch.tensor([-0.2, -0.9, -1.1]).exp()
    policy = PolicySupport.from_logits(torch.stack([p.log(), (1 - p).log()], -1), behaviour)
    for name in ("none", "ppo_clip", "cispo", "icepop"):
        decision = RULES[name]()(behaviour, policy, torch.ones(3))
        assert decision.keep.tolist() == [True, False, True]
        assert decision.weight[[0, 2]].tolist() == pytest.approx([1.0, 1.0])
        metrics = mask_metrics(behaviour, policy, decision)
        assert metrics.means["mismatch_kl"] == pytest.approx((0.0, 2), abs=1e-6)
        assert metrics.means["mask_frac"] == (0.0, 2)
        assert metrics.compute()["unknown_logprob_count"] == 1


def test_unknown_topk_spoils_no_mean():
    """Neither where the rule reads the sampled token alone, nor where it did not look at the token."""
    behaviour = BehaviourSupport.from_topk(
        torch.tensor([0, 0]),
        torch.tensor([-1.0, -1.0]),
        torch.tensor([[1], [1]]),
        torch.tensor([[-1.0], [math.nan]]),
    )
    policy = PolicySupport.from_logits(torch.zeros(2, 3), behaviour)
    for mask, unknown in ((None, 1), (torch.tensor([True, False]), 0)):
        decision = PPOClip()(behaviour, policy, torch.ones(2), mask)
        result = mask_metrics(behaviour, policy, decision)
        assert result.means["behaviour_kl"][1] == 1
        assert all(math.isfinite(value) for value in result.compute().values())
        assert result.compute()["unknown_logprob_count"] == unknown


def test_which_tokens_are_hit():
    """prime-rl 3236, 3244: 2 of 100 tokens are masked, both the same id with A > 0."""
    ids = torch.arange(100)
    ids[[20, 70]] = 17
    ids[17] = 999
    ratio = [1.0] * 100
    ratio[20] = ratio[70] = 3.0
    decision = PPOClip()(*ratios(ratio), torch.ones(100))
    assert masked_tokens(decision, ids) == [MaskedToken(id=17, count=2, share=1.0, positive=2, negative=0)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hit_tokens_are_sorted_by_count_then_id(dtype):
    decision = PPOClip()(
        *ratios([3.0, 3.0, 0.1, 3.0, 0.1, 1.0, 0.1]), torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    )
    table = masked_tokens(decision, torch.tensor([8, 5, 8, 5, 2, 2, 2], dtype=dtype))
    assert [(row.id, row.count, row.positive, row.negative) for row in table] == [
        (5, 2, 2, 0),
        (8, 2, 1, 1),
        (2, 1, 0, 1),
    ]
    assert [row.share for row in table] == pytest.approx([0.4, 0.4, 0.2])
    parts = [
        masked_tokens(
            replace(decision, reason=decision.reason.where(torch.arange(7) % 2 == half, 0)),
            torch.tensor([8, 5, 8, 5, 2, 2, 2]),
        )
        for half in (0, 1)
    ]
    assert merge_masked_tokens(*parts) == table
    assert merge_masked_tokens() == []
    assert masked_tokens(replace(decision, reason=torch.zeros_like(decision.reason)), torch.zeros(7).long()) == []


def test_tokens_that_the_policy_did_not_sample_are_in_no_number():
    """SkyRL 758: an appended end with a placeholder log-prob of 0, and worse placeholders."""
    generator = np.random.default_rng(21)
    tokens = [random_case(generator, size=7, top_k=3, drift=2.0) for _ in range(3)]
    behaviour, logits = stack(tokens)
    advantage, sequence = torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3, dtype=torch.int64)
    mask, staleness = torch.tensor([True, True, False]), torch.tensor([1, 2, 50])

    def numbers(behaviour, count, name):
        scores = torch.tensor(logits[:count], requires_grad=True)
        policy = PolicySupport.from_logits(scores, behaviour)
        decision = RULES[name]()(behaviour, policy, advantage[:count], mask[:count])
        metrics = mask_metrics(behaviour, policy, decision, staleness=staleness[:count])
        losses = []
        for aggregation in ("token_mean", "seq_mean_token_mean"):
            weights = token_weights(mask[:count], sequence[:count], aggregation)
            losses.append(policy_loss(policy.logp[:, 0], decision, advantage[:count], weights))
        sum(losses).backward()
        hits = masked_tokens(decision, behaviour.ids[:, 0])
        return metrics.compute(), [loss.item() for loss in losses], scores.grad[:2].tolist(), hits

    top = torch.tensor([token.top for token in tokens])
    top_logp = torch.tensor(np.stack([log_softmax(token.mu_logits)[token.top] for token in tokens]))
    for placeholder in (0.0, math.nan, -math.inf):
        logp = behaviour.logp[:, 0].clone()
        logp[2], top_logp[2] = placeholder, placeholder
        three = BehaviourSupport.from_topk(behaviour.ids[:, 0], logp, top, top_logp)
        two = BehaviourSupport.from_topk(behaviour.ids[:2, 0], logp[:2], top[:2], top_logp[:2])
        for name in RULES:
            assert numbers(three, 3, name) == numbers(two, 2, name)


def test_staleness_of_mixed_policy_versions():
    """slime 1800: versions 3, 3, 4, 5 with the trainer at 5."""
    staleness = 5 - torch.tensor([3, 3, 4, 5])
    result = figures(NoMask(), ratios([1.5, 1.5, 1.5, 1.1]), [1.0] * 4, staleness=staleness)
    assert result["staleness_mean"] == 1.25
    assert result["staleness_max"] == 2
    assert result["mismatch_kl"] == pytest.approx(0.1 - math.log(1.1))


@pytest.mark.parametrize("name", ["none", "ppo_clip", "icepop"])
def test_a_metric_without_tokens_is_absent(name):
    """unsloth-zoo 1286: absent, not 0."""
    result = figures(RULES[name](), ratios([1.0, 1.0]), [1.0, 1.0], torch.tensor([False, False]), torch.zeros(2))
    assert result == {"unknown_logprob_count": 0.0, "overflow_count": 0.0}


def test_overflowing_ratios_are_counted_and_stay_out_of_the_mismatch():
    behaviour = BehaviourSupport.from_topk(torch.tensor([0, 0]), torch.tensor([-100.0, math.log(0.4)]))
    policy = PolicySupport.from_logits(torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), behaviour)
    result = figures(PPOClip(), (behaviour, policy), [1.0, 1.0])
    assert result["overflow_count"] == 1
    assert result["mismatch_kl"] == pytest.approx(0.25 - math.log(1.25))
    assert result["mask_frac"] == 0.5


def test_values_against_plain_arithmetic():
    mu, pi, advantage = [0.5, 0.9, 0.2, 0.4], [0.7, 0.2, 0.3, 0.1], [1.0, 1.0, -1.0, -1.0]
    rule = DPPO(divergence="tv", support="binary", delta=0.15)
    result = figures(rule, sampled_only(mu, pi), advantage)
    # Gaps .2, .7, .1, .3: outside but for the third; outward are the first (up, A > 0) and the last (down, A < 0).
    assert result["mask_frac"] == 0.5
    assert (result["mask_frac_pos"], result["mask_frac_neg"]) == (0.25, 0.25)
    assert result["divergence_masked_mean"] == pytest.approx(0.25)
    assert result["divergence_masked_max"] == pytest.approx(0.3)
    assert result["divergence_kept_mean"] == pytest.approx(0.4)
    assert result["divergence_kept_max"] == pytest.approx(0.7)
    r = np.array(pi) / np.array(mu)
    assert result["mismatch_kl"] == pytest.approx((r - 1 - np.log(r)).mean())
    pairs = [np.array([[m, 1 - m], [p, 1 - p]]) for m, p in zip(mu, pi, strict=True)]
    assert result["behaviour_kl"] == pytest.approx(np.mean([(a * np.log(a / b)).sum() for a, b in pairs]))
    assert result["entropy"] == pytest.approx(np.mean([-(b * np.log(b)).sum() for _, b in pairs]))


@pytest.mark.parametrize("name", RULES)
@given(cuts=st.lists(st.integers(0, 60), max_size=5), seed=st.integers(0, 99))
def test_any_split_merges_to_the_figures_of_the_whole(name, cuts, seed):
    generator = np.random.default_rng(seed)
    behaviour, logits = stack([random_case(generator, size=6, top_k=2, drift=2.0) for _ in range(60)])
    logp = behaviour.logp[:, 0].clone()
    logp[torch.tensor(generator.uniform(size=60) < 0.1)] = math.nan
    behaviour = BehaviourSupport.from_topk(behaviour.ids[:, 0], logp, behaviour.ids[:, 1:], behaviour.logp[:, 1:])
    advantage = torch.tensor(generator.choice([-1.0, 0.0, 1.0], 60))
    mask = torch.tensor(generator.uniform(size=60) < 0.7)
    staleness = torch.tensor(generator.integers(0, 3, 60))

    def part(index):
        fields = {field: getattr(behaviour, field)[index] for field in ("ids", "valid", "logp", "log_tail", "log_kth")}
        some = BehaviourSupport(**fields, top_k=behaviour.top_k)
        policy = PolicySupport.from_logits(torch.tensor(logits[index]), some)
        decision = RULES[name]()(some, policy, advantage[index], mask[index])
        return mask_metrics(some, policy, decision, staleness=staleness[index])

    order = generator.permutation(60)
    edges = [0, *sorted(cuts), 60]
    merged = Metrics()
    for a, b in pairwise(edges):
        merged = merged.merge(part(order[a:b]))
    whole = part(np.arange(60)).compute()
    assert merged.compute() == pytest.approx(whole)
    assert whole["unknown_logprob_count"] == (mask & torch.isnan(logp)).sum()


def test_merging_leaves_the_parts_alone():
    one, other = Metrics(), Metrics()
    one.mean("a", torch.tensor([1.0]))
    other.mean("a", torch.tensor([2.0, 6.0]))
    other.maximum("m", torch.tensor([-3.0, -4.0]))
    other.total("t", 2.0)
    assert one.merge(other).compute() == {"a": 3.0, "m": -3.0, "t": 2.0}
    assert one.merge(other).merge(other).compute() == {"a": 3.4, "m": -3.0, "t": 4.0}
    assert one.compute() == {"a": 1.0}
    assert other.compute() == {"a": 4.0, "m": -3.0, "t": 2.0}


def test_metrics_take_no_gradient():
    behaviour, logits = stack([random_case(np.random.default_rng(0)) for _ in range(4)])
    policy = PolicySupport.from_logits(torch.tensor(logits, requires_grad=True), behaviour)
    decision = DPPO()(behaviour, policy, torch.ones(4))
    assert all(isinstance(value, float) for value in mask_metrics(behaviour, policy, decision).compute().values())
