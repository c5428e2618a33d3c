"""Anybody's arrays become the trace that predmask itself would have written."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from predmask import RULES, BehaviourSupport, NoMask, PolicySupport, PPOClip, Predictive, Reason, mask_metrics
from predmask.core.rules import Criteria, Rule
from predmask.traces import (
    Trace,
    TraceError,
    TraceInfo,
    TraceWriter,
    rule_settings,
    samples_from_trl,
    samples_from_verl,
    tokens_from_arrays,
    tokens_from_trl,
    tokens_from_verl,
)

NAN, INF = math.nan, math.inf
EVERY_RULE = pytest.mark.parametrize("name", RULES)


def log_softmax(values):
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def info_for(rule, *, top_k=3, vocabulary_size=11, **more):
    return TraceInfo(
        run="mine",
        rule=rule_settings(rule),
        vocabulary_size=vocabulary_size,
        top_k=top_k,
        **{"temperature": 1.0, **more},
    )


def made(shape=(4, 6), *, top_k=3, vocabulary_size=11, seed=0):
    """Random arrays as another trainer has them: NumPy, padded, with logits; the last row is empty."""
    generator = np.random.default_rng(seed)
    mu = log_softmax(2 * generator.standard_normal((*shape, vocabulary_size))).astype(np.float32)
    tokens = generator.integers(0, vocabulary_size, shape)
    top = np.argsort(-mu, axis=-1)[..., :top_k]
    lengths = generator.integers(0, shape[1] + 1, shape[0])
    lengths[-1] = 0
    arrays = {
        "tokens": tokens,
        "behaviour_logp": np.take_along_axis(mu, tokens[..., None], -1)[..., 0],
        "topk_ids": top,
        "topk_logp": np.take_along_axis(mu, top, -1),
        "policy_logits": (3 + mu + generator.standard_normal(mu.shape)).astype(np.float32),
        "advantage": generator.choice([-1.0, -0.5, 0.0, 1.0], shape[0]),
        "response_mask": np.arange(shape[1]) < lengths[:, None],
    }
    if not top_k:
        del arrays["topk_ids"], arrays["topk_logp"]
    return arrays


def on_support(arrays):
    """The arrays with log-probs of pi on the support in place of its logits, by NumPy."""
    logits = arrays["policy_logits"].astype(np.float64)
    ids = np.concatenate([arrays["tokens"][..., None], arrays["topk_ids"]], -1)
    logp = log_softmax(logits)
    outside = np.ones(logp.shape, dtype=bool)
    np.put_along_axis(outside, ids, False, -1)
    tail = np.where(outside, np.exp(logp), 0.0)
    return {
        **{name: value for name, value in arrays.items() if name != "policy_logits"},
        "policy_logp": np.take_along_axis(logp, ids, -1).astype(np.float32),
        "policy_log_tail": np.log(tail.sum(-1)),
        "policy_tail_sum_squares": (tail**2).sum(-1),
        "policy_entropy": -(np.exp(logp) * logp).sum(-1),
    }


def flat(arrays):
    """The same tokens without padding, one after the other."""
    mask = arrays["response_mask"]
    rows = {
        name: value[:, None].repeat(mask.shape[1], 1)[mask] if value.ndim == 1 else value[mask]
        for name, value in arrays.items()
        if name != "response_mask"
    }
    return {**rows, "sample": np.nonzero(mask)[0]}


def tensors(record, prefix=""):
    """Every tensor of a record and of those in it, by name."""
    found = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            found[prefix + field.name] = value
        elif value is not None and hasattr(value, "__dataclass_fields__"):
            found |= tensors(value, f"{prefix}{field.name}.")
    return found


def assert_same(one, other, **tolerance):
    assert tensors(one).keys() == tensors(other).keys()
    for name, value in tensors(one).items():
        torch.testing.assert_close(
            tensors(other)[name], value, equal_nan=True, **tolerance, msg=lambda m, n=name: n + m
        )


def by_core(rule, arrays):
    """What core decides for the padded arrays."""
    torches = {name: torch.from_numpy(value) for name, value in arrays.items()}
    behaviour = BehaviourSupport.from_topk(
        torches["tokens"], torches["behaviour_logp"], torches.get("topk_ids"), torches.get("topk_logp")
    )
    policy = PolicySupport.from_logits(torches["policy_logits"], behaviour)
    return rule(behaviour, policy, torches["advantage"][:, None], torches["response_mask"])


@EVERY_RULE
@settings(max_examples=25)
@given(shape=st.tuples(st.integers(1, 5), st.integers(1, 6)), top_k=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_imported_tokens_are_decided_as_core_decides(name, shape, top_k, seed):
    rule, arrays = RULES[name](), made(shape, top_k=top_k, seed=seed)
    tokens = tokens_from_arrays(info_for(rule, top_k=top_k), step=1, **arrays)
    mask = torch.from_numpy(arrays["response_mask"])
    assert tokens.id.tolist() == arrays["tokens"][arrays["response_mask"]].tolist()
    for field, expected in tensors(by_core(rule, arrays)).items():
        torch.testing.assert_close(getattr(tokens.decision, field), expected[mask], equal_nan=True)


@EVERY_RULE
def test_what_is_read_back_is_decided_in_the_same_way_again(name, tmp_path):
    rule = RULES[name]()
    info = info_for(rule)
    parts = [tokens_from_arrays(info, step=step, **made(seed=step)) for step in (1, 2)]
    with TraceWriter(tmp_path / "traces", info) as writer:
        for step, part in enumerate(parts, 1):
            writer.add(part)
            writer.commit(step)
    assert writer.problem is None
    trace = Trace(tmp_path)
    for step, part in zip(trace.steps, parts, strict=True):
        (read,) = trace.tokens([step])
        assert len(read) > 0
        assert_same(part, read, rtol=0, atol=0)
        again = trace.info.make_rule()(read.behaviour, read.policy, read.advantage, read.decision.response_mask)
        for field, expected in tensors(read.decision).items():
            assert torch.equal(getattr(again, field).nan_to_num(), expected.nan_to_num()), field


@settings(max_examples=20)
@given(shape=st.tuples(st.integers(1, 5), st.integers(1, 6)), top_k=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_padded_flat_and_nested_lists_agree(shape, top_k, seed):
    info, arrays = info_for(Predictive(delta=0.05), top_k=top_k), made(shape, top_k=top_k, seed=seed)
    padded = tokens_from_arrays(info, step=3, **arrays)
    assert_same(padded, tokens_from_arrays(info, step=3, **flat(arrays)))
    assert_same(padded, tokens_from_arrays(info, step=3, **{k: torch.from_numpy(v) for k, v in arrays.items()}))
    assert_same(padded, tokens_from_arrays(info, step=3, **{k: v.tolist() for k, v in arrays.items()}))


@EVERY_RULE
def test_log_probs_on_the_support_stand_for_logits(name):
    info, arrays = info_for(RULES[name]()), made((6, 8))
    from_logits = tokens_from_arrays(info, step=1, **arrays)
    assert_same(from_logits, tokens_from_arrays(info, step=1, **on_support(arrays)), rtol=1e-4, atol=1e-5)


def test_large_calls_are_worked_on_in_parts(monkeypatch):
    info, arrays = info_for(Predictive()), made((5, 7))
    whole = tokens_from_arrays(info, step=1, **arrays)
    monkeypatch.setattr("predmask.traces.importers._ENTRIES", 30)
    assert_same(whole, tokens_from_arrays(info, step=1, **arrays))


def test_the_temperature_belongs_to_the_logits():
    arrays = made()
    cold = tokens_from_arrays(info_for(Predictive(), temperature=0.5), step=1, **arrays)
    same = tokens_from_arrays(
        info_for(Predictive()), step=1, **{**arrays, "policy_logits": 2 * arrays["policy_logits"]}
    )
    assert_same(cold, same)


def test_read_only_arrays_and_half_precision_logits():
    arrays = made()
    for values in arrays.values():
        values.flags.writeable = False
    tokens = tokens_from_arrays(info_for(Predictive()), step=1, **arrays)
    halves = {**arrays, "policy_logits": torch.tensor(arrays["policy_logits"]).bfloat16()}
    assert tokens_from_arrays(info_for(Predictive()), step=1, **halves).policy.logp.dtype == torch.float32
    assert len(tokens) == arrays["response_mask"].sum()


SAMPLED = {
    "tokens": [[5, 6, 7, 0], [8, 9, 1, 2]],
    "behaviour_logp": [[-0.2, -0.9, 0.0, 0.0], [-0.3, -0.5, 0.0, -0.1]],
    "policy_logp": [[-0.2, -0.4, 0.0, 0.0], [-1.3, -0.5, -9.0, -0.1]],
    "advantage": [1.0, -1.0],
}
BINARY = info_for(PPOClip(), top_k=0)


def test_padding_leaves_the_trace_and_tool_output_stays_outside_the_mask():
    tokens = tokens_from_arrays(BINARY, step=1, response_mask=[[1, 1, 0, 0], [1, 1, 0, 1]], **SAMPLED)
    assert tokens.id.tolist() == [5, 6, 8, 9, 1, 2]
    assert tokens.decision.response_mask.tolist() == [True, True, True, True, False, True]
    assert (tokens.sample.tolist(), tokens.position.tolist()) == ([0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 3])
    assert tokens.decision.reason.tolist() == [1, 3, 4, 1, 0, 1]
    assert tokens.decision.divergence[1].item() == pytest.approx(math.expm1(0.5))
    assert tokens.policy.log_tail[1].exp().item() == pytest.approx(1 - math.exp(-0.4))


def test_without_a_mask_every_token_counts():
    tokens = tokens_from_arrays(BINARY, step=1, **SAMPLED)
    assert (len(tokens), tokens.decision.response_mask.all().item()) == (8, True)


def test_no_token_at_all():
    tokens = tokens_from_arrays(BINARY, step=1, response_mask=np.zeros((2, 4)), **SAMPLED)
    assert (len(tokens), tokens.behaviour.logp.shape) == (0, (0, 1))


def test_an_unknown_log_prob_is_not_probability_one():
    """Field case 11."""
    tokens = tokens_from_arrays(
        BINARY,
        step=1,
        tokens=[[1, 2, 3]],
        behaviour_logp=[[-0.2, None, -1.1]],
        policy_logp=[[-0.2, -0.9, -1.1]],
        advantage=[1.0],
    )
    assert tokens.decision.reason.tolist() == [Reason.KEPT_INSIDE, Reason.UNKNOWN, Reason.KEPT_INSIDE]
    figures = mask_metrics(tokens.behaviour, tokens.policy, tokens.decision, staleness=tokens.staleness).compute()
    assert (figures["mismatch_kl"], figures["unknown_logprob_count"], figures["mask_frac"]) == (0.0, 1.0, 0.0)


def test_missing_behaviour_log_probs_are_an_error():
    """Field case 6: what the trainer computed again is no substitute."""
    with pytest.raises(TraceError, match=r"behaviour_logp is missing.*what the engine reported"):
        tokens_from_arrays(BINARY, step=1, **{**SAMPLED, "behaviour_logp": None})


@pytest.mark.parametrize("name", ["behaviour_logp", "topk_logp", "policy_logp"])
@pytest.mark.parametrize("half", [lambda a: a.astype(np.float16), lambda a: torch.from_numpy(a).bfloat16()])
def test_16_bit_log_probs_are_refused(name, half):
    """Field case 18."""
    arrays = on_support(made())
    with pytest.raises(TypeError, match=f"{name} is torch.b?float16"):
        tokens_from_arrays(info_for(Predictive()), step=1, **{**arrays, name: half(arrays[name])})


@pytest.mark.parametrize("top_k", [0, 3])
@EVERY_RULE
def test_sampled_only_records_do_not_become_binary_top_k(name, top_k):
    """Field case 17."""
    rule = RULES[name]()
    arguments = {"info": info_for(rule, top_k=top_k), "step": 1, **SAMPLED}
    if rule.needs_topk or top_k:
        with pytest.raises(ValueError, match="top-K missing"):
            tokens_from_arrays(**arguments)
    else:
        assert tokens_from_arrays(**arguments).behaviour.top_k == 0


def test_a_capped_record_names_the_cap():
    """Field case 12."""
    arrays = made(top_k=5)
    arrays["topk_logp"][..., 2:] = -INF
    with pytest.raises(TraceError, match=r"2 of 5 top-K entries.*cap its log-probs at 2.*max_logprobs"):
        tokens_from_arrays(info_for(Predictive(), top_k=5), step=1, **arrays)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_top_k_of_the_next_position_is_found_out(shift):
    arrays = made()
    moved = {name: np.roll(arrays[name], shift, axis=1) for name in ("topk_ids", "topk_logp")}
    with pytest.raises(TraceError, match=r"position \d+: the sampled id \d+ has log-prob .* one position"):
        tokens_from_arrays(info_for(Predictive()), step=1, **{**arrays, **moved})


def test_a_sampled_token_that_its_top_k_forgot():
    arrays = {"tokens": [[1, 2]], "behaviour_logp": [[-3.0, -0.5]], "topk_ids": [[[0], [0]]], "advantage": [1.0]}
    more = {"topk_logp": [[[-0.2], [-0.9]]], "policy_logits": np.zeros((1, 2, 11))}
    with pytest.raises(TraceError, match=r"sample 0, position 1: the sampled id 2 has log-prob -0.5, .* is missing"):
        tokens_from_arrays(info_for(Predictive(), top_k=1), step=1, **arrays, **more)
    masked = tokens_from_arrays(info_for(Predictive(), top_k=1), step=1, response_mask=[[1, 0]], **arrays, **more)
    assert masked.id.tolist() == [1]


def test_places():
    everything = {
        "epoch": 1,
        "minibatch": [2, 3],
        "optimizer_step": 40,
        "version": [[38, 38, 39, 39], [40, 40, 40, 40]],
        "sample": [6, 7],
        "group": [3, 3],
        "position": [[10, 11, 12, 13], [20, 21, 22, 23]],
    }
    tokens = tokens_from_arrays(BINARY, step=9, **SAMPLED, **everything)
    found = {name: getattr(tokens, name).view(2, 4)[:, ::3].tolist() for name in ("step", *everything)}
    assert found == {
        "step": [[9, 9], [9, 9]],
        "epoch": [[1, 1], [1, 1]],
        "minibatch": [[2, 2], [3, 3]],
        "optimizer_step": [[40, 40], [40, 40]],
        "version": [[38, 39], [40, 40]],
        "sample": [[6, 6], [7, 7]],
        "group": [[3, 3], [3, 3]],
        "position": [[10, 13], [20, 23]],
    }
    default = tokens_from_arrays(BINARY, step=9, **SAMPLED)
    assert (default.optimizer_step.unique().tolist(), default.staleness.unique().tolist()) == ([8], [0])
    assert default.sample.tolist() == default.group.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_positions_of_interleaved_responses():
    one = {name: np.concatenate([values[0], values[1]]) for name, values in SAMPLED.items() if name != "advantage"}
    order = [0, 4, 1, 5, 2, 3, 6, 7]
    mixed = {name: values[order] for name, values in one.items()}
    tokens = tokens_from_arrays(BINARY, step=1, advantage=1.0, sample=(np.array(order) // 4), **mixed)
    assert tokens.position.tolist() == [0, 0, 1, 1, 2, 3, 2, 3]


def test_a_mask_that_was_made_elsewhere():
    """Its `keep` and the reasons that follow, beside the rule's criteria."""
    rule = PPOClip()
    info = replace(BINARY, rule={"name": "my-mask"})
    arrays = {**SAMPLED, "advantage": [1.0, 0.0], "response_mask": [[1, 1, 1, 0], [1, 0, 0, 0]]}
    tokens = tokens_from_arrays(info, step=1, keep=[[0, 1, 1, 1], [1, 1, 1, 1]], rule=rule, **arrays)
    by_rule = tokens_from_arrays(BINARY, step=1, **arrays)
    assert by_rule.decision.reason.tolist() == [1, 3, 1, 0]
    expected = [Reason.DROPPED_POSITIVE, Reason.KEPT_RETURNING, Reason.KEPT_INSIDE, Reason.NOT_TRAINABLE]
    assert tokens.decision.reason.tolist() == expected
    assert tokens.decision.keep.tolist() == [False, True, True, False]
    for field in ("divergence", "rate", "outside", "weight", "response_mask"):
        assert torch.equal(getattr(tokens.decision, field), getattr(by_rule.decision, field))
    with pytest.raises(TraceError, match="keep needs rule="):
        tokens_from_arrays(info, step=1, keep=np.ones((2, 4)), **arrays)
    with pytest.raises(TraceError, match="rule 'ppo_clip' decided; give your mask a name of its own"):
        tokens_from_arrays(BINARY, step=1, keep=np.ones((2, 4)), rule=rule, **arrays)


