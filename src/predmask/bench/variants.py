"""The table of what is measured. To add a peer, write its function in `peers.py` and its line here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from predmask.bench import peers
from predmask.bench.cases import Case, Inputs
from predmask.bench.peers import Outcome
from predmask.core import BehaviourSupport, NoMask, Predictive
from predmask.ops import masked_policy_loss, support_statistics
from predmask.ops.fused import Fused, Wanted
from predmask.ops.head import Head
from predmask.ops.statistics import Tail
from predmask.ops.sweep import TorchSweep, chunk_tokens

_RULE = Predictive(tail="exact")
_LOGP = "log-prob"
_ENTROPY = "log-prob, entropy"
_ALL = "log-prob, entropy, top-K statistics, mask"


@dataclass(frozen=True)
class Variant:
    """One way to do the work."""

    label: str
    returns: str
    """What one has afterwards, beside loss and gradients."""
    run: Callable[[Inputs], Outcome]
    """Forward and backward pass."""
    needs: str = ""
    """The package to install, as pip spells it; empty for what is here already."""
    dense: bool = False
    """Whether it holds all logits, a few times over."""
    usual: bool = True
    """Whether it is measured when not asked for by name."""
    logp: Callable[[Inputs], Tensor] | None = None
    """Its log-probs, where `run` does not return them."""
    prepare: Callable[[Inputs], object] = Inputs.clear
    """Allocates the gradients that a trainer would have already."""


class LogProbSweep(TorchSweep):
    """The pass of `TorchSweep`, measuring the sampled token's log-prob and nothing else: what statistics cost.

    For heads without bias and soft-cap, and a support that is the sampled token alone.
    """

    def _measure_part(self, part: slice, gain: float, support: Tensor, tail: Tail) -> None:
        rows = self._rows[part]
        largest = rows.amax(1)
        self._shift[part] = largest
        support[part] = self._cells.take(self._places[part])
        rows.sub_(largest[:, None]).exp_()
        places = self._distinct_places[part]
        self._write(places, rows.new_zeros(places.shape))
        tail.log_mass[part] = rows.sum(1).log()
        tail.mean[part] = tail.collision[part] = 0.0


@torch.no_grad()
def gemm(inputs: Inputs) -> Outcome:
    """The three products alone, chunk by chunk, into memory that is there already: the bound."""
    hidden, weight = inputs.hidden, inputs.weight
    count = chunk_tokens(len(weight), len(hidden))
    space = inputs.buffer("logits", hidden.dtype, count, len(weight))
    by_hidden, by_weight = _gemm_gradients(inputs)
    for index, rows in enumerate(torch.arange(len(hidden), device=hidden.device).split(count)):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        logits = torch.mm(hidden[part], weight.T, out=space[: len(rows)])
        torch.mm(logits, weight, out=by_hidden[part])
        by_weight.addmm_(logits.T, hidden[part], beta=min(index, 1))
    return Outcome(None, None)


def _gemm_gradients(inputs: Inputs) -> tuple[Tensor, Tensor]:
    dtype = inputs.hidden.dtype
    return inputs.buffer("hidden_grad", dtype, *inputs.hidden.shape), inputs.weight_grad(dtype)


def fused(inputs: Inputs) -> Outcome:
    """The operator, all gradients through autograd."""
    return _masked_loss(inputs)


def fused_into_buffer(inputs: Inputs) -> Outcome:
    """The operator, adding the weight's gradient to a buffer."""
    return _masked_loss(inputs, weight_grad=inputs.weight_grad())


def dense(inputs: Inputs) -> Outcome:
    """All logits at once, with the same statistics and mask."""
    return _masked_loss(inputs, backend="dense")


def _masked_loss(inputs: Inputs, **options: object) -> Outcome:
    found = masked_policy_loss(
        inputs.hidden,
        inputs.weight,
        inputs.behaviour,
        inputs.advantage,
        rule=_RULE,
        denominator=len(inputs.hidden),
        **options,  # pyright: ignore[reportArgumentType]
    )
    found.loss.backward()
    return Outcome.of(found.loss, found.policy.logp[:, 0])


