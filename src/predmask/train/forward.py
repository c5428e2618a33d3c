"""From a rollout to the policy's statistics and the masked loss: fused with the model's head, or through all logits."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, PolicySupport, Rule
from predmask.core.support import each_tensor
from predmask.ops import MaskedPolicyLoss, masked_policy_loss, support_statistics
from predmask.ops.reference import loss_of
from predmask.rollout import Rollout
from predmask.train.batches import Batch, response_rows
from predmask.train.config import Config, ConfigError
from predmask.train.heads import HeadError, ModelHead


class Forward(Protocol):
    """The forward pass of the policy that is trained."""

    def support(
        self, rollout: Rollout, behaviour: BehaviourSupport | None = None
    ) -> tuple[BehaviourSupport, PolicySupport]:
        """Both policies on the support of each of the rollout's N tokens (or on another one), on the model's device."""
        ...

    def loss(self, batch: Batch, rule: Rule, ratio_cap: float | None) -> MaskedPolicyLoss:
        """The masked loss of the batch, and the rule's decision that it reads."""
        ...


class DenseForward:
    """Through the model's own logits, of prompts and padding too: right for any model."""

    def __init__(self, model: Any, *, temperature: float, autocast: bool) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._temperature = temperature
        self._autocast = autocast

    def support(
        self, rollout: Rollout, behaviour: BehaviourSupport | None = None
    ) -> tuple[BehaviourSupport, PolicySupport]:
        """See `Forward`."""
        logits = response_rows(self._logits, rollout, self._device, autocast=self._autocast).float()
        behaviour = _on_device(rollout, behaviour, self._device)
        return behaviour, PolicySupport.from_logits(logits, behaviour, temperature=self._temperature)

    def loss(self, batch: Batch, rule: Rule, ratio_cap: float | None) -> MaskedPolicyLoss:
        """See `Forward`."""
        behaviour, policy = self.support(batch.rollout)
        loss, decision, policy = loss_of(policy, behaviour, *batch.per_token(self._device), rule, ratio_cap)
        return MaskedPolicyLoss(loss=loss, decision=decision, behaviour=behaviour, policy=policy)

    def _logits(self, ids: Tensor) -> Tensor:
        return self._model(input_ids=ids, use_cache=False).logits


class FusedForward:
    """Through the operator: logits exist for a chunk of response tokens at a time."""

    def __init__(self, head: ModelHead, *, temperature: float, autocast: bool) -> None:
        self._head = head
        self._device = next(head.body.parameters()).device
        self._temperature = temperature
        self._autocast = autocast

    def support(
        self, rollout: Rollout, behaviour: BehaviourSupport | None = None
    ) -> tuple[BehaviourSupport, PolicySupport]:
        """See `Forward`."""
        behaviour = _on_device(rollout, behaviour, self._device)
        weight = self._cast(self._head.weight())
        return behaviour, support_statistics(self._hidden(rollout), weight, behaviour, **self._settings())

    def loss(self, batch: Batch, rule: Rule, ratio_cap: float | None) -> MaskedPolicyLoss:
        """See `Forward`."""
        advantage, weights, sampled = batch.per_token(self._device)
        hidden, weight = self._hidden(batch.rollout), self._head.weight()
        return masked_policy_loss(
            hidden,
            self._cast(weight),
            batch.rollout.behaviour(self._device),
            advantage,
            rule=rule,
            weights=weights,
            response_mask=sampled,
            ratio_cap=ratio_cap,
            weight_grad=_own_gradient(weight) if hidden.requires_grad else None,
            **self._settings(),
        )

    def _hidden(self, rollout: Rollout) -> Tensor:
        return self._cast(response_rows(self._head.hidden, rollout, self._device, autocast=self._autocast))

    def _cast(self, values: Tensor) -> Tensor:
        """As autocast has operands of a product; the operator's sums are float32."""
        return values.bfloat16() if self._autocast else values

    def _settings(self) -> dict[str, Any]:
        head = self._head
        return {
            "bias": head.bias,
            "softcap": head.softcap,
            "scale": head.scale,
            "temperature": self._temperature,
        }


def choose_forward(
    model: Any, path: Literal["auto", "fused", "dense"], *, temperature: float, autocast: bool
) -> tuple[Forward, str | None]:
    """The forward pass for the model, and why it is not the fused one where `auto` asked for that.

    Raises HeadError for `fused` where the model's head cannot be honoured.
    """
    dense = DenseForward(model, temperature=temperature, autocast=autocast)
    if path == "dense":
        return dense, None
    try:
        head = ModelHead.of(model)
    except HeadError as error:
        if path == "fused":
            raise
        return dense, str(error)
    return FusedForward(head, temperature=temperature, autocast=autocast), None


def forward_of(config: Config, model: Any) -> tuple[Forward, str | None]:
    """What `choose_forward` finds for a configuration; ConfigError where it refuses."""
    update = config.update
    try:
        return choose_forward(model, update.head, temperature=config.rollout.temperature, autocast=update.autocast)
    except HeadError as error:
        raise ConfigError(
            f"update.head is 'fused', but the head of model {config.model!r} cannot be taken apart: {error}; use "
            "'auto' or 'dense'"
        ) from error


def _on_device(rollout: Rollout, behaviour: BehaviourSupport | None, device: torch.device) -> BehaviourSupport:
    """The given support, or that of the rollout's records."""
    return rollout.behaviour(device) if behaviour is None else each_tensor(behaviour, lambda v: v.to(device))


def _own_gradient(weight: Tensor) -> Tensor | None:
    """The weight's gradient, to be added to in place over micro-batches; None where autograd must hand it on."""
    if not (weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()):
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