@dataclass(frozen=True, kw_only=True)
class Never(Rule):
    """Everything is outside, and outward for A > 0."""

    name = "never"
    summary = source = ""

    def criteria(self, behaviour, policy):
        ones = torch.ones_like(policy.logp[..., 0])
        return Criteria(divergence=ones, outside=ones > 0, rate=ones)


def test_a_rule_of_ones_own():
    tokens = tokens_from_arrays(info_for(Never(), top_k=0), step=1, rule=Never(), **SAMPLED)
    assert tokens.decision.reason.tolist() == [3] * 4 + [2] * 4
    with pytest.raises(TraceError, match=r"'ppo_clip'.* decided; say TraceInfo"):
        tokens_from_arrays(BINARY, step=1, rule=Never(), **SAMPLED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros((2, 4))}, r"tokens is torch.float64 \[2, 4\]; expected integer ids"),
        ({"tokens": [["a"]]}, "tokens is no array of numbers"),
        ({"behaviour_logp": [[-0.1], [-0.1, -0.2]]}, "behaviour_logp is no array of numbers"),
        ({"behaviour_logp": np.zeros((2, 5))}, r"behaviour_logp has shape \[2, 5\]; expected \[2, 4\]"),
        ({"advantage": [1.0, 2.0, 3.0]}, r"advantage has shape \[3\]; expected \[2, 4\]"),
        ({"policy_logp": None}, "give policy_logits or policy_logp"),
        ({"policy_logits": np.zeros((2, 4, 11))}, "give policy_logits or policy_logp, and not both"),
        ({"policy_logp": None, "policy_logits": np.zeros((2, 4, 7))}, r"policy_logits has shape .* \[2, 4, 11\]"),
        ({"topk_ids": np.zeros((2, 4, 3))}, "K = 0, and topk_ids was given"),
        ({"tokens": [5, 6], "behaviour_logp": [-1.0, -1.0]}, "flat tokens need sample="),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(TraceError, match=message):
        tokens_from_arrays(BINARY, step=1, **{**SAMPLED, **changes})


