"""The operator on logits that are extreme, and on what is not finite."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from helpers_ops import (
    EVERY_BACKEND,
    EVERY_RULE,
    LIMITS,
    WHOLE,
    assert_near,
    assert_policy_of,
    assert_same_policy,
    build,
    each,
    gradients,
    leaves,
    loss,
    oracle_gradients,
    oracle_loss,
    oracle_policy,
    oracle_slope,
    run,
    small_chunks,
    statistics,
)
from predmask import (
    BehaviourSupport,
    NoMask,
    PolicySupport,
    Reason,
)
from predmask.ops import support_statistics, sweep

pytestmark = pytest.mark.usefixtures("small_sweeps")


# Extremes


def exact(logits: list[float], support: list[int]) -> dict[str, float]:
    """In 60-digit arithmetic."""
    with mpmath.workdps(60):
        terms = [mpmath.exp(mpmath.mpf(z)) if z > -math.inf else mpmath.mpf(0) for z in logits]
        norm = mpmath.fsum(terms)
        pi = [t / norm for t in terms]
        tail = [p for i, p in enumerate(pi) if i not in support]
        mass = mpmath.fsum(tail)
        return {
            "logp": [float(mpmath.log(pi[i])) if pi[i] else -math.inf for i in support],
            "log_tail": float(mpmath.log(mass)) if mass else -math.inf,
            "tail_sum_squares": float(mpmath.fsum(p * p for p in tail)),
            "entropy": float(-mpmath.fsum(p * mpmath.log(p) for p in pi if p)),
        }


EXTREME: dict[str, tuple[list[float], list[int]]] = {
    "large": ([1e4, 9990.0, 1e4 - 3, -1e4, 0.0], [1, 3]),
    "large and negative": ([-1e4, -1e4 - 2, -1e4 - 9, -2e4], [2, 0]),
    "faint tail": ([0.0, -150.0, -151.0, -153.0], [0]),
    "fainter tail": ([100.0, -900.0, -901.0], [0]),
    "tail near the smallest float": ([0.0, -87.0, -88.0, -90.0], [0]),
    "tail among the subnormal floats": ([0.0, -99.0, -100.0, -100.5], [0]),
    "tail at the switch": ([0.0, -69.0, -69.5, -72.0], [0]),
    "tail above the switch": ([0.0, -68.5, -68.0, -70.0], [0]),
    "sampled is all but impossible": ([0.0, -2.0, -120.0, -1.0], [2, 1]),
    "impossible tail": ([0.0, -1.0, -math.inf, -math.inf], [0, 1]),
    "impossible support": ([0.0, -math.inf, -2.0, -1.0], [0, 1]),
    "impossible sampled": ([0.0, -math.inf, -2.0, -1.0], [1, 0]),
    "only one is possible": ([-math.inf, 3.0, -math.inf, -math.inf], [1]),
    "all equal": ([7.0] * 6, [4, 2]),
    "all but one equal": ([-5.0] * 5 + [60.0], [5]),
}
"""Logits, support."""


def from_logits(rows: list[tuple[list[float], list[int]]], backend: str) -> PolicySupport:
    """Statistics of rows of logits, one hidden unit each; -inf in the first row's bias if they all have it."""
    size, slots = max(len(z) for z, _ in rows), max(len(s) for _, s in rows)
    logits = torch.tensor([z + [z[-1] - 1e9] * (size - len(z)) for z, _ in rows])
    bias = torch.where(torch.isinf(logits).all(0), -math.inf, 0.0)
    ids = torch.tensor([s + [s[0]] * (slots - len(s)) for _, s in rows])
    weight = logits.masked_fill(torch.isinf(logits), 0.0).T.contiguous()
    return support_statistics(torch.eye(len(rows)), weight, ids, bias=bias, backend=backend)


def assert_exact(found: PolicySupport, row: int, logits: list[float], support: list[int]) -> None:
    expected = exact(logits, support)
    assert found.logp[row, : len(support)].tolist() == pytest.approx(expected["logp"], rel=2e-6, abs=1e-6)
    assert found.log_tail[row].item() == pytest.approx(expected["log_tail"], rel=2e-6, abs=1e-6)
    assert found.tail_sum_squares[row].item() == pytest.approx(expected["tail_sum_squares"], rel=3e-5, abs=1e-36)
    assert found.entropy[row].item() == pytest.approx(expected["entropy"], rel=1e-5, abs=1e-6)


@EVERY_BACKEND
@pytest.mark.parametrize(("logits", "support"), EXTREME.values(), ids=EXTREME)
def test_extreme_logits(logits, support, backend):
    assert_exact(from_logits([(logits, support)], backend), 0, logits, support)


