"""The operator against float64 formulas: values, decisions and gradients, on every shape and setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_ops import (
    BACKENDS,
    EVERY_BACKEND,
    EVERY_RULE,
    EVERY_SETTING,
    LIMITS,
    RULE_SETTINGS,
    SETTINGS,
    SHAPES,
    WHOLE,
    OperatorCase,
    assert_near,
    assert_policy_of,
    assert_same_decision,
    assert_same_gradients,
    assert_same_policy,
    build,
    each,
    gradients,
    leaves,
    loss,
    oracle_gradients,
    oracle_loss,
    oracle_policy,
    run,
    small_chunks,
    statistics,
)
from predmask import (
    CISPO,
    IcePop,
    MaskDecision,
    NoMask,
    PolicySupport,
    PPOClip,
    Reason,
    Rule,
)
from predmask.ops import support_statistics
from reference import log_softmax

pytestmark = pytest.mark.usefixtures("small_sweeps")


def field_case(backend: str, weight: list[list[float]] | None = None, **options: Any) -> PolicySupport:
    head = torch.tensor(weight or [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    return support_statistics(torch.tensor([[1.0, 2.0]]), head, torch.tensor([[2, 0, 1]]), backend=backend, **options)


@EVERY_BACKEND
def test_head_bias_and_softcap_of_the_field(backend):
    """TRL 7065, prime-rl 1545: h = [1, 2], W = [[1, 0], [0, 1], [1, 1]]."""
    assert field_case(backend).logp[0, 0].item() == pytest.approx(-0.4076, abs=5e-5)
    biased = field_case(backend, bias=torch.tensor([0.0, 0.0, -2.0]))
    assert biased.logp[0, 0].item() == pytest.approx(-1.5514, abs=5e-5)
    assert field_case(backend, softcap=2.0).logp[0, 0].item() == pytest.approx(-0.7714, abs=5e-5)
    capped = field_case(backend, [[90.0, 0.0], [0.0, 30.0], [0.0, 0.0]], softcap=30.0)
    assert capped.logp[0].tolist() == pytest.approx([-30.18, -0.332, -1.263], abs=5e-3)


@EVERY_BACKEND
def test_scale_comes_before_the_cap_and_temperature_after(backend):
    found = field_case(backend, softcap=2.0, scale=0.5, temperature=0.7)
    expected = log_softmax(2 * np.tanh(0.5 * np.array([1.0, 2.0, 3.0]) / 2) / 0.7)
    assert found.logp[0].tolist() == pytest.approx(expected[[2, 0, 1]], abs=1e-6)


@EVERY_BACKEND
@EVERY_SETTING
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_statistics_are_those_of_the_formulas(shape, settings, backend):
    case = build(**shape, **settings)
    found = statistics(case, backend)
    assert found.logp.dtype == torch.float64
    assert_same_policy(found, oracle_policy(case), LIMITS[torch.float64])


@EVERY_SETTING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_in_other_precisions(dtype, settings):
    """Inputs are rounded; what follows is float32, for 16-bit inputs too."""
    case = build(150, 61, 8, size=2.0, seed=3, dtype=dtype, **settings)
    found = statistics(case)
    assert {value.dtype for value in vars(found).values() if isinstance(value, torch.Tensor)} == {torch.float32}
    assert_same_policy(found, oracle_policy(case), LIMITS[torch.float32])


@EVERY_BACKEND
@EVERY_SETTING
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradient_of_log_probs_is_that_of_the_formulas(shape, settings, backend):
    case = build(**shape, **settings, seed=1)
    own = leaves(case)
    logp = statistics(own, backend).logp
    by_logp = torch.tensor(np.random.default_rng(5).normal(size=logp.shape))
    by_logp[::5] = 0.0
    torch.where(case.behaviour.valid, logp, 0.0).backward(by_logp)
    assert_same_gradients(gradients(own), oracle_gradients(case, by_logp.numpy()), case)


def test_gradient_at_entries_that_are_not_valid_is_dropped():
    case = build(6, seed=1)
    own = leaves(case)
    assert not case.behaviour.valid.all()
    statistics(own).logp.backward(torch.ones(case.behaviour.ids.shape, dtype=torch.float64))
    assert_same_gradients(gradients(own), oracle_gradients(case, np.ones(case.behaviour.ids.shape)), case)


def masked_rules(shape: dict[str, Any]) -> list[Rule]:
    return [rule for rule in RULE_SETTINGS if not (rule.needs_topk and shape.get("top_k") == 0)]


@EVERY_BACKEND
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradient_of_every_rule(shape, backend):
    for seed, (rule, settings) in enumerate(
        (rule, settings) for rule in masked_rules(shape) for settings in ({}, SETTINGS["all"])
    ):
        case = build(**shape, **settings, seed=seed, drift=1.0)
        expected = oracle_loss(case, rule)
        found, grads = run(case, rule, backend)
        assert_near(found.loss, expected.loss, LIMITS[torch.float64])
        assert_same_decision(found.decision, expected.decision, 1e-9, case.response)
        assert_policy_of(case, found.policy, 1e-11)
        assert_same_gradients(grads, expected.gradients, case)


@EVERY_RULE
def test_the_cases_are_not_trivial(rule):
    """Every rule keeps some tokens, and drops some if it can; importance weights are not 1."""
    decision = oracle_loss(build(200, 37, 5, seed=2, drift=1.0), rule).decision
    assert decision.keep.sum() > 20
    assert (decision.dropped.sum() > 5) == rule.can_fire
    assert (decision.reason == Reason.KEPT_RETURNING).any() or isinstance(rule, NoMask | IcePop)
    assert (decision.weight[decision.keep] - 1).abs().max() > 0.2


@EVERY_SETTING
@pytest.mark.parametrize("rule", [WHOLE, PPOClip(), CISPO()], ids=str)
def test_loss_and_gradient_with_every_setting(rule, settings):
    case = build(150, 61, 8, seed=4, dtype=torch.float32, record_dtype=torch.float32, drift=1.0, **settings)
    expected = oracle_loss(case, rule)
    found, grads = run(case, rule)
    assert_near(found.loss, expected.loss, LIMITS[torch.float32])
    assert_same_decision(found.decision, expected.decision, 1e-4, case.response)
    assert_same_gradients(grads, expected.gradients, case)


MIXED = {
    "float16": (torch.float16, torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.float32),
    "float32, wide record": (torch.float32, torch.float32, torch.float64),
    "bfloat16 hidden": (torch.bfloat16, torch.float32, torch.float32),
    "bfloat16 weight": (torch.float32, torch.bfloat16, torch.float64),
    "float64 hidden": (torch.float64, torch.float32, torch.float32),
    "float64 weight": (torch.float32, torch.float64, torch.float32),
    "both halves": (torch.float16, torch.bfloat16, torch.float32),
}
"""Hidden states, head, record."""


@pytest.mark.parametrize(("hidden", "weight", "record"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_precisions_may_differ(hidden, weight, record, backend):
    """Gradients come in their inputs' dtypes, rounded once: sums are formed in float32 or better."""
    options = {"dtype": hidden, "weight_dtype": weight, "record_dtype": record, "bias": True, "drift": 1.0}
    case = build(150, 61, 8, seed=6, **options)
    case = case.replace(weights=case.weights.to(record))
    expected = oracle_loss(case, WHOLE)
    found, grads = run(case, WHOLE, backend)
    assert found.policy.logp.dtype == case.dtype
    assert found.decision.divergence.dtype == found.loss.dtype == torch.promote_types(case.dtype, record)
    assert_near(found.loss, expected.loss, LIMITS[torch.float32])
    assert_policy_of(case, found.policy, LIMITS[case.dtype])
    assert_same_decision(found.decision, expected.decision, 1e-4, case.response)
    assert_same_gradients(grads, expected.gradients, case)


