"""The support of both policies: ids, masses, tails, and what is refused at its border."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask import DIVERGENCES, DPPO, BehaviourSupport, PolicySupport, get_divergence
from predmask.core.support import log1mexp
from reference import cases, log_softmax, softmax


def one(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def record(sampled, logp, ids, topk_logp, dtype=torch.float64):
    """One token's behaviour support."""
    return BehaviourSupport.from_topk(
        torch.tensor([sampled]), torch.tensor([logp], dtype=dtype), torch.tensor([ids]), one(topk_logp, dtype)
    )


def masses(behaviour):
    """id -> probability of one token's support, and the tail's."""
    slots = zip(behaviour.ids[behaviour.valid].tolist(), behaviour.logp[behaviour.valid].exp().tolist(), strict=True)
    return dict(slots), behaviour.log_tail.exp().item()


@given(case=cases())
def test_masses_of_both_policies(case):
    behaviour, policy = case.supports()
    assert behaviour.ids[0, 0] == case.sampled
    slots, tail = masses(behaviour)
    assert slots == pytest.approx({i: case.mu[i] for i in case.support})
    assert tail == pytest.approx(sum(case.mu[i] for i in case.tail), abs=1e-12)
    kept = policy.logp[behaviour.valid].exp().tolist()
    assert kept == pytest.approx([case.pi[i] for i in behaviour.ids[behaviour.valid].tolist()])
    assert policy.log_tail.exp().item() == pytest.approx(sum(case.pi[i] for i in case.tail), abs=1e-12)
    assert policy.tail_sum_squares.item() == pytest.approx(sum(case.pi[i] ** 2 for i in case.tail), abs=1e-12)
    assert policy.entropy.item() == pytest.approx(-(case.pi * np.log(case.pi)).sum())
    assert behaviour.log_kth.exp().item() == pytest.approx(min(case.mu[i] for i in case.top))


@given(case=cases())
def test_binary_view_is_the_record_without_topk(case):
    behaviour, policy = case.supports()
    alone = BehaviourSupport.from_topk(behaviour.ids[:, 0], behaviour.logp[:, 0])
    direct = PolicySupport.from_logits(torch.tensor(case.pi_logits[None]), alone)
    for binary, expected in ((behaviour.binary(), alone), (case.full()[0].binary(), alone)):
        assert (binary.top_k, binary.ids.tolist()) == (0, expected.ids.tolist())
        torch.testing.assert_close(binary.log_tail.exp(), expected.log_tail.exp())
    for binary in (policy.binary(), case.full()[1].binary()):
        torch.testing.assert_close(binary.logp, direct.logp)
        torch.testing.assert_close(binary.log_tail, direct.log_tail)
        torch.testing.assert_close(binary.tail_sum_squares, direct.tail_sum_squares)


def test_sampled_token_outside_topk_joins_and_overwrites_nothing():
    slots, tail = masses(record(7, math.log(0.05), [3, 5], [math.log(0.6), math.log(0.2)]))
    assert slots == pytest.approx({7: 0.05, 3: 0.6, 5: 0.2})
    assert tail == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("ids", "logp"),
    [([0, 3], [-math.inf, -1.0]), ([0, 0, 3], [-math.inf, -0.7, -1.0]), ([-1, -1, 3], [-0.1, -math.inf, -1.0])],
)
def test_missing_entry_hides_no_recorded_one(ids, logp):
    expected = {3: math.exp(-1.0), 9: math.exp(-2.0)} | ({0: math.exp(-0.7)} if -0.7 in logp else {})
    for order in ([*range(len(ids))], [*reversed(range(len(ids)))]):
        behaviour = record(9, -2.0, [ids[i] for i in order], [logp[i] for i in order])
        slots, tail = masses(behaviour)
        assert slots == pytest.approx(expected)
        assert tail == pytest.approx(1 - sum(expected.values()))


def test_log1mexp_is_accurate_at_both_ends():
    x = torch.tensor([-1e-12, -1e-5, -0.5, -math.log(2), -3.0, -40.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) if v > -1 else math.log1p(-math.exp(v)) for v in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-14)
    assert log1mexp(torch.tensor([0.0, -math.inf])).tolist() == [-math.inf, 0.0]


