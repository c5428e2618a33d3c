"""What completions were sampled from, as TRL's trainer records it: from transformers, and from vLLM's answers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from trl.generation.vllm_generation import VLLMGeneration

import helpers_trl
from helpers_trl import (
    EOS,
    HOST_WARNINGS,
    PROMPTS,
    ROWS,
    TOP_K,
    WIDTH,
    StandIn,
    assert_trained,
    dense_logits,
    make_trainer,
    policy_model,
    read_tokens,
    tokenizer,
    train,
    watched,
)
from predmask.core import DPPO, NoMask, PPOClip, Predictive, Reason
from predmask.plugins.trl.capture import Recorder, padded, recorded, rollout_from_vllm_lists
from predmask.rollout import Rollout, RolloutError

pytestmark = [pytest.mark.filterwarnings(text) for text in HOST_WARNINGS]

PROMPT_IDS = [tokenizer()(prompt)["input_ids"] for prompt in PROMPTS for _ in range(2)]


def record(directory: Any, *, seed: int = 0, **settings: Any) -> tuple[Any, list[list[int]], Rollout]:
    """What one generation is recorded as, by the trainer."""
    trainer = make_trainer(directory, **settings)
    trainer.model.train()
    trainer.state.global_step = 3
    torch.manual_seed(seed)
    completions, logprobs = trainer._generate_single_turn(PROMPT_IDS, None, {}, 2)
    assert logprobs is None
    return trainer, completions, trainer._rollout


@torch.no_grad()
def assert_recorded(model: Any, completions: list[list[int]], rollout: Rollout, top_k: int, temperature: float) -> None:
    rows = [dense_logits(model, p, c).double() for p, c in zip(PROMPT_IDS, completions, strict=True)]
    logp = (torch.cat(rows) / temperature).log_softmax(-1)
    top = logp.topk(top_k)
    assert rollout.responses() == completions
    assert [list(prompt) for prompt in rollout.prompts] == PROMPT_IDS
    close = {"rtol": 0, "atol": 1e-5}
    sampled = torch.tensor([token for completion in completions for token in completion])
    torch.testing.assert_close(rollout.logp.double(), logp.gather(1, sampled[:, None])[:, 0], **close)
    torch.testing.assert_close(rollout.topk_logp.double(), top.values, **close)
    torch.testing.assert_close(logp.gather(1, rollout.topk_ids), top.values, **close)
    assert set(rollout.version.tolist()) == {3}
    rollout.check(top_k=top_k, vocabulary_size=ROWS)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 1, TOP_K, ROWS])
def test_the_record_is_what_was_sampled_from(tmp_path, top_k, temperature):
    """Prompts of several lengths, padded on the left; completions cut at their ends, and at the limit."""
    rule = Predictive() if top_k else PPOClip()
    trainer, completions, rollout = record(tmp_path, rule=rule, behaviour_top_k=top_k, temperature=temperature)
    lengths = {len(completion) for completion in completions}
    assert {1, WIDTH} <= lengths
    assert len({len(prompt) for prompt in PROMPT_IDS}) > 3
    ends = trainer.eos_token_ids
    assert any(len(c) == WIDTH and c[-1] not in ends for c in completions)
    assert all(c[-1] in ends for c in completions if len(c) < WIDTH)
    assert_recorded(policy_model(), completions, rollout, top_k, temperature)


def test_the_longest_completion_may_end_by_itself(tmp_path):
    """Then generation stops early, and the last token was never seen as input."""
    model = policy_model(eos_token_id=list(range(EOS, ROWS, 2)))
    _, completions, rollout = record(tmp_path, model=model, max_completion_length=40)
    longest = max(completions, key=len)
    assert len(longest) < 40
    assert longest[-1] % 2 == 1
    assert_recorded(policy_model(), completions, rollout, TOP_K, 1.0)


def test_a_single_token_is_recorded(tmp_path):
    _, completions, rollout = record(tmp_path, max_completion_length=1)
    assert {len(completion) for completion in completions} == {1}
    assert_recorded(policy_model(), completions, rollout, TOP_K, 1.0)


def test_adapters_are_part_of_what_is_recorded(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer, completions, rollout = record(tmp_path, peft_config=config)
    assert_recorded(trainer.model, completions, rollout, TOP_K, 1.0)
    with pytest.raises(AssertionError):
        assert_recorded(policy_model(), completions, rollout, TOP_K, 1.0)


def test_recording_changes_nothing_of_what_is_sampled(tmp_path):
    """To the last bit, and the random numbers that come after."""
    stock = make_trainer(tmp_path, stock=True)
    stock.model.train()
    torch.manual_seed(4)
    expected, _ = stock._generate_single_turn(PROMPT_IDS, None, {}, 2)
    after = torch.get_rng_state()
    _, completions, _ = record(tmp_path, seed=4)
    assert completions == expected
    assert torch.equal(torch.get_rng_state(), after)
    recorder = Recorder(2, 0.5)
    scores = torch.randn(2, 9)
    assert recorder(torch.zeros(2, 3, dtype=torch.long), scores) is scores


def test_generate_is_as_before(tmp_path):
    """After a generation, and after one that failed."""
    model = policy_model()

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    trainer, _, _ = record(tmp_path, model=model)
    assert "generate" not in vars(model)
    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer._generate_single_turn(PROMPT_IDS, None, {}, 2)
    hook.remove()
    assert "generate" not in vars(model)
    with recorded(model, Recorder(1, 1.0)):
        assert "generate" in vars(model)


def test_a_batch_without_a_record_is_an_error(tmp_path):
    """Completions that came about otherwise are not trained on."""
    trainer = make_trainer(tmp_path)
    trainer._generate_single_turn = lambda prompts, *_: ([[3, EOS] for _ in prompts], None)
    with pytest.raises(RuntimeError, match="_generate_single_turn"):
        trainer.train()


def test_the_record_travels_as_fields_of_the_batch():
    """[B, T] and [B, T, K]; behind a completion nothing is known."""
    rollout = rollout_from_vllm_lists(
        [[2], [2]], [[9], [4, 5]], [[[-0.1]], [[-0.2], [-0.3]]], [[[9]], [[4], [5]]], top_k=1, version=2
    )
    fields = padded(rollout, 3, "cpu")
    expected = torch.tensor([[-0.1, math.nan, math.nan], [-0.2, -0.3, math.nan]])
    torch.testing.assert_close(fields["predmask_logp"], expected, equal_nan=True)
    assert fields["predmask_topk_ids"].tolist() == [[[9], [-1], [-1]], [[4], [5], [-1]]]
    torch.testing.assert_close(fields["predmask_topk_logp"], expected[..., None], equal_nan=True)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_the_sampled_token_is_found_by_its_id(order):
    """Field case 10: 9 was sampled, 4 is likelier; in either order it is 9's log-prob."""
    ids, logprobs = [4, 9], [-0.2, -2.5]
    rollout = rollout_from_vllm_lists(
        [[2]], [[9]], [[[logprobs[i] for i in order]]], [[[ids[i] for i in order]]], top_k=1, version=0
    )
    assert rollout.logp.tolist() == pytest.approx([-2.5])
    assert rollout.topk_ids.tolist() == [[4]]
    assert rollout.topk_logp[0].tolist() == pytest.approx([-0.2])
    with pytest.raises(RolloutError, match=r"sampled id 9 is not among the returned ids \[4\]"):
        rollout_from_vllm_lists([[2]], [[9]], [[[-0.2]]], [[[4]]], top_k=1, version=0)


