"""Cases of the operator, what NumPy makes of them in float64, and what a backend makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from predmask import RULES, BehaviourSupport, MaskDecision, PolicySupport, Predictive, Rule
from predmask.ops import MaskedPolicyLoss, masked_policy_loss, support_statistics, sweep
from reference import Array, log_softmax

LIMITS = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 1.01 * 2**-8, torch.float16: 1.01 * 2**-11}
"""How far a number in this dtype may be from the float64 one: a few steps of the sums in float64 and float32; in 16
bits half a step, since sums are formed in float32 and rounded once (bfloat16: 8 bits, float16: 11 bits)."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "bias": {"bias": True},
    "softcap": {"softcap": 2.5},
    "scale": {"scale": 0.4},
    "all": {"bias": True, "softcap": 3.0, "scale": 1.7, "temperature": 0.6},
}
RULE_SETTINGS: list[Rule] = [
    *(rule() for rule in RULES.values()),
    RULES["dppo"](divergence="tv", support="binary", delta=0.1),
    RULES["predictive"](divergence="reverse_kl", tail="uniform"),
]


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """N tokens and a head; `shaped` gives them another leading shape."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    behaviour: BehaviourSupport
    advantage: Tensor
    response: Tensor
    weights: Tensor
    """[...] float64, of each token in the loss."""
    settings: dict[str, float] = field(default_factory=dict)
    """softcap, scale, temperature"""

    def replace(self, **changes: Any) -> OperatorCase:
        return dataclasses.replace(self, **changes)

    def take(self, rows: Any) -> OperatorCase:
        """Some tokens."""
        return self._each(lambda values: values[rows])

    def shaped(self, *leading: int) -> OperatorCase:
        """The same tokens in another leading shape."""
        flat = self.response.ndim
        return self._each(lambda values: values.reshape((*leading, *values.shape[flat:])))

    def _each(self, function: Any) -> OperatorCase:
        names = ("hidden", "advantage", "response", "weights")
        changed = {name: function(getattr(self, name)) for name in names}
        return self.replace(**changed, behaviour=each(self.behaviour, function))

    @property
    def leading(self) -> torch.Size:
        return self.response.shape

    @property
    def dtype(self) -> torch.dtype:
        """What the sums are formed in."""
        wide = torch.float64 in (self.hidden.dtype, self.weight.dtype)
        return torch.float64 if wide else torch.float32


def each(record: Any, function: Any) -> Any:
    """A record with a function applied to each of its tensors."""
    values = {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}
    return dataclasses.replace(record, **{name: function(value) for name, value in values.items()})


def build(
    tokens: int = 9,
    vocabulary: int = 13,
    width: int = 4,
    top_k: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
    record_dtype: torch.dtype = torch.float64,
    bias: bool = False,
    spoilt: bool = True,
    full: bool = False,
    size: float = 1.0,
    drift: float = 0.5,
    sampled: list[int] | None = None,
    **settings: float,
) -> OperatorCase:
    """Tokens whose behaviour policy is the head's own with noise `drift` on the logits, so that rules keep and drop.

    `size` scales the logits. `spoilt` records lack entries and repeat others; `full` ones are whole distributions.
    Inputs are rounded to their dtypes before anything is derived from them.
    """
    generator = np.random.default_rng([seed, tokens, vocabulary, width])

    def normal(*shape: int, to: torch.dtype) -> Tensor:
        return torch.tensor(generator.normal(size=shape)).to(to)

    hidden = (normal(tokens, width, to=torch.float64) * size).to(dtype)
    weight = normal(vocabulary, width, to=weight_dtype or dtype)
    offset = normal(vocabulary, to=weight_dtype or dtype) if bias else None
    head = OperatorCase(
        hidden=hidden,
        weight=weight,
        bias=offset,
        behaviour=BehaviourSupport.from_topk(torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens)),
        advantage=torch.tensor(generator.choice([-1.5, -0.6, 0.0, 0.4, 1.0], tokens)).to(record_dtype),
        response=torch.tensor(generator.random(tokens) < 0.8),
        weights=torch.tensor(generator.uniform(0.5, 1.5, tokens) / max(tokens, 1)),
        settings=settings,
    )
    mu = oracle_logits(head) + drift * generator.normal(size=(tokens, vocabulary))
    log_mu = torch.tensor(np.array([log_softmax(row) for row in mu]).reshape(tokens, vocabulary))
    if sampled is None:
        chosen = torch.tensor([generator.choice(vocabulary, p=np.exp(row)) for row in log_mu.numpy()])
    else:
        chosen = torch.tensor([sampled[i % len(sampled)] for i in range(tokens)])
    chosen = chosen.reshape(tokens).long()
    if full:
        return head.replace(behaviour=BehaviourSupport.full(chosen, log_mu.to(record_dtype)))
    top = log_mu.topk(min(top_k, vocabulary), dim=-1)
    top_ids, top_logp = top.indices, top.values
    if spoilt and top_k > 1:
        # A missing entry in every third row, a repeated one in every fourth.
        top_ids[::3, 1] = -1
        top_ids[1::4, -1], top_logp[1::4, -1] = top_ids[1::4, 0], top_logp[1::4, 0]
    own = log_mu.gather(-1, chosen[:, None])[:, 0]
    return head.replace(
        behaviour=BehaviourSupport.from_topk(chosen, own.to(record_dtype), top_ids, top_logp.to(record_dtype))
    )


def double(values: Tensor) -> Array:
    return values.detach().double().numpy()


def oracle_logits(case: OperatorCase) -> Array:
    """[..., V] in float64."""
    raw = double(case.hidden) @ double(case.weight).T
    if case.bias is not None:
        raw = raw + double(case.bias)
    raw = raw * case.settings.get("scale", 1.0)
    softcap = case.settings.get("softcap")
    if softcap is not None:
        raw = softcap * np.tanh(raw / softcap)
    return raw / case.settings.get("temperature", 1.0)


def oracle_slope(case: OperatorCase) -> Array:
    """[..., V] d logit / d raw logit."""
    softcap = case.settings.get("softcap")
    temperature = case.settings.get("temperature", 1.0)
    slope = np.full((*case.leading, len(case.weight)), case.settings.get("scale", 1.0) / temperature)
    return slope if softcap is None else slope * (1 - (oracle_logits(case) * temperature / softcap) ** 2)


def oracle_policy(case: OperatorCase) -> PolicySupport:
    """The statistics of N tokens, one at a time; the tail is a sum over a set."""
    behaviour = case.behaviour
    logp, log_tail, squares, entropy = np.full(behaviour.ids.shape, -np.inf), [], [], []
    for row, logits in enumerate(oracle_logits(case)):
        every = log_softmax(logits)
        ids, valid = behaviour.ids[row].tolist(), behaviour.valid[row].tolist()
        support = {i for i, used in zip(ids, valid, strict=True) if used}
        logp[row] = [every[i] if used else -np.inf for i, used in zip(ids, valid, strict=True)]
        tail = np.array([every[i] for i in range(len(every)) if i not in support and every[i] > -np.inf])
        top = tail.max() if len(tail) else -np.inf
        log_tail.append(top + np.log(np.exp(tail - top).sum()) if len(tail) else -np.inf)
        squares.append(np.exp(2 * tail).sum())
        entropy.append(-sum(np.exp(v) * v for v in every if v > -np.inf))
    return PolicySupport(
        logp=torch.tensor(logp),
        log_tail=torch.tensor(log_tail, dtype=torch.float64),
        vocabulary_size=len(case.weight),
        tail_sum_squares=torch.tensor(squares, dtype=torch.float64),
        entropy=torch.tensor(entropy, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Gradients:
    hidden: Any
    weight: Any
    bias: Any


def oracle_gradients(case: OperatorCase, by_logp: Array) -> Gradients:
    """By hidden, weight and bias of N tokens, from the derivatives by log pi [N, S]."""
    by_logit = np.zeros((len(case.hidden), len(case.weight)))
    for row, logits in enumerate(oracle_logits(case)):
        pi = np.exp(log_softmax(logits))
        for token, used, value in zip(
            case.behaviour.ids[row].tolist(), case.behaviour.valid[row].tolist(), by_logp[row], strict=True
        ):
            if used:
                step = -pi
                step[token] = np.delete(pi, token).sum()  # 1 - pi would lose it to rounding
                by_logit[row] += value * step
    by_raw = by_logit * oracle_slope(case)
    # What comes before the cap's slope: raw = hidden · weightᵀ + bias, and the scale is in the slope.
    return Gradients(by_raw @ double(case.weight), by_raw.T @ double(case.hidden), by_raw.sum(0))


@dataclass(frozen=True)
class Expected:
    """What masked_policy_loss owes, from formulas."""

    loss: float
    decision: MaskDecision
    policy: PolicySupport
    coefficients: Array
    gradients: Gradients


def oracle_loss(case: OperatorCase, rule: Rule, ratio_cap: float | None = None) -> Expected:
    """The loss of N tokens; the rule is asked about the oracle's own statistics."""
    policy = oracle_policy(case)
    decision = rule(each(case.behaviour, lambda v: v.double() if v.is_floating_point() else v), policy, *asked(case))
    keep, weight, advantage = decision.keep.numpy(), double(decision.weight), double(case.advantage)
    capped = np.minimum(weight, np.inf if ratio_cap is None else ratio_cap)
    coefficients = np.array(
        [-w * c * a if k else 0.0 for w, c, a, k in zip(double(case.weights), capped, advantage, keep, strict=True)]
    )
    by_logp = np.zeros(case.behaviour.ids.shape)
    by_logp[:, 0] = coefficients
    return Expected(coefficients.sum(), decision, policy, coefficients, oracle_gradients(case, by_logp))