def test_near_one_masses_survive_float32():
    """1 - p of a likely token is not rounded away, on either side."""
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([-1e-9]))
    policy = PolicySupport.from_logits(one([0.0, -21.0, -25.0], torch.float32), behaviour)
    assert behaviour.log_tail.exp().item() == pytest.approx(1e-9, rel=1e-5)
    assert policy.log_tail.exp().item() == pytest.approx(math.exp(-21) + math.exp(-25), rel=1e-5)
    assert policy.tail_sum_squares.item() == pytest.approx(math.exp(-42) + math.exp(-50), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_above_one_by_rounding_gives_no_tail(dtype):
    """verl 7856: mu sums to 1.0000001."""
    behaviour = record(0, math.log(0.6000001), [0, 1], [math.log(0.6000001), math.log(0.4)], dtype)
    policy = PolicySupport.from_logits(one([0.7, 0.2, 0.1], dtype).log(), behaviour)
    assert behaviour.log_tail.exp().item() == pytest.approx(0, abs=1e-7)
    for name in DIVERGENCES:
        assert torch.isfinite(get_divergence(name)(behaviour, policy)).all()


@pytest.mark.parametrize("topk_logp", [[math.log(0.6), math.log(0.5)], [math.nan, math.log(0.3)]])
def test_impossible_records_are_unusable(topk_logp):
    """Mass far above 1, and NaN even where the sampled token's own entry holds it."""
    assert torch.isnan(record(0, math.log(0.6), [0, 1], topk_logp).log_tail).all()


@pytest.mark.parametrize("row", [[3.0, 2.0, 1.0], [-4.0, -5.0, -6.0], [-1.0, math.nan, -1.0]])
def test_full_row_that_is_no_distribution_is_unusable(row):
    assert torch.isnan(BehaviourSupport.full(torch.tensor([0]), one(row)).log_tail).all()


def test_temperature_belongs_to_both_policies():
    """TRL 4159: log-probs after temperature, which raw log-probs over T are not."""
    alone = BehaviourSupport.full(torch.tensor([0]), one([-0.142932, -2.142932, -4.142932]))
    logits = one([2.0, 1.0, 0.0])
    assert PolicySupport.from_logits(logits, alone, temperature=0.5).logp[0].tolist() == pytest.approx(
        [-0.143, -2.143, -4.143], abs=1e-3
    )
    assert PolicySupport.from_logits(logits, alone).logp[0].tolist() == pytest.approx(
        [-0.408, -1.408, -2.408], abs=1e-3
    )
    raw_over_temperature = BehaviourSupport.full(torch.tensor([0]), one([-0.408, -1.408, -2.408]) / 0.5)
    assert torch.isnan(raw_over_temperature.log_tail).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature):
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([-1.0]))
    with pytest.raises(ValueError, match="temperature"):
        PolicySupport.from_logits(torch.zeros(1, 3), behaviour, temperature=temperature)


def test_truncated_sampling_shows_and_renormalising_removes_it():
    """TRL 6789, prime-rl 3235: top_k=2 sampling of the very same weights."""
    kept = log_softmax(np.array([3.0, 2.0])).tolist()
    assert kept == pytest.approx([-0.313, -1.313], abs=1e-3)
    behaviour = record(0, kept[0], [0, 1], kept)
    whole = PolicySupport.from_logits(one([3.0, 2.0, 1.0, 0.0]), behaviour)
    assert whole.logp[behaviour.valid].tolist() == pytest.approx([-0.440, -1.440], abs=1e-3)
    assert (whole.logp - behaviour.logp)[0, 0].exp().item() == pytest.approx(0.881, abs=1e-3)
    same_set = PolicySupport.from_logits(one([3.0, 2.0, -math.inf, -math.inf]), behaviour)
    assert (same_set.logp - behaviour.logp)[0, 0].exp().item() == pytest.approx(1.0, abs=1e-6)
    for name in DIVERGENCES:
        assert get_divergence(name)(behaviour, same_set).item() == pytest.approx(0.0, abs=1e-9)
        assert get_divergence(name)(behaviour, whole).item() > 0.03


def test_padded_vocabulary_distorts_the_ratio():
    """NeMo-RL 237, vLLM 13175: two of five rows of the head are padding."""
    logits = one([2.0, 1.0, 0.0, 3.0, 3.0])
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([-0.407606], dtype=torch.float64))
    real = PolicySupport.from_logits(logits[:, :3], behaviour)
    padded = PolicySupport.from_logits(logits, behaviour)
    assert real.logp.item() == pytest.approx(-0.408, abs=1e-3)
    assert padded.logp.item() == pytest.approx(-1.937, abs=1e-3)
    assert (padded.logp - behaviour.logp).exp().item() == pytest.approx(0.217, abs=1e-3)


