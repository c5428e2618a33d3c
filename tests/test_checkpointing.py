"""Gradient checkpointing: the same gradients, no dropout, less memory, and engines that notice nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers_training import small
from predmask.core import Predictive
from predmask.rollout import Sampling, TransformersEngine
from predmask.train import ConfigError, Trainer
from predmask.train.config import LoraConfig
from predmask.train.forward import choose_forward
from predmask.train.lora import add_adapters
from predmask.train.models import recompute_layers
from small_models import sampled_batch, small_model

PROMPTS = [[5, 6, 7], [8], [9, 4, 4, 11, 5], [5, 6, 7]]
KINDS = ["qwen3", "llama", "gemma2", "qwen3_moe", "gpt2", "lora"]


def plain(kind):
    if kind != "lora":
        return small_model(kind)
    model = add_adapters(small_model("qwen3_untied"), LoraConfig(enabled=True, rank=3), 0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    return model


def recomputed(kind):
    model = plain(kind)
    recompute_layers(model)
    return model


def gradients(model, batch, path="fused", autocast=False):
    forward, _ = choose_forward(model, path, temperature=1.0, autocast=autocast)
    model.zero_grad()
    forward.loss(batch, Predictive(delta=0.02), 5.0).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(("path", "autocast"), [("fused", False), ("dense", False), ("fused", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same(kind, path, autocast):
    """GPT-2 has dropout, from which evaluation mode must keep it."""
    if kind == "gpt2":
        assert small_model(kind).config.resid_pdrop > 0
    batch = sampled_batch(plain(kind), PROMPTS)
    expected = gradients(plain(kind), batch, path, autocast)
    found = gradients(recomputed(kind), batch, path, autocast)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_computed_twice(kind):
    model = recomputed(kind)
    batch = sampled_batch(model, PROMPTS)
    norm = next(module for name, module in model.named_modules() if name.endswith(("1.input_layernorm", "1.ln_1")))
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    gradients(model, batch)
    assert calls.count(True) == 2


def test_less_is_kept():
    """Of eight layers, not much more than their inputs."""
    config = AutoConfig.for_model(
        "qwen3", vocab_size=24, hidden_size=32, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    ids = torch.arange(48).reshape(2, 24) % 24

    def kept():
        """Bytes that autograd keeps for the backward pass, weights apart."""
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=ids, use_cache=False).logits.sum()
        assert loss.requires_grad
        return sum(size for size, _ in found.values())

    before = kept()
    recompute_layers(model)
    assert kept() < 0.25 * before


@pytest.mark.parametrize("kind", KINDS)
def test_engines_sample_as_before(kind):
    """With their cache, also where gradients are enabled around them."""
    sampling = Sampling(temperature=1.0, max_new_tokens=12, top_k=4)
    expected = TransformersEngine(plain(kind)).generate(PROMPTS, sampling, torch.Generator().manual_seed(3))
    model = recomputed(kind)
    with torch.enable_grad():
        found = TransformersEngine(model).generate(PROMPTS, sampling, torch.Generator().manual_seed(3))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logp, expected.logp)
    assert not any(module.training for module in model.modules())


def test_a_copy_computes_with_its_own_weights():
    model = recomputed("qwen3")
    copied = copy.deepcopy(model)
    ids = torch.tensor([[5, 6, 7]])
    before = copied(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(copied(input_ids=ids, use_cache=False).logits, before)
    assert not torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match=r"update\.gradient_checkpointing is on, but Linear has no layers"):
        recompute_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("lora", [{}, {"enabled": True}])
def test_a_run_comes_to_the_same_weights(lora):
    ends = []
    for recompute in (False, True):
        trainer = Trainer(small(lora=lora, update={"gradient_checkpointing": recompute}))
        losses = [result.metrics["loss"] for result in trainer.steps()]
        trainer.close()
        assert recompute == any("forward" in vars(module) for module in trainer.model.modules())
        ends.append((losses, trainer.model.state_dict()))
    (expected_losses, expected), (losses, found) = ends
    assert losses == expected_losses
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
