"""The Triton backend against the dense one in float64, from the same inputs.

On a GPU the kernels run there. Without one they are interpreted, which must be settled before triton is imported:
then one test here runs all others in a process of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers_ops import RULE_SETTINGS, SETTINGS, OperatorCase, build, each, gradients, leaves, loss, statistics
from predmask import RULES, BehaviourSupport, PolicySupport, Predictive, Reason, Rule
from predmask.core.support import first_occurrence
from predmask.ops import operator, support_statistics
from predmask.ops.head import Head
from predmask.ops.statistics import Measured, Tail
from predmask.ops.sweep import HeadGradient, TorchSweep

pytest.importorskip("triton", reason="the Triton backend needs triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNABLE = DEVICE.type == "cuda" or INTERPRETED
if RUNNABLE:
    from predmask.ops import triton_sweep
    from predmask.ops.triton_sweep import Tiling, TritonSweep

    # Three blocks of tokens, two splits of the vocabulary, three tiles in the first and two in the second.
    SMALL = Tiling(rows=32, columns=64, depth=16, warps=4, stages=1, programs=6)

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
# NaN and infinite inputs, which the interpreter's NumPy would warn of.
NOT_FINITE = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOT = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EVERY_SETTING = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
EVERY_RULE = pytest.mark.parametrize("rule", RULE_SETTINGS, ids=str)
VALUES = 1e-5
"""How far statistics may be from float64, in nats or as a share: float32 sums, for inputs of 16 bits too."""
GRADIENTS = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""How far gradients may be, as a share of the largest: in 16 bits slopes and result are each rounded once."""
SIZE = {"tokens": 70, "vocabulary": 300, "width": 24, "top_k": 6}
SHAPES: dict[str, dict[str, Any]] = {
    "no token": {**SIZE, "tokens": 0},
    "one token": {**SIZE, "tokens": 1},
    "sampled alone": {**SIZE, "top_k": 0},
    "all but one": {**SIZE, "vocabulary": 130, "top_k": 129, "spoilt": False},
    "top-K is everything": {**SIZE, "vocabulary": 65, "top_k": 65, "spoilt": False},
    "full": {**SIZE, "tokens": 9, "vocabulary": 130, "full": True},
    "whole tiles": {**SIZE, "tokens": 64, "vocabulary": 256, "width": 32},
    "one more than a tile": {**SIZE, "tokens": 33, "vocabulary": 65, "width": 17},
    "one word": {"tokens": 5, "vocabulary": 1, "width": 3, "top_k": 1, "spoilt": False},
    "width 1": {**SIZE, "width": 1},
}
"""Shapes of `build`."""


@pytest.mark.skipif(RUNNABLE, reason="the kernels run in this process")
def test_everything_here_in_a_process_that_interprets_the_kernels():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=550
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]


@pytest.fixture(autouse=True)
def _only_where_kernels_run(request: pytest.FixtureRequest) -> None:
    if not RUNNABLE and request.node.name != "test_everything_here_in_a_process_that_interprets_the_kernels":
        pytest.skip("runs in the process that interprets the kernels")


