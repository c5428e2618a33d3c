"""Values and gradients of the divergences, on the full vocabulary, the top-K view and the binary view."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from predmask import DIVERGENCES, BehaviourSupport, PolicySupport, get_divergence
from reference import DIVERGENCE, cases, random_case, slope, softmax

ALL = pytest.mark.parametrize("name", DIVERGENCES)


def record(mu, pi, top_k, dtype=torch.float64):
    """Supports of one token, the likeliest, from probabilities in falling order."""
    logp = torch.tensor([mu], dtype=dtype).log()
    ids = torch.arange(top_k)[None]
    behaviour = BehaviourSupport.from_topk(ids[:, 0], logp[:, 0], ids, logp[:, :top_k])
    return behaviour, PolicySupport.from_logits(torch.tensor([pi], dtype=dtype).log(), behaviour)


def test_every_divergence_has_a_reference():
    assert set(DIVERGENCE) == set(DIVERGENCES)
    with pytest.raises(ValueError, match="kl, reverse_kl, tv, js"):
        get_divergence("hellinger")


@ALL
@given(case=cases())
def test_values(name, case):
    divergence = get_divergence(name)
    behaviour, policy = case.supports()
    assert divergence(*case.full()).item() == pytest.approx(DIVERGENCE[name](case.mu, case.pi), abs=1e-8)
    assert divergence(behaviour, policy).item() == pytest.approx(case.topk_divergence(name), abs=1e-8)
    binary = divergence(behaviour.binary(), policy.binary()).item()
    assert binary == pytest.approx(case.binary_divergence(name), abs=1e-8)


@ALL
@given(case=cases())
def test_fewer_categories_never_see_more(name, case):
    """Data processing: 0 <= binary <= top-K <= full <= the stated bound."""
    divergence = get_divergence(name)
    behaviour, policy = case.supports()
    binary = divergence(behaviour.binary(), policy.binary()).item()
    topk, full = divergence(behaviour, policy).item(), divergence(*case.full()).item()
    assert 0 <= binary <= topk + 1e-8
    assert topk <= full + 1e-8
    assert full <= divergence.upper_bound + 1e-8


@ALL
@given(case=cases())
def test_equal_policies_diverge_by_nothing(name, case):
    behaviour, _ = case.supports(torch.float32)
    same = PolicySupport.from_logits(torch.tensor(case.mu_logits[None], dtype=torch.float32), behaviour)
    assert 0 <= get_divergence(name)(behaviour, same).item() < 1e-5


@ALL
def test_bound_is_reached_or_infinite(name):
    divergence = get_divergence(name)
    value = divergence(*record([1 - 1e-12, 1e-12], [1e-12, 1 - 1e-12], 2)).item()
    expected = {"tv": 1.0, "js": math.log(2)}.get(name)
    assert value == pytest.approx(expected, abs=1e-9) if expected else value > 25
    assert divergence.upper_bound == (expected or math.inf)


def test_topk_kl_needs_the_tail():
    """verl 7856: the truncated sum is negative, with the tail bucket it is a divergence."""
    behaviour, policy = record([0.6, 0.1, 0.3], [0.7, 0.2, 0.1], 2)
    truncated = 0.6 * math.log(0.6 / 0.7) + 0.1 * math.log(0.1 / 0.2)
    assert truncated == pytest.approx(-0.162, abs=1e-3)
    assert get_divergence("kl")(behaviour, policy).item() == pytest.approx(0.168, abs=1e-3)
    assert get_divergence("tv")(behaviour, policy).item() == pytest.approx(0.20)


def test_topk_view_is_a_lower_bound():
    """verl 7856: what moves inside the tail is not seen."""
    mu, pi = [0.5, 0.2, 0.1, 0.1, 0.1], [0.5, 0.2, 0.1, 0.0, 0.2]
    behaviour, policy = record(mu, pi, 3)
    assert get_divergence("tv")(behaviour, policy).item() == pytest.approx(0, abs=1e-12)
    assert get_divergence("tv")(*record(mu, pi, 5)).item() == pytest.approx(0.1)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_weigh_nothing_where_neither_policy_goes(name, dtype):
    """0·log 0 = 0 in value and in gradient."""
    mu = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=dtype).log()
    logits = torch.tensor([[1.0, 0.0, 0.0, -math.inf]], dtype=dtype, requires_grad=True)
    behaviour = BehaviourSupport.full(torch.tensor([1]), mu)
    value = get_divergence(name)(behaviour, PolicySupport.from_logits(logits, behaviour))
    three = np.array([0.5, 0.25, 0.25])
    assert value.item() == pytest.approx(DIVERGENCE[name](three, softmax(np.array([1.0, 0, 0]))), abs=1e-6)
    value.sum().backward()
    expected = [
        slope(lambda h, e=e: DIVERGENCE[name](three, softmax(np.array([1.0, 0, 0]) + h * e))) for e in np.eye(3)
    ]
    assert logits.grad[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-5)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("mu", "pi"),
    [([0.6, 0.4, 0.0], [0.6, 0.0, 0.4]), ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]), ([0.5, 0.0, 0.5], [0.0, 0.5, 0.5])],
)
def test_one_sided_zeros_stay_finite_with_their_gradient(name, dtype, mu, pi):
    logits = torch.tensor([pi], dtype=dtype).log().requires_grad_()
    behaviour = BehaviourSupport.full(torch.tensor([0]), torch.tensor([mu], dtype=dtype).log())
    value = get_divergence(name)(behaviour, PolicySupport.from_logits(logits, behaviour))
    assert value.item() > 0.1
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logits.grad).all()


@ALL
def test_full_support_gradient(name):
    """Autograd through a divergence, against finite differences."""
    case = random_case(np.random.default_rng(5), size=6)
    logits = torch.tensor(case.pi_logits[None], requires_grad=True)
    behaviour, _ = case.full()
    get_divergence(name)(behaviour, PolicySupport.from_logits(logits, behaviour)).sum().backward()
    expected = [
        slope(lambda h, e=e: DIVERGENCE[name](case.mu, softmax(case.pi_logits + h * e))) for e in np.eye(len(case.mu))
    ]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-8)


@ALL
def test_nan_is_not_swallowed(name):
    behaviour, policy = record([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], 2)
    spoilt = BehaviourSupport.from_topk(
        behaviour.ids[:, 0], behaviour.logp[:, 0], behaviour.ids[:, 1:], torch.tensor([[-1.0, math.nan]]).double()
    )
    assert torch.isfinite(get_divergence(name)(behaviour, policy)).all()
    assert torch.isnan(get_divergence(name)(spoilt, policy)).all()
    too_much, policy = record([0.9, 0.8], [0.5, 0.5], 2)
    assert torch.isnan(get_divergence(name)(too_much, policy)).all()


@ALL
def test_likely_tokens_in_float32(name):
    """Tails of 1e-6 against 1e-3, as a near-certain token has them."""
    mu, pi = np.array([1 - 1e-6, 1e-6]), np.array([1 - 1e-3, 1e-3])
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([math.log1p(-1e-6)]))
    logits = torch.tensor([[0.0, math.log(1e-3 / (1 - 1e-3))]])
    value = get_divergence(name)(behaviour, PolicySupport.from_logits(logits, behaviour)).item()
    assert value == pytest.approx(DIVERGENCE[name](mu, pi), rel=1e-3)


@ALL
@pytest.mark.parametrize("mu_tail", [0.0, 1e-12, 1e-8, 1e-7, 1e-6])
@pytest.mark.parametrize("pi_tail", [0.0, 1e-9, 1e-5, 1e-3, 3e-3])
def test_tails_below_the_rounding_of_their_sum_stay_a_lower_bound(name, mu_tail, pi_tail):
    """In float32 one minus the rest is nothing below 1e-7; that must not read as an infinite divergence."""
    size, top_k = 60, 20
    shares = np.full(size - top_k, 1 / (size - top_k))
    head = np.linspace(3, 1, top_k) / np.linspace(3, 1, top_k).sum()
    mu = np.concatenate([head * (1 - mu_tail), shares * mu_tail])
    pi = np.concatenate([head * (1 - pi_tail), shares * pi_tail])
    narrow = get_divergence(name)(*record(mu.tolist(), pi.tolist(), top_k, dtype=torch.float32)).item()
    if mu_tail or name != "reverse_kl":
        assert narrow <= DIVERGENCE[name](np.maximum(mu, 1e-300), np.maximum(pi, 1e-300)) + 2e-6
    assert narrow < 0.05
