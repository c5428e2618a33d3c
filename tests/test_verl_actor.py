"""verl's actor with the mask, on one worker: what it trains is what a dense forward pass and the rule say."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_verl import (
    IDS,
    LENGTHS,
    ROWS,
    TOP_K,
    Case,
    Sample,
    assert_as_expected,
    assert_close,
    assert_follows,
    dense_logits,
    expect,
    filled,
    forced,
    joined,
    long_and_short,
    make_samples,
    policy_model,
    read_tokens,
    run_processes,
    with_reference,
    without_topk,
    write_policy,
)
from predmask.core import RULES, Reason
from predmask.traces import Trace

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl", allow_module_level=True)

OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "ppo_clip": {"eps_low": 0.1, "eps_high": 0.5, "dual_clip": 2.0},
    "cispo": {"eps_low": 0.3, "eps_high": 0.1},
    "icepop": {"low": 0.8, "high": 1.5},
    "dppo": {"divergence": "tv", "support": "binary", "delta": 0.05},
    "predictive": {"divergence": "js", "tail": "uniform", "delta": 0.02},
}
"""Besides the defaults, of every rule."""
PADDED = {"use_remove_padding": False}


def rule_case(name: str, settings: dict[str, Any], **more: Any) -> Callable[[], Case]:
    return lambda: Case(rule={"name": name, **settings}, **more)


def spoilt(field: str, place: int | tuple[int, ...], value: float, *, sample: int = 1) -> list[Sample]:
    """The default samples with something else in one record."""
    samples = make_samples()
    samples[sample][field][place] = value
    return samples


def one_token(gap: float) -> list[Sample]:
    """A single token of A = 1 that was recorded as `gap` less likely than the policy has it."""
    (sample,) = make_samples([(3, 1)], seed=2)
    logits = dense_logits(policy_model(), sample["prompt"], sample["response"]).double()
    sample["response"] = logits.argmax(-1)
    likely = logits.log_softmax(-1).max().exp()
    sample["logp"] = (likely - gap).log().float()[None]
    return [{**sample, "advantage": torch.ones(1)}]


CASES: dict[str, Callable[[], Case]] = {
    **{f"{name}, default": rule_case(name, {}) for name in RULES},
    **{f"{name}, other": rule_case(name, other, actor=PADDED) for name, other in OTHER_SETTINGS.items()},
    # How a batch is laid out and cut
    "padded": lambda: Case(actor=PADDED, split={"micro_batch": 2}),
    "two at a time": lambda: Case(split={"micro_batch": 2}),
    "all at once": lambda: Case(split={"micro_batch": 6}),
    "five in three": lambda: Case(samples=make_samples()[:5], split={"tokens": 16}),
    "five in three, padded": lambda: Case(samples=make_samples()[:5], split={"tokens": 16}, actor=PADDED),
    # What the average runs over
    "token-sum": lambda: Case(samples=forced(), actor={"loss_agg_mode": "token-sum"}),
    "seq-mean-token-mean": lambda: Case(samples=forced(), actor={"loss_agg_mode": "seq-mean-token-mean"}),
    "seq-mean-token-sum": lambda: Case(samples=forced(), actor={"loss_agg_mode": "seq-mean-token-sum"}),
    "seq-mean-token-sum-norm": lambda: Case(
        samples=forced(),
        actor={"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 48},
        split={"micro_batch": 2},
    ),
    "2 and 8 tokens": lambda: Case(samples=long_and_short(), rule={"name": "none"}),
    "2 and 8 tokens at once": lambda: Case(samples=long_and_short(), rule={"name": "none"}, split={"micro_batch": 2}),
    # What is in it
    "forced tokens": lambda: Case(samples=forced(), split={"micro_batch": 2}),
    "forced tokens, padded": lambda: Case(samples=forced(), actor=PADDED, split={"micro_batch": 2}),
    "filled": lambda: Case(samples=filled(), split={"micro_batch": 2}),
    "padding alone": lambda: Case(samples=filled(), split={"micro_batch": 1}),
    "filled, by sequence": lambda: Case(samples=filled(), actor={**PADDED, "loss_agg_mode": "seq-mean-token-mean"}),
    "a row without numbers": lambda: Case(samples=spoilt("topk_logp", 3, math.nan)),
    "an entry without a number": lambda: Case(samples=spoilt("topk_logp", (3, 4), math.nan)),
    "an entry is missing": lambda: Case(samples=spoilt("topk_ids", (3, 4), -1)),
    "no log-prob": lambda: Case(samples=spoilt("logp", 3, math.nan)),
    "no advantage": lambda: Case(samples=spoilt("advantage", 0, 0.0)),
    "advantage unknown": lambda: Case(samples=spoilt("advantage", 0, math.nan)),
    # The settings
    "low cap": lambda: Case(rule={"name": "none"}, ratio_cap=1.1),
    "no cap": lambda: Case(rule={"name": "none"}, ratio_cap=None),
    "temperature": lambda: Case(samples=make_samples(temperature=0.7), temperature=0.7),
    "temperature, padded": lambda: Case(samples=make_samples(temperature=0.7), temperature=0.7, actor=PADDED),
    "larger head": lambda: Case(samples=make_samples(ids=IDS), sampled_ids=IDS),
    "larger head, all sampled": lambda: Case(samples=make_samples(ids=ROWS)),
    "sampled alone, ppo_clip": lambda: Case(samples=without_topk(), rule={"name": "ppo_clip"}, top_k=0),
    "sampled alone, dppo": lambda: Case(
        samples=without_topk(), rule={"name": "dppo", "support": "binary"}, top_k=0, actor=PADDED
    ),
    "gap of .4": lambda: Case(
        samples=one_token(0.4), rule={"name": "dppo", "divergence": "tv", "support": "binary", "delta": 0.2}
    ),
    "nothing moved": lambda: Case(samples=make_samples(apart=0.0)),
    # What verl adds to the loss
    "entropy": lambda: Case(samples=forced(), actor={"entropy_coeff": 0.2}, split=WITH_ENTROPY),
    "entropy and reference": lambda: Case(
        samples=with_reference(), actor={"entropy_coeff": 0.2, **REFERENCE}, split=WITH_ENTROPY
    ),
    "entropy and reference, padded": lambda: Case(
        samples=with_reference(),
        actor={"entropy_coeff": 0.2, **REFERENCE, **PADDED, "loss_agg_mode": "seq-mean-token-mean"},
        split=WITH_ENTROPY,
    ),
    "entropy logged": lambda: Case(samples=forced(), actor={"entropy_coeff": 0.0}, split=WITH_ENTROPY),
}
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl"}
WITH_ENTROPY = {"micro_batch": 2, "entropy": True}

ROUNDED: dict[str, Callable[[], Case]] = {
    "rounded": lambda: Case(actor={"precision": "bf16"}, split={"micro_batch": 3}),
    "rounded, warm": lambda: Case(
        samples=make_samples(temperature=0.7), temperature=0.7, actor={"precision": "bf16"}, split={"micro_batch": 3}
    ),
}
"""verl's default: the forward pass in 16 bits. It divides by a temperature that is rounded to them, too."""