def test_ids_outside_the_vocabulary():
    with pytest.raises(ValueError, match="token id 11 is outside the vocabulary of 11"):
        tokens_from_arrays(BINARY, step=1, **{**SAMPLED, "tokens": np.full((2, 4), 11)})


def test_a_support_needs_all_of_the_policy():
    info, arrays = info_for(Predictive()), on_support(made())
    with pytest.raises(TraceError, match="policy_log_tail is missing"):
        tokens_from_arrays(info, step=1, **{**arrays, "policy_log_tail": None})
    with pytest.raises(TraceError, match=r"sampled token alone, and the trace has K = 3"):
        tokens_from_arrays(info, step=1, **{**arrays, "policy_logp": arrays["policy_logp"][..., 0]})
    with pytest.raises(ValueError, match="exact tail needs Q_T"):
        tokens_from_arrays(info, step=1, **{**arrays, "policy_tail_sum_squares": None})


def verl_batch(*, top_k=0, seed=0):
    """Three responses of up to 4 tokens to two prompts of up to 3, as verl pads them; what they mean is `made`."""
    arrays = made((3, 4), top_k=max(top_k, 1), seed=seed)
    arrays["response_mask"] = np.array([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
    arrays["advantage"] = (arrays["advantage"][:, None] * arrays["response_mask"]).astype(np.float32)
    torches = {name: torch.from_numpy(value) for name, value in arrays.items()}
    mask = torches["response_mask"]
    mu, pi = torches["behaviour_logp"], torches["policy_logits"].log_softmax(-1)
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]])
    batch = {
        "prompts": torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 2]]),
        "responses": torches["tokens"],
        "attention_mask": attention,
        "response_mask": mask,
        "rollout_log_probs": mu,
        "old_log_probs": pi.gather(-1, torches["tokens"][..., None])[..., 0],
        "advantages": torches["advantage"],
        "token_level_scores": torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0], [0.5, 0, 0, 0]]),
    }
    if top_k:
        # Row t is about the token at t + 1: two rows of the prompt before, one behind.
        batch["teacher_ids"] = torch.nn.functional.pad(torches["topk_ids"], (0, 0, 2, 1))
        batch["teacher_logprobs"] = torch.nn.functional.pad(torches["topk_logp"], (0, 0, 2, 1))
    uids = np.array(["x", "y", "x"], dtype=object)
    truths = np.array([{"ground_truth": 7}, {"ground_truth": "8"}, {"ground_truth": 7}], dtype=object)
    return SimpleNamespace(batch=batch, non_tensor_batch={"uid": uids, "reward_model": truths}), arrays


