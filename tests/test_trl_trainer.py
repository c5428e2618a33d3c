"""TRL's trainer with the mask: TRL's own where both do the same, else what a dense forward pass and the rule say."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from helpers_trl import (
    HOST_WARNINGS,
    NO_MASK,
    TOP_K,
    WIDTH,
    Run,
    assert_gradients,
    assert_trained,
    exact_model,
    expect,
    make_trainer,
    policy_model,
    read_tokens,
    reward,
    rows_of,
    shares,
    train,
    watched,
)
from predmask.cli import main
from predmask.core import RULES, NoMask, PPOClip, Predictive, Reason
from predmask.plugins.trl.trainer import SAMPLE, VERSION
from predmask.traces import TokenTrace, Trace

pytestmark = [pytest.mark.filterwarnings(text) for text in HOST_WARNINGS]

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]
SMALL_STEPS: dict[str, dict[str, Any]] = {
    "accumulation 1": {"gradient_accumulation_steps": 1},
    "accumulation 2": {"gradient_accumulation_steps": 2},
    "accumulation 4": {"gradient_accumulation_steps": 4},
    "4 of a generation, accumulation 2": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "2 of a generation, accumulation 4": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
}
"""How a generation is cut into micro-batches and optimiser steps."""


@pytest.mark.parametrize("cut", SMALL_STEPS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_without_a_mask_it_is_the_stock_trainer(tmp_path, loss_type, cut):
    """Where mu is pi: the same completions, loss, and gradient of every parameter."""
    settings = {"loss_type": loss_type, **SMALL_STEPS[cut]}
    stock = train(tmp_path, stock=True, **settings)
    ours = train(tmp_path, **settings, **NO_MASK)
    assert ours.completions() == stock.completions()
    assert len({len(completion) for completion in ours.completions()}) > 2
    assert torch.equal(ours.batches[0]["advantages"], stock.batches[0]["advantages"])
    expected_loss = stock.logs[0]["loss"]
    # The average over a group's completions is 0 by itself.
    assert loss_type == "grpo" or abs(expected_loss) > 1e-3
    assert ours.logs[0]["loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert_gradients(ours.steps[0].gradients, stock.steps[0].gradients)
    assert ours.logs[0]["grad_norm"] == pytest.approx(stock.logs[0]["grad_norm"], rel=1e-4)


SECOND_STEPS: dict[str, dict[str, Any]] = {
    "another pass": {"num_iterations": 2, "learning_rate": 0.25},
    "a later part": {"steps_per_generation": 4, "learning_rate": 1.0},
}
"""Two optimiser steps on one generation."""


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("second", SECOND_STEPS)
def test_clipping_is_that_of_the_stock_trainer(tmp_path, loss_type, second):
    """Where both have the weights that sampled as their anchor, and ratios are no longer 1.

    TRL's clipped surrogate has another value than a dropped token, and the same gradient.
    """
    settings = {
        "loss_type": loss_type,
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
        **SECOND_STEPS[second],
    }
    stock = train(tmp_path, stock=True, epsilon=0.2, epsilon_high=0.28, **settings)
    rule = PPOClip(eps_low=0.2, eps_high=0.28)
    ours = train(tmp_path, rule=rule, ratio_cap=None, traces=str(tmp_path / "traces"), **settings)
    assert len(ours.generations) == len(stock.generations) == 1
    for step in (0, 1):
        assert_gradients(ours.steps[step].gradients, stock.steps[step].gradients, tolerance=1e-4)
    tokens = read_tokens(ours)
    tokens = tokens[tokens.optimizer_step == 1]
    assert {Reason.DROPPED_POSITIVE, Reason.DROPPED_NEGATIVE} <= set(tokens.decision.reason.tolist())
    assert ((tokens.decision.weight - 1).abs() > 0.05)[tokens.decision.keep].any()
    exact = exact_model(policy_model(), ours.states[-1])
    dropped = [expect(exact, batch, rule=rule, cap=None).decision.dropped for batch in ours.batches[2:]]
    # The stock trainer's figure is the mean over micro-batches, ours is that of all tokens.
    clipped = stock.logs[1]["clip_ratio/region_mean"]
    assert clipped == pytest.approx(float(torch.stack([part.float().mean() for part in dropped]).mean()))
    assert ours.logs[1]["predmask/mask_frac"] == pytest.approx(float(torch.cat(dropped).float().mean()))


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "ppo_clip": {"eps_low": 0.1, "eps_high": 0.5, "dual_clip": 2.0},
    "cispo": {"eps_low": 0.3, "eps_high": 0.1},
    "icepop": {"low": 0.8, "high": 1.5},
    "dppo": {"divergence": "tv", "support": "binary", "delta": 0.05},
    "predictive": {"divergence": "js", "tail": "uniform", "delta": 0.02},
}
"""Besides the defaults, of every rule."""
TWICE = {"max_steps": 2, "num_iterations": 2, "gradient_accumulation_steps": 2, "learning_rate": 1.0}
"""Two optimiser steps on one generation: the second is off-policy."""


@pytest.mark.parametrize("settings", ["default", "other"])
@pytest.mark.parametrize("name", RULES)
def test_each_rule_trains_what_it_decides(tmp_path, name, settings):
    """Loss, gradient and figures of each optimiser step, and each token's decision."""
    rule = RULES[name](**(OTHER_SETTINGS[name] if settings == "other" else {}))
    traces = tmp_path / "traces"
    run = train(tmp_path, rule=rule, traces=str(traces), traces_responses=0, **TWICE)
    assert_trained(run, rule=rule)
    tokens = read_tokens(run)
    assert tokens.decision.dropped.any() == rule.can_fire
    assert_recorded(run, tokens, rule)
    again = tokens.decide(rule)
    assert torch.equal(again.reason, tokens.decision.reason)
    assert torch.equal(again.keep, tokens.decision.keep)


