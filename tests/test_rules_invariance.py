"""What changes no decision, what makes a token unknown, and what a decision must not carry."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask import DPPO, RULES, BehaviourSupport, PolicySupport, Reason, policy_loss
from reference import Case, cases, log_softmax, random_case, stack

EVERY_RULE = pytest.mark.parametrize("name", RULES)


def decide(name, case, top=None, top_logp=None):
    """The rule's decision for one token, with the top-K record written as given."""
    logp = log_softmax(case.mu_logits)
    top = case.top if top is None else top
    behaviour = BehaviourSupport.from_topk(
        torch.tensor([case.sampled]),
        torch.tensor([logp[case.sampled]]),
        torch.tensor([top]),
        torch.tensor([[logp[i] for i in top] if top_logp is None else top_logp]),
    )
    policy = PolicySupport.from_logits(torch.tensor(case.pi_logits[None]), behaviour)
    return RULES[name]()(behaviour, policy, torch.tensor([0.5]))


def assert_same(one, other):
    """Equal numbers; equal decisions but where a criterion lies within rounding of its threshold."""
    for field in ("divergence", "rate", "weight"):
        torch.testing.assert_close(getattr(one, field), getattr(other, field), atol=1e-8, rtol=1e-8)
    clear = (one.rate.abs() > 1e-9) & (one.outside == other.outside)
    assert torch.equal(one.reason[clear], other.reason[clear])


@EVERY_RULE
@given(case=cases(), data=st.data())
def test_order_of_the_vocabulary_does_not_matter(name, case, data):
    order = data.draw(st.permutations(range(len(case.mu))))
    moved = Case(case.mu_logits[order], case.pi_logits[order], order.index(case.sampled), case.top_k)
    top = [order.index(i) for i in case.top]
    assert_same(decide(name, case), decide(name, moved, top))


@EVERY_RULE
@given(case=cases(), data=st.data())
def test_order_and_repetition_in_the_record_do_not_matter(name, case, data):
    """The record may be in any order, hold the sampled token or not, once or twice, and be padded."""
    logp = log_softmax(case.mu_logits)
    entries = [(i, logp[i]) for i in case.top]
    extra = [(case.sampled, logp[case.sampled]), (-1, -math.inf), (-1, -0.5), (0, -math.inf), entries[0]]
    entries += data.draw(st.lists(st.sampled_from(extra), max_size=4))
    entries = data.draw(st.permutations(entries))
    changed = decide(name, case, [i for i, _ in entries], [v for _, v in entries])
    assert_same(decide(name, case), changed)


@EVERY_RULE
def test_leading_shape_does_not_matter(name):
    """[B, T] with advantages [B, 1] and a mask decides as [N] does."""
    generator = np.random.default_rng(6)
    tokens = [random_case(generator) for _ in range(12)]
    behaviour, logits = stack(tokens)
    advantage = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)[:, None]
    mask = torch.tensor([True, True, True, False]).repeat(3)
    flat = RULES[name]()(
        behaviour,
        PolicySupport.from_logits(torch.tensor(logits), behaviour),
        advantage.expand(3, 4).reshape(-1),
        mask,
    )
    square = BehaviourSupport.from_topk(
        behaviour.ids[:, 0].view(3, 4),
        behaviour.logp[:, 0].view(3, 4),
        torch.tensor([token.top for token in tokens]).view(3, 4, -1),
        torch.tensor(np.stack([log_softmax(token.mu_logits)[token.top] for token in tokens])).view(3, 4, -1),
    )
    policy = PolicySupport.from_logits(torch.tensor(logits).view(3, 4, -1), square)
    decision = RULES[name]()(square, policy, advantage, mask.view(3, 4))
    for field in ("keep", "divergence", "rate", "outside", "reason", "weight"):
        assert getattr(decision, field).shape == (3, 4)
        assert torch.equal(getattr(decision, field).reshape(-1), getattr(flat, field)), field


BAD = {
    "mu": [math.nan, math.inf, -math.inf],
    "topk": [math.nan, math.inf],
    "sampled_logit": [math.nan, math.inf, -math.inf],
    "other_logit": [math.nan, math.inf],
    "advantage": [math.nan, math.inf, -math.inf],
}


@EVERY_RULE
@pytest.mark.parametrize(("where", "value"), [(where, value) for where in BAD for value in BAD[where]])
def test_what_is_not_finite_makes_its_token_unknown(name, where, value):
    """TRL 6166 and its kind: neither kept nor masked, and no neighbour notices."""
    generator = np.random.default_rng(8)
    tokens = [random_case(generator, size=6, top_k=3) for _ in range(3)]
    clean, logits = stack(tokens, torch.float32)
    logits = torch.tensor(logits, dtype=torch.float32)
    logp, advantage = clean.logp[:, 0].clone(), torch.tensor([1.0, -1.0, 1.0])
    top = torch.tensor([token.top for token in tokens])
    top_logp = torch.tensor(np.stack([log_softmax(token.mu_logits)[token.top] for token in tokens])).float()
    rule = RULES[name]()
    before = rule(clean, PolicySupport.from_logits(logits, clean), advantage)
    other = (tokens[1].sampled + 1) % 6
    target, index = {
        "mu": (logp, 1),
        "topk": (top_logp, (1, 2)),
        "sampled_logit": (logits, (1, tokens[1].sampled)),
        "other_logit": (logits, (1, other)),
        "advantage": (advantage, 1),
    }[where]
    target[index] = value
    behaviour = BehaviourSupport.from_topk(clean.ids[:, 0], logp, top, top_logp)
    decision = rule(behaviour, PolicySupport.from_logits(logits, behaviour), advantage)
    assert decision.reason[1] == Reason.UNKNOWN
    assert not (decision.keep | decision.dropped | decision.outside)[1]
    assert torch.equal(decision.reason[[0, 2]], before.reason[[0, 2]])
    policy_logp = torch.zeros(3, requires_grad=True)
    loss = policy_loss(policy_logp, decision, advantage, torch.ones(3))
    loss.backward()
    assert torch.isfinite(loss)
    assert policy_logp.grad[1] == 0
    masked = rule(behaviour, PolicySupport.from_logits(logits, behaviour), advantage, torch.tensor([True, False, True]))
    assert masked.reason[1] == Reason.NOT_TRAINABLE


