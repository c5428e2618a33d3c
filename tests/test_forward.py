"""The trainer's two ways through a model's head give the same loss and gradients, on every kind of head."""

from __future__ import annotations

import math
import warnings

import peft
import pytest
import torch

from helpers_training import recorded_as, small
from predmask.core import DPPO, RULES, Predictive
from predmask.ops import masked_policy_loss, support_statistics
from predmask.rollout import Sampling, TransformersEngine
from predmask.train import Trainer
from predmask.train.batches import Batch
from predmask.train.config import ConfigError
from predmask.train.forward import DenseForward, FusedForward, choose_forward
from predmask.train.heads import HeadError, ModelHead
from small_models import SIZES, VOCABULARY, small_model, with_logits

TEMPERATURE = 1.3
RULE = Predictive(delta=0.02)


def with_head_bias(kind="llama"):
    """A model whose head was given a bias."""
    model = small_model(kind)
    head = torch.nn.Linear(16, VOCABULARY, bias=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.nn.init.normal_(head.weight, std=0.5)
        torch.nn.init.normal_(head.bias)
    model.lm_head = head
    return model


def with_lora(inner=None, targets=("q_proj", "lm_head")):
    """A model with trained-looking LoRA factors."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers in a way that transformers deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(4)
        model = peft.get_peft_model(
            inner or small_model("qwen3_untied"),
            peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(targets), lora_dropout=0.0),
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


MODELS = {
    **{kind: lambda kind=kind: small_model(kind) for kind in SIZES},
    "head bias": with_head_bias,
    "lora": with_lora,
    "lora on a head with bias": lambda: with_lora(with_head_bias()),
    "lora beside the head": lambda: with_lora(targets=("q_proj",)),
}


def batch_of(model, *, seed=0):
    """Responses of unlike lengths that another policy recorded, with tokens the policy did not sample."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [[5, 6, 7], [8], [9, 4, 4, 11, 5], [5, 6, 7]]
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # LoRA included
    full = TransformersEngine(inner).generate(
        prompts, Sampling(temperature=TEMPERATURE, max_new_tokens=9, top_k=5, record_full=True), generator
    )
    noise = 0.6 * torch.randn(full.full_logp.shape, generator=generator)
    rollout = recorded_as(full, (full.full_logp + noise).log_softmax(-1))
    count = len(rollout.tokens)
    rollout.sampled[3] = False
    advantage = torch.randn(count, generator=generator)
    advantage[5:8] = 0.0
    return Batch(rollout, torch.arange(len(prompts)), advantage, torch.rand(count, generator=generator) / count)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def both(model, batch, rule, ratio_cap=5.0):
    """Loss, decision and gradients by the dense path and by the fused one."""
    found = []
    for path in ("dense", "fused"):
        forward, reason = choose_forward(model, path, temperature=TEMPERATURE, autocast=False)
        assert reason is None
        model.zero_grad()
        result = forward.loss(batch, rule, ratio_cap)
        result.loss.backward()
        found.append((result, {name: value.clone() for name, value in gradients(model).items()}))
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_fused_and_dense_give_the_same_loss_and_gradients(kind):
    model = MODELS[kind]()
    batch = batch_of(model)
    (dense, expected), (fused, found) = both(model, batch, RULE)
    assert dense.decision.dropped.any()
    assert dense.decision.keep.any()
    assert torch.equal(dense.decision.reason, fused.decision.reason)
    torch.testing.assert_close(fused.loss, dense.loss, rtol=1e-5, atol=1e-7)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", RULES)
def test_every_rule_runs_fused(name):
    model = small_model("gemma2")
    rule = RULES[name]()
    (dense, expected), (fused, found) = both(model, batch_of(model), rule, ratio_cap=1.1)
    assert torch.equal(dense.decision.reason, fused.decision.reason)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "lora"])