@pytest.mark.parametrize("given", [(None, [[[4]]]), ([[[-0.2]]], None)])
def test_answers_without_log_probs_are_an_error(given):
    with pytest.raises(RolloutError, match=r"restart the server with TRL 1\.16"):
        rollout_from_vllm_lists([[2]], [[4]], *given, top_k=1, version=0)


def vllm_trainer(directory: Any, monkeypatch: Any, **settings: Any) -> Any:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", StandIn)
    return make_trainer(directory, use_vllm=True, **settings)


@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_is_recorded_and_trained_on(tmp_path, monkeypatch, mode, temperature):
    """K of them are asked for, from the weights that TRL sent before the generation."""
    rule = Predictive(delta=0.02)
    settings = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = vllm_trainer(
        tmp_path,
        monkeypatch,
        rule=rule,
        vllm_mode=mode,
        temperature=temperature,
        traces=str(tmp_path / "t"),
        **settings,
    )
    assert trainer.vllm_generation.logprobs == TOP_K
    run = watched(trainer)
    trainer.train()
    assert trainer.vllm_generation.syncs == 2
    assert_trained(run, rule=rule, temperature=temperature)
    assert run.logs[0]["predmask/staleness_max"] == 0
    assert abs(run.logs[0]["predmask/mismatch_kl"]) < 1e-9
    assert run.logs[1]["predmask/mask_frac"] > 0
    assert "generate" not in vars(trainer.vllm_generation)
    for batch in run.batches:
        there = batch["completion_mask"].bool()
        torch.testing.assert_close(batch["sampling_per_token_logps"][there], batch["predmask_logp"][there])


def test_the_sampled_token_alone_is_enough_for_some_rules(tmp_path, monkeypatch):
    rule = PPOClip()
    trainer = vllm_trainer(tmp_path, monkeypatch, rule=rule, behaviour_top_k=0, max_steps=2, num_iterations=2)
    run = watched(trainer)
    trainer.train()
    assert_trained(run, rule=rule)


