"""What others offer for the same work, each called as its users call it, with its own defaults.

One function a peer: from the batch to the loss -mean(A · pi / mu), and its gradients by hidden states and weight.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from predmask.bench.cases import SEQUENCES, Inputs


class Outcome(NamedTuple):
    """What a variant computed; its gradients are those of the inputs."""

    loss: Tensor | None
    logp: Tensor | None
    """[N] of the sampled tokens"""

    @classmethod
    def of(cls, loss: Tensor | None, logp: Tensor | None) -> Outcome:
        """Outside the graph."""
        return cls(*(None if value is None else value.detach() for value in (loss, logp)))


def from_logp(inputs: Inputs, logp: Tensor) -> Outcome:
    """Loss and gradients from differentiable log-probs [N] of the sampled tokens."""
    loss = -(inputs.advantage * (logp.float() - inputs.logp).exp()).mean()
    loss.backward()
    return Outcome.of(loss, logp)


def dense_logp(inputs: Inputs) -> Outcome:
    """All logits at once, in float32 after the product, which is rounded to the dtype of its inputs; and autograd."""
    logits = (inputs.hidden @ inputs.weight.T).float()
    logp = logits.gather(-1, inputs.sampled[:, None])[:, 0] - logits.logsumexp(-1)
    return from_logp(inputs, logp)


def liger(inputs: Inputs) -> Outcome:
    """Liger's chunked GRPO loss, a response at a time; no reference model, and a clip that nothing reaches.

    Not compiled: that would cover the arithmetic on one number a token only.
    """
    module = _load("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, compiled=False, epsilon_low=1.0, epsilon_high=float("inf")
    )
    sampled = inputs.sampled.view(SEQUENCES, -1)
    loss, _ = module(
        inputs.hidden.view(*sampled.shape, -1),
        inputs.weight,
        sampled,
        torch.ones_like(sampled),
        inputs.advantage.view(sampled.shape)[:, 0],
        old_per_token_logps=inputs.logp.view(sampled.shape),
    )
    loss.backward()
    return Outcome.of(loss, None)


def liger_logp(inputs: Inputs) -> Tensor:
    """The log-probs that Liger's loss is made of, for it does not return them."""
    base = _load("liger_kernel.chunked_loss.fused_linear_ppo").LigerFusedLinearPPOBase
    sampled = inputs.sampled.view(SEQUENCES, -1)
    hidden = inputs.hidden.view(*sampled.shape, -1)
    return base.chunk_forward(hidden, inputs.weight, sampled).reshape(-1)


def trl(inputs: Inputs) -> Outcome:
    """What TRL's GRPO trainer does with its fused head: log-prob and entropy, recomputed in the backward pass."""
    utils = _load("trl.trainer.utils")
    logp, *_ = utils._ChunkedLogProbFunction.apply(
        inputs.hidden,
        inputs.weight,
        None,
        inputs.sampled,
        1.0,
        utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        ("log_probs", "entropy"),
    )
    return from_logp(inputs, logp)


def verl(inputs: Inputs) -> Outcome:
    """The fused kernel of verl, its torch path: log-prob and entropy, recomputed in the backward pass."""
    module = _load("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    logp, _ = module(inputs.hidden, inputs.weight, inputs.sampled)
    return from_logp(inputs, logp)


def torch_auto(inputs: Inputs) -> Outcome:
    """PyTorch's chunked linear cross entropy, with the chunks that it chooses."""
    return _torch_cross_entropy(inputs)


def torch_256(inputs: Inputs) -> Outcome:
    """The same in chunks of 256 tokens."""
    return _torch_cross_entropy(inputs, batch_chunk_size=256)


def _torch_cross_entropy(inputs: Inputs, **options: Any) -> Outcome:
    from torch.nn import LinearCrossEntropyOptions, functional

    nll = functional.linear_cross_entropy(
        inputs.hidden,
        inputs.weight,
        inputs.sampled,
        reduction="none",
        options=LinearCrossEntropyOptions(**options),
    )
    return from_logp(inputs, -nll)


def _load(module: str) -> Any:
    """A module of a package that need not be installed."""
    return importlib.import_module(module)