def asked(case: OperatorCase) -> tuple[Tensor, Tensor]:
    return case.advantage.double(), case.response


def leaves(case: OperatorCase, *, hidden: bool = True, weight: bool = True, bias: bool = True) -> OperatorCase:
    """The case with inputs that ask for gradients."""

    def leaf(values: Tensor | None, wanted: bool) -> Tensor | None:
        return None if values is None else values.detach().clone().requires_grad_(wanted)

    return case.replace(hidden=leaf(case.hidden, hidden), weight=leaf(case.weight, weight), bias=leaf(case.bias, bias))


def statistics(case: OperatorCase, backend: Any = "chunked", **options: Any) -> PolicySupport:
    options = {"bias": case.bias, **case.settings, **options}
    return support_statistics(case.hidden, case.weight, case.behaviour, backend=backend, **options)


def loss(case: OperatorCase, rule: Rule, backend: Any = "chunked", **options: Any) -> MaskedPolicyLoss:
    if "denominator" not in options:
        options = {"weights": case.weights, **options}
    options = {"response_mask": case.response, "bias": case.bias, **case.settings, **options}
    return masked_policy_loss(
        case.hidden, case.weight, case.behaviour, case.advantage, rule=rule, backend=backend, **options
    )


def gradients(case: OperatorCase) -> Gradients:
    """What has been gathered in the inputs of `leaves`."""
    return Gradients(case.hidden.grad, case.weight.grad, None if case.bias is None else case.bias.grad)


