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
    write_policy,
)
from predmask.cli import main
from predmask.core import RULES, Reason
from predmask.traces import TokenTrace, Trace

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


def without_topk() -> list[Sample]:
    return [{key: value for key, value in sample.items() if "topk" not in key} for sample in make_samples()]


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
}


ROUNDED = Case(actor={"precision": "bf16"}, split={"micro_batch": 3})
"""verl's default: the forward pass in 16 bits."""


def work(rank: int, folder: str) -> None:
    """Everything in one process, each result written down at once."""
    from verl_on_cpu.actor import join

    where = Path(folder)
    join(rank, 1, where / "store")
    for name, case in [*((name, make()) for name, make in CASES.items()), ("rounded", ROUNDED)]:
        torch.save(train_case(where, name, case), where / f"{name}.pt")
    for part in (train_steps, resume, other_loss, infer, refusals):
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


UIDS = ["a", "a", "b", "b"]
VERSIONS = [[0, 0, 0, 0], [1, 1, 0, 0]]
"""Steps after which the weights were sent that sampled the responses, in the first and the second step."""


def step_samples(step: int) -> list[Sample]:
    """Two responses to each of two prompts; the prompts of the second step are others."""
    samples = make_samples([(3, 4), (3, 6), (2, 5), (2, 3)], seed=step)
    for number, sample in enumerate(samples):
        of_prompt = number // 2 * 2
        sample["prompt"] = samples[of_prompt]["prompt"]
        version = VERSIONS[step - 1][number]
        sample |= {"uid": f"{step}{UIDS[number]}", "session": number % 2, "step": step}
        sample["extra"] = {"min_global_steps": version, "max_global_steps": version}
    return samples


def train_steps(where: Path) -> list[dict[str, Any]]:
    """Two steps of two epochs of two mini-batches, as verl's trainer asks for them; its metrics."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch, make_worker, train_step

    traces = {"directory": str(where / "steps"), "responses": 0}
    worker = make_worker(where / "model", PolicyLossConfig(**Case().policy_loss, traces=traces), lr=1e-2)
    batches = [make_batch(step_samples(step), micro_batch=1, global_batch_size=2) for step in (1, 2)]
    return [train_step(worker, batch, epochs=2, mini_batch_size=2) for batch in batches]


def resume(where: Path) -> list[dict[str, Any]]:
    """Two steps of a run that begins with step 7, of which a part is recorded."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch, make_worker, train_step

    traces = {"directory": str(where / "resumed"), "responses": 1, "every": 2}
    worker = make_worker(where / "model", PolicyLossConfig(**Case().policy_loss, traces=traces))
    found = []
    for step in (7, 8):
        samples = step_samples(1)
        for sample in samples:
            sample |= {"step": step, "extra": {"min_global_steps": step - 2, "max_global_steps": step - 1}}
        batch = make_batch(samples, micro_batch=2, global_batch_size=2)
        found.append(train_step(worker, batch, epochs=1, mini_batch_size=2))
    return found


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


