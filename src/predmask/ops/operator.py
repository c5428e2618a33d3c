"""What a trainer calls: hidden states and a head's weight to statistics, decision, loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from predmask.core import BehaviourSupport, MaskDecision, Metrics, PolicySupport, Rule, mask_metrics
from predmask.core.support import each_tensor
from predmask.ops.fused import Fused, Gradients, Wanted
from predmask.ops.head import Head
from predmask.ops.reference import dense_loss, dense_statistics
from predmask.ops.shard import Shard
from predmask.ops.sweep import MakeSweep, TorchSweep

Backend = Literal["auto", "dense", "chunked", "triton"]

_Record = TypeVar("_Record", PolicySupport, MaskDecision)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class MaskedPolicyLoss:
    """A masked policy loss and what it was computed from."""

    loss: Tensor
    """Scalar, with gradient to hidden states, weight and bias."""
    decision: MaskDecision
    """[...] the rule's decision; the loss reads it."""
    behaviour: BehaviourSupport
    """[...] mu, as given."""
    policy: PolicySupport
    """[...] pi on the same support, without gradient; undefined for tokens outside the response mask."""

    @cached_property
    def metrics(self) -> Metrics:
        """The figures of `predmask.core.mask_metrics`."""
        return mask_metrics(self.behaviour, self.policy, self.decision)


def _eager(function: _Function) -> _Function:
    """Out of torch.compile's reach: workspaces that are written in place are not what it can trace."""
    # As torch.compiler.disable, which would load the compiler, and triton with it, at import.
    return cast("_Function", torch._disable_dynamo(function))  # pyright: ignore[reportPrivateImportUsage]


@_eager
def support_statistics(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor | BehaviourSupport,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    shard: Shard | None = None,
    backend: Backend = "auto",
) -> PolicySupport:
    """Log-probs of each token's support, log tail mass, sum of squares and entropy, from hidden states.

    logits = cap(scale · (hidden · weightᵀ + bias)) / temperature, cap(z) = softcap · tanh(z / softcap). The numbers
    are those of `PolicySupport.from_logits` on these logits, but memory does not grow with the number of tokens.
    Everything is summed in float32 (float64 where an input is), also for 16-bit inputs; TF32, where you allow it,
    rounds float32 inputs. Log-probs are differentiable by hidden, weight and bias; the backward pass forms the logits
    again.

    Args:
        hidden: [..., D] hidden states, after the model's last norm.
        weight: [V, D] the head's weight.
        ids: [..., S] token ids, or the behaviour policy's support. An id that stands twice is one id.
        bias: [V]
        softcap: the head's final soft-cap, if it has one.
        scale: the head's logit scale (Cohere's `logit_scale`, one over Granite's `logits_scaling`).
        temperature: the sampling temperature.
        shard: which part of the vocabulary `weight` is, if it is only a part. Then `hidden` and `ids` are the same in
            all processes (and so must be the gradient that comes back, or processes wait for each other in vain), and
            the gradient of `hidden` is summed already.
        backend: `dense` holds all logits and is the specification, `chunked` runs anywhere, `triton` runs on GPUs;
            `auto` is triton on a GPU that has it, else chunked.

    Raises ValueError for shapes, ids or settings that do not fit.
    """
    head = Head(weight=weight, bias=bias, softcap=softcap, scale=scale, temperature=temperature)
    behaviour = ids if isinstance(ids, BehaviourSupport) else _unknown_behaviour(ids)
    leading = _check(hidden, head, behaviour, shard)
    hidden, behaviour = hidden.reshape(-1, hidden.shape[-1]), _flat(behaviour, leading)
    make_sweep = _sweep(backend, hidden, shard)
    if make_sweep is None:
        policy = dense_statistics(hidden, head, behaviour)
    else:
        fused = Fused(
            hidden=hidden.detach(), head=head.detach(), behaviour=behaviour, shard=shard, make_sweep=make_sweep
        )
        with torch.no_grad():
            policy = fused.statistics()
        wanted = _wanted(hidden, head)
        if wanted.by_autograd:

            def gradients(by_logp: Tensor) -> Gradients:
                return fused.statistics_gradient(by_logp, wanted)

            logp = _attach(policy.logp, gradients, hidden, head, behaviour.ids, behaviour.valid)
            policy = replace(policy, logp=logp)
    return _shaped(policy, leading)