@EVERY_BACKEND
def test_a_bias_in_double_precision_counts_as_such(backend):
    case = build(5, dtype=torch.float32, bias=True)
    wide = case.replace(bias=case.bias.double() + 1e-9)
    found = statistics(wide, backend)
    assert found.logp.dtype == torch.float64
    assert_same_policy(found, oracle_policy(wide), LIMITS[torch.float64])


@EVERY_BACKEND
@pytest.mark.parametrize("leading", [(2, 6), (2, 3, 2), (12,), (1, 12)])
def test_leading_shape_does_not_matter(leading, backend):
    flat = build(12, seed=7)
    case = flat.shaped(*leading)
    found, grads = run(case, WHOLE, backend)
    expected, expected_grads = run(flat, WHOLE, backend)
    for record in ("decision", "policy"):
        for name, value in vars(getattr(expected, record)).items():
            if isinstance(value, torch.Tensor):
                actual = getattr(getattr(found, record), name)
                assert actual.shape == (*leading, *value.shape[1:]), name
                assert torch.equal(actual.reshape(value.shape).nan_to_num(7.0), value.nan_to_num(7.0)), name
    assert found.loss == expected.loss
    assert found.behaviour is case.behaviour
    assert torch.equal(grads.hidden.reshape(flat.hidden.shape), expected_grads.hidden)
    assert torch.equal(grads.weight, expected_grads.weight)
    assert torch.equal(statistics(case, backend).entropy, statistics(flat, backend).entropy.reshape(leading))