@EVERY_BACKEND
def test_faint_and_other_tails_in_one_chunk(backend):
    rows = [row for row in EXTREME.values() if not any(math.isinf(z) for z in row[0])] * 3
    with small_chunks(tokens=None, hot_rows=4):
        found = from_logits(rows, backend)
    for number, (logits, support) in enumerate(rows):
        assert_exact(found, number, logits, support)


def test_only_faint_tails_are_measured_twice(monkeypatch):
    """The second time is a pass over a copy: for the few rows that need it."""
    again: list[int] = []
    measure = sweep.TorchSweep._tail_of

    def counted(own: Any, logits: torch.Tensor, *rest: Any) -> Any:
        again.append(len(logits))
        return measure(own, logits, *rest)

    monkeypatch.setattr(sweep.TorchSweep, "_tail_of", counted)
    statistics(build(50, seed=3, size=2.0, dtype=torch.float32))
    assert again == []
    with small_chunks(tokens=None, hot_rows=40):
        from_logits([EXTREME["large"], EXTREME["faint tail"], EXTREME["all equal"]], "chunked")
    assert again == [1]


def test_gradient_of_a_sure_token_is_not_rounded_away():
    """1 - pi_k is summed from what is left: in float32, one minus the softmax would be 0."""
    gap = torch.tensor([21.0, 40.0, 60.0])
    case = build(3, 3, 1, dtype=torch.float32, sampled=[0]).replace(
        hidden=gap[:, None], weight=torch.tensor([[1.0], [0.0], [-0.1]]), advantage=torch.ones(3), response=gap > 0
    )
    case = case.replace(
        behaviour=BehaviourSupport.from_topk(torch.zeros(3, dtype=torch.int64), torch.full((3,), -1e-9))
    )
    _, grads = run(case, NoMask())
    expected = oracle_loss(case, NoMask()).gradients
    torch.testing.assert_close(grads.hidden.double(), torch.tensor(expected.hidden), rtol=1e-5, atol=0)
    for row in range(3):
        _, alone = run(case.take([row]), NoMask())
        expected = oracle_loss(case.take([row]), NoMask()).gradients
        torch.testing.assert_close(alone.weight.double(), torch.tensor(expected.weight), rtol=1e-5, atol=1e-36)