def assert_recorded(run: Run, tokens: TokenTrace, rule: Any, cap: float | None = 5.0) -> None:
    """Token by token, what the trace has is what a dense forward pass says."""
    steps = run.trainer.args.gradient_accumulation_steps
    for number, batch in enumerate(run.batches):
        exact = exact_model(policy_model(), run.states[number])
        expected = expect(exact, batch, rule=rule, cap=cap)
        ends = list(itertools.accumulate(expected.lengths))
        for row, (_, completion) in enumerate(rows_of(batch)):
            mine = tokens[(tokens.optimizer_step == number // steps) & (tokens.sample == trace_number(run, batch, row))]
            part = slice(ends[row] - expected.lengths[row], ends[row])
            assert mine.id.tolist() == completion
            assert mine.position.tolist() == list(range(len(completion)))
            assert torch.equal(mine.decision.reason, expected.decision.reason[part])
            assert torch.equal(mine.behaviour.ids, expected.behaviour.ids[part])
            torch.testing.assert_close(mine.behaviour.logp, expected.behaviour.logp[part].float())
            torch.testing.assert_close(mine.policy.logp.double(), expected.policy.logp[part], rtol=1e-4, atol=1e-5)
            assert set(mine.version.tolist()) == {int(batch[VERSION][row])}
            assert mine.advantage.tolist() == [float(batch["advantages"][row])] * len(completion)


def trace_number(run: Run, batch: dict[str, Any], row: int) -> int:
    """The trace numbers completions in the order in which they are first trained on."""
    order: list[int] = []
    for other in run.batches:
        order += [int(n) for n in other[SAMPLE] if int(n) not in order]
    return order.index(int(batch[SAMPLE][row]))


def test_the_other_settings_are_of_every_rule():
    assert set(OTHER_SETTINGS) == set(RULES)


VARIANTS: dict[str, dict[str, Any]] = {
    "loss grpo": {"loss_type": "grpo"},
    "loss bnpo": {"loss_type": "bnpo"},
    "loss dr_grpo": {"loss_type": "dr_grpo"},
    "temperature": {"temperature": 0.7},
    "low cap": {"ratio_cap": 1.1},
    "no cap": {"ratio_cap": None},
    "padded to multiples": {"pad_to_multiple_of": 4},
    "accumulation 4": {"gradient_accumulation_steps": 4},
    "accumulation 1": {"gradient_accumulation_steps": 1, "max_steps": 2},
    "two generations in a step": {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "head in float32": {"cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_so_under_other_settings(tmp_path, name):
    settings = {**TWICE, "rule": Predictive(delta=0.02), **VARIANTS[name]}
    run = train(tmp_path, **settings)
    cap = settings.get("ratio_cap", 5.0)
    assert_trained(run, rule=settings["rule"], cap=cap, temperature=settings.get("temperature", 1.0))
    if name == "low cap":
        exact = exact_model(policy_model(), run.states[-1])
        assert expect(exact, run.batches[-1], rule=settings["rule"], cap=None).decision.weight.max() > 1.1


@pytest.mark.parametrize("kind", ["qwen3_tied", "gemma2", "gpt2"])
def test_it_is_so_for_other_models(tmp_path, kind):
    run = train(tmp_path, model=policy_model(kind), rule=Predictive(delta=0.02), **{**TWICE, "learning_rate": 0.1})
    assert_trained(run, rule=Predictive(delta=0.02), model=policy_model(kind))


def test_dropout_is_no_hindrance(tmp_path):
    """The head is looked at without it; and afterwards the model is as it was."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(policy_model(), config).train()
    trainer = make_trainer(tmp_path, model=model)
    assert all(module.training for module in trainer.model.modules())
    run = watched(trainer)
    trainer.train()
    assert run.logs[0]["predmask/mismatch_kl"] > 1e-3


def test_adapters_are_trained_and_nothing_else(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    rule = Predictive(delta=0.02)
    run = train(tmp_path, peft_config=config, rule=rule, **TWICE)
    assert_trained(run, rule=rule, model=run.trainer.model)
    assert run.steps[0].gradients
    assert all("lora_" in name for name in run.steps[0].gradients)
    for name, weight in run.steps[-1].weights.items():
        assert torch.equal(weight, run.states[0][name]) == ("lora_" not in name)


def test_a_rounded_forward_pass_is_measured_as_it_is(tmp_path):
    """bf16 autocast: log-probs move by thousandths, and all else follows from the numbers that were recorded."""
    rule = Predictive(delta=0.02)
    run = train(tmp_path, rule=rule, bf16=True, traces=str(tmp_path / "traces"), traces_responses=0, **TWICE)
    tokens = read_tokens(run)
    first = tokens[tokens.optimizer_step == 0]
    apart = (first.policy.logp[:, 0] - first.behaviour.logp[:, 0]).abs()
    assert 1e-5 < apart.max() < 0.3
    again = tokens.decide(rule)
    assert torch.equal(again.reason, tokens.decision.reason)
    for step in (0, 1):
        mine = tokens[tokens.optimizer_step == step]
        losses = torch.where(mine.decision.keep, -mine.decision.weight.clamp(max=5.0) * mine.advantage, 0.0)
        assert run.logs[step]["loss"] == pytest.approx(float(losses.mean()), rel=1e-4, abs=1e-6)
        mass = torch.cat([mine.policy.logp, mine.policy.log_tail[:, None]], 1).double().exp().sum(1)
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)
    exact = exact_model(policy_model(), run.states[0])
    expected = expect(exact, run.batches[0], rule=rule, cap=5.0)
    there = run.batches[0]["completion_mask"].bool()
    torch.testing.assert_close(
        run.batches[0]["predmask_logp"][there].double(), expected.policy.logp[:, 0], atol=0.2, rtol=0
    )


def unscored(completion_ids: Any, **more: Any) -> list[float | None]:
    """Every third completion cannot be scored."""
    scores = reward(None, completion_ids)
    return [None if number % 3 == 1 else score for number, score in enumerate(scores)]


def test_unscored_completions_are_no_part(tmp_path):
    """Their advantage is 0, and no token of theirs is trained on."""
    run = train(tmp_path, rewards=unscored, rule=NoMask(), traces=str(tmp_path / "t"), gradient_accumulation_steps=2)
    assert_trained(run, rule=NoMask())
    tokens, samples = read_tokens(run), Trace(tmp_path / "t").samples(1)
    generated = run.generations[0]
    for sample in samples:
        mine = tokens[tokens.sample == sample.sample]
        (row,) = [n for n, (_, ids) in enumerate(rows_of(generated)) if ids == mine.id.tolist()]
        if row % 3 == 1:
            assert float(generated["advantages"][row]) == 0
            assert set(mine.decision.reason.tolist()) == {Reason.NOT_TRAINABLE}
            assert math.isnan(sample.reward)
        else:
            assert sample.reward == pytest.approx(sum(mine.id.tolist()) % 7 / 7)
            assert sample.advantage == pytest.approx(float(generated["advantages"][row]))


def test_equal_rewards_train_nothing(tmp_path):
    run = train(tmp_path, rewards=lambda prompts, **_: [0.5] * len(prompts), rule=Predictive())
    assert run.logs[0]["loss"] == 0
    assert all(not gradient.any() for gradient in run.steps[0].gradients.values())
    assert run.logs[0]["predmask/mask_frac"] == 0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_truncated_completions_can_be_left_out(tmp_path, loss_type):
    """As in the stock trainer; the remaining tokens are averaged among themselves (field case 27)."""
    settings = {"loss_type": loss_type, "mask_truncated_completions": True, "gradient_accumulation_steps": 2}
    stock = train(tmp_path, stock=True, **settings)
    ours = train(tmp_path, traces=str(tmp_path / "t"), **settings, **NO_MASK)
    lengths = [len(completion) for completion in ours.completions()]
    assert 0 < lengths.count(0) < len(lengths)
    assert_gradients(ours.steps[0].gradients, stock.steps[0].gradients)
    assert_trained(ours, rule=NoMask(), cap=None)
    assert len(read_tokens(ours)) == sum(lengths)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_micro_batch_may_be_empty(tmp_path, loss_type):
    """All its completions were cut and left out: it adds nothing, and its gradient is 0."""
    trainer = make_trainer(tmp_path, loss_type=loss_type, mask_truncated_completions=True, max_completion_length=1)
    trainer.eos_token_ids = [0]
    run = watched(trainer)
    trainer.train()
    assert run.completions() == [[]] * 4
    assert run.logs[0]["loss"] == 0
    assert all(not gradient.any() for gradient in run.steps[0].gradients.values())


def test_evaluation(tmp_path):
    """Its figures are logged as eval's, and leave those of the training alone."""
    settings = {"rule": Predictive(delta=0.02), **TWICE}
    options = {"per_device_eval_batch_size": 8, "num_generations_eval": 2, "eval_data": True}
    trainer = make_trainer(
        tmp_path, **settings, **options, eval_strategy="steps", eval_steps=1, traces=str(tmp_path / "t")
    )
    run = watched(trainer)
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 2
    for entry in evaluated:
        assert entry["eval_predmask/mask_frac"] == 0
        assert abs(entry["eval_predmask/mismatch_kl"]) < 1e-6
        assert entry["eval_predmask/staleness_max"] == 0
        assert not any(name.startswith("predmask/") for name in entry)
    train_batches = [number for number, batch in enumerate(run.batches) if len(batch["completion_ids"]) == 4]
    assert len(train_batches) == 4
    run.batches = [run.batches[number] for number in train_batches]
    run.states = [run.states[number] for number in train_batches]
    assert_trained(run, rule=Predictive(delta=0.02))
    assert Trace(tmp_path / "t").steps == [1]
    found = trainer.evaluate()
    assert math.isfinite(found["eval_loss"])


def test_a_generation_longer_than_the_optimiser_step(tmp_path):
    """Field case 26: 40 tokens for 4 micro-steps, accumulation 2, a loss of 1 per token: 1.0 in each step."""
    for counts in ([10, 10, 10, 10], [4, 16, 10, 10]):
        run = counted(tmp_path, counts)
        assert [log["loss"] for log in run.logs] == pytest.approx([1.0, 1.0], abs=1e-6)


def counted(directory: Path, counts: list[int]) -> Run:
    """Micro-batches of so many tokens, each of A = -1."""
    trainer = make_trainer(
        directory,
        **NO_MASK,
        loss_type="dapo",
        max_steps=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=8,
        learning_rate=0.0,
    )
    model = policy_model(eos_token_id=None)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for count in counts:
        mask = torch.zeros(2, 8, dtype=torch.long)
        mask[0, : min(count, 8)] = 1
        mask[1, : count - min(count, 8)] = 1
        prompt = torch.randint(3, 60, (2, 3), generator=generator)
        ids = torch.randint(3, 60, (2, 8), generator=generator)
        with torch.no_grad():
            logp = model(input_ids=torch.cat([prompt, ids], 1)).logits[:, 2:-1].log_softmax(-1)
        top = logp.topk(TOP_K)
        batches.append(
            {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": torch.full((2,), -1.0),
                "num_items_in_batch": torch.tensor(sum(counts)),
                "predmask_logp": logp.gather(-1, ids[..., None])[..., 0],
                "predmask_topk_ids": top.indices,
                "predmask_topk_logp": top.values,
                SAMPLE: torch.arange(2),
                VERSION: torch.zeros(2, dtype=torch.long),
            }
        )
    run = watched(trainer)
    trainer._prepare_inputs = lambda _: batches[trainer._step % 4]
    trainer.train()
    return run


def test_the_anchor_is_what_was_recorded(tmp_path):
    """Field case 6: mu = .2, pi = .6, A = 1 is beyond a delta of .2; there is no other anchor in the batch.

    Missing records are unknown: neither trained on nor masked, and counted.
    """
    from predmask.core import DPPO

    rule = DPPO(divergence="tv", support="binary", delta=0.2)
    for gap, known in ((0.4, True), (0.1, True), (0.4, False)):
        trainer = make_trainer(tmp_path, rule=rule, behaviour_top_k=0, temperature=0.3)
        run = watched(trainer)
        generate = trainer._generate_and_score_completions

        def shifted(inputs, generate=generate, gap=gap, known=known):
            batch = generate(inputs)
            pi = batch["predmask_logp"].exp()
            batch["predmask_logp"] = (pi - gap).clamp(min=1e-4).log() if known else torch.full_like(pi, math.nan)
            batch["advantages"] = torch.ones_like(batch["advantages"])
            batch["probability"] = pi
            return batch

        trainer._generate_and_score_completions = shifted
        trainer.train()
        (batch,) = run.batches
        assert "old_per_token_logps" not in batch
        pi = batch["probability"][batch["completion_mask"].bool()]
        beyond = (pi - (pi - gap).clamp(min=1e-4)) > 0.2
        log = run.logs[0]
        assert log.get("predmask/mask_frac") == (pytest.approx(float(beyond.float().mean())) if known else None)
        assert log["predmask/unknown_logprob_count"] == (0 if known else len(pi))
        assert not known or beyond.any() == (gap == 0.4)
        if not known:
            assert log["loss"] == 0


def test_steps_are_numbered_as_the_host_took_them(tmp_path):
    """Two generations of two passes over two optimiser steps each."""
    traces = tmp_path / "run"
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 8}
    run = train(tmp_path, rule=Predictive(), traces=str(traces), traces_responses=0, **settings)
    trace = Trace(traces)
    assert trace.steps == [1, 2]
    assert (trace.info.run, trace.info.top_k, trace.info.vocabulary_size) == ("run", TOP_K, 72)
    for step, generated in zip(trace.steps, run.generations, strict=True):
        tokens = TokenTrace.cat(list(trace.tokens([step])))
        samples = trace.samples(step)
        assert [sample.sample for sample in samples] == list(range(16))
        completions = [tokens[(tokens.sample == s.sample) & (tokens.epoch == 0)].id.tolist() for s in samples]
        assert sorted(completions) == sorted(ids for _, ids in rows_of(generated))
        begun = 4 * (step - 1)
        assert set(tokens.version.tolist()) == {begun}
        assert tokens.minibatch.tolist() == ((tokens.optimizer_step - begun) % 2).tolist()
        assert tokens.epoch.tolist() == ((tokens.optimizer_step - begun) // 2).tolist()
        assert torch.equal(tokens.staleness, tokens.optimizer_step - begun)
        assert len({(s.group, s.prompt) for s in samples}) == len({s.group for s in samples}) == 4
        for sample, completion in zip(samples, completions, strict=True):
            assert sample.reward == pytest.approx(sum(completion) % 7 / 7)
            assert sample.length == len(completion)
            assert sample.finished == (completion[-1] in run.trainer.eos_token_ids)
    figures = [log["predmask/staleness_max"] for log in run.logs]
    assert figures == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_part_is_recorded(tmp_path):
    """Of every second generation three completions, in each of its passes."""
    settings = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 6}
    traces = tmp_path / "t"
    run = train(tmp_path, rule=Predictive(), traces=str(traces), traces_every=2, traces_responses=3, **settings)
    assert len(run.generations) == 3
    trace = Trace(traces)
    assert trace.steps == [1, 3]
    for step in trace.steps:
        tokens = TokenTrace.cat(list(trace.tokens([step])))
        assert len(trace.samples(step)) == 3
        for epoch in (0, 1):
            assert len(tokens[tokens.epoch == epoch].sample.unique()) == 3


def test_a_trace_makes_a_report(tmp_path):
    pytest.importorskip("matplotlib")
    traces, page = tmp_path / "t", tmp_path / "report.html"
    train(tmp_path, rule=Predictive(delta=0.02), traces=str(traces), **TWICE)
    assert main(["report", str(traces), "--output", str(page)]) == 0
    assert "<html" in page.read_text()


def test_options_are_saved_as_text(tmp_path):
    """Loggers and checkpoints get the rule's name and fields."""
    args = make_trainer(tmp_path, rule=PPOClip(eps_high=0.3)).args
    assert args.to_dict()["rule"] == {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.3, "dual_clip": None}
    assert "ppo_clip" in args.to_json_string()


def test_a_checkpoint_is_resumed(tmp_path):
    settings = {"rule": Predictive(delta=0.02), **TWICE, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path, **settings)
    trainer = make_trainer(tmp_path, **settings)
    run = watched(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert run.completions() == whole.completions()[8:]
    assert [int(batch[VERSION][0]) for batch in run.batches] == [2] * 4
    assert_gradients(run.steps[0].gradients, whole.steps[2].gradients)


def test_shares_add_up():
    """What the expected averages are: of equal losses, one."""
    for loss_type in LOSSES:
        whole = shares([WIDTH, WIDTH], loss_type, steps=1, window=2 * WIDTH)
        assert float(whole.sum()) == pytest.approx(1.0)
