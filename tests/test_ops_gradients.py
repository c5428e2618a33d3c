"""The operator: which tokens have a gradient, which inputs, where it goes and how often."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers_ops import (
    EVERY_BACKEND,
    EVERY_RULE,
    EVERY_SETTING,
    FIELD_WORKSPACE,
    LIMITS,
    WHOLE,
    assert_near,
    assert_same_decision,
    assert_same_gradients,
    build,
    double,
    gradients,
    leaves,
    loss,
    oracle_gradients,
    oracle_logits,
    oracle_loss,
    run,
    statistics,
)
from predmask import (
    PolicySupport,
    mask_metrics,
    policy_loss,
)
from predmask.ops import sweep
from reference import log_softmax

pytestmark = pytest.mark.usefixtures("small_sweeps")


# Tokens that do not count


@EVERY_BACKEND
@pytest.mark.parametrize("reason", ["masked", "no advantage", "no weight", "unknown", "no token"])
def test_nothing_to_learn_from(reason, backend):
    """unsloth-zoo 1286: loss 0, still connected, gradients 0."""
    case = build(0 if reason == "no token" else 10, seed=12, bias=True)
    changes: dict[str, Any] = {
        "masked": {"response": torch.zeros(10, dtype=torch.bool)},
        "no advantage": {"advantage": torch.zeros(10)},
        "no weight": {"weights": torch.zeros(10)},
        "unknown": {"hidden": torch.full((10, 4), math.nan, dtype=torch.float64)},
        "no token": {},
    }[reason]
    own = leaves(case.replace(**changes))
    found = loss(own, WHOLE, backend)
    assert found.loss.item() == 0.0
    assert found.loss.requires_grad
    (found.loss + 0.0 * own.weight.sum()).backward()
    for grad in dataclasses.astuple(gradients(own)):
        assert grad is not None
        assert not grad.any()
        assert torch.isfinite(grad).all()
    if reason in ("masked", "unknown", "no token"):
        assert "mask_frac" not in found.metrics.compute()


@EVERY_BACKEND
@EVERY_RULE
def test_ratio_cap(rule, backend):
    case = build(60, seed=13, drift=1.5)
    expected = oracle_loss(case, rule, ratio_cap=1.1)
    # The cap binds, but for the one rule that has another of its own.
    assert (expected.decision.weight[expected.decision.keep] > 1.1).any()
    found, grads = run(case, rule, backend, ratio_cap=1.1)
    assert_near(found.loss, expected.loss, 1e-11)
    assert_same_gradients(grads, expected.gradients, case)
    assert (found.decision.weight[case.response] > 1.1).any()  # the decision's weight is that before the cap


@EVERY_BACKEND
def test_a_denominator_is_a_weight_of_each_token(backend):
    case = build(30, seed=14)
    weighed, weighed_grads = run(case.replace(weights=torch.full((30,), 1 / 48, dtype=torch.float64)), WHOLE, backend)
    found, grads = run(case, WHOLE, backend, denominator=48)
    assert_near(found.loss, weighed.loss, 1e-11)
    assert_same_gradients(grads, weighed_grads, case)


def test_weights_carry_no_gradient():
    case = build(10, seed=14)
    weights, advantage = case.weights.requires_grad_(), case.advantage.requires_grad_()
    found, _ = run(case, WHOLE)
    assert found.loss.requires_grad
    assert weights.grad is None
    assert advantage.grad is None
    assert not any(
        v.requires_grad for v in [*vars(found.policy).values(), *vars(found.decision).values()] if torch.is_tensor(v)
    )


@EVERY_RULE
def test_the_decision_is_the_rule_of_the_statistics(rule):
    """On response tokens; `metrics` are those of `mask_metrics`."""
    case = build(90, 31, 6, seed=15, drift=1.0, bias=True, temperature=0.8)
    found, _ = run(case, rule)
    policy = PolicySupport.from_logits(torch.tensor(oracle_logits(case)), case.behaviour)
    decision = rule(case.behaviour, policy, case.advantage, case.response)
    assert_same_decision(found.decision, decision, 1e-9, case.response)
    expected = mask_metrics(case.behaviour, policy, decision).compute()
    assert found.metrics.compute() == pytest.approx(expected, rel=1e-9)
    assert {"mask_frac", "entropy", "behaviour_kl"} <= expected.keys()
    # The value is that of core's loss, too.
    core = policy_loss(policy.logp[:, 0], decision, case.advantage, case.weights)
    assert_near(found.loss, core, 1e-11)


class Counted:
    """How many tokens a sweep measures and multiplies, chunk by chunk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.measured: list[int] = []
        self.products: list[int] = []
        self.added: list[int] = []
        measure, multiply = sweep.TorchSweep.measure, sweep.TorchSweep.hidden_gradient
        add = sweep.TorchSweep.add_head_gradient

        def counted_measure(own: Any, hidden: Any, *rest: Any) -> Any:
            self.measured.append(len(hidden))
            return measure(own, hidden, *rest)

        def counted_multiply(own: Any, slopes: Any) -> Any:
            assert len(slopes.tokens) == len(slopes.values) == len(slopes.scale)
            self.products.append(len(slopes.tokens))
            return multiply(own, slopes)

        def counted_add(own: Any, slopes: Any, *rest: Any) -> Any:
            self.added.append(len(slopes.tokens))
            return add(own, slopes, *rest)

        patch.setattr(sweep.TorchSweep, "measure", counted_measure)
        patch.setattr(sweep.TorchSweep, "hidden_gradient", counted_multiply)
        patch.setattr(sweep.TorchSweep, "add_head_gradient", counted_add)