@EVERY_BACKEND
def test_a_saturated_cap(backend):
    """Logits at the cap: finite log-probs, and next to no gradient."""
    case = build(6, 5, 3, top_k=2, size=300.0, softcap=20.0, dtype=torch.float32, seed=3)
    own = leaves(case)
    policy = statistics(own, backend)
    assert_same_policy(policy, oracle_policy(case), LIMITS[torch.float32])
    assert (oracle_slope(case).min(1) < 1e-9).all()
    policy.logp[case.behaviour.valid].sum().backward()
    by_logp = case.behaviour.valid.double().numpy()
    expected = oracle_gradients(case, by_logp)
    # 1 - tanh² is rounded in float32 where tanh is 1: 2^-22 of the largest weight or hidden state.
    assert_near(own.hidden.grad, expected.hidden, 1e-3)
    torch.testing.assert_close(
        own.weight.grad.double(), torch.tensor(expected.weight), rtol=1e-3, atol=6 * 600 * 2**-22
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@EVERY_BACKEND
def test_columns_that_are_out_of_the_question(backend, softcap):
    """-inf in the bias: no mass, no gradient, no NaN. (A cap makes it the lowest logit that there is.)"""
    case = build(9, 12, bias=True, seed=4, softcap=softcap, sampled=[0, 1, 2, 3])
    used = set(case.behaviour.ids.flatten().tolist())
    case.bias[[i for i in range(12) if i not in used] + [case.behaviour.ids[0, -1].item()]] = -math.inf
    own = leaves(case)
    found = loss(own, NoMask(), backend)
    found.loss.backward()
    assert_policy_of(case, found.policy, 1e-11)
    for grad, expected in zip(
        dataclasses.astuple(gradients(own)), dataclasses.astuple(oracle_loss(case, NoMask()).gradients), strict=True
    ):
        assert torch.isfinite(grad).all()
        if softcap is None:
            assert_near(grad, expected, 1e-10)
    if softcap is None:
        assert not own.weight.grad[torch.isinf(case.bias)].any()


# What is not finite


SPOILS = [math.nan, math.inf, -math.inf]


@EVERY_BACKEND
@pytest.mark.parametrize("value", SPOILS)
@pytest.mark.parametrize("where", ["response", "masked", "no advantage"])
def test_a_spoilt_hidden_state_spoils_nothing_else(where, value, backend):
    """Its token is unknown, or not trainable, and every gradient is what it is without that token."""
    case = build(10, seed=9, bias=True)
    case = case.replace(
        advantage=torch.where(case.advantage == 0, 1.0, case.advantage), response=torch.ones(10, dtype=torch.bool)
    )
    row, others = 4, [i for i in range(10) if i != 4]
    hidden, response, advantage = case.hidden.clone(), case.response.clone(), case.advantage.clone()
    hidden[row, 1] = value
    response[row] = where != "masked"
    advantage[row] = 0.0 if where == "no advantage" else 1.0
    found, grads = run(case.replace(hidden=hidden, response=response, advantage=advantage), WHOLE, backend)
    without, without_grads = run(case.take(others), WHOLE, backend)
    assert found.decision.reason[row] == (Reason.NOT_TRAINABLE if where == "masked" else Reason.UNKNOWN)
    assert not found.decision.keep[row]
    assert torch.equal(found.decision.reason[others], without.decision.reason)
    assert_near(found.loss, without.loss, 1e-11)
    assert not grads.hidden[row].any()
    assert_near(grads.hidden[others], without_grads.hidden, 1e-11)
    assert_near(grads.weight, without_grads.weight, 1e-11)
    assert_near(grads.bias, without_grads.bias, 1e-11)


@EVERY_BACKEND
@pytest.mark.parametrize("value", SPOILS)
def test_statistics_of_a_spoilt_hidden_state(value, backend):
    case = build(6, seed=10, spoilt=False)
    hidden = case.hidden.clone()
    hidden[2, 0] = value
    own = leaves(case.replace(hidden=hidden))
    found = statistics(own, backend)
    assert torch.isnan(found.logp[2][case.behaviour.valid[2]]).all()
    assert torch.isnan(torch.stack([found.log_tail[2], found.tail_sum_squares[2], found.entropy[2]])).all()
    others = [0, 1, 3, 4, 5]
    assert_same_policy(each(found.detach(), lambda v: v[others]), oracle_policy(case.take(others)), 1e-11)
    # Finite and non-finite gradients alike must not come through.
    found.logp.backward(torch.where(torch.arange(6) == 2, math.nan, 1.0)[:, None].expand(found.logp.shape).double())
    by_logp = np.ones(found.logp.shape)
    by_logp[2] = 0.0
    expected = oracle_gradients(case, by_logp)
    assert not own.hidden.grad[2].any()
    assert_near(own.hidden.grad, expected.hidden, 1e-10)
    by_logp = np.ones((5, found.logp.shape[1]))
    assert_near(own.weight.grad, oracle_gradients(case.take(others), by_logp).weight, 1e-10)


@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_spoilt_head_makes_every_token_unknown(where, value):
    case = build(7, bias=True)
    getattr(case, where)[3] = value
    found, grads = run(case, WHOLE)
    known = found.decision.reason == Reason.KEPT_INSIDE
    assert not known.any() or where == "weight"  # +inf times a negative hidden state is -inf: no mass, and known
    assert (found.decision.reason[case.response] == Reason.UNKNOWN).any()
    for grad in dataclasses.astuple(grads):
        assert torch.isfinite(grad).all()
    assert torch.isfinite(found.loss)


@EVERY_BACKEND
@EVERY_RULE
@pytest.mark.parametrize("where", ["advantage", "mu", "record"])
def test_what_is_not_finite_elsewhere(where, rule, backend):
    case = build(8, seed=11, spoilt=False)
    case = case.replace(response=torch.ones(8, dtype=torch.bool))
    if where == "advantage":
        values = case.advantage.clone()
        values[3] = math.nan
        spoilt = case.replace(advantage=values)
    else:
        logp, tail = case.behaviour.logp.clone(), case.behaviour.log_tail.clone()
        logp[3, 0 if where == "mu" else 2] = math.nan
        tail[3] = math.nan
        spoilt = case.replace(behaviour=dataclasses.replace(case.behaviour, logp=logp, log_tail=tail))
    found, grads = run(spoilt, rule, backend)
    without, without_grads = run(case.take([0, 1, 2, 4, 5, 6, 7]), rule, backend)
    assert found.decision.reason[3] == Reason.UNKNOWN
    assert not grads.hidden[3].any()
    assert_near(found.loss, without.loss, 1e-11)
    assert_near(grads.weight, without_grads.weight, 1e-11)