@pytest.fixture(params=[True, False], ids=["product in the kernel", "product by the library"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to form the product, with several blocks and splits, and a weight widened in several blocks."""
    monkeypatch.setattr(triton_sweep, "_WIDENED_ROWS", 128)
    monkeypatch.setattr(triton_sweep, "_SLOPES_TILE", 128)
    monkeypatch.setattr(triton_sweep, "TritonSweep", partial(TritonSweep, form_product=request.param, tiling=SMALL))


def moved(case: OperatorCase, device: torch.device, dtype: torch.dtype | None = None) -> OperatorCase:
    """The case on another device, its inputs in another dtype."""

    def there(values: Tensor) -> Tensor:
        return values.to(device)

    def inputs(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(device, dtype)

    names = ("advantage", "response", "weights")
    return case.replace(
        hidden=inputs(case.hidden),
        weight=inputs(case.weight),
        bias=inputs(case.bias),
        behaviour=each(case.behaviour, there),
        **{name: there(getattr(case, name)) for name in names},
    )


def dense(case: OperatorCase) -> OperatorCase:
    return moved(case, torch.device("cpu"), torch.float64)


def near(found: Any, expected: Any, limit: float, name: str = "") -> None:
    """Equal within `limit`, or within that share of the number."""
    found, expected = (torch.as_tensor(values).detach().cpu().double() for values in (found, expected))
    torch.testing.assert_close(
        found, expected, rtol=limit, atol=limit, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def near_gradients(found: Any, expected: Any, dtype: torch.dtype) -> None:
    """Equal within the dtype's share of the largest number of each gradient."""
    for name in ("hidden", "weight", "bias"):
        actual, right = getattr(found, name), getattr(expected, name)
        assert (actual is None) == (right is None), name
        if actual is not None and actual.numel():
            unit = right.abs().max().clamp(min=1e-300)
            near(actual.cpu().double() / unit, right / unit, GRADIENTS[dtype], name)


def near_policy(found: PolicySupport, expected: PolicySupport, limit: float = VALUES) -> None:
    for name in ("logp", "log_tail", "entropy"):
        near(getattr(found, name), getattr(expected, name), limit, name)
    # A small number; its share counts.
    torch.testing.assert_close(
        found.tail_sum_squares.cpu().double(), expected.tail_sum_squares, rtol=5 * limit, atol=1e-37, equal_nan=True
    )


def slots(case: OperatorCase) -> Tensor:
    """[N, S] some derivatives by log pi, none for every fifth token."""
    by_logp = torch.randn(case.behaviour.ids.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    by_logp[::5] = 0.0
    return by_logp


def statistics_of(case: OperatorCase, backend: str) -> tuple[PolicySupport, Any]:
    """The statistics, and the gradients where `slots` are the derivatives of the log-probs."""
    own = leaves(case)
    policy = statistics(own, backend)
    valid = own.behaviour.valid
    torch.where(valid, policy.logp, 0.0).backward(slots(case).to(policy.logp))
    return policy.detach(), gradients(own)


def loss_of(case: OperatorCase, rule: Rule, backend: str, **options: Any) -> tuple[Any, Any]:
    own = leaves(case)
    found = loss(own, rule, backend, **options)
    found.loss.backward()
    return found, gradients(own)


def check_statistics(case: OperatorCase, dtype: torch.dtype) -> None:
    found, by_found = statistics_of(moved(case, DEVICE), "triton")
    expected, by_expected = statistics_of(dense(case), "dense")
    near_policy(found, expected)
    near_gradients(by_found, by_expected, dtype)


def check_loss(case: OperatorCase, rule: Rule, dtype: torch.dtype, **options: Any) -> Any:
    found, by_found = loss_of(moved(case, DEVICE), rule, "triton", **options)
    expected, by_expected = loss_of(dense(case), rule, "dense", **options)
    for name in ("keep", "outside", "reason"):
        assert torch.equal(getattr(found.decision, name).cpu(), getattr(expected.decision, name)), name
    near(found.loss, expected.loss, VALUES)
    asked = case.response
    near_policy(each(found.policy, lambda values: values.cpu()[asked]), each(expected.policy, lambda v: v[asked]))
    near_gradients(by_found, by_expected, dtype)
    return found


@EVERY_DTYPE
@EVERY_SETTING
def test_statistics_and_their_gradient(small, dtype, settings):
    check_statistics(build(**SIZE, dtype=dtype, size=1.5, **settings), dtype)


@EVERY_DTYPE
@EVERY_SETTING
def test_loss_and_its_gradient(small, dtype, settings):
    case = build(**SIZE, dtype=dtype, drift=1.0, **settings)
    found = check_loss(case, Predictive(delta=0.05), dtype, ratio_cap=5.0)
    assert found.decision.dropped.sum() > 3


@EVERY_RULE
def test_every_rule(small, rule):
    assert set(RULES) == {rule.name for rule in RULE_SETTINGS}
    check_loss(build(**SIZE, seed=1, dtype=torch.bfloat16, drift=1.0), rule, torch.bfloat16)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(small, shape, dtype):
    case = build(**shape, dtype=dtype, **SETTINGS["all"])
    check_statistics(case, dtype)
    if len(case.hidden):
        check_loss(case, RULES["ppo_clip"](), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiling_of_the_field(dtype):
    case = build(130, 1500, 70, dtype=dtype, bias=True, drift=1.0)
    check_statistics(case, dtype)
    check_loss(case, Predictive(), dtype)


def test_hidden_states_and_weight_of_different_dtypes(small):
    for hidden, weight in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        # The gradient of the 16-bit input is rounded; products and slopes are float32.
        case = build(**SIZE, dtype=hidden, weight_dtype=weight, bias=True, drift=1.0)
        check_statistics(case, torch.bfloat16)
        check_loss(case, Predictive(), torch.bfloat16)
        _, found = loss_of(moved(case, DEVICE), Predictive(), "triton")
        _, expected = loss_of(dense(case), Predictive(), "dense")
        wide = "hidden" if hidden == torch.float32 else "weight"
        right = getattr(expected, wide)
        near(getattr(found, wide).cpu() / right.abs().max(), right / right.abs().max(), GRADIENTS[torch.float32], wide)


@EVERY_DTYPE
def test_ids_that_stand_twice_are_one_id_with_both_gradients(small, dtype):
    case = build(**SIZE, dtype=dtype)
    ids = torch.randint(0, 300, (70, 7), generator=torch.Generator().manual_seed(0))
    ids[:, 3], ids[::2, 5] = ids[:, 0], ids[::2, 1]
    results = []
    for backend, own in (("triton", leaves(moved(case, DEVICE))), ("dense", leaves(dense(case)))):
        policy = support_statistics(own.hidden, own.weight, ids.to(own.hidden.device), backend=backend)
        policy.logp.backward(slots(case).to(policy.logp))
        results.append((policy.detach(), gradients(own)))
    (found, by_found), (expected, by_expected) = results
    near_policy(found, expected)
    near_gradients(by_found, by_expected, dtype)


def measured(case: OperatorCase, **options: Any) -> Measured:
    """What a sweep of the whole vocabulary measures."""
    there = moved(case, DEVICE)
    head = Head(weight=there.weight, bias=there.bias, **case.settings)
    ids = there.behaviour.ids
    sweep = triton_sweep.TritonSweep(head, there.hidden, len(there.weight), **options)
    return sweep.measure(there.hidden, ids, first_occurrence(ids))


def exactly(case: OperatorCase) -> Measured:
    """The same from float64 logits."""
    logits = Head(weight=case.weight.double(), bias=case.bias, **case.settings).logits(case.hidden.double())
    ids = case.behaviour.ids
    shift = logits.amax(1)
    logits = logits - shift[:, None]
    tail = Tail.of(logits.scatter(1, ids, -math.inf))
    return Measured(shift=shift, support=logits.gather(1, ids), distinct=first_occurrence(ids), tail=tail)


def near_tail(found: Tail, expected: Tail) -> None:
    for name in ("log_mass", "mean", "collision"):
        near(getattr(found, name), getattr(expected, name), VALUES, name)


@pytest.mark.parametrize("form_product", [True, False])
@pytest.mark.parametrize(
    "slope", [-40.0, -3.0, -0.1, 0.1, 3.0, 40.0], ids=lambda slope: f"largest logit {'last' if slope > 0 else 'first'}"
)
def test_sums_follow_the_largest_logit_wherever_it_comes(form_product, slope):
    """Logits that rise or fall over the tiles: what was summed so far is brought to the new largest one, each time."""
    case = build(40, 300, 2, dtype=torch.float32)
    case = case.replace(
        hidden=torch.ones(40, 2), weight=torch.stack([torch.linspace(0, slope, 300), torch.randn(300)], 1)
    )
    for tiling in (SMALL, Tiling(rows=16, columns=32, depth=16, warps=4, stages=1, programs=1)):
        found = measured(case, form_product=form_product, tiling=tiling)
        near_tail(found.tail, exactly(case).tail)


def test_a_tail_far_below_float32(small):
    """Logits from 0 down to -150 and less, and a support that holds the largest."""
    case = build(20, 200, 2, top_k=1, sampled=[3], dtype=torch.float32, spoilt=False)
    weight = torch.stack([torch.linspace(-155, -150, 200), torch.zeros(200)], 1)
    weight[3] = 0.0
    case = case.replace(hidden=torch.ones(20, 2), weight=weight)
    case = case.replace(
        behaviour=BehaviourSupport.from_topk(torch.full((20,), 3), torch.full((20,), -0.1, dtype=torch.float64))
    )
    found, expected = measured(case), exactly(case)
    assert expected.tail.log_mass.max() < -140
    near_tail(found.tail, expected.tail)
    near(statistics(moved(case, DEVICE), "triton").log_tail, statistics(dense(case), "dense").log_tail, VALUES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_minus_pi_is_summed(small, dtype):
    """pi_k = 1 - 3e-9: its slope is the others' sum, which 1 - pi_k would lose. (float16 itself has no such number.)"""
    case = build(20, 200, 2, sampled=[3], dtype=dtype, top_k=0)
    weight = torch.zeros(200, 2, dtype=dtype)
    weight[3, 0] = 25.0
    weight[:, 1] = torch.linspace(-1, 1, 200).to(dtype)
    case = case.replace(hidden=torch.ones(20, 2, dtype=dtype), weight=weight)
    case = case.replace(
        behaviour=BehaviourSupport.from_topk(torch.full((20,), 3), torch.full((20,), -0.1, dtype=torch.float64))
    )
    check_loss(case.replace(advantage=torch.ones(20)), RULES["none"](), dtype)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits_lose_no_digits(small, size):
    """Logits around ±1e4 that differ by a few; exact in float32, so that only the sums can lose digits."""
    case = build(40, 300, 2, dtype=torch.float32)
    steps = torch.randint(-64, 64, (300, 2), generator=torch.Generator().manual_seed(0)) / 32
    case = case.replace(hidden=torch.ones(40, 2), weight=steps, bias=torch.full((300,), size))
    check_statistics(case, torch.float32)
    check_loss(case, Predictive(), torch.float32)


@EVERY_DTYPE
def test_ids_that_cannot_occur(small, dtype):
    """Whole tiles and some of the support at -inf: no share of the tail, and no NaN."""
    case = build(**SIZE, dtype=dtype, bias=True)
    case.bias[40:140] = -math.inf
    case.bias[200] = -math.inf
    ids = case.behaviour.ids.clone()
    ids[:, -1] = 55
    case = case.replace(behaviour=BehaviourSupport(**{**vars(case.behaviour), "ids": ids}))
    usable = case.bias[ids[:, 0]] > -math.inf
    found = measured(case, form_product=False, tiling=SMALL)
    assert torch.isfinite(found.log_norm).all()
    case = case.take(usable)
    found, expected = statistics(moved(case, DEVICE), "triton"), statistics(dense(case), "dense")
    near_policy(found, expected)
    check_loss(case, RULES["ppo_clip"](), dtype)


@NOT_FINITE
@EVERY_DTYPE
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_spoilt_rows_are_unknown_and_reach_no_gradient(small, dtype, value):
    case = build(**SIZE, dtype=dtype, drift=1.0)
    spoilt = torch.zeros(70, dtype=torch.bool)
    spoilt[[0, 5, 33, 69]] = True
    broken = case.replace(hidden=case.hidden.masked_fill(spoilt[:, None], value))
    policy = statistics(moved(broken, DEVICE), "triton")
    for name in ("log_tail", "tail_sum_squares", "entropy"):
        assert torch.equal(torch.isnan(getattr(policy, name)).cpu(), spoilt), name
    found, by_found = loss_of(moved(broken, DEVICE), Predictive(), "triton")
    asked = spoilt & case.response
    assert ((found.decision.reason.cpu() == Reason.UNKNOWN) == asked).all()
    clean = case.replace(response=case.response & ~spoilt)
    right, by_right = loss_of(dense(clean), Predictive(), "dense")
    near(found.loss, right.loss, VALUES)
    near_gradients(by_found, by_right, dtype)
    own = leaves(moved(broken, DEVICE))
    torch.where(own.behaviour.valid, statistics(own, "triton").logp, 0.0).nan_to_num().sum().backward()
    assert all(torch.isfinite(values).all() for values in (own.hidden.grad, own.weight.grad))


@NOT_FINITE
@pytest.mark.parametrize("column", [7, 130, 299])
def test_one_spoilt_logit_spoils_its_row(small, column):
    """In whichever tile it stands, in the tail or in the support."""
    case = build(**SIZE, dtype=torch.float32, bias=True)
    case.bias[column] = math.nan
    policy = statistics(moved(case, DEVICE), "triton")
    assert all(torch.isnan(getattr(policy, name)).all() for name in ("log_tail", "tail_sum_squares", "entropy"))


@EVERY_DTYPE
def test_coefficients_of_any_size(small, dtype):
    """A denominator of 1e9, and tokens whose weights differ by 1e4: no slope is lost to the range of 16 bits."""
    case = build(**SIZE, dtype=dtype, drift=1.0)
    spread = torch.logspace(-13, -9, 70, dtype=torch.float64)
    found, by_found = loss_of(moved(case.replace(weights=spread), DEVICE), RULES["none"](), "triton")
    right, by_right = loss_of(dense(case.replace(weights=spread)), RULES["none"](), "dense")
    assert found.loss.item() == pytest.approx(right.loss.item(), rel=1e-4)
    if dtype == torch.float16:
        # Gradients of 1e-13 do not fit float16 itself; their sums do fit the float32 buffer.
        buffer = torch.zeros(300, 24, device=DEVICE)
        loss_of(moved(case.replace(weights=spread), DEVICE), RULES["none"](), "triton", weight_grad=buffer)
        unit = by_right.weight.abs().max()
        near(buffer.cpu() / unit, by_right.weight / unit, GRADIENTS[dtype])
    else:
        near_gradients(by_found, by_right, dtype)


def test_several_chunks_and_a_buffer_for_the_gradient(small, monkeypatch):
    monkeypatch.setattr(triton_sweep, "WORKSPACE_BYTES", 1)
    case = build(**{**SIZE, "tokens": 300}, dtype=torch.bfloat16, drift=1.0, bias=True)
    there = moved(case, DEVICE)
    assert TritonSweep(Head(weight=there.weight), there.hidden, 300).chunk_tokens == 128
    check_statistics(case, torch.bfloat16)
    check_loss(case, Predictive(), torch.bfloat16)
    buffer = torch.full((300, 24), 0.25, device=DEVICE)
    loss_of(there, Predictive(), "triton", weight_grad=buffer)
    _, expected = loss_of(dense(case), Predictive(), "dense")
    # Summed in float32: only the slopes are rounded.
    limit = GRADIENTS[torch.bfloat16] * expected.weight.abs().max()
    near((buffer.cpu() - 0.25) / limit, expected.weight / limit, 1.0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs(small, frozen):
    case = build(**SIZE, dtype=torch.float32, drift=1.0)
    own = leaves(moved(case, DEVICE), **{frozen: False})
    loss(own, Predictive(), "triton").loss.backward()
    _, expected = loss_of(dense(case), Predictive(), "dense")
    found = gradients(own)
    assert getattr(found, frozen) is None
    other = "weight" if frozen == "hidden" else "hidden"
    unit = getattr(expected, other).abs().max()
    near(getattr(found, other).cpu() / unit, getattr(expected, other) / unit, GRADIENTS[torch.float32])


def test_only_tokens_with_a_coefficient_have_slopes():
    case = moved(build(**SIZE, dtype=torch.float32), DEVICE)
    sweep = TritonSweep(Head(weight=case.weight), case.hidden, 300)
    by_logp = torch.randn(70, device=DEVICE)
    by_logp[::3] = 0.0
    ids = case.behaviour.ids
    slopes = sweep.slopes(sweep.measure(case.hidden, ids, first_occurrence(ids)), by_logp)
    assert torch.equal(slopes.tokens, by_logp.nonzero()[:, 0])
    assert slopes.values.shape == (len(slopes.tokens), 300)
    logits = (case.hidden @ case.weight.T).double()
    right = torch.nn.functional.one_hot(ids[:, 0], 300) - logits.softmax(1)
    right = (by_logp[:, None] * right)[slopes.tokens]
    near(slopes.values.double() * slopes.scale.to(DEVICE)[:, None], right, 1e-5)


@EVERY_DTYPE
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_parts_of_the_vocabulary_that_differ_in_size(dtype, softcap):
    """Three sweeps, one of them over ids of which none is in any support, merge to the whole."""
    case = moved(build(**SIZE, dtype=dtype, bias=True), DEVICE)
    ids, settings = case.behaviour.ids.clone(), {"softcap": softcap, "temperature": 0.8}
    ids[(ids >= 200) & (ids < 230)] = 5
    distinct = first_occurrence(ids)
    bounds = [(0, 200), (200, 230), (230, 300)]
    heads = [Head(weight=case.weight[a:b], bias=case.bias[a:b], **settings) for a, b in bounds]
    sweeps = [TritonSweep(head, case.hidden, 100, tiling=SMALL) for head in heads]
    assert len({sweep.chunk_tokens for sweep in sweeps}) == 1
    parts = [sweep.measure(case.hidden, ids - a, distinct) for sweep, (a, _) in zip(sweeps, bounds, strict=True)]
    whole = Measured.merge(parts)
    double = {"hidden": case.hidden.double(), "weight": case.weight.double(), "bias": case.bias.double()}
    double = {name: values.clone().requires_grad_() for name, values in double.items()}
    hidden = double.pop("hidden")
    expected = support_statistics(hidden, ids=ids, backend="dense", **double, **settings)
    found = whole.policy(300)
    near_policy(each(found, lambda values: values.cpu()), each(expected.detach(), lambda values: values.cpu()))
    by_logp = slots(case).to(DEVICE, torch.float32)
    for name, by in (("slopes", by_logp[:, 0].contiguous()), ("support_slopes", by_logp)):
        if name == "support_slopes":  # the first ones consumed the logits
            for sweep, (a, _) in zip(sweeps, bounds, strict=True):
                sweep.measure(case.hidden, ids - a, distinct)
        right = torch.zeros(ids.shape, dtype=torch.float64, device=DEVICE)
        right[:, : 1 if by.ndim == 1 else None] = by.double().reshape(len(by), -1)
        by_right = torch.autograd.grad(expected.logp, [hidden, *double.values()], right, retain_graph=True)
        total, sums = torch.zeros(70, 24, device=DEVICE), []
        for sweep, (a, b) in zip(sweeps, bounds, strict=True):
            slopes = getattr(sweep, name)(whole, by)
            total[slopes.tokens] += sweep.hidden_gradient(slopes)
            gradient = HeadGradient(torch.full((b - a, 24), math.nan), torch.full((b - a,), math.nan), blank=True)
            gradient.weight, gradient.bias = gradient.weight.to(DEVICE), gradient.bias.to(DEVICE)
            sweep.add_head_gradient(slopes, case.hidden[slopes.tokens], gradient)
            assert not gradient.blank
            sums.append((gradient.weight, gradient.bias))
        found_gradients = (total, torch.cat([weight for weight, _ in sums]), torch.cat([bias for _, bias in sums]))
        for actual, wanted in zip(found_gradients, by_right, strict=True):
            near(actual.cpu() / wanted.abs().max().cpu(), (wanted / wanted.abs().max()).cpu(), GRADIENTS[dtype], name)


def test_a_part_without_rows_or_without_possible_ids():
    case = moved(build(**SIZE, dtype=torch.float32, bias=True), DEVICE)
    ids, distinct = case.behaviour.ids, first_occurrence(case.behaviour.ids)
    impossible = torch.full((50,), -math.inf, device=DEVICE)
    heads = [Head(weight=case.weight[:0]), Head(weight=case.weight[:50], bias=impossible)]
    for head in heads:
        found = TritonSweep(head, case.hidden, 100).measure(case.hidden, ids - 1000, distinct)
        assert (found.shift == 0).all()
        assert (found.support == -math.inf).all()
        assert (found.tail.log_mass == -math.inf).all()
        assert (found.tail.mean == 0).all()
        assert (found.tail.collision == 0).all()


def test_float64_is_refused_with_advice():
    case = build(3)
    with pytest.raises(ValueError, match=r"float64; use 'chunked', or 'auto'"):
        statistics(case, "triton")
    with pytest.raises(ValueError, match="float64"):
        loss(case, RULES["none"](), "triton")


def test_without_triton_the_backend_is_refused_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "predmask.ops.triton_sweep")
    with pytest.raises(ValueError, match="pip install triton"):
        statistics(build(3, dtype=torch.float32), "triton")
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert operator._sweep("auto", on_gpu, None) is TorchSweep


def test_auto_takes_triton_on_a_gpu_where_it_can():
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    chosen: Any = operator._sweep("auto", on_gpu, None)
    for dtype, expected in ((torch.bfloat16, TritonSweep), (torch.float32, TritonSweep), (torch.float64, TorchSweep)):
        case = moved(build(3, dtype=dtype), DEVICE)
        assert isinstance(chosen(Head(weight=case.weight), case.hidden, 13), expected)
    assert operator._sweep("auto", torch.zeros(1), None) is TorchSweep
    assert operator._sweep("chunked", on_gpu, None) is TorchSweep


def python(*command: str, status: int = 0, **environment: str) -> str:
    """What a fresh Python prints, where the kernels are not interpreted unless it asks for that."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, *command], env={**kept, **environment}, capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == status, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    return found.stdout + found.stderr


@pytest.mark.skipif(DEVICE.type == "cuda", reason="has a GPU")
def test_a_cpu_neither_loads_triton_nor_runs_it():
    found = python(
        "-c",
        """
import sys, torch
from predmask.ops import support_statistics
hidden, weight, ids = torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, 1, dtype=torch.int64)
print("triton" in sys.modules)
support_statistics(hidden, weight, ids)
print("predmask.ops.triton_sweep" in sys.modules)
try:
    support_statistics(hidden, weight, ids, backend="triton")
except ValueError as error:
    print(error)
""",
    )
    assert found.startswith("False\nFalse\nbackend 'triton' needs a GPU, and hidden is on cpu")
    assert "use 'chunked'" in found


COMPILE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from predmask.ops import triton_sweep

NUMBERS = {"gain": "fp32", "ceiling": "fp32", "inverse_ceiling": "fp32", "excluded": "*i32", "tokens": "*i64"}
COUNTS = ("count", "size", "dimensions", "stride", "tiles_each")


def build(kernel, capability, operand, ones, warps, stages, **constants):
    types = {**NUMBERS, **dict.fromkeys(COUNTS, "i32"), **dict.fromkeys(("hidden", "weight", "values"), operand)}
    constants |= {name: 1 for name in ones}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def measure(capability, operand, ones=(), extras=False, ways=(True, False)):
    dtype = {"*bf16": torch.bfloat16, "*fp32": torch.float32}[operand]
    for form_product in ways:
        tiling = triton_sweep._tiling(dtype, form_product)
        compiled = build(
            triton_sweep._measure_kernel, capability, operand, ones, tiling.warps, tiling.stages,
            form_product=form_product, with_bias=extras, with_cap=extras, widen=False,
            rows=tiling.rows, columns=tiling.columns, depth=tiling.depth,
        )
        assert compiled.metadata.shared <= 99 * 1024
        if form_product and operand == "*bf16":
            assert "wgmma" in compiled.asm["ptx"]


measure(80, "*bf16", extras=True, ways=(False,))
measure(80, "*fp32")
measure(90, "*bf16", extras=True)
measure(90, "*bf16", ones=("count", "size", "dimensions", "tiles_each"))
for cap in (True, False):
    build(triton_sweep._slopes_kernel, 90, "*bf16", (), 8, 3, with_cap=cap, columns=triton_sweep._SLOPES_TILE)
build(triton_sweep._slopes_kernel, 90, "*fp16", ("size",), 8, 3, with_cap=False, columns=4096)
print("compiled")
"""


def test_the_kernels_compile_for_gpus(tmp_path):
    """To machine code of Ampere and Hopper, which needs no GPU; also with counts of 1, which triton makes constants."""
    assert python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), PYTHONWARNINGS="ignore") == "compiled\n"


GPU_CHECK = str(ROOT / "benchmarks" / "gpu_check.py")


def test_the_gpu_check_tries_itself_out():
    found = python(GPU_CHECK, "--tiny", "--repeats", "1")
    assert found.count("| ok |") == 9
    assert "FAILED" not in found
    assert "| the three products alone |" in found
    assert found.count("| 1 |\n") == 10


@pytest.mark.skipif(DEVICE.type == "cuda", reason="has a GPU")
def test_the_gpu_check_needs_a_gpu():
    assert "needs a CUDA GPU" in python(GPU_CHECK, status=2)


def test_the_gpu_check_fails_where_parity_fails_and_keeps_to_its_time():
    code = """
import sys
sys.path.insert(0, "benchmarks")
import gpu_check
gpu_check.VALUE_LIMIT = 1e-9
sys.argv[1:] = ["--tiny", "--seconds", "0"]
sys.exit(gpu_check.main())
"""
    found = python("-c", code, status=1)
    assert "PARITY FAILED" in found
    assert found.count("skipped: the time budget is used") == 10