def nested(batch):
    """The batch without padding, as verl's TransferQueue gives it."""
    places = batch["attention_mask"].bool()
    asked, said = places[:, :3], places[:, 3:]

    def rows(values):
        kept = said if values.shape[1] == 4 else asked if values.shape[1] == 3 else places
        return torch.nested.as_nested_tensor([v[k] for v, k in zip(values, kept, strict=True)], layout=torch.jagged)

    return {name: rows(values) for name, values in batch.items() if name != "attention_mask"}


def test_verl_binary():
    batch, arrays = verl_batch()
    tokens = tokens_from_verl(BINARY, batch, step=2, minibatch=1)
    del arrays["topk_ids"], arrays["topk_logp"]
    expected = tokens_from_arrays(BINARY, step=2, minibatch=1, group=[0, 1, 0], **arrays)
    assert len(tokens) == 9
    plain = replace(expected.policy, tail_sum_squares=None, entropy=None)
    assert_same(replace(expected, policy=plain), tokens, rtol=1e-4, atol=1e-5)
    mapping = {**batch.batch, **batch.non_tensor_batch}
    assert_same(tokens, tokens_from_verl(BINARY, mapping, step=2, minibatch=1))
    ragged = tokens_from_verl(BINARY, {**nested(batch.batch), "uid": ["x", "y", "x"]}, step=2, minibatch=1)
    assert_same(tokens, ragged)
    del mapping["uid"]
    assert tokens_from_verl(BINARY, mapping, step=2).group.unique().tolist() == [0, 1, 2]


