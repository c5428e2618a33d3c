"""A model that, asked with `masked_loss=`, returns a masked policy loss instead of logits.

The loss is formed inside the model's forward pass, where FSDP and its like have the head's weight at hand; TRL's own
fused head does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from predmask.core import BehaviourSupport, Rule
from predmask.ops import MaskedPolicyLoss, masked_policy_loss
from predmask.rollout.weights import base_model
from predmask.train.heads import ModelHead


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of the last T tokens of B sequences."""

    behaviour: BehaviourSupport
    """[B, T] mu"""
    advantage: Tensor
    """[B, 1]"""
    weights: Tensor
    """[B, T] of each token in the loss"""
    response_mask: Tensor
    """[B, T] bool"""
    rule: Rule
    ratio_cap: float | None
    temperature: float


def add_masked_loss(model: Any) -> None:
    """Let `model(..., masked_loss=Question)` return a `MaskedPolicyLoss`; any other call is as before.

    Raises HeadError for a model whose head cannot be taken apart.
    """
    inner = base_model(model)
    with _without_dropout(model):
        head = ModelHead.of(model)
    has_positions = "position_ids" in signature(inner.forward).parameters
    original = inner.forward

    # The original signature: `generate` validates what it is given against it.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, masked_loss: Question | None = None, **kwargs: Any) -> Any:
        if masked_loss is None:
            return original(*args, **kwargs)
        if has_positions:
            # As `generate` counts them: padding on the left has none.
            kwargs["position_ids"] = (kwargs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        hidden = head.body(*args, use_cache=False, **kwargs).last_hidden_state
        return _answer(head, hidden, masked_loss)

    inner.forward = MethodType(forward, inner)


@contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _answer(head: ModelHead, hidden: Tensor, question: Question) -> MaskedPolicyLoss:
    tokens = question.response_mask.shape[1]
    weight, bias = _whole(head.weight()), _whole(head.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        return masked_policy_loss(
            hidden[:, -tokens - 1 : -1],
            weight,
            question.behaviour,
            question.advantage,
            rule=question.rule,
            weights=question.weights,
            response_mask=question.response_mask,
            ratio_cap=question.ratio_cap,
            bias=bias,
            softcap=head.softcap,
            scale=head.scale,
            temperature=question.temperature,
        )


def _whole(parameter: Any) -> Any:
    """FSDP2 has parameters in parts; the gradient goes back to them."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
