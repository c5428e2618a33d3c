"""Every number and decision of the shared vectors, which were computed in 50-digit arithmetic."""

import json
from pathlib import Path

import pytest
import torch

from predmask import (
    DIVERGENCES,
    DPPO,
    TAILS,
    BehaviourSupport,
    PolicySupport,
    PPOClip,
    Predictive,
    divergence_rate,
    full_kl_rate_bracket,
    get_divergence,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "masks.json").read_text())
RATE_KEYS = {"aggregated": "rate_aggregated", "uniform": "rate_uniform", "exact": "rate_exact_tail"}
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-10}


class Supports:
    """One vector's policies on the top-K and the full support."""

    def __init__(self, vector, dtype):
        sampled = torch.tensor([vector["sampled"]])
        logits = torch.tensor([vector["pi_logp"]], dtype=dtype)
        mu = torch.tensor([vector["mu_logp"]], dtype=dtype)
        top = mu.topk(vector["K"])
        self.behaviour = BehaviourSupport.from_topk(sampled, mu[:, vector["sampled"]], top.indices, top.values)
        self.policy = PolicySupport.from_logits(logits, self.behaviour)
        self.full_behaviour = BehaviourSupport.full(sampled, mu)
        self.full_policy = PolicySupport.from_logits(logits, self.full_behaviour)
        self.advantage = torch.tensor([vector["advantage"]], dtype=dtype)

    def decide(self, name: str) -> bool:
        """Whether the rule behind the name keeps the token."""
        rule, threshold = name.split("@")
        supports = self.behaviour, self.policy
        if rule == "ppo_clip":
            low, high = map(float, threshold.split("/"))
            decide = PPOClip(eps_low=low, eps_high=high)
        elif rule == "predictive_full":
            decide, supports = Predictive(delta=float(threshold)), (self.full_behaviour, self.full_policy)
        elif rule.startswith("predictive_"):
            tail = rule.removeprefix("predictive_").removesuffix("_tail")
            decide = Predictive(tail=tail, delta=float(threshold))
        else:
            _, support, divergence = rule.split("_")
            decide = DPPO(support=support, divergence=divergence, delta=float(threshold))
        return bool(decide(*supports, self.advantage).keep)


@pytest.fixture(params=VECTORS, ids=lambda vector: vector["name"])
def vector(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def supports(request, vector):
    return Supports(vector, request.param)


@pytest.fixture
def near(supports):
    tolerance = DTYPES[supports.advantage.dtype]
    return lambda value: pytest.approx(value, abs=tolerance, rel=tolerance)


def test_tables_are_covered():
    assert set(RATE_KEYS) == set(TAILS)
    assert all(set(vector["full"]) == set(DIVERGENCES) for vector in VECTORS)
    assert {decision for vector in VECTORS for decision in vector["decisions"].values()} == {True, False, None}


def test_full_vocabulary(vector, supports, near):
    for name, expected in vector["full"].items():
        value = get_divergence(name)(supports.full_behaviour, supports.full_policy)
        assert value.item() == near(expected["divergence"]), name
        for tail in TAILS:
            rate = divergence_rate(supports.full_behaviour, supports.full_policy, divergence=name, tail=tail)
            assert rate.item() == near(expected["rate"]), (name, tail)


def test_support_and_tails(vector, supports, near):
    behaviour, policy = supports.behaviour, supports.policy
    assert behaviour.ids[0, 0] == vector["sampled"]
    assert sorted(behaviour.ids[behaviour.valid].tolist()) == sorted(vector["support"])
    assert behaviour.log_tail.exp().item() == near(vector["mu_tail"])
    assert policy.log_tail.exp().item() == near(vector["pi_tail"])
    assert policy.tail_sum_squares.item() == near(vector["topk_kl"]["pi_tail_sum_sq"])
    assert (policy.logp - behaviour.logp)[0, 0].exp().item() == near(vector["ratio"])


def test_topk_and_binary_divergences(vector, supports, near):
    behaviour, policy = supports.behaviour, supports.policy
    for name in ("kl", "tv"):
        topk = get_divergence(name)(behaviour, policy).item()
        assert topk == near(vector[f"topk_{name}"]["divergence"]), name
        assert topk <= vector["full"][name]["divergence"] + DTYPES[supports.advantage.dtype], name
        assert get_divergence(name)(behaviour.binary(), policy.binary()).item() == near(vector[f"binary_{name}"])


def test_topk_kl_rates(vector, supports, near):
    for tail, key in RATE_KEYS.items():
        rate = divergence_rate(supports.behaviour, supports.policy, tail=tail)
        assert rate.item() == near(vector["topk_kl"][key]), tail


def test_bracket_holds_the_full_kl_rate(vector, supports):
    low, high = full_kl_rate_bracket(supports.behaviour, supports.policy)
    rate = vector["full"]["kl"]["rate"]
    tolerance = DTYPES[supports.advantage.dtype]
    assert low.item() - tolerance <= rate <= high.item() + tolerance


def test_decisions(vector, supports):
    wrong = {
        name: expected
        for name, expected in vector["decisions"].items()
        if expected is not None and supports.decide(name) != expected
    }
    assert not wrong