@EVERY_BACKEND
@pytest.mark.parametrize("leading", [(12,), (3, 4), (2, 3, 2)])
def test_without_a_response_mask_every_token_counts(leading, backend):
    case = build(12, seed=7).shaped(*leading)
    found = loss(case, WHOLE, backend, response_mask=None)
    assert found.decision.response_mask.all()
    assert found.loss == loss(case, WHOLE, backend, response_mask=torch.ones(leading)).loss
    # Any dtype says what is False: 0.
    expected = loss(case, WHOLE, backend).loss
    assert loss(case, WHOLE, backend, response_mask=case.response.long()).loss == expected


@EVERY_BACKEND
def test_a_single_token_without_a_leading_shape(backend):
    row = next(i for i in range(12) if build(12, seed=7).response[i])
    flat = build(12, seed=7).take([row])
    case = flat.shaped()
    assert case.hidden.ndim == 1
    found, grads = run(case, WHOLE, backend)
    expected, expected_grads = run(flat, WHOLE, backend)
    assert found.decision.keep.shape == ()
    assert found.loss == expected.loss
    assert torch.equal(grads.hidden, expected_grads.hidden[0])
    assert torch.equal(statistics(case, backend).logp, statistics(flat, backend).logp[0])
    assert loss(case, WHOLE, backend, response_mask=None).loss == expected.loss


@EVERY_BACKEND
def test_advantages_of_sequences_are_stretched_over_their_tokens(backend):
    case = build(12, seed=8).shaped(3, 4).replace(advantage=torch.tensor([[1.0], [-2.0], [0.5]]))
    expected = oracle_loss(case.replace(advantage=case.advantage.expand(3, 4)).shaped(12), WHOLE)
    found, grads = run(case, WHOLE, backend)
    assert_near(found.loss, expected.loss, LIMITS[torch.float64])
    assert_same_gradients(grads, expected.gradients, case)
    scalar = run(case.replace(advantage=torch.tensor(1.0)), WHOLE, backend)[0]
    ones = run(case.replace(advantage=torch.ones(3, 4)), WHOLE, backend)[0]
    assert scalar.loss == ones.loss


def test_ids_alone_may_repeat_and_be_of_any_integer_type():
    case = build(5, 11)
    ids = torch.tensor([[3, 3, 3], [1, 2, 1], [0, 10, 10], [4, 5, 6], [9, 9, 2]], dtype=torch.int32)
    unknown = torch.full(ids.shape, -1.0, dtype=torch.float64)
    behaviour = dataclasses.replace(
        case.behaviour, ids=ids.long(), valid=torch.ones_like(ids, dtype=torch.bool), logp=unknown
    )
    expected = oracle_policy(case.replace(behaviour=behaviour))
    weights = torch.tensor(np.random.default_rng(2).normal(size=(5, 3)))
    for backend in BACKENDS:
        own = leaves(case)
        found = support_statistics(own.hidden, own.weight, ids, backend=backend)
        assert_same_policy(found, expected, LIMITS[torch.float64])
        (found.logp * weights).sum().backward()
        by_logp = oracle_gradients(case.replace(behaviour=behaviour), weights.numpy())
        assert_same_gradients(gradients(own), by_logp, case)


def test_inputs_need_not_be_contiguous():
    case = build(30, seed=1, bias=True)
    expected = oracle_loss(case, WHOLE)

    def strided(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, values], -1)[..., 0]

    names = ("hidden", "weight", "bias", "advantage", "response", "weights")
    moved = case.replace(
        **{name: strided(getattr(case, name)) for name in names}, behaviour=each(case.behaviour, strided)
    )
    assert not moved.weight.is_contiguous()
    found, grads = run(moved, WHOLE)
    assert_near(found.loss, expected.loss, 1e-11)
    assert_same_gradients(grads, expected.gradients, case)
    for buffer in (torch.zeros(4, 13).double().T, torch.zeros(13, 8).double()[:, :4]):
        loss(leaves(case), WHOLE, weight_grad=buffer)
        assert_near(buffer, expected.gradients.weight, 1e-10)