def test_an_unknown_log_prob_is_not_probability_one(tmp_path, monkeypatch):
    """Field case 11: None is counted, neither trained on nor masked, and in no mean."""
    rule = DPPO(support="binary", delta=0.02)
    trainer = vllm_trainer(
        tmp_path, monkeypatch, rule=rule, behaviour_top_k=0, traces=str(tmp_path / "t"), traces_responses=0
    )

    def forget(prompts, completions, logprobs, ids):
        for rows in logprobs:
            rows[0] = [None]
        return prompts, completions, logprobs, ids

    trainer.vllm_generation.change = forget
    run = watched(trainer)
    trainer.train()
    assert_trained(run, rule=rule)
    tokens = read_tokens(run)
    unknown = tokens.position == 0
    assert set(tokens.decision.reason[unknown].tolist()) == {Reason.UNKNOWN}
    assert not tokens.decision.keep[unknown].any()
    assert (tokens.decision.reason[~unknown] != Reason.UNKNOWN).all()
    assert not tokens.decision.dropped.any()
    torch.testing.assert_close(tokens.decision.weight[~unknown], torch.ones(int((~unknown).sum())))
    (log,) = run.logs
    assert log["predmask/unknown_logprob_count"] == int(unknown.sum())
    assert log["predmask/mask_frac"] == 0
    assert abs(log["predmask/mismatch_kl"]) < 1e-9


FAULTS: dict[str, tuple[Any, str]] = {
    "the sampled token is missing": (
        lambda p, c, logprobs, ids: (p, [[(t + 1) % 3 + 66 for t in one] for one in c], logprobs, ids),
        "is not among the returned ids",
    ),
    "fewer than K": (
        lambda p, c, logprobs, ids: (
            p,
            [[row[0] for row in rows] for rows in ids],
            [[row[:3] for row in rows] for rows in logprobs],
            [[row[:3] for row in rows] for rows in ids],
        ),
        "3 log-probs were returned, but top-5 was asked for",
    ),
    "of the wrong length": (
        lambda p, c, logprobs, ids: (p, c, [rows[1:] for rows in logprobs], [rows[1:] for rows in ids]),
        r"tokens but \d+ log-probs",
    ),
    "no ids": (lambda p, c, logprobs, ids: (p, c, logprobs, None), "restart the server"),
    "of another model": (
        lambda p, c, logprobs, ids: (
            p,
            [[t + 100 for t in one] for one in c],
            logprobs,
            [[[i + 100 for i in row] for row in rows] for rows in ids],
        ),
        "do engine and policy use the same model",
    ),
    "no distribution": (
        lambda p, c, logprobs, ids: (p, c, [[[v + 2 for v in row] for row in rows] for rows in logprobs], ids),
        "at most 0|more than 1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_answers_stop_the_run(tmp_path, monkeypatch, name):
    trainer = vllm_trainer(tmp_path, monkeypatch, rule=NoMask())
    trainer.vllm_generation.change, said = FAULTS[name]
    with pytest.raises(RolloutError, match=said):
        trainer.train()
    assert "generate" not in vars(trainer.vllm_generation)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs.*restart it with --logprobs-mode processed"),
        ({"max_logprobs": 4}, "returns 4 log-probs at most; restart it with --max-logprobs 5"),
    ],
)
def test_servers_that_answer_something_else_are_refused(tmp_path, monkeypatch, setting, said):
    monkeypatch.setattr(helpers_trl, "SERVER", setting)
    with pytest.raises(ValueError, match=said):
        vllm_trainer(tmp_path, monkeypatch, vllm_mode="server")
    vllm_trainer(tmp_path, monkeypatch, vllm_mode="colocate")


@pytest.mark.parametrize("name", ["generate", "sync_weights"])
def test_the_stand_in_is_called_as_the_real_one_is(name):
    """What holds of the stand-in holds of TRL's class: same parameters, and fields that it has, too."""
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (StandIn, VLLMGeneration))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
    taken = inspect.signature(VLLMGeneration.__init__).parameters
    assert {"model", "accelerator", "processing_class", "mode", "temperature", "logprobs"} <= set(taken)
    source = inspect.getsource(VLLMGeneration)
    assert '"logprobs": self.logprobs' in source
    assert "return prompt_ids, completion_ids, logprobs, logprob_token_ids" in source
    assert "self.vllm_client = " in source


def test_no_rule_reads_what_was_not_recorded(tmp_path):
    """K = 0 and a rule of the sampled token alone: the batch has no entries, and trains the same."""
    rule = PPOClip()
    settings = {"rule": rule, "max_steps": 2, "num_iterations": 2}
    without, with_ = (train(tmp_path, behaviour_top_k=top_k, **settings) for top_k in (0, TOP_K))
    assert without.batches[0]["predmask_topk_ids"].shape[-1] == 0
    assert without.completions() == with_.completions()
    for mine, other in zip(without.steps, with_.steps, strict=True):
        helpers_trl.assert_gradients(mine.gradients, other.gradients)
