"""Mixtures of experts are trained like any other model."""

from __future__ import annotations

import pytest
import torch

from helpers_training import small
from predmask.core import Predictive
from predmask.train import Trainer
from predmask.train.batches import response_rows
from predmask.train.forward import choose_forward
from small_models import dense_rows, sampled_batch, small_model

PROMPTS = [[5, 6, 7], [8], [9, 4, 4, 11, 5, 20, 13, 2], [5, 6, 7]] * 2


def mixture():
    return small_model("qwen3_moe")


def in_full(model):
    """The model with each mixture computed in full: every expert for every token, weighed by 0 where it is not chosen.

    y = sum_e w_e down_e(silu(gate_e x) · up_e x), with w the k largest of softmax(R x), divided by their sum where
    the model says so (`norm_topk_prob`).
    """

    def forward(block, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        shares = torch.softmax(x @ block.gate.weight.T, dim=-1)
        least = shares.sort(dim=-1, descending=True).values[:, block.gate.top_k - 1 : block.gate.top_k]
        shares = torch.where(shares >= least, shares, 0.0)
        if block.gate.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        gate, up = torch.einsum("td,eid->eti", x, block.experts.gate_up_proj).chunk(2, dim=-1)
        each = torch.einsum("eti,edi->etd", torch.sigmoid(gate) * gate * up, block.experts.down_proj)
        return torch.einsum("te,etd->td", shares, each).reshape(hidden.shape)

    for layer in model.model.layers:
        layer.mlp.forward = forward.__get__(layer.mlp)
    return model


@pytest.mark.parametrize("path", ["fused", "dense"])
@pytest.mark.parametrize("normalised", [True, False])
def test_gradients_are_those_of_the_mixture_in_full(path, normalised):
    batch = sampled_batch(mixture(), PROMPTS)
    found = []
    for change in (lambda model: model, in_full):
        model = mixture()
        for layer in model.model.layers:
            layer.mlp.gate.norm_topk_prob = normalised
        forward, reason = choose_forward(change(model), path, temperature=1.0, autocast=False)
        assert reason is None
        result = forward.loss(batch, Predictive(delta=0.5), 5.0)
        result.loss.backward()
        found.append((result.loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (loss, gradients), (expected_loss, expected) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-7)
    for name, value in expected.items():
        torch.testing.assert_close(
            gradients[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    for layer in range(2):
        for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
            each_expert = gradients[f"model.layers.{layer}.mlp.{name}"].flatten(1).norm(dim=1)
            assert (each_expert > 0).all()


def test_a_sequence_alone_and_in_a_batch():
    """Experts see all tokens of a batch at once; no answer depends on what else is there, padding included."""
    model = mixture()
    rollout = sampled_batch(model, PROMPTS).rollout
    with torch.no_grad():
        logits = response_rows(
            lambda ids: model(input_ids=ids, use_cache=False).logits, rollout, torch.device("cpu"), autocast=False
        )
    torch.testing.assert_close(logits.log_softmax(-1).double(), dense_rows(model, rollout), rtol=0, atol=1e-5)


def test_each_expert_moves_in_a_run(tmp_path):
    """Loaded from a checkpoint, which has a matrix for each expert, and written again."""
    from predmask.train.models import load_policy

    model = mixture()
    config = small(model=str(tmp_path), task={"name": "helpers_training:Fickle"}, steps=1)
    embedded, tokenizer = load_policy("embedded", torch.device("cpu"))
    model.config.vocab_size = embedded.config.vocab_size
    model = type(model)(model.config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trainer = Trainer(config)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    list(trainer.steps())
    trainer.close()
    for name, value in trainer.model.state_dict().items():
        if "experts" in name:
            assert ((value - start[name]).flatten(1).abs().amax(dim=1) > 0).all(), name