def work(rank: int, folder: str) -> None:
    """Everything in one process, each result written down at once."""
    from verl_on_cpu.actor import join

    where = Path(folder)
    join(rank, 1, where / "store")
    for name, make in {**CASES, **ROUNDED}.items():
        torch.save(train_case(where, name, make()), where / f"{name}.pt")
    for part in (other_loss, infer):
        torch.save(part(where), where / f"{part.__name__}.pt")
    torch.distributed.destroy_process_group()


def train_case(where: Path, name: str, case: Case) -> dict[str, Any]:
    """One optimiser step with a worker of its own."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import logged, make_batch, make_worker, micro_batches, train, watch_gradients

    traces = {"directory": str(where / name), "responses": 0}
    worker = make_worker(where / "model", PolicyLossConfig(**case.policy_loss, traces=traces), **case.actor)
    gradients = watch_gradients(worker)
    metrics = train(worker, make_batch(case.samples, temperature=case.temperature, **case.split))
    parts = micro_batches(metrics)
    return {"metrics": logged(metrics), "micro_batches": parts, "gradients": gradients[0]}


def other_loss(where: Path) -> dict[str, Any]:
    """verl's own loss, through the same engine."""
    from verl.workers.config import PolicyLossConfig

    from verl_on_cpu.actor import logged, make_batch, make_worker, train, watch_gradients

    worker = make_worker(where / "model", PolicyLossConfig(loss_mode="dppo_tv"))
    gradients = watch_gradients(worker)
    return {"metrics": logged(train(worker, make_batch(make_samples()))), "gradients": gradients[0]}