@_eager
def masked_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    behaviour: BehaviourSupport,
    advantage: Tensor,
    *,
    rule: Rule,
    denominator: float | None = None,
    weights: Tensor | None = None,
    response_mask: Tensor | None = None,
    ratio_cap: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    weight_grad: Tensor | None = None,
    shard: Shard | None = None,
    backend: Backend = "auto",
) -> MaskedPolicyLoss:
    """The masked policy loss of `predmask.core.policy_loss`, and the decision, in one pass over the logits.

    A chunk of tokens at a time: the logits are formed once, measured, handed to the rule, and turned into the
    gradients of hidden, weight and bias, which the backward pass only hands out (the loss is final, for the weights
    of all tokens are known). Tokens that have no gradient (dropped, A = 0) are left out of the backward products,
    and those outside the response mask are not computed at all.

    Args:
        hidden: [..., D] hidden states, after the model's last norm; row i predicts token i.
        weight: [V, D] the head's weight.
        behaviour: [...] mu on the support of each token (`BehaviourSupport.from_topk`).
        advantage: [...] of each token, or broadcastable with as many dimensions.
        rule: the mask. It is asked about a chunk of tokens [n] at a time, so it must decide each token alone.
        denominator: how many tokens the loss is averaged over, in the whole optimiser step. This project counts those
            in the response mask that have A ≠ 0; the mask's drops do not change it.
        weights: [...] instead of the denominator: each token's weight, from `token_weights`.
        response_mask: [...] bool, False for padding and for tokens that the policy did not sample.
        ratio_cap: C, the cap of the detached importance weight; None for no cap.
        bias, softcap, scale, temperature: as in `support_statistics`.
        weight_grad: [V, D] a buffer, such as `weight.grad`, to which the weight's gradient is added at once, instead of
            by autograd: no second [V, D] tensor. Float32 (float64 where an input is). The loss must then not be
            multiplied by anything before its backward pass: put that into the weights. Without grad mode nothing is
            added. Hooks on the weight do not see this gradient, and a call that fails may have added part of it.
        shard: as in `support_statistics`; all arguments but weight and bias are the same in all processes.
        backend: as in `support_statistics`.

    Raises ValueError for shapes, ids or settings that do not fit, and what the rule raises.
    """
    head = Head(weight=weight, bias=bias, softcap=softcap, scale=scale, temperature=temperature)
    if not isinstance(rule, Rule):
        raise TypeError(f"rule is {rule!r}; it must be an instance of a rule, such as Predictive(delta=0.15)")
    leading = _check(hidden, head, behaviour, shard)
    advantage = _per_token("advantage", advantage, hidden).to(behaviour.logp.dtype)
    weights = _per_token("weights", _weights(weights, denominator, advantage), hidden)
    if response_mask is None:
        response_mask = torch.ones((), dtype=torch.bool, device=hidden.device)
    response = _per_token("response_mask", response_mask, hidden).bool()
    hidden, flat = hidden.reshape(-1, hidden.shape[-1]), _flat(behaviour, leading)
    make_sweep = _sweep(backend, hidden, shard)
    if make_sweep is None:
        if weight_grad is not None:
            raise ValueError("weight_grad needs a backend other than 'dense', whose gradients are autograd's")
        loss, decision, policy = dense_loss(hidden, head, flat, advantage, weights, response, rule, ratio_cap)
    else:
        wanted = _wanted(hidden, head, weight_grad)
        fused = Fused(hidden=hidden.detach(), head=head.detach(), behaviour=flat, shard=shard, make_sweep=make_sweep)
        with torch.no_grad():
            loss, decision, policy, gradients = fused.loss(advantage, weights, response, rule, ratio_cap, wanted)
        if wanted.by_autograd:
            loss = _attach(loss, _Once(gradients, final=weight_grad is not None), hidden, head)
    return MaskedPolicyLoss(
        loss=loss, decision=_shaped(decision, leading), behaviour=behaviour, policy=_shaped(policy, leading)
    )