def test_verl_top_k_rows():
    batch, arrays = verl_batch(top_k=3)
    info = info_for(Predictive())
    logits = torch.from_numpy(arrays["policy_logits"])
    expected = tokens_from_arrays(info, step=1, group=[0, 1, 0], **arrays)
    assert_same(expected, tokens_from_verl(info, batch, step=1, policy_logits=logits))
    ragged = {**nested(batch.batch), "uid": ["x", "y", "x"]}
    assert_same(expected, tokens_from_verl(info, ragged, step=1, policy_logits=logits))
    with pytest.raises(TraceError, match="sampled token alone, and the trace has K = 3"):
        tokens_from_verl(info, batch, step=1)
    batch.batch["teacher_ids"] = batch.batch["teacher_ids"][:, 1:]
    with pytest.raises(TraceError, match="teacher_ids has 6 rows for prompts of 3 and responses of 4"):
        tokens_from_verl(info, batch, step=1, policy_logits=logits)
    del batch.batch["teacher_ids"]
    with pytest.raises(TraceError, match="no 'teacher_ids': record the engine's top-K"):
        tokens_from_verl(info, batch, step=1, policy_logits=logits)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("rollout_log_probs", r"calculate_log_probs=True; it has advantages, .*responses, .*uid"),
        ("old_log_probs", "policy_logp="),
        ("advantages", "with its advantages"),
    ],
)
def test_verl_missing_keys(key, remedy):
    batch, _ = verl_batch()
    del batch.batch[key]
    with pytest.raises(TraceError, match=f"the batch has no '{key}': .*{remedy}"):
        tokens_from_verl(BINARY, batch, step=1)


