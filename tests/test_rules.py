"""Each rule's mask against its own definition, and what every rule owes."""

import math
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask import (
    CISPO,
    DIVERGENCES,
    DPPO,
    RULES,
    TAILS,
    IcePop,
    NoMask,
    PolicySupport,
    PPOClip,
    Predictive,
    Reason,
)
from reference import cases, random_case, ratios, sampled_only, stack

ADVANTAGES = st.sampled_from([-2.5, -1.0, 0.37, 1.0])
SETTINGS = [
    NoMask(),
    PPOClip(),
    PPOClip(eps_low=0.4, eps_high=0.2, dual_clip=3.0),
    CISPO(),
    CISPO(eps_low=0.3, eps_high=0.4),
    IcePop(),
    IcePop(low=0.8, high=1.3),
    *(DPPO(divergence=d, support=s, delta=x) for d in DIVERGENCES for s, x in (("topk", 0.15), ("binary", 0.05))),
    *(Predictive(divergence=d, tail=t) for d in DIVERGENCES for t in TAILS),
]


def expected_drop(rule, case, advantage):
    """(drop, margin): the published mask in plain arithmetic, and how far it is from being another."""
    ratio = case.pi[case.sampled] / case.mu[case.sampled]
    if isinstance(rule, NoMask | CISPO):
        return False, math.inf
    if isinstance(rule, IcePop):
        return not rule.low <= ratio <= rule.high, min(abs(ratio - rule.low), abs(ratio - rule.high))
    if isinstance(rule, PPOClip):
        low, high, dual = 1 - rule.eps_low, 1 + rule.eps_high, rule.dual_clip or math.inf
        margin = min(abs(ratio - low), abs(ratio - high), abs(ratio - dual))
        return (ratio > high if advantage > 0 else ratio < low or ratio > dual), margin
    if isinstance(rule, DPPO):
        value = getattr(case, f"{rule.support}_divergence")(rule.divergence)
        rate = ratio - 1
    else:
        value, rate = case.topk_divergence(rule.divergence), case.topk_rate(rule.divergence, rule.tail)
        if rule.divergence == "tv" and case.gap() < 1e-3:
            return None, 0.0
    return value > rule.delta and advantage * rate > 0, min(abs(value - rule.delta), abs(rate))


def test_every_rule_is_checked_against_its_definition():
    assert {type(rule) for rule in SETTINGS} == set(RULES.values())
    assert all(RULES[name].name == name for name in RULES)


@pytest.mark.parametrize("rule", SETTINGS, ids=str)
@given(case=cases(), advantage=ADVANTAGES)
def test_mask_is_the_published_one(rule, case, advantage):
    expected, margin = expected_drop(rule, case, advantage)
    if margin < 1e-6:
        return
    decision = rule(*case.supports(), torch.tensor([advantage]))
    assert decision.keep.item() == (not expected)
    assert decision.dropped.item() == expected
    names = {(True, True): "DROPPED_POSITIVE", (True, False): "DROPPED_NEGATIVE"}
    kept = "KEPT_RETURNING" if decision.outside.item() else "KEPT_INSIDE"
    assert Reason(decision.reason.item()).name == names.get((bool(expected), advantage > 0), kept)


@pytest.mark.parametrize("rule", SETTINGS, ids=str)
def test_masks_drop_some_and_keep_some(rule):
    """Unless they say that they cannot."""
    generator = np.random.default_rng(4)
    behaviour, logits = stack([random_case(generator, drift=1.5) for _ in range(400)])
    advantage = torch.tensor(generator.choice([-1.0, 1.0], 400))
    decision = rule(behaviour, PolicySupport.from_logits(torch.tensor(logits), behaviour), advantage)
    assert decision.dropped.any().item() is rule.can_fire
    assert 20 < decision.keep.sum() <= 400


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo_mask_is_where_the_objective_has_no_gradient(dual_clip):
    generator = np.random.default_rng(9)
    ratio, advantage = np.exp(generator.normal(0, 1, 600)), generator.choice([-2.0, -1.0, 0.0, 1.0], 600)
    behaviour, policy = ratios(ratio.tolist())
    decision = PPOClip(dual_clip=dual_clip)(behaviour, policy, torch.tensor(advantage))
    r, a = torch.tensor(ratio, requires_grad=True), torch.tensor(advantage)
    objective = torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    if dual_clip:
        objective = torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)
    objective.sum().backward()
    assert torch.equal(decision.keep, r.grad != 0)
    assert decision.dropped.sum() > 100


def test_ppo_clip_is_one_sided_for_negative_advantages():
    """TRL 3435: a ratio of 8 passes, unless dual clip forbids it."""
    behaviour, policy = ratios([8.0])
    advantage = torch.tensor([-1.0])
    assert PPOClip(eps_low=0.2, eps_high=0.2)(behaviour, policy, advantage).keep.item()
    assert not PPOClip(eps_low=0.2, eps_high=0.2, dual_clip=3)(behaviour, policy, advantage).keep.item()