class _WithGradient(torch.autograd.Function):
    """A value that is known already, with a function that knows its gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Callable[[Tensor], Gradients], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Reading the saved inputs raises where one was changed in between.
        inputs = ctx.saved_tensors
        found: Gradients = ctx.gradients(*grad_outputs)
        gradients = [
            gradient if gradient is None else gradient.to(values.dtype)
            for gradient, values in zip((found.hidden, found.weight, found.bias), inputs, strict=False)
        ]
        return None, None, *gradients, *[None] * (len(inputs) - 3)


class _Once:
    """Gradients that were formed before the backward pass: multiplied in place and handed out, so only once."""

    def __init__(self, gradients: Gradients, *, final: bool) -> None:
        self._gradients: Gradients | None = gradients
        self._final = final

    def __call__(self, by_loss: Tensor) -> Gradients:
        if self._gradients is None:
            raise RuntimeError(
                "the gradients of this loss were handed out already; compute masked_policy_loss again for a second "
                "backward pass"
            )
        gradients, self._gradients = self._gradients, None
        if by_loss != 1:
            if self._final:
                raise RuntimeError(
                    f"the loss was multiplied by {by_loss.item()} after weight_grad was filled; put that factor into "
                    "weights or denominator, or leave weight_grad out"
                )
            for values in (gradients.hidden, gradients.weight, gradients.bias):
                if values is not None:
                    values.mul_(by_loss)
        return gradients


def _attach(
    value: Tensor, gradients: Callable[[Tensor], Gradients], hidden: Tensor, head: Head, *constants: Tensor
) -> Tensor:
    """The value in the graph; `constants` are what its gradients depend on, too."""
    return cast("Tensor", _WithGradient.apply(value, gradients, hidden, head.weight, head.bias, *constants))


def _wanted(hidden: Tensor, head: Head, buffer: Tensor | None = None) -> Wanted:
    """Which gradients are asked for; ValueError for a buffer that cannot hold one."""
    if buffer is not None:
        dtype = head.accumulation(hidden)
        if buffer.shape != head.weight.shape or buffer.dtype != dtype or buffer.requires_grad:
            raise ValueError(
                f"weight_grad is {buffer.dtype} of shape {tuple(buffer.shape)}; it must be {dtype} of shape "
                f"{tuple(head.weight.shape)} (sums over many chunks do not fit 16 bits), and outside the graph"
            )
    if not torch.is_grad_enabled():
        return Wanted(hidden=False, weight=False, bias=False)
    return Wanted(
        hidden=hidden.requires_grad,
        weight=head.weight.requires_grad and buffer is None,
        bias=head.bias is not None and head.bias.requires_grad,
        buffer=buffer,
    )


def _weights(weights: Tensor | None, denominator: float | None, advantage: Tensor) -> Tensor:
    """The weight of each token, from one of the two ways to say it."""
    if (weights is None) == (denominator is None):
        raise ValueError(
            "give either denominator (tokens of the whole optimiser step) or weights (from predmask.core.token_weights)"
        )
    if denominator is None:
        return cast("Tensor", weights)
    if isinstance(denominator, Tensor) and denominator.numel() != 1:
        raise ValueError(
            f"denominator has shape {tuple(denominator.shape)}; it is one number (weights says it token by token)"
        )
    denominator = float(denominator)
    if not 0 < denominator < math.inf:
        raise ValueError(f"denominator is {denominator}; it must be a finite number above 0")
    return torch.tensor(1.0 / denominator, dtype=advantage.dtype, device=advantage.device)


def _per_token(name: str, values: Tensor, hidden: Tensor) -> Tensor:
    """[N] a value for each token, outside the graph; ValueError for a shape that does not say which token is meant."""
    leading = hidden.shape[:-1]
    pairs = zip(values.shape, leading, strict=True) if values.ndim == len(leading) else ()
    if values.ndim not in (0, len(leading)) or any(size not in (1, tokens) for size, tokens in pairs):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} for tokens of shape {tuple(leading)}; give one for each token, "
            "or a tensor with as many dimensions that broadcasts (for sequences: values[:, None])"
        )
    _check_device(name, values, hidden)
    return values.detach().expand(leading).reshape(-1)


def _check_device(name: str, values: Tensor, hidden: Tensor) -> None:
    if values.device != hidden.device:
        raise ValueError(f"{name} is on {values.device} and hidden on {hidden.device}; move one with .to(device)")


def _sweep(backend: Backend, hidden: Tensor, shard: Shard | None) -> MakeSweep | None:
    """What sweeps over the logits; None for the dense reference."""
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
    if backend == "dense":
        if shard is not None:
            raise ValueError("backend 'dense' needs the whole vocabulary; use 'chunked' or 'triton' for a shard")
        return None
    if backend == "chunked" or (backend == "auto" and not hidden.is_cuda):
        return TorchSweep
    try:
        from predmask.ops.triton_sweep import TritonSweep, hindrance
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        if backend == "auto":
            return TorchSweep
        raise ValueError(
            "backend 'triton' needs the package triton (pip install triton; torch's wheels for GPUs bring it); use "
            "'chunked' without it"
        ) from error
    if backend == "triton":
        return TritonSweep
    return lambda head, states, rows: (TorchSweep if hindrance(head, states) else TritonSweep)(head, states, rows)


def _check(hidden: Tensor, head: Head, behaviour: BehaviourSupport, shard: Shard | None) -> tuple[int, ...]:
    """The leading shape [...] that everything has in common; ValueError for what does not fit."""
    leading = behaviour.ids.shape[:-1]
    if hidden.shape[:-1] != leading or hidden.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(head.weight.shape)} and support {tuple(behaviour.ids.shape)} "
            "do not fit: expected [..., D], [V, D] and [..., S], with one hidden state for each token: the one at the "
            "position before it (hidden[:, :-1] for the tokens input_ids[:, 1:]; ids[..., None] for one id a token)"
        )
    _check_device("weight", head.weight, hidden)
    _check_device("support", behaviour.ids, hidden)
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype}; hidden states are floating point")
    size = len(head.weight) if shard is None else shard.vocabulary_size
    if shard is not None and not 0 <= shard.start <= size - len(head.weight):
        raise ValueError(
            f"a shard of {len(head.weight)} rows from {shard.start} on does not lie in a vocabulary of {size}"
        )
    behaviour.check_ids(size)
    return tuple(leading)


def _flat(behaviour: BehaviourSupport, leading: tuple[int, ...]) -> BehaviourSupport:
    """[N] from [...]"""
    return each_tensor(behaviour, lambda values: values.reshape(-1, *values.shape[len(leading) :]))


def _shaped(record: _Record, leading: tuple[int, ...]) -> _Record:
    """[...] from [N]"""
    return each_tensor(record, lambda values: values.reshape((*leading, *values.shape[1:])))


def _unknown_behaviour(ids: Tensor) -> BehaviourSupport:
    """A support of which only the ids are known."""
    if ids.is_floating_point() or not ids.ndim or not ids.shape[-1]:
        raise ValueError(
            f"ids are {ids.dtype} of shape {tuple(ids.shape)}; expected integers [..., S] with S of 1 or more"
        )
    unknown = torch.full(ids.shape, torch.nan, device=ids.device)
    return BehaviourSupport(
        ids=ids.long(),
        valid=torch.ones_like(ids, dtype=torch.bool),
        logp=unknown,
        log_tail=unknown[..., 0],
        log_kth=unknown[..., 0],
        top_k=0,
    )
