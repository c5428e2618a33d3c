"""A Hugging Face causal language model taken apart: hidden states, and the head that turns them into logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from predmask.ops.head import Head

_PROBE_TOKENS = 64
_PROBE_TOLERANCE = 3e-5
"""How far the head's logits may be from the model's own, relative to the largest; both are float32."""


class HeadError(ValueError):
    """The model's head is none that can be taken apart; the text says what it has."""


@dataclass(frozen=True)
class ModelHead:
    """The two halves of a causal language model."""

    body: Any
    """The model up to its last norm."""
    module: Any
    """Its output embeddings."""
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, model: Any) -> ModelHead:
        """Weight (tied or not), bias, soft-cap, logit scale and LoRA on the head, checked on a few tokens.

        Raises HeadError when these do not give the model's own logits.
        """
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        module = whole.get_output_embeddings()
        body = getattr(whole, whole.base_model_prefix, None)
        if module is None or body is None:
            raise HeadError(f"{type(whole).__name__} has no body and output embeddings that stand apart")
        settings = whole.config.get_text_config()
        head = cls(
            body=body,
            module=module,
            softcap=getattr(settings, "final_logit_softcapping", None),
            scale=getattr(settings, "logit_scale", None) or 1.0 / (getattr(settings, "logits_scaling", None) or 1.0),
        )
        head._check_against(model, settings.vocab_size)
        return head

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T, D] hidden states after the last norm."""
        return self.body(input_ids=ids, use_cache=False).last_hidden_state

    def weight(self) -> Tensor:
        """[V, D]; with LoRA on the head the product of its factors is added, as one matrix."""
        module = self.module
        if type(module) is torch.nn.Linear:
            return module.weight
        # peft wraps the layer: its own matrix, and a delta for each active adapter.
        base = getattr(module, "base_layer", None)
        if type(base) is not torch.nn.Linear or not hasattr(module, "lora_A"):
            raise HeadError(f"its head is a {type(module).__name__}, not a torch.nn.Linear or LoRA on one")
        active = [] if module.disable_adapters or module.merged else module.active_adapters
        adapters = [name for name in active if name in module.lora_A]
        if any(name in module.lora_variant or module.lora_bias[name] for name in adapters):
            # Such as DoRA: the same at first, and something else after the first step.
            raise HeadError("the LoRA on its head is of a variant, or has a bias")
        return sum((module.get_delta_weight(name) for name in adapters), start=base.weight)

    @property
    def bias(self) -> Tensor | None:
        """[V]"""
        return self.module.bias

    @torch.no_grad()
    def _check_against(self, model: Any, vocabulary_size: int) -> None:
        device = next(model.parameters()).device
        ids = torch.linspace(0, vocabulary_size - 1, _PROBE_TOKENS, device=device).long()[None]
        expected = model(input_ids=ids, use_cache=False).logits.float()
        weight = self.weight()
        try:
            head = Head(weight=weight, bias=self.bias, softcap=self.softcap, scale=self.scale)
        except (TypeError, ValueError) as error:
            raise HeadError(str(error)) from error
        hidden = self.hidden(ids)
        if hidden.shape[-1] != head.weight.shape[1]:
            raise HeadError(
                f"its hidden states are {tuple(hidden.shape)}, and its head's weight {tuple(head.weight.shape)}"
            )
        found = head.logits(hidden)
        if found.shape != expected.shape:
            raise HeadError(f"its logits are {tuple(expected.shape)}, and its head gives {tuple(found.shape)}")
        error = float((found - expected).abs().max())
        if not error <= _PROBE_TOLERANCE * float(expected.abs().max()):
            raise HeadError(
                f"its logits are up to {error:.2g} away from what weight, bias, soft-cap and scale of its head give"
            )