def refusals(where: Path) -> dict[str, str]:
    """What is said of faulty batches and settings."""
    from verl.utils import tensordict_utils as tu

    from predmask.plugins.verl.loss import policy_loss
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch, make_worker, train

    def trained(samples: list[Sample] | None = None, *, flags: Any = None, fields: Any = None, **settings: Any) -> None:
        worker = make_worker(where / "model", PolicyLossConfig(**{**Case().policy_loss, **settings}))
        batch = make_batch(samples or make_samples(), micro_batch=1)
        for key, change in (fields or {}).items():
            batch[key] = change(batch)
        tu.assign_non_tensor(batch, **(flags or {}))
        train(worker, batch)

    def configured(**settings: Any) -> None:
        PolicyLossConfig(**{"host": {"rollout_name": "vllm"}, **settings})

    faults: dict[str, Callable[[], Any]] = {
        "top-K missing": lambda: trained(without_topk()),
        "another K": lambda: trained(top_k=4),
        "a problem at the server": lambda: trained(with_problem()),
        "a second weight": lambda: trained(
            fields={
                "rollout_is_weights": lambda batch: torch.nested.nested_tensor_from_jagged(
                    torch.ones_like(batch["old_log_probs"].values()), batch["old_log_probs"].offsets()
                )
            }
        ),
        "fused kernels": lambda: trained(flags={"use_fused_kernels": True}),
        "padded": lambda: trained(fields={"response_mask": lambda batch: batch["response_mask"].to_padded_tensor(0)}),
        "no engine": lambda: policy_loss(*torch.zeros(4, 1, 2).unbind()),
        "rule": lambda: configured(rule={"name": "clip"}),
        "rule field": lambda: configured(rule={"name": "dppo", "epsilon": 0.2}),
        "rule value": lambda: configured(rule={"name": "dppo", "delta": -1.0}),
        "traces field": lambda: configured(traces={"dir": "x"}),
        "top_k": lambda: configured(top_k=0),
        "top_k below 0": lambda: configured(rule={"name": "ppo_clip"}, top_k=-1),
        "ratio_cap": lambda: configured(ratio_cap=0.0),
        "loss_mode": lambda: configured(loss_mode="vanilla"),
        "host": lambda: PolicyLossConfig(),
    }
    return {name: said(fault) for name, fault in faults.items()}


def with_problem() -> list[Sample]:
    samples = make_samples()
    samples[4]["extra"] = {"min_global_steps": 0, "predmask_problem": "position 3 has 4 entries, and 5 were asked for"}
    return samples


def said(fault: Callable[[], Any]) -> str:
    try:
        fault()
    except Exception as error:  # noqa: BLE001  whatever it is, its text is what is tested
        return f"{type(error).__name__}: {error}"
    return "nothing"


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


def test_a_rounded_forward_pass_is_measured_as_it_is(folder):
    """In 16 bits the policy is another one; all else follows from its float32 statistics."""
    tokens = read_tokens(folder / "rounded", ROUNDED.samples)
    exact = expect(ROUNDED).policy.logp
    apart = (tokens.policy.logp - exact)[tokens.behaviour.valid].abs()
    assert 1e-3 < apart.max() < 0.1
    assert_follows(ROUNDED, tokens, torch.load(folder / "rounded.pt", weights_only=False)["metrics"])


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