# Properties


@st.composite
def operator_cases(draw: st.DrawFn) -> OperatorCase:
    vocabulary = draw(st.integers(1, 9))
    settings: dict[str, Any] = {}
    for name, values in (
        ("softcap", st.floats(0.5, 30)),
        ("scale", st.floats(0.05, 4)),
        ("temperature", st.floats(0.3, 2)),
    ):
        if draw(st.booleans()):
            settings[name] = draw(values)
    return build(
        draw(st.integers(0, 8)),
        vocabulary,
        draw(st.integers(1, 4)),
        draw(st.integers(1, vocabulary)),
        seed=draw(st.integers(0, 10**6)),
        bias=draw(st.booleans()),
        full=draw(st.booleans()),
        spoilt=draw(st.booleans()),
        size=draw(st.sampled_from([0.0, 0.1, 1.0, 5.0])),
        drift=draw(st.sampled_from([0.0, 0.3, 1.5])),
        **settings,
    )


def clear(decision: MaskDecision, rule: Rule) -> torch.Tensor:
    """[N] bool, tokens whose decision is not within rounding of another one."""
    near = decision.rate.abs() < 1e-9
    # Ratio rules: |r - 1| is the divergence; thresholds of all rules.
    for threshold in (0.05, 0.1, 0.15, 0.2, 0.28, 0.5, 4.0):
        near |= (decision.divergence - threshold).abs() < 1e-9
    return ~near | isinstance(rule, NoMask)


@EVERY_RULE
@given(case=operator_cases())
def test_chunked_is_dense(rule, case):
    with small_chunks():
        found, grads = run(case, rule, ratio_cap=3.0)
        policy = statistics(case)
    dense, dense_grads = run(case, rule, "dense", ratio_cap=3.0)
    assert_same_policy(policy, statistics(case, "dense"), 1e-10)
    expected = rule(case.behaviour, policy, case.advantage, case.response)
    assert_same_decision(found.decision, expected, 1e-8, case.response)
    if clear(dense.decision, rule)[case.response].all():
        assert torch.equal(found.decision.reason, dense.decision.reason)
        assert_near(found.loss, dense.loss, 1e-9)
        assert_same_gradients(grads, dense_grads, case)


@given(case=operator_cases(), data=st.data())
def test_order_of_tokens_does_not_matter(case, data):
    order = data.draw(st.permutations(range(len(case.hidden))))
    moved = case.take(torch.tensor(order, dtype=torch.int64))
    with small_chunks():
        found, grads = run(case, NoMask())
        other, other_grads = run(moved, NoMask())
        assert_same_policy(statistics(moved), each(statistics(case), lambda v: v[order]), 1e-11)
    assert torch.equal(other.decision.reason, found.decision.reason[order])
    assert_near(other.loss, found.loss, 1e-10)
    assert_near(other_grads.hidden, grads.hidden[order], 1e-10)
    assert_near(other_grads.weight, grads.weight, 1e-10)


@given(case=operator_cases(), data=st.data())
def test_batches_side_by_side(case, data):
    cut = data.draw(st.integers(0, len(case.hidden)))
    with small_chunks():
        whole, parts = statistics(case), [statistics(case.take(slice(cut))), statistics(case.take(slice(cut, None)))]
    for name in ("logp", "log_tail", "tail_sum_squares", "entropy"):
        assert_near(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name), 1e-11, name)


@given(case=operator_cases(), constant=st.floats(-50, 50))
def test_a_constant_on_all_logits_changes_nothing(case, constant):
    case = case.replace(settings={name: v for name, v in case.settings.items() if name != "softcap"})
    bias = torch.zeros(len(case.weight), dtype=torch.float64) if case.bias is None else case.bias
    case, moved = case.replace(bias=bias), case.replace(bias=bias + constant)
    with small_chunks():
        assert_same_policy(statistics(moved), statistics(case), 1e-9)
        (_, grads), (_, moved_grads) = run(case, NoMask()), run(moved, NoMask())
    # Of each token, the bias's gradient sums to 0.
    limit = max(1e-9 * float(grads.bias.abs().max()), 1e-12)
    for found in (grads, moved_grads):
        assert found.bias.sum().item() == pytest.approx(0.0, abs=100 * limit)
    torch.testing.assert_close(moved_grads.hidden, grads.hidden, rtol=1e-6, atol=1e-9)