def infer(where: Path) -> Any:
    """A forward pass without a loss, of an actor that trains with the mask."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import infer, make_batch, make_worker

    worker = make_worker(where / "model", PolicyLossConfig(**Case().policy_loss))
    return infer(worker, make_batch(make_samples(), micro_batch=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker found."""
    found = tmp_path_factory.mktemp("found")
    write_policy(found / "model")
    run_processes(work, str(found), count=1)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_actor_trains_what_the_rule_decides(folder, name):
    """Token by token, in the metrics, the loss and its gradient: whatever the layout and the split."""
    found = torch.load(folder / f"{name}.pt", weights_only=False)
    assert_as_expected(CASES[name](), folder / name, found["metrics"], found["gradients"])


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_rule_decides_again_as_it_did(folder, name):
    """To the last bit: the trace has what the rule read."""
    trace = Trace(folder / name)
    for tokens in trace.tokens():
        again = tokens.decide(trace.info.make_rule())
        for field in ("keep", "reason", "outside", "divergence", "rate", "weight"):
            before, after = getattr(tokens.decision, field), getattr(again, field)
            assert torch.equal(before, after) or torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0)), field


def test_dynamic_micro_batches_are_reordered(folder):
    """Field case 37: so the test above has something to put right."""
    for name in ("five in three", "five in three, padded"):
        found = torch.load(folder / f"{name}.pt", weights_only=False)
        assert found["micro_batches"] == 3
        samples, asked = Trace(folder / name).samples(1), [s["prompt"].tolist() for s in CASES[name]().samples]
        assert sorted(list(sample.prompt) for sample in samples) == sorted(asked)
        assert [list(sample.prompt) for sample in samples] != asked


def metrics_of(folder: Path, name: str) -> dict[str, float]:
    found = torch.load(folder / f"{name}.pt", weights_only=False)["metrics"]
    return {key.removeprefix("predmask/"): float(value) for key, value in found.items()}


def reasons_of(folder: Path, name: str) -> list[list[Reason]]:
    """Of each recorded sample's tokens."""
    samples = CASES[name]().samples
    tokens = read_tokens(folder / name, samples)
    parts = tokens.decision.reason.split([len(sample["response"]) for sample in samples if sample["mask"].any()])
    return [[Reason(value) for value in part.tolist()] for part in parts]


def test_the_average_has_one_denominator(folder):
    """Field case 25: 2 tokens of loss 1 and 8 tokens of loss 3 are 2.6, however they are split."""
    for name in ("2 and 8 tokens", "2 and 8 tokens at once"):
        assert metrics_of(folder, name)["actor/pg_loss"] == pytest.approx(2.6, abs=1e-5)


def test_the_anchor_is_what_was_recorded(folder):
    """Field case 6: a gap of .4 to the recorded probability is beyond a delta of .2."""
    assert reasons_of(folder, "gap of .4") == [[Reason.DROPPED_POSITIVE]]
    found = metrics_of(folder, "gap of .4")
    assert (found["mask_frac"], found["actor/pg_loss"]) == (1.0, 0.0)
    assert found["divergence_masked_mean"] == pytest.approx(0.4, abs=1e-6)


def test_nothing_is_masked_where_nothing_moved(folder):
    found = metrics_of(folder, "nothing moved")
    assert found["mask_frac"] == 0
    assert found["divergence_kept_max"] < 1e-6
    assert abs(found["mismatch_kl"]) < 1e-6


def test_a_larger_head_is_no_distance(folder):
    """Field case 15: where only the tokenizer's ids are sampled, only they share the policy's probability."""
    case, plain = CASES["larger head"](), make_samples(apart=0.0, ids=IDS)
    assert [s["response"].tolist() for s in plain] == [s["response"].tolist() for s in case.samples]
    rows = torch.cat([dense_logits(policy_model(), s["prompt"], s["response"]) for s in case.samples]).detach()
    real = rows.double()[:, :IDS].log_softmax(-1).gather(1, joined(case.samples, "response")[:, None])[:, 0]
    tokens = read_tokens(folder / "larger head", case.samples)
    assert_close(tokens.policy.logp[:, 0], real, "logp")
    assert Trace(folder / "larger head").info.vocabulary_size == IDS
    # The rows beyond have a share that would show.
    assert (rows.double().log_softmax(-1)[:, IDS:].exp().sum(-1) > 0.01).any()