def run(case: OperatorCase, rule: Rule, backend: Any = "chunked", **options: Any) -> tuple[MaskedPolicyLoss, Gradients]:
    """The loss and all its gradients."""
    own = leaves(case)
    found = loss(own, rule, backend, **options)
    found.loss.backward()
    return found, gradients(own)


def assert_near(actual: Any, expected: Any, limit: float, name: str = "", floor: float = 0.0) -> None:
    """Equal within `limit` of the number itself, or of the largest one where sums cancel."""
    actual, expected = torch.as_tensor(actual).detach().double(), torch.as_tensor(expected).detach().double()
    some = expected[torch.isfinite(expected)].abs()
    # float32 sums cannot be nearer than a few steps of their largest term.
    floor += max(min(limit, LIMITS[torch.float32]), 1e-13) * (float(some.max()) if some.numel() else 0.0)
    torch.testing.assert_close(
        actual, expected, rtol=limit, atol=floor, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def assert_same_policy(actual: PolicySupport, expected: PolicySupport, limit: float) -> None:
    """Nats within `limit`, and probabilities within `limit` of themselves."""
    for name in ("logp", "log_tail", "entropy"):
        assert_near(getattr(actual, name), getattr(expected, name), limit, name, floor=limit)
    assert_near(actual.tail_sum_squares, expected.tail_sum_squares, 3 * limit, "tail_sum_squares", floor=1e-37)
    assert actual.vocabulary_size == expected.vocabulary_size


def assert_same_decision(actual: MaskDecision, expected: MaskDecision, limit: float, where: Tensor) -> None:
    """Equal for the tokens of `where`; the others' flags are those of tokens that are not decided."""
    for name in ("keep", "outside", "reason", "response_mask"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    # Divergences and rates are sums of terms of either sign, none of them large.
    for name, floor in (("divergence", limit / 10), ("rate", limit / 10), ("weight", 0.0)):
        values = (getattr(record, name)[where].double() for record in (actual, expected))
        torch.testing.assert_close(*values, rtol=limit, atol=floor, msg=lambda text, name=name: f"{name}: {text}")


def assert_policy_of(case: OperatorCase, policy: PolicySupport, limit: float) -> None:
    """The formulas' statistics for the tokens that were asked about."""
    assert_same_policy(
        each(policy, lambda values: values[case.response]), oracle_policy(case.take(case.response)), limit
    )


def assert_same_gradients(actual: Gradients, expected: Gradients, case: OperatorCase) -> None:
    """Each within the limit of its own dtype, or of what it was summed in."""
    for name in ("hidden", "weight", "bias"):
        found, like = getattr(actual, name), getattr(case, name)
        if like is None:
            assert found is None, name
        else:
            assert found.dtype == like.dtype, name
            assert found.shape == like.shape, name
            limit = max(LIMITS[like.dtype], 10 * LIMITS[case.dtype])
            assert_near(found, torch.as_tensor(getattr(expected, name)).reshape(like.shape), limit, name)


@contextmanager
def small_chunks(tokens: int | None = 3, hot_rows: int = 2, weight_rows: int = 4) -> Iterator[None]:
    """Chunks of a few tokens, measured a few at a time, and weights widened by a few rows."""
    with pytest.MonkeyPatch.context() as patch:
        if tokens is not None:
            patch.setattr(sweep, "chunk_tokens", lambda _, count: max(1, min(count, tokens)))
        patch.setattr(sweep, "WORKSPACE_ELEMENTS", 1)
        patch.setattr(sweep, "_WIDENED_ROWS", weight_rows)
        patch.setattr(sweep, "HOT_ELEMENTS", hot_rows * 13)
        yield


BACKENDS = ["dense", "chunked"]
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
EVERY_RULE = pytest.mark.parametrize("rule", RULE_SETTINGS, ids=str)
EVERY_SETTING = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
WHOLE = Predictive(delta=0.05)
FIELD_WORKSPACE = sweep.WORKSPACE_ELEMENTS
SHAPES: dict[str, dict[str, Any]] = {
    "odd": {"tokens": 7, "vocabulary": 17, "width": 5, "top_k": 4},
    "no token": {"tokens": 0},
    "one token": {"tokens": 1},
    "sampled alone": {"top_k": 0},
    "all but one": {"tokens": 11, "vocabulary": 6, "top_k": 5, "spoilt": False},
    "top-K is everything": {"tokens": 11, "vocabulary": 6, "top_k": 6, "spoilt": False},
    "full": {"tokens": 5, "full": True},
    "two words": {"vocabulary": 2, "top_k": 1},
    "width 1": {"width": 1},
    "many": {"tokens": 200, "vocabulary": 37, "width": 5},
}
"""Shapes of `build`."""