def test_verl_copies_of_the_behaviour_policy_are_not_the_trained_one():
    batch, _ = verl_batch()
    policy, behaviour = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
    expected = tokens_from_verl(BINARY, batch, step=1)
    batch.batch["old_log_probs"] = torch.where(batch.batch["response_mask"] != 0, behaviour, policy)
    with pytest.raises(TraceError, match=r"copy of rollout_log_probs.*bypass_mode=True.*policy_logp="):
        tokens_from_verl(BINARY, batch, step=1)
    assert_same(expected, tokens_from_verl(BINARY, batch, step=1, policy_logp=policy))


def test_verl_samples():
    batch, arrays = verl_batch()
    samples = samples_from_verl(batch, step=4, eos=int(arrays["tokens"][0, 3]))
    assert [s.prompt for s in samples] == [(1, 2), (3, 4, 5), (1, 2)]
    assert [(s.step, s.sample, s.group, s.length) for s in samples] == [(4, 0, 0, 4), (4, 1, 1, 4), (4, 2, 0, 1)]
    assert [(s.reward, s.reference) for s in samples] == [(1.0, "7"), (0.0, "8"), (0.5, "7")]
    assert [s.advantage for s in samples] == arrays["advantage"][:, 0].tolist()
    ends = [arrays["tokens"][row, length - 1] for row, length in ((0, 4), (1, 4), (2, 1))]
    assert [s.finished for s in samples] == [end == ends[0] for end in ends]
    ragged = {**nested(batch.batch), **batch.non_tensor_batch}
    assert samples_from_verl(ragged, step=4, eos=int(ends[0])) == samples
    del batch.batch["token_level_scores"], batch.non_tensor_batch["reward_model"]
    bare = samples_from_verl(batch, step=4, eos={int(end) for end in ends})
    assert all(s.finished and math.isnan(s.reward) and s.reference == "" for s in bare)