def test_an_unusable_record_is_unknown(folder):
    """It is counted, and neither trained on nor masked; a missing entry leaves the token known."""
    for name in ("a row without numbers", "an entry without a number", "no log-prob"):
        reasons = reasons_of(folder, name)
        assert [(i, j) for i, row in enumerate(reasons) for j, r in enumerate(row) if r == Reason.UNKNOWN] == [(1, 3)]
        assert metrics_of(folder, name)["unknown_logprob_count"] == 1
    assert all(Reason.UNKNOWN not in row for row in reasons_of(folder, "an entry is missing"))
    assert metrics_of(folder, "an entry is missing")["unknown_logprob_count"] == 0
    tokens = read_tokens(folder / "an entry is missing", CASES["an entry is missing"]().samples)
    assert not tokens.behaviour.valid[LENGTHS[0][1] + 3, TOP_K]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_forward_pass_is_measured_as_it_is(folder, name):
    """In 16 bits the policy is another one, by up to a tenth of a nat; all else follows from its float32 statistics."""
    case = ROUNDED[name]()
    tokens = read_tokens(folder / name, case.samples)
    apart = (tokens.policy.logp - expect(case).policy.logp)[tokens.behaviour.valid].abs()
    assert 1e-3 < apart.max() < 0.1
    assert_follows(case, tokens, torch.load(folder / f"{name}.pt", weights_only=False)["metrics"])


def test_what_was_not_sampled_is_no_part(folder):
    reasons = reasons_of(folder, "forced tokens")
    assert [i for i, r in enumerate(reasons[1]) if r == Reason.NOT_TRAINABLE] == [2, 3]
    assert reasons[4][0] == Reason.NOT_TRAINABLE
    assert metrics_of(folder, "forced tokens")["unknown_logprob_count"] == 0
    assert len(reasons_of(folder, "filled")) == len(filled()) - 1  # what verl fills up with is not recorded
    assert set(reasons_of(folder, "no advantage")[1]) == {Reason.NOT_TRAINABLE}


def test_the_cases_are_not_trivial(folder):
    """Every rule is here twice; tokens are dropped for either sign, and ratios exceed the caps."""
    assert set(OTHER_SETTINGS) == set(RULES)
    for name, rule in RULES.items():
        for kind in ("default", "other"):
            tokens = read_tokens(folder / f"{name}, {kind}", make_samples())
            assert tokens.decision.dropped.any() == rule().can_fire
    reasons = {reason for row in reasons_of(folder, "predictive, default") for reason in row}
    assert {Reason.KEPT_INSIDE, Reason.KEPT_RETURNING, Reason.DROPPED_POSITIVE, Reason.DROPPED_NEGATIVE} <= reasons
    weight = read_tokens(folder / "no cap", make_samples()).decision.weight
    assert weight.max() > 5
    assert (weight > 1.1).sum() > 5


def test_another_loss_is_the_hosts_own(folder):
    found, samples = torch.load(folder / "other_loss.pt", weights_only=False), make_samples()
    rows = torch.cat([dense_logits(policy_model(), s["prompt"], s["response"]) for s in samples]).detach()
    logp = rows.double().log_softmax(-1).gather(1, joined(samples, "response")[:, None])[:, 0]
    mu, advantage = joined(samples, "logp").double(), joined(samples, "advantage").double()
    moved = logp.exp() - mu.exp()
    valid = torch.where(advantage > 0, moved <= 0.2, moved >= -0.2)
    losses = -advantage * (logp - mu).exp().clamp(max=3.0) * logp * valid
    assert found["metrics"]["actor/pg_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found["metrics"]["actor/pg_clipfrac"] == pytest.approx(float((~valid).double().mean()))
    assert not [name for name in found["metrics"] if "predmask" in name]
    assert all(value.abs().max() > 0 for value in found["gradients"].values())


def test_a_forward_pass_without_a_loss_is_the_hosts_own(folder):
    log_probs, metrics = torch.load(folder / "infer.pt", weights_only=False)
    assert not [name for name in metrics if "predmask" in name]
    for sample, logp in zip(make_samples(), log_probs, strict=True):
        rows = dense_logits(policy_model(), sample["prompt"], sample["response"]).detach().double().log_softmax(-1)
        start = len(sample["prompt"]) - 1
        mine = logp[start : start + len(sample["response"])]
        assert_close(mine, rows.gather(1, sample["response"][:, None])[:, 0], "log_probs")
