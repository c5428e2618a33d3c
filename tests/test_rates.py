"""Direction: rates against finite differences of the divergence along the real logit step, and identities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given

from predmask import (
    DIVERGENCES,
    TAILS,
    BehaviourSupport,
    PolicySupport,
    divergence_rate,
    full_kl_rate_bracket,
    get_tail,
)
from reference import DIVERGENCE, Case, cases, log_softmax, random_case, slope, softmax

EVERY_DIVERGENCE = pytest.mark.parametrize("name", DIVERGENCES)
EVERY_TAIL = pytest.mark.parametrize("tail", TAILS)


def smooth(name: str, case: Case) -> None:
    """Total variation has no derivative where mu = pi."""
    if name == "tv":
        assume(case.gap() > 1e-3)


@EVERY_DIVERGENCE
@given(case=cases())
def test_full_rate_is_the_derivative_along_the_step(name, case):
    smooth(name, case)
    for tail in TAILS:
        rate = divergence_rate(*case.full(), divergence=name, tail=tail).item()
        assert rate == pytest.approx(case.full_rate(name), abs=1e-7, rel=1e-6)


@EVERY_DIVERGENCE
@EVERY_TAIL
@given(case=cases(min_tail=1))
def test_topk_rate_is_the_derivative_under_its_tail(name, tail, case):
    """Exact: of the real policy; aggregated and uniform: of the policy with one tail token, or a flat tail."""
    smooth(name, case)
    rate = divergence_rate(*case.supports(), divergence=name, tail=tail).item()
    assert rate == pytest.approx(case.topk_rate(name, tail), abs=1e-7, rel=1e-6)


@EVERY_DIVERGENCE
def test_tails_differ_where_the_tail_is_neither_flat_nor_one_token(name):
    """Otherwise the test above could not tell the estimators apart."""
    case = random_case(np.random.default_rng(3), size=8, top_k=2)
    rates = [divergence_rate(*case.supports(), divergence=name, tail=tail).item() for tail in TAILS]
    assert len({round(rate, 6) for rate in rates}) == len(TAILS)


@given(case=cases())
def test_kl_rate_is_the_papers_closed_form(case):
    k, mu, pi = case.sampled, case.mu, case.pi
    assert divergence_rate(*case.full()).item() == pytest.approx(pi[k] - mu[k] + (pi * (mu - pi)).sum(), abs=1e-12)
    support = np.array(case.support)
    mu_tail, pi_tail = sum(mu[i] for i in case.tail), sum(pi[i] for i in case.tail)
    local = pi[k] - mu[k] + (pi[support] * (mu[support] - pi[support])).sum()
    squares = {"aggregated": pi_tail**2, "exact": sum(pi[i] ** 2 for i in case.tail)}
    squares["uniform"] = pi_tail**2 / max(len(case.tail), 1)
    for tail, value in squares.items():
        expected = local + (value / pi_tail * (mu_tail - pi_tail) if case.tail else 0.0)
        assert divergence_rate(*case.supports(), tail=tail).item() == pytest.approx(expected, abs=1e-12)


def rates_of_every_token(case: Case, name: str) -> np.ndarray:
    size = len(case.pi)
    return np.array(
        [
            divergence_rate(*Case(case.mu_logits, case.pi_logits, k, size).full(), divergence=name).item()
            for k in range(size)
        ]
    )


@EVERY_DIVERGENCE
@given(case=cases())
def test_full_rate_vanishes_on_average_over_the_policy(name, case):
    assert (case.pi * rates_of_every_token(case, name)).sum() == pytest.approx(0, abs=1e-11)


@given(case=cases())
def test_kl_rate_on_average_over_the_behaviour_policy(case):
    expected = -((case.pi - case.mu) ** 2).sum()
    assert (case.mu * rates_of_every_token(case, "kl")).sum() == pytest.approx(expected, abs=1e-12)


@EVERY_DIVERGENCE
@given(case=cases(min_tail=1))
def test_exact_topk_rate_vanishes_on_average_over_the_policy(name, case):
    """The support's tokens by their rates, the tail's tokens by finite differences along their mean step."""
    smooth(name, case)
    support, tail, pi = case.support, case.tail, case.pi
    total = 0.0
    for k in support:
        logp = log_softmax(case.mu_logits)
        behaviour = BehaviourSupport.from_topk(
            torch.tensor([k]), torch.tensor([logp[k]]), torch.tensor([support]), torch.tensor(logp[support][None])
        )
        policy = PolicySupport.from_logits(torch.tensor(case.pi_logits[None]), behaviour)
        total += pi[k] * divergence_rate(behaviour, policy, divergence=name).item()
    step = sum(pi[i] * (np.eye(len(pi))[i] - pi) for i in tail)
    mu = case.coarse(case.mu)
    total += slope(lambda h: DIVERGENCE[name](mu, case.coarse(softmax(case.pi_logits + h * step))))
    assert total == pytest.approx(0, abs=1e-7)


@given(case=cases())
def test_the_papers_tails_bracket_the_exact_kl_rate(case):
    aggregated, uniform, exact = (
        divergence_rate(*case.supports(), tail=tail).item() for tail in ("aggregated", "uniform", "exact")
    )
    assert min(aggregated, uniform) - 1e-12 <= exact <= max(aggregated, uniform) + 1e-12


@given(case=cases())
def test_bracket_holds_the_full_kl_rate(case):
    low, high = (bound.item() for bound in full_kl_rate_bracket(*case.supports()))
    assert low - 1e-12 <= case.full_rate("kl") + 1e-8
    assert case.full_rate("kl") - 1e-8 <= high + 1e-12
    seen = sum(case.pi[i] * case.mu[i] for i in case.tail)
    assert high - low >= seen - 1e-12


def test_bracket_certifies_most_directions():
    """It is no empty promise: with drifted policies and a small tail, most signs are certain, and right."""
    generator = np.random.default_rng(0)
    certain = 0
    for _ in range(200):
        case = random_case(generator, size=30, top_k=8)
        low, high = (bound.item() for bound in full_kl_rate_bracket(*case.supports()))
        if low * high > 0:
            certain += 1
            assert low * case.full_rate("kl") > 0
    assert certain > 150


def test_without_a_tail_the_bracket_is_the_rate():
    case = random_case(np.random.default_rng(1), size=6, top_k=6)
    low, high = full_kl_rate_bracket(*case.supports())
    assert low.item() == pytest.approx(case.full_rate("kl"), abs=1e-8)
    assert high.item() == pytest.approx(low.item(), abs=1e-12)


@EVERY_DIVERGENCE
@given(case=cases())
def test_binary_rate_has_the_sign_of_the_ratio(name, case):
    """On the sampled token against the rest, the ratio direction is exact."""
    assume(abs(case.mu[case.sampled] - case.pi[case.sampled]) > 1e-6)
    behaviour, policy = (view.binary() for view in case.supports())
    rate = divergence_rate(behaviour, policy, divergence=name, tail="aggregated").item()
    assert math.copysign(1, rate) == math.copysign(1, case.pi[case.sampled] - case.mu[case.sampled])


def test_ratio_and_divergence_can_disagree():
    """The reason for the method: the ratio says outward, the divergence falls."""
    case = Case(np.log([0.1, 0.29, 0.61]), np.log([0.5, 0.3, 0.2]), 1, 3)
    assert case.pi[1] > case.mu[1]
    assert divergence_rate(*case.supports()).item() == pytest.approx(-0.111)
    assert case.full_rate("kl") == pytest.approx(-0.111)


@EVERY_DIVERGENCE
@EVERY_TAIL
def test_impossible_tokens_give_finite_rates(name, tail):
    mu = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log()
    logits = torch.tensor([[0.2, 0.0, 0.8, 0.0]]).log()
    full = BehaviourSupport.full(torch.tensor([1]), mu)
    topk = BehaviourSupport.from_topk(torch.tensor([1]), mu[:, 1], torch.tensor([[0, 1]]), mu[:, :2])
    for behaviour in (full, topk):
        rate = divergence_rate(behaviour, PolicySupport.from_logits(logits, behaviour), divergence=name, tail=tail)
        assert torch.isfinite(rate).all()


@EVERY_DIVERGENCE
@EVERY_TAIL
def test_float32_rates(name, tail):
    generator = np.random.default_rng(11)
    for _ in range(30):
        case = random_case(generator, size=40, top_k=6)
        single = divergence_rate(*case.supports(torch.float32), divergence=name, tail=tail).item()
        double = divergence_rate(*case.supports(), divergence=name, tail=tail).item()
        assert single == pytest.approx(double, abs=2e-6)


def test_what_is_missing_is_named():
    behaviour, policy = random_case(np.random.default_rng(2)).supports()
    blind = PolicySupport(logp=policy.logp, log_tail=policy.log_tail, vocabulary_size=policy.vocabulary_size)
    with pytest.raises(ValueError, match="'uniform' or 'aggregated'"):
        divergence_rate(behaviour, blind)
    with pytest.raises(ValueError, match="Q_T"):
        full_kl_rate_bracket(behaviour, blind)
    with pytest.raises(ValueError, match="exact, aggregated, uniform"):
        get_tail("flat")
    for tail in TAILS.values():
        if not tail.needs_sum_squares:
            assert torch.isfinite(divergence_rate(behaviour, blind, tail=tail.name)).all()