@pytest.mark.parametrize("sampled", [-1, 3, -100])
def test_ids_outside_the_vocabulary_are_refused(sampled):
    """NeMo-RL 237: an id is valid iff 0 <= id < rows."""
    behaviour = BehaviourSupport.from_topk(torch.tensor([0, sampled]), torch.tensor([-1.0, -1.0]))
    with pytest.raises(ValueError, match=f"id {sampled} is outside the vocabulary of 3"):
        PolicySupport.from_logits(torch.zeros(2, 3), behaviour)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_log_probs_are_refused(dtype):
    """NeMo-RL 4096: in bf16 a ratio of 1.010 reads 1.064."""
    mu, pi = torch.tensor([-8.04]), torch.tensor([-8.03])
    assert (pi - mu).exp().item() == pytest.approx(1.010, abs=1e-3)
    if dtype == torch.bfloat16:
        assert (pi.to(dtype) - mu.to(dtype)).float().exp().item() == pytest.approx(1.064, abs=1e-3)
    ids = torch.tensor([0])
    for build in (
        lambda: BehaviourSupport.from_topk(ids, mu.to(dtype)),
        lambda: BehaviourSupport.from_topk(ids, mu, ids[None], mu[None].to(dtype)),
        lambda: BehaviourSupport.full(ids, torch.log_softmax(torch.zeros(1, 4), -1).to(dtype)),
    ):
        with pytest.raises(TypeError, match="float32"):
            build()


def test_sixteen_bit_logits_are_normalised_in_float32():
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([-1.0]))
    logits = torch.linspace(-3, 3, 1000).to(torch.bfloat16)[None]
    policy = PolicySupport.from_logits(logits, behaviour)
    assert policy.logp.dtype == torch.float32
    assert policy.logp.item() == pytest.approx(log_softmax(logits[0].double().numpy())[0], abs=1e-5)


def test_shapes_must_fit():
    ids, logp = torch.zeros(3, dtype=torch.int64), torch.full((3,), -1.0)
    with pytest.raises(ValueError, match="go together"):
        BehaviourSupport.from_topk(ids, logp, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="shapes do not fit"):
        BehaviourSupport.from_topk(ids, logp[:2])
    with pytest.raises(ValueError, match="shapes do not fit"):
        BehaviourSupport.from_topk(ids, logp, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2))
    for rows in (5, 1):
        with pytest.raises(ValueError, match="one leading shape"):
            PolicySupport.from_logits(torch.zeros(rows, 6), BehaviourSupport.from_topk(ids, logp))


@given(case=cases(), weight=st.floats(-2, 2))
def test_gradient_of_logp_is_that_of_log_softmax(case, weight):
    behaviour, _ = case.supports()
    logits = torch.tensor(case.pi_logits[None], requires_grad=True)
    (weight * PolicySupport.from_logits(logits, behaviour).logp[0, 0]).backward()
    assert logits.grad[0].tolist() == pytest.approx((weight * case.step).tolist(), abs=1e-12)


def test_detach_leaves_no_gradient():
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([-1.0], requires_grad=True))
    policy = PolicySupport.from_logits(torch.zeros(1, 3, requires_grad=True), behaviour)
    assert policy.logp.requires_grad
    assert not any(t.requires_grad for t in (behaviour.logp, policy.log_tail, policy.detach().logp))


def test_masked_vocabulary_of_the_policy():
    """Tokens that the policy cannot produce (logit -inf) are in no sum, and give no NaN."""
    behaviour = record(0, math.log(0.5), [0, 1], [math.log(0.5), math.log(0.3)])
    policy = PolicySupport.from_logits(one([1.0, -math.inf, 0.0, -math.inf]), behaviour)
    expected = softmax(np.array([1.0, 0.0]))
    assert policy.logp[0, [0, 2]].exp().tolist() == pytest.approx([expected[0], 0.0])
    assert policy.entropy.item() == pytest.approx(-(expected * np.log(expected)).sum())
    assert policy.log_tail.exp().item() == pytest.approx(expected[1])
    assert DPPO()(behaviour, policy, torch.ones(1)).keep.tolist() == [False]


def test_some_tokens_of_a_support() -> None:
    """How a batch is cut into micro-batches."""
    logp = torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    top = logp.topk(3)
    whole = BehaviourSupport.from_topk(top.indices[..., 1], top.values[..., 1], top.indices, top.values)
    part = BehaviourSupport.from_topk(top.indices[1:3, :, 1], top.values[1:3, :, 1], top.indices[1:3], top.values[1:3])
    for name, values in vars(part).items():
        found = getattr(whole[1:3], name)
        assert torch.equal(found, values) if isinstance(values, torch.Tensor) else found == values