def trl_batch(seed=0):
    """Three completions to two prompts, as GRPOTrainer returns them; the third was truncated and masked."""
    arrays = made((3, 4), top_k=0, seed=seed)
    arrays["response_mask"] = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    torches = {name: torch.from_numpy(value) for name, value in arrays.items()}
    logp = torches["policy_logits"].log_softmax(-1)
    return {
        "prompt_ids": torch.tensor([[1, 2], [0, 2], [1, 2]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1], [1, 1]]),
        "completion_ids": torches["tokens"],
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
        "sampling_per_token_logps": torches["behaviour_logp"],
        "old_per_token_logps": logp.gather(-1, torches["tokens"][..., None])[..., 0],
        "advantages": torches["advantage"],
        "num_items_in_batch": torch.tensor(5),
    }, arrays


def test_trl():
    batch, arrays = trl_batch()
    expected = tokens_from_arrays(BINARY, step=5, version=3, group=[0, 1, 0], **arrays)
    plain = replace(expected.policy, tail_sum_squares=None, entropy=None)
    tokens = tokens_from_trl(BINARY, batch, step=5, version=3)
    assert_same(replace(expected, policy=plain), tokens, rtol=1e-4, atol=1e-5)
    assert tokens.sample.tolist() == [0, 0, 0, 0, 1, 1]
    assert tokens.decision.response_mask.tolist() == [True, True, False, True, True, True]
    given_top = {**made((3, 4), top_k=3), "group": [0, 1, 0]}
    more = {name: given_top[name] for name in ("topk_ids", "topk_logp", "policy_logits")}
    given_top["response_mask"] = arrays["response_mask"]
    with_top = tokens_from_trl(info_for(Predictive()), batch, step=1, **more)
    for name in ("tokens", "behaviour_logp", "advantage"):
        given_top[name] = arrays[name]
    assert_same(tokens_from_arrays(info_for(Predictive()), step=1, **given_top), with_top)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("sampling_per_token_logps", "use_vllm=True in GRPOConfig; it has advantages, completion_ids"),
        ("old_per_token_logps", "vllm_importance_sampling_correction=True"),
        ("completion_mask", "_generate_and_score_completions"),
    ],
)
def test_trl_missing_keys(key, remedy):
    batch, _ = trl_batch()
    del batch[key]
    with pytest.raises(TraceError, match=f"the batch has no '{key}': .*{remedy}"):
        tokens_from_trl(BINARY, batch, step=1)


