"""A Hugging Face causal language model taken apart: hidden states, and the head that turns them into logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from predmask.ops.head import Head
from predmask.rollout.weights import base_model, merged_weight

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
        whole = base_model(model)
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
        if not hasattr(module, "base_layer"):
            raise HeadError(f"its head is a {type(module).__name__}, not a torch.nn.Linear or LoRA on one")
        try:
            return merged_weight(module)
        except ValueError as error:
            raise HeadError(f"its head is not a torch.nn.Linear or LoRA on one: {error}") from error

    @property
    def bias(self) -> Tensor | None:
        """[V]"""
        return self.module.bias

    @torch.no_grad()
    def _check_against(self, model: Any, vocabulary_size: int) -> None:
        device = next(model.parameters()).device
        ids = torch.linspace(0, vocabulary_size - 1, _PROBE_TOKENS, device=device).long()[None]
        with self._in_float32():
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

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        """In here the model's head computes in float32 on its body's hidden states, whatever the body computes in."""
        kept = [(parameter, parameter.data) for parameter in self.module.parameters()]

        def widen(_body: Any, _inputs: Any, output: Any) -> Any:
            # Only now: a tied head is the embedding, too.
            for parameter, values in kept:
                parameter.data = values.float()
            output.last_hidden_state = output.last_hidden_state.float()
            return output

        hook = self.body.register_forward_hook(widen)
        try:
            yield
        finally:
            hook.remove()
            for parameter, values in kept:
                parameter.data = values