def test_cispo_weight_is_clipped_and_no_token_is_dropped():
    behaviour, policy = ratios([0.05, 0.6, 0.9, 1.1, 1.5, 40.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    decision = CISPO(eps_low=0.3, eps_high=0.4)(behaviour, policy, advantage)
    assert decision.weight.tolist() == pytest.approx([0.7, 0.7, 0.9, 1.1, 1.4, 1.4])
    assert decision.outside.tolist() == [True, True, False, False, True, True]
    assert decision.keep.all()
    assert CISPO(eps_high=0.4)(behaviour, policy, advantage).weight[:2].tolist() == pytest.approx([0.05, 0.6])


def test_ratio_and_divergence_rules_disagree_where_documented():
    """prime-rl 3135: a rare token's large ratio, and a likely token's large loss of mass."""
    rare, likely = sampled_only([1e-6], [1e-4]), sampled_only([0.95], [0.60])
    up, down = torch.tensor([1.0]), torch.tensor([-1.0])
    binary_tv = DPPO(divergence="tv", support="binary", delta=0.2)
    assert PPOClip()(*rare, up).dropped.item()
    assert binary_tv(*rare, up).keep.item()
    assert binary_tv(*likely, down).dropped.item()
    assert PPOClip(eps_low=0.4)(*likely, down).keep.item()


def test_anchor_is_the_behaviour_policy():
    """SkyRL 1813, verl 4511: mu .2, a recomputed .55, pi .60: the gap is .40, and there is one weight, pi / mu."""
    rule, up = DPPO(divergence="tv", support="binary", delta=0.2), torch.tensor([1.0])
    decision = rule(*sampled_only([0.2], [0.6]), up)
    assert decision.dropped.item()
    assert decision.divergence.item() == pytest.approx(0.4)
    assert decision.weight.item() == pytest.approx(3.0)
    assert rule(*sampled_only([0.55], [0.6]), up).keep.item()
    missing = rule(*sampled_only([math.nan], [0.6]), up)
    assert missing.reason.item() == Reason.UNKNOWN
    assert not missing.keep.item()


@pytest.mark.parametrize("rule", [rule for rule in SETTINGS if rule.needs_topk], ids=str)
def test_topk_rules_refuse_sampled_only_records(rule):
    """SGLang 12418: an engine without top-K gets an error, not a silent binary fall-back."""
    with pytest.raises(ValueError, match="top-K missing"):
        rule(*sampled_only([0.2], [0.6]), torch.tensor([1.0]))


def test_exact_tail_refuses_a_policy_without_it():
    behaviour, policy = random_case(np.random.default_rng(0)).supports()
    blind = PolicySupport(logp=policy.logp, log_tail=policy.log_tail, vocabulary_size=policy.vocabulary_size)
    for rule in SETTINGS:
        if rule.needs_sum_squares:
            with pytest.raises(ValueError, match="exact tail"):
                rule(behaviour, blind, torch.ones(1))
        else:
            assert rule(behaviour, blind, torch.ones(1)).reason.item() != Reason.UNKNOWN


@pytest.mark.parametrize(
    ("rule", "options", "match"),
    [
        (PPOClip, {"eps_low": 0.0}, "eps_low"),
        (PPOClip, {"eps_low": 1.5}, "below 0"),
        (PPOClip, {"eps_high": math.nan}, "eps_high"),
        (PPOClip, {"dual_clip": 1.1}, "dual_clip"),
        (CISPO, {"eps_low": 2.0}, "eps_low"),
        (CISPO, {"eps_high": -0.1}, "eps_high"),
        (IcePop, {"low": 1.5}, "between"),
        (IcePop, {"high": math.inf}, "high"),
        (DPPO, {"delta": 0.0}, "delta"),
        (DPPO, {"divergence": "l2"}, "l2"),
        (DPPO, {"support": "full"}, "support"),
        (Predictive, {"delta": -1.0}, "delta"),
        (Predictive, {"divergence": "l2"}, "l2"),
        (Predictive, {"tail": "flat"}, "flat"),
    ],
)
def test_settings_are_checked(rule, options, match):
    with pytest.raises(ValueError, match=match):
        rule(**options)


@pytest.mark.parametrize("name", RULES)
def test_rules_are_frozen_keyword_only_and_documented(name):
    rule = RULES[name]()
    for field in fields(rule):
        with pytest.raises(FrozenInstanceError):
            setattr(rule, field.name, 1.0)
    with pytest.raises(TypeError):
        RULES[name](0.1)
    assert rule.__doc__
    assert rule.summary
    assert rule.source


def test_threshold_above_the_largest_value_cannot_fire():
    assert not DPPO(divergence="tv", delta=1.0).can_fire
    assert not Predictive(divergence="js", delta=0.7).can_fire
    assert DPPO(divergence="tv", delta=0.99).can_fire
    assert Predictive(divergence="js", delta=0.69).can_fire
    assert DPPO(divergence="kl", delta=50.0).can_fire