@torch.no_grad()
def fused_logp(inputs: Inputs) -> Outcome:
    """The operator's pass without its statistics."""
    found = Fused(
        hidden=inputs.hidden.detach(),
        head=Head(weight=inputs.weight.detach()),
        behaviour=inputs.behaviour.binary(),
        shard=None,
        make_sweep=LogProbSweep,
    )
    weights = torch.full_like(inputs.advantage, 1.0 / len(inputs.hidden))
    wanted = Wanted(hidden=True, weight=True, bias=False)
    everything = torch.ones_like(inputs.sampled, dtype=torch.bool)
    loss, _, policy, gradients = found.loss(inputs.advantage, weights, everything, NoMask(), None, wanted)
    inputs.hidden.grad, inputs.weight.grad = gradients.hidden, gradients.weight
    return Outcome.of(loss, policy.logp[:, 0])


@torch.no_grad()
def statistics(inputs: Inputs) -> Outcome:
    """The statistics alone, without gradients."""
    return Outcome.of(None, support_statistics(inputs.hidden, inputs.weight, inputs.behaviour).logp[:, 0])


def checkpointed(inputs: Inputs) -> Outcome:
    """The dense computation a chunk of tokens at a time, computed again in the backward pass."""

    def part(hidden: Tensor, weight: Tensor, behaviour: BehaviourSupport, advantage: Tensor) -> tuple[Tensor, Tensor]:
        found = masked_policy_loss(
            hidden, weight, behaviour, advantage, rule=_RULE, denominator=len(inputs.hidden), backend="dense"
        )
        return found.loss, found.policy.logp[:, 0]

    everything = torch.arange(len(inputs.hidden), device=inputs.hidden.device)
    parts: list[tuple[Tensor, Tensor]] = [
        checkpoint(  # pyright: ignore[reportAssignmentType]
            part,
            inputs.hidden[rows],
            inputs.weight,
            inputs.behaviour[rows],
            inputs.advantage[rows],
            use_reentrant=False,
        )
        for rows in everything.split(chunk_tokens(len(inputs.weight), len(inputs.hidden)))
    ]
    loss = torch.stack([loss for loss, _ in parts]).sum()
    loss.backward()
    return Outcome.of(loss, torch.cat([logp for _, logp in parts]))


BOUND = "gemm"
FULL = "predmask"
PLAIN = "predmask-logp"
VARIANTS: dict[str, Variant] = {
    BOUND: Variant("the three products alone", "nothing", gemm, prepare=_gemm_gradients),
    FULL: Variant("predmask", _ALL, fused),
    "predmask-buffer": Variant("predmask, into a buffer", _ALL, fused_into_buffer, prepare=Inputs.weight_grad),
    PLAIN: Variant("predmask, log-prob only", _LOGP, fused_logp),
    "statistics": Variant("predmask, statistics without gradient", "log-prob, entropy, top-K statistics", statistics),
    "dense": Variant("all logits at once", _LOGP, peers.dense_logp, dense=True),
    "dense-statistics": Variant("all logits at once, statistics", _ALL, dense, dense=True),
    "checkpoint": Variant("chunks with recomputation, statistics", _ALL, checkpointed),
    "liger": Variant("Liger GRPO loss", "the loss alone", peers.liger, "liger-kernel", logp=peers.liger_logp),
    "trl": Variant("TRL chunked log-prob", _ENTROPY, peers.trl, "trl"),
    "verl": Variant("verl fused linear", _ENTROPY, peers.verl, "verl"),
    "torch": Variant("torch linear_cross_entropy", _LOGP, peers.torch_auto, "torch>=2.13", usual=False),
    "torch-256": Variant("torch linear_cross_entropy, chunk 256", _LOGP, peers.torch_256, "torch>=2.13"),
}


def why_not(name: str, device: str = "cpu") -> str | None:
    """Why a variant cannot run here; None where it can. Tried on a tiny batch, which also loads what it needs."""
    variant = VARIANTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(variant, Case(tokens=8, hidden_size=16, vocabulary=64, top_k=4, device=device).inputs())
        except Exception as error:  # whatever a peer raises is the reason
            if not variant.needs:
                raise
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            missing = isinstance(error, ModuleNotFoundError)
            return f"{reason}; pip install '{variant.needs}'" if missing else reason
    return None


def run(variant: Variant, inputs: Inputs) -> Outcome:
    """Forward and backward pass, after dropping the gradients of the last one."""
    inputs.clear()
    return variant.run(inputs)