def test_gradients_add_up_over_micro_batches(kind):
    model = MODELS[kind]()
    batch = batch_of(model)
    forward, _ = choose_forward(model, "fused", temperature=TEMPERATURE, autocast=False)
    for size in (4, 1):
        model.zero_grad()
        for micro in batch.split(size):
            forward.loss(micro, RULE, 5.0).loss.backward()
        if size == 4:
            expected = {name: value.clone() for name, value in gradients(model).items()}
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_both_paths_measure_the_same_statistics(kind):
    model = MODELS[kind]()
    rollout = batch_of(model).rollout
    forwards = [choose_forward(model, path, temperature=0.4, autocast=False)[0] for path in ("dense", "fused")]
    (_, dense), (_, fused) = (forward.support(rollout) for forward in forwards)
    torch.testing.assert_close(fused.logp, dense.logp, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(fused.log_tail, dense.log_tail, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(fused.tail_sum_squares, dense.tail_sum_squares, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(fused.entropy, dense.entropy, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    model = small_model("qwen3_untied")
    model.lm_head.weight.requires_grad_(False)
    (_, expected), (_, found) = both(model, batch_of(model), RULE)
    assert "lm_head.weight" not in found
    assert found.keys() == expected.keys()


def test_only_response_positions_reach_the_head(monkeypatch):
    model = small_model("llama")
    batch = batch_of(model)
    seen = []

    def watched(hidden, *args, **settings):
        seen.append(len(hidden))
        return masked_policy_loss(hidden, *args, **settings)

    monkeypatch.setattr("predmask.train.forward.masked_policy_loss", watched)
    monkeypatch.setattr(model.lm_head, "forward", lambda *_: seen.append("logits"))
    head = ModelHead(body=model.model, module=model.lm_head, softcap=None, scale=1.0)
    FusedForward(head, temperature=1.0, autocast=False).loss(batch, RULE, None).loss.backward()
    assert seen == [len(batch.rollout.tokens)]


def test_under_autocast_the_heads_sums_stay_float32():
    model = small_model("llama")
    rollout = batch_of(model).rollout
    forward, _ = choose_forward(model, "fused", temperature=1.0, autocast=True)
    hidden, weight = forward._hidden(rollout), model.lm_head.weight.bfloat16()
    _, policy = forward.support(rollout)
    exact = support_statistics(hidden.double(), weight.double(), rollout.behaviour(hidden.device))
    assert policy.logp.dtype == torch.float32
    torch.testing.assert_close(policy.logp[:, 0].double(), exact.logp[:, 0], rtol=0, atol=1e-5)


def test_under_autocast_the_heads_gradient_is_not_rounded():
    """It is summed in the float32 gradient of the float32 weight."""
    model = small_model("qwen3_untied")
    batch = batch_of(model)
    forward, _ = choose_forward(model, "fused", temperature=1.0, autocast=True)
    forward.loss(batch, RULE, None).loss.backward()
    gradient = model.lm_head.weight.grad
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())
    model.zero_grad()
    choose_forward(model, "fused", temperature=1.0, autocast=False)[0].loss(batch, RULE, None).loss.backward()
    assert (gradient - model.lm_head.weight.grad).norm() < 0.1 * gradient.norm()


def test_only_the_head_may_be_trained():
    model = small_model("qwen3_untied").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    (_, expected), (_, found) = both(model, batch_of(model), RULE)
    assert found.keys() == {"lm_head.weight"}
    torch.testing.assert_close(found["lm_head.weight"], expected["lm_head.weight"], rtol=1e-4, atol=1e-6)


class Shifted(torch.nn.Linear):
    """A head of its own kind."""

    def forward(self, hidden):
        return super().forward(hidden) + 1.0


def shifted():
    model = small_model("llama")
    model.lm_head.__class__ = Shifted
    return model


def another_scale():
    """Logits that the configuration does not explain."""
    model = small_model("llama")

    def change(_module, _inputs, output):
        output.logits = output.logits * 1.01
        return output

    model.register_forward_hook(change)
    return model


def unread_cap():
    """A soft-cap that no name in the configuration tells of, on logits so small that it hardly shows."""
    model = small_model("llama")
    model.lm_head.weight.data.mul_(0.2)

    def change(_module, _inputs, output):
        output.logits = 30.0 * torch.tanh(output.logits / 30.0)
        return output

    model.register_forward_hook(change)
    return model


def impossible_scale():
    model = small_model("cohere")
    model.config.logit_scale = -0.3
    return model


def adapted(**settings):
    """A model whose head peft has adapted in its own way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = settings.pop("kind", peft.LoraConfig)(r=3, target_modules=["lm_head"], **settings)
        return peft.get_peft_model(small_model("qwen3_untied"), config).eval()


UNHONOURED = {
    "unread soft-cap": (unread_cap, "away from"),
    "impossible scale": (impossible_scale, "scale is -0.3"),
    "DoRA": (lambda: adapted(use_dora=True), "variant"),
    "LoRA with bias": (lambda: adapted(lora_bias=True), "bias"),
    "LoHa": (lambda: adapted(kind=peft.LoHaConfig), "not a torch.nn.Linear or LoRA"),
    "another module": (shifted, "Shifted"),
    "another scale": (another_scale, "away from"),
    "other logits": (lambda: with_logits([0.0] * VOCABULARY), "away from"),
}


@pytest.mark.parametrize("kind", UNHONOURED)
def test_a_head_that_cannot_be_honoured_goes_the_dense_way_or_is_refused(kind):
    make, says = UNHONOURED[kind]
    forward, reason = choose_forward(make(), "auto", temperature=1.0, autocast=False)
    assert isinstance(forward, DenseForward)
    assert says in reason
    with pytest.raises(HeadError, match=says):
        choose_forward(make(), "fused", temperature=1.0, autocast=False)


def test_the_trainer_says_once_that_it_goes_the_dense_way(monkeypatch):
    monkeypatch.setattr("predmask.train.trainer.load_trained_policy", lambda *_: (shifted_embedded(), tokenizer()))
    trainer = Trainer(small())
    trainer.close()
    assert [note for note in trainer.notes if "Shifted" in note and "update.head" in note] == trainer.notes
    with pytest.raises(ConfigError, match=r"update.head is 'fused'.*Shifted"):
        Trainer(small(update={"head": "fused"}))


def embedded():
    from predmask.train.models import load_policy

    return load_policy("embedded", torch.device("cpu"))


def tokenizer():
    return embedded()[1]


def shifted_embedded():
    model = embedded()[0]
    model.lm_head.__class__ = Shifted
    return model


@pytest.mark.parametrize("rule", [RULE, DPPO(delta=0.02)])
def test_a_run_comes_to_the_same_weights_either_way(rule):
    start = torch.cat([values.flatten() for values in embedded()[0].state_dict().values()])
    ends = []
    for path in ("dense", "fused"):
        trainer = Trainer(small(rule={"name": rule.name, "delta": rule.delta}, update={"head": path}, steps=2))
        figures = [result.metrics for result in trainer.steps()]
        trainer.close()
        ends.append((figures, torch.cat([values.flatten() for values in trainer.model.state_dict().values()]) - start))
    (dense, expected), (fused, found) = ends
    assert dense[0]["mask_frac"] == fused[0]["mask_frac"] > 0
    for name in ("loss", "grad_norm", "entropy", "behaviour_kl", "mismatch_kl"):
        assert math.isclose(dense[0][name], fused[0][name], rel_tol=2e-3, abs_tol=1e-6), name
    # Adam makes whole steps of what rounding leaves of a gradient, so a few weights go elsewhere.
    assert (found - expected).norm() < 0.05 * expected.norm()