def test_tokens_that_do_not_count_cost_nothing(monkeypatch):
    """Outside the response mask: not computed. A = 0 or no weight: measured alone. Dropped: left out of products."""
    case = build(400, 21, seed=16, drift=1.0)
    case = case.replace(weights=case.weights.masked_fill(torch.arange(400) % 7 == 0, 0.0))
    counted = Counted(monkeypatch)
    found, _ = run(case, WHOLE)
    may_learn = (case.advantage != 0) & (case.weights != 0)
    learning, resting = int((case.response & may_learn).sum()), int((case.response & ~may_learn).sum())
    kept = int((found.decision.keep & may_learn).sum())
    assert 0 < kept < learning
    # Chunks of 64, whole: those that may learn first.
    expected = [64] * (learning // 64) + [learning % 64] + [64] * (resting // 64) + [resting % 64]
    assert counted.measured == [n for n in expected if n]
    assert sum(counted.products) == kept
    assert counted.added == counted.products
    assert torch.isnan(found.policy.logp[~case.response]).all()
    assert not torch.isnan(found.policy.log_tail[case.response]).any()


def test_statistics_multiply_only_tokens_with_a_gradient(monkeypatch):
    case = build(100, 21, seed=17)
    counted = Counted(monkeypatch)
    own = leaves(case)
    logp = statistics(own).logp
    assert counted.measured == [64, 36]
    assert counted.products == []
    logp[::3, 0].sum().backward()
    assert counted.measured == [64, 36, 34]
    assert counted.products == [34]


def test_without_gradients_nothing_is_multiplied(monkeypatch):
    case = build(40, seed=18)
    counted = Counted(monkeypatch)
    with torch.no_grad():
        found = loss(leaves(case), WHOLE)
    alone = loss(case, WHOLE)
    assert counted.products == counted.added == []
    for result in (found, alone):
        assert not result.loss.requires_grad
        assert_near(result.loss, oracle_loss(case, WHOLE).loss, 1e-11)
        assert_same_decision(result.decision, oracle_loss(case, WHOLE).decision, 1e-9, case.response)
    with torch.no_grad():
        assert not statistics(leaves(case)).logp.requires_grad


def test_chunks_are_whole_multiples(monkeypatch):
    assert sweep.chunk_tokens(13, 5) == 5
    assert sweep.chunk_tokens(13, 0) == 1
    assert sweep.chunk_tokens(13, 500) == 64
    monkeypatch.setattr(sweep, "WORKSPACE_ELEMENTS", 1000 * 200)
    assert sweep.chunk_tokens(1000, 500) == 192
    assert sweep.chunk_tokens(1000, 100) == 100
    monkeypatch.setattr(sweep, "WORKSPACE_ELEMENTS", FIELD_WORKSPACE)
    assert sweep.chunk_tokens(151_936, 8192) == 512


# Gradients: which, where, how often


class Allocated(TorchDispatchMode):
    """The memory of tensors of a given shape that operations returned, but for what is known."""

    def __init__(self, shape: tuple[int, ...], *known: torch.Tensor) -> None:
        super().__init__()
        self.shape, self.found = shape, set()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else [out]:
            if isinstance(value, torch.Tensor) and value.shape == self.shape:
                self.found.add(value.untyped_storage().data_ptr())
        self.found -= self.known
        return out


WANTED = [(True, True, False), (True, False, True), (False, True, True), (False, False, True), (True, False, False)]


@EVERY_BACKEND
@pytest.mark.parametrize("wanted", WANTED)
def test_frozen_inputs_get_no_gradient(wanted, backend):
    case = build(100, 23, bias=True, seed=19)
    expected = oracle_loss(case, WHOLE).gradients
    by_logp = torch.where(case.behaviour.valid, 1.0, 0.0).double()
    expected_statistics = oracle_gradients(case, by_logp.numpy())
    names = ("hidden", "weight", "bias")
    own, other = (leaves(case, **dict(zip(names, wanted, strict=True))) for _ in range(2))
    loss(own, WHOLE, backend).loss.backward()
    statistics(other, backend).logp[case.behaviour.valid].sum().backward()
    for name, asked in zip(names, wanted, strict=True):
        for found, formula in ((own, expected), (other, expected_statistics)):
            grad = getattr(found, name).grad
            assert (grad is not None) is asked
            if asked:
                assert_near(grad, getattr(formula, name), 1e-10, name)


def test_a_frozen_head_costs_no_memory_of_its_size():
    case = build(70, 97, 4, seed=19, dtype=torch.float32)
    for weight, count in ((False, 0), (True, 1)):
        for task in ("loss", "statistics"):
            own = leaves(case, weight=weight)
            with Allocated((97, 4), own.weight) as allocated:
                result = loss(own, WHOLE).loss if task == "loss" else statistics(own).logp[:, 0].sum()
                result.backward()
            assert len(allocated.found) == count
            if weight:
                assert allocated.found == {own.weight.grad.untyped_storage().data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weight_grad_takes_the_gradient_at_once(dtype):
    """It adds to what is there, equals autograd's, and is the only [V, D] tensor."""
    case = build(150, 97, 4, seed=20, dtype=dtype, record_dtype=torch.float32, drift=1.0)
    own = leaves(case)
    there = torch.tensor(np.random.default_rng(0).normal(0, 0.01, (97, 4))).to(case.dtype)
    buffer = there.clone()
    with Allocated((97, 4), own.weight, buffer) as allocated:
        found = loss(own, WHOLE, weight_grad=buffer)
        found.loss.backward()
    assert allocated.found == set()
    assert own.weight.grad is None
    expected = oracle_loss(case, WHOLE)
    assert_near(found.loss, expected.loss, LIMITS[torch.float32])
    assert_near(buffer - there, expected.gradients.weight, 10 * LIMITS[case.dtype])
    assert_near(own.hidden.grad, expected.gradients.hidden, max(LIMITS[dtype], 10 * LIMITS[case.dtype]))


def test_weight_grad_may_be_the_grad_of_the_weight():
    case = build(50, seed=20)
    own = leaves(case)
    own.weight.grad = torch.zeros_like(own.weight)
    for rows in (range(20), range(20, 50)):
        part = own.take(rows)
        loss(part, WHOLE, weight_grad=own.weight.grad).loss.backward()
    assert_same_gradients(gradients(own), oracle_loss(case, WHOLE).gradients, case)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_weight_grad_when_something_else_is_frozen(frozen):
    """A head alone may be trained (its hidden states are cached), and the buffer is what is asked for."""
    case = build(20, seed=20)
    own = leaves(case, **{frozen: False})
    buffer = torch.zeros_like(case.weight)
    found = loss(own, WHOLE, weight_grad=buffer)
    expected = oracle_loss(case, WHOLE)
    assert_near(buffer, expected.gradients.weight, 1e-10)
    assert_near(found.loss, expected.loss, 1e-11)
    assert found.loss.requires_grad is (frozen != "hidden")


def test_weight_grad_is_final():
    """What the buffer has got cannot be multiplied any more."""
    own = leaves(build(20, seed=20))
    found = loss(own, WHOLE, weight_grad=torch.zeros_like(own.weight)).loss
    with pytest.raises(RuntimeError, match=r"multiplied by 0\.5 after weight_grad was filled; put that factor into"):
        (found / 2).backward()


def test_weight_grad_without_a_token_is_left_alone():
    case = build(10, seed=20)
    buffer = torch.ones_like(case.weight)
    loss(leaves(case.replace(advantage=torch.zeros(10))), WHOLE, weight_grad=buffer).loss.backward()
    assert torch.equal(buffer, torch.ones_like(buffer))


def test_without_grad_a_buffer_is_left_alone():
    case = build(10, seed=20)
    buffer = torch.zeros_like(case.weight)
    with torch.no_grad():
        loss(leaves(case), WHOLE, weight_grad=buffer)
    assert not buffer.any()


@EVERY_BACKEND
def test_micro_batches_add_up_to_the_whole(backend):
    case = build(50, seed=21, bias=True)
    whole, whole_grads = run(case, WHOLE, backend)
    own = leaves(case)
    total = 0.0
    for rows in (range(20), range(20, 21), range(21, 50)):
        part = loss(own.take(rows), WHOLE, backend)
        part.loss.backward()
        total += part.loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-11)
    assert_same_gradients(gradients(own), whole_grads, case)


@EVERY_BACKEND
@pytest.mark.parametrize("factor", [3.0, -0.25, 0.0])
def test_a_multiplied_loss(factor, backend):
    case = build(20, seed=22, bias=True)
    own = leaves(case)
    (factor * loss(own, WHOLE, backend).loss).backward()
    expected = oracle_loss(case.replace(weights=factor * case.weights), WHOLE).gradients
    assert_same_gradients(gradients(own), expected, case)


@EVERY_BACKEND
def test_two_losses_through_one_head(backend):
    """Tied embeddings: the head's weight, and the hidden states, have another use as well."""
    case = build(20, seed=22)
    own = leaves(case)
    tied = own.replace(hidden=own.hidden * 2.0)
    second = statistics(tied, backend).logp[:, 0]
    other = (own.weight**2).sum() + (own.hidden**3).sum() + second.sum()
    (loss(tied, WHOLE, backend).loss + other).backward()
    doubled = case.replace(hidden=case.hidden * 2)
    expected = oracle_loss(doubled, WHOLE).gradients
    alone = np.zeros(case.behaviour.ids.shape)
    alone[:, 0] = 1
    more = oracle_gradients(doubled, alone)
    assert_near(own.weight.grad, expected.weight + more.weight + 2 * double(case.weight), 1e-10)
    assert_near(own.hidden.grad, 2 * (expected.hidden + more.hidden) + 3 * double(case.hidden) ** 2, 1e-10)


def test_a_second_backward_pass_is_refused():
    own = leaves(build(20, seed=22))
    found = loss(own, WHOLE).loss
    found.backward(retain_graph=True)
    first = own.hidden.grad.clone()
    with pytest.raises(RuntimeError, match="handed out already; compute masked_policy_loss again"):
        found.backward()
    assert torch.equal(own.hidden.grad, first)
    found = loss(own, WHOLE).loss
    found.backward()
    with pytest.raises(RuntimeError, match=r"second time|second backward pass"):
        found.backward()


def test_statistics_may_go_backward_twice():
    case = build(20, seed=22, spoilt=False)
    own = leaves(case)
    logp = statistics(own).logp
    logp.sum().backward(retain_graph=True)
    logp.sum().backward()
    expected = oracle_gradients(case, 2 * np.ones(logp.shape))
    assert_same_gradients(gradients(own), expected, case)


def test_gradients_of_gradients_are_refused():
    own = leaves(build(5, seed=22, spoilt=False))
    (first,) = torch.autograd.grad(statistics(own).logp.sum(), own.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(first.sum(), own.hidden)


@pytest.mark.parametrize("task", ["loss", "statistics"])
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("graph", [True, False])
def test_an_input_that_was_changed_meanwhile_is_noticed(name, task, graph):
    """With frozen inputs too: statistics form the logits again."""
    case = build(20, seed=22, bias=True, spoilt=False)
    own = leaves(case, **({} if graph else {name: False}))
    value = loss(own, WHOLE).loss if task == "loss" else statistics(own).logp.sum()
    with torch.no_grad():
        getattr(own, name).mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_ids_that_were_changed_meanwhile_are_noticed():
    case = build(20, seed=22, spoilt=False)
    own = leaves(case)
    value = statistics(own).logp.sum()
    case.behaviour.ids[:, 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@EVERY_SETTING
def test_gradcheck_of_log_probs(settings):
    """Finite differences by torch, a way of their own."""
    case = build(4, 6, 3, top_k=3, seed=23, **settings)
    own = leaves(case)
    inputs = [own.hidden, own.weight, *([own.bias] if own.bias is not None else [])]

    def logp(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        found = statistics(own.replace(hidden=hidden, weight=weight, bias=bias)).logp
        return found[case.behaviour.valid]

    assert torch.autograd.gradcheck(logp, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


@EVERY_SETTING
@EVERY_RULE
def test_finite_differences_of_the_surrogate(rule, settings):
    """The importance weight and the mask are constants: the loss's slope is that of sum (coefficient · log pi_k)."""
    case = build(6, 7, 3, top_k=3, seed=24, drift=1.0, **settings)
    coefficients = oracle_loss(case, rule, 1.5).coefficients
    _, grads = run(case, rule, ratio_cap=1.5)

    def surrogate(name: str, index: tuple[int, ...], step: float) -> float:
        moved = getattr(case, name).clone()
        moved[index] += step
        logits = oracle_logits(case.replace(**{name: moved}))
        logp = [log_softmax(row)[k] for row, k in zip(logits, case.behaviour.ids[:, 0].tolist(), strict=True)]
        return float(coefficients @ np.array(logp))

    for name in ("hidden", "weight", *(["bias"] if case.bias is not None else [])):
        found = getattr(grads, name)
        for index in list(np.ndindex(*found.shape))[::2]:
            slope = (surrogate(name, index, 1e-5) - surrogate(name, index, -1e-5)) / 2e-5
            assert found[index].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)