def test_steps_are_numbered_as_the_host_took_them(folder):
    """Two steps of two epochs of two mini-batches: versions count optimiser steps, prompts are groups."""
    trace = Trace(folder / "steps")
    assert trace.steps == [1, 2]
    for step in trace.steps:
        tokens, samples = TokenTrace.cat(list(trace.tokens([step]))), step_samples(step)
        for number, sample in enumerate(samples):
            mine = tokens[tokens.sample == number]
            length = len(sample["response"])
            assert mine.id.tolist() == sample["response"].tolist() * 2
            assert mine.position.tolist() == list(range(length)) * 2
            assert mine.epoch.tolist() == [0] * length + [1] * length
            assert set(mine.group.tolist()) == {number // 2}
            assert set(mine.minibatch.tolist()) == {number // 2}
            begun = 4 * (step - 1)
            assert mine.optimizer_step.tolist() == [begun + number // 2] * length + [begun + 2 + number // 2] * length
            assert set(mine.version.tolist()) == {4 if VERSIONS[step - 1][number] == 1 else 0}
            assert torch.equal(mine.advantage, sample["advantage"].expand(2 * length))
        assert [list(s.prompt) for s in trace.samples(step)] == [s["prompt"].tolist() for s in samples]
        assert [s.group for s in trace.samples(step)] == [0, 0, 1, 1]
    metrics = torch.load(folder / "train_steps.pt", weights_only=False)
    # verl's means over the optimiser steps.
    assert [m["predmask/staleness_mean"] for m in metrics] == [(0 + 1 + 2 + 3) / 4, (0 + 5 + 2 + 7) / 4]
    assert [m["predmask/staleness_max"] for m in metrics] == [3, 7]


def test_the_first_pass_is_by_the_weights_that_were_there(folder):
    tokens = TokenTrace.cat(list(Trace(folder / "steps").tokens([1])))
    sample = step_samples(1)[0]
    rows = dense_logits(policy_model(), sample["prompt"], sample["response"]).detach().double()
    expected = rows.log_softmax(-1).gather(1, sample["response"][:, None])[:, 0]
    first, second = (tokens[(tokens.sample == 0) & (tokens.epoch == epoch)].policy.logp[:, 0] for epoch in (0, 1))
    assert_close(first, expected, "logp")
    assert (second - expected).abs().max() > 0.1


def test_a_trace_of_the_actor_makes_a_report(folder, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert main(["report", str(folder / "steps"), "--output", str(page)]) == 0
    assert "<html" in page.read_text()


def test_a_run_is_resumed_and_recorded_in_part(folder):
    """It begins with the host's step; one response of each optimiser step, of every second step."""
    trace = Trace(folder / "resumed")
    assert trace.steps == [7]
    tokens = TokenTrace.cat(list(trace.tokens()))
    samples = step_samples(1)
    assert tokens.id.tolist() == [*samples[0]["response"].tolist(), *samples[2]["response"].tolist()]
    assert tokens.optimizer_step.tolist() == [0] * len(samples[0]["response"]) + [1] * len(samples[2]["response"])
    # What came before this worker counts as its beginning.
    assert set(tokens.version.tolist()) == {0}
    first, second = torch.load(folder / "resume.pt", weights_only=False)
    assert (first["predmask/staleness_mean"], second["predmask/staleness_mean"]) == (0.5, 2.5)


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


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("top-K missing", "ValueError", ["no teacher_ids and no teacher_logprobs", "default_agent_loop=predmask"]),
        ("another K", "ValueError", ["(7, 5)", "policy_loss.top_k is 4"]),
        ("a problem at the server", "RuntimeError", ["1 of 6 responses", "position 3 has 4 entries, and 5 were"]),
        ("a second weight", "ValueError", ["set algorithm.rollout_correction.rollout_is=null"]),
        ("fused kernels", "ValueError", ["set actor_rollout_ref.model.use_fused_kernels=False"]),
        ("padded", "ValueError", ["set trainer.use_v1=True"]),
        ("no engine", "RuntimeError", ["the actor's engine is not predmask's", "predmask verl doctor"]),
        ("rule", "SettingsError", ["policy_loss.rule.name is 'clip'", "choose one of none, ppo_clip, cispo"]),
        ("rule field", "SettingsError", ["'epsilon': 0.2", "(fields of dppo: divergence, support, delta)"]),
        ("rule value", "SettingsError", ["rule.delta is -1.0", "above 0"]),
        ("traces field", "SettingsError", ["{'dir': 'x'}", "directory, every, responses, max_mb"]),
        ("top_k", "SettingsError", ["rule 'predictive' reads the top-K", "top_k is 0", "set 20"]),
        ("top_k below 0", "SettingsError", ["top_k is -1", "0 or more"]),
        ("ratio_cap", "SettingsError", ["ratio_cap is 0.0", "above 0 (null for no cap)"]),
        ("loss_mode", "SettingsError", ["'vanilla'", "set it to 'predmask'"]),
        ("host", "SettingsError", ["policy_loss.host is empty", "predmask verl args"]),
    ],
)
def test_a_fault_is_named_with_its_remedy(folder, fault, kind, words):
    text = torch.load(folder / "refusals.pt", weights_only=False)[fault]
    assert text.startswith(f"{kind}: "), text
    assert all(word in text for word in words), text