def test_trl_samples():
    batch, arrays = trl_batch()
    samples = samples_from_trl(batch, step=1, eos=[int(arrays["tokens"][1, 1])], reward=[1.0, None, 0.0])
    assert [s.prompt for s in samples] == [(1, 2), (2,), (1, 2)]
    assert [(s.group, s.length) for s in samples] == [(0, 4), (1, 2), (0, 0)]
    assert [s.finished for s in samples] == [arrays["tokens"][0, 3] == arrays["tokens"][1, 1], True, False]
    assert [s.advantage for s in samples] == arrays["advantage"].tolist()
    assert [s.reward for s in samples[::2]] == [1.0, 0.0]
    assert math.isnan(samples[1].reward)
    assert all(math.isnan(s.reward) for s in samples_from_trl(batch, step=1, eos=0))


def test_a_host_batch_as_a_written_trace(tmp_path):
    batch, _ = verl_batch()
    info = info_for(NoMask(), top_k=0)
    with TraceWriter(tmp_path / "traces", info) as writer:
        samples = samples_from_verl(batch, step=1, eos=0)
        writer.add(samples)
        writer.add(tokens_from_verl(info, batch, step=1))
        writer.commit(1)
    trace = Trace(tmp_path)
    assert (trace.size, trace.samples(1)) == (9, samples)


COST = """
import json, time
import torch
from helpers_memory import peak_growth
from predmask import Predictive
from predmask.traces import TraceInfo, rule_settings, tokens_from_arrays

torch.set_num_threads(1)
rows, length, top_k, part = 256, 4096, 20, 8
generator = torch.Generator().manual_seed(0)
ids = (torch.arange(top_k, dtype=torch.int32) * 7).expand(rows, length, top_k).contiguous()
mu = (2 * torch.randn(length, top_k, generator=generator)).log_softmax(-1) - 0.01
mu = mu.expand(rows, length, top_k).contiguous()
pi = torch.empty(rows, length, top_k + 1)
pi[..., 0] = mu[..., 3] + 0.1
pi[..., 1:] = mu
pi[..., 4] += 0.1
tail, squares = torch.full((rows, length), -5.0), torch.full((rows, length), 1e-6)
advantage = torch.randn(rows, generator=generator)
rule = Predictive()
info = TraceInfo(run="cost", rule=rule_settings(rule), vocabulary_size=152_000, top_k=top_k)
started, tokens = time.process_time(), 0

def work():
    global tokens
    for row in range(0, rows, part):
        of = slice(row, row + part)
        tokens += len(tokens_from_arrays(
            info, step=1, tokens=ids[of, :, 3], behaviour_logp=mu[of, :, 3], topk_ids=ids[of], topk_logp=mu[of],
            policy_logp=pi[of], policy_log_tail=tail[of], policy_tail_sum_squares=squares[of],
            advantage=advantage[of], sample=torch.arange(row, row + part),
        ))

grown = peak_growth(work)
print(json.dumps({"tokens": tokens, "seconds": time.process_time() - started, "megabytes": grown / 1e6}))
"""


@pytest.mark.slow
def test_cost_of_a_large_top_k_payload():
    """Field case 35: 256 × 4096 × 20 entries, decided too, in under 5 s of one core and 300 MB beside the arrays."""
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": here}
    done = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True, env=environment)
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["tokens"] == 256 * 4096
    assert measured["seconds"] < 5
    assert measured["megabytes"] < 300