@EVERY_RULE
def test_unusable_full_rows_are_unknown(name):
    rows = torch.log_softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), -1)
    rows[1, 2] = math.nan
    rows[2] += 1.0  # not normalised
    behaviour = BehaviourSupport.full(torch.tensor([0, 0, 0]), rows)
    decision = RULES[name]()(behaviour, PolicySupport.from_logits(torch.zeros(3, 5), behaviour), torch.ones(3))
    assert decision.reason.tolist()[1:] == [Reason.UNKNOWN] * 2
    assert decision.reason[0] != Reason.UNKNOWN


@EVERY_RULE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_elsewhere_are_known(name, dtype):
    """A policy that cannot produce some unsampled token is a policy all the same."""
    mu = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=dtype).log()
    ids = torch.tensor([[0, 1, 2]])
    behaviour = BehaviourSupport.from_topk(ids[:, 0], mu[:, 0], ids, mu[:, :3])
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]], dtype=dtype)
    for view in (behaviour, BehaviourSupport.full(ids[:, 0], mu)):
        decision = RULES[name]()(view, PolicySupport.from_logits(logits, view), torch.ones(1))
        assert decision.reason.item() != Reason.UNKNOWN


@EVERY_RULE
def test_huge_ratios_are_known(name):
    """A ratio beyond float32 is outside, not unknown."""
    mu = torch.tensor([[-100.0, math.log(0.7), math.log(0.3)]])
    ids = torch.tensor([[1, 2]])
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), mu[:, 0], ids, mu[:, 1:])
    policy = PolicySupport.from_logits(torch.tensor([[9.0, 0.0, 0.0]]), behaviour)
    decision = RULES[name]()(behaviour, policy, torch.ones(1))
    assert decision.reason.item() not in (Reason.UNKNOWN, Reason.NOT_TRAINABLE)
    assert decision.dropped.item() is RULES[name]().can_fire


@EVERY_RULE
def test_decision_carries_no_gradient(name):
    generator = np.random.default_rng(1)
    behaviour, logits = stack([random_case(generator) for _ in range(5)])
    policy = PolicySupport.from_logits(torch.tensor(logits, requires_grad=True), behaviour)
    advantage = torch.ones(5, dtype=torch.float64, requires_grad=True)
    decision = RULES[name]()(behaviour, policy, advantage)
    assert policy.logp.requires_grad
    assert not any(value.requires_grad for value in vars(decision).values())


@EVERY_RULE
def test_zero_advantage_and_masked_tokens_are_outside_everything(name):
    behaviour, logits = stack([random_case(np.random.default_rng(2), drift=3.0)] * 3)
    policy = PolicySupport.from_logits(torch.tensor(logits), behaviour)
    decision = RULES[name]()(behaviour, policy, torch.tensor([0.0, 1.0, -1.0]), torch.tensor([True, False, True]))
    assert decision.reason[:2].tolist() == [Reason.NOT_TRAINABLE] * 2
    assert decision.trainable.tolist() == [False, False, True]
    assert not decision.keep[:2].any()


def test_tiny_advantages_keep_their_sign():
    """The product of an advantage and a rate must not underflow to 'not outward'."""
    mu, logits = torch.tensor([[0.2, 0.7, 0.1]]).log(), torch.tensor([[0.20002, 0.1, 0.69998]]).log()
    behaviour = BehaviourSupport.full(torch.tensor([0]), mu)
    policy = PolicySupport.from_logits(logits, behaviour)
    assert DPPO()(behaviour, policy, torch.tensor([1e-43])).dropped.item()
    assert DPPO()(behaviour, policy, torch.tensor([-1e-43])).keep.item()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spoiled", [math.nan, math.inf, -math.inf])
def test_a_spoiled_row_of_logits_leaves_the_gradient_alone(name, spoiled):
    """The token is unknown; the other tokens' gradients are those without it, and its own row's is 0."""
    generator = torch.Generator().manual_seed(4)
    engine = torch.randn(3, 9, generator=generator).log_softmax(-1)
    sampled, top = torch.tensor([2, 5, 7]), engine.topk(4)
    behaviour = BehaviourSupport.from_topk(sampled, engine[range(3), sampled], top.indices, top.values)

    def gradient(logits):
        logits = logits.clone().requires_grad_()
        policy = PolicySupport.from_logits(logits, behaviour)
        advantage = torch.tensor([1.0, -1.0, 0.5])
        decision = RULES[name]()(behaviour, policy, advantage)
        policy_loss(policy.logp[:, 0], decision, advantage, torch.ones(3) / 3).backward()
        return decision, logits.grad

    clean = torch.randn(3, 9, generator=generator)
    broken = clean.clone()
    broken[1] = spoiled
    decision, spoiled_gradient = gradient(broken)
    assert Reason(int(decision.reason[1])) is Reason.UNKNOWN
    assert not decision.keep[1]
    assert torch.equal(spoiled_gradient[[0, 2]], gradient(clean)[1][[0, 2]])
    assert not spoiled_gradient[1].any()
