"""What is measured on: a seeded batch of tokens, about as in training."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from predmask.core import BehaviourSupport

SEQUENCES = 4
"""Into how many responses the tokens are divided; each has one advantage."""
_SPREAD = 4.0
"""Standard deviation of the logits: with V = 152k an entropy of about 4 nats."""
_NOISE = 0.02
"""Relative perturbation of the behaviour policy's hidden states: a KL of a few thousandths, no token is dropped."""
_ROWS = 64
_COLUMNS = 2048


class BenchError(ValueError):
    """A benchmark that cannot be run; the text names the remedy."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    tokens: int = 256
    hidden_size: int = 1024
    vocabulary: int = 151_936
    top_k: int = 20
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.tokens % SEQUENCES:
            raise BenchError(
                f"tokens is {self.tokens}; it must be a multiple of {SEQUENCES} (the batch is {SEQUENCES} responses)"
            )
        if not 1 <= self.top_k < self.vocabulary:
            raise BenchError(
                f"top-k is {self.top_k}; it must be from 1 to {self.vocabulary - 1}, the vocabulary less one"
            )
        if self.hidden_size < 1:
            raise BenchError(f"hidden size is {self.hidden_size}; it must be 1 or more")

    @property
    def title(self) -> str:
        """In words."""
        sizes = f"D = {self.hidden_size:,}, V = {self.vocabulary:,}, K = {self.top_k}"
        return f"{self.dtype}, {self.tokens:,} tokens ({sizes})"

    def inputs(self, seed: int = 0) -> Inputs:
        """The batch: random hidden states and weight, and what a slightly different policy sampled.

        Made a few tokens at a time, so that it needs far less memory than what is to be measured.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        place = {"device": self.device, "generator": generator}
        hidden = torch.randn(self.tokens, self.hidden_size, **place)
        weight = torch.randn(self.vocabulary, self.hidden_size, **place).mul_(_SPREAD / math.sqrt(self.hidden_size))
        records: list[tuple[Tensor, ...]] = []
        for rows in hidden.split(_ROWS):
            noise = torch.randn(rows.shape, **place)
            logits = (rows + _NOISE * noise) @ weight.T
            log_norm = logits.logsumexp(-1, keepdim=True)
            top = logits.topk(self.top_k, dim=-1)
            # The largest of logits plus Gumbel noise is a sample.
            uniform = torch.rand(logits.shape, **place)
            sampled = (logits - uniform.log_().neg_().log_()).argmax(-1, keepdim=True)
            logp = logits.gather(-1, sampled) - log_norm
            records.append((sampled[:, 0], logp[:, 0], top.indices, top.values - log_norm))
        sampled, logp, topk_ids, topk_logp = (torch.cat(parts) for parts in zip(*records, strict=True))
        advantage = torch.randn(SEQUENCES, **place).repeat_interleave(self.tokens // SEQUENCES)
        dtype = getattr(torch, self.dtype)
        return Inputs(
            hidden=hidden.to(dtype).requires_grad_(),
            weight=weight.to(dtype).requires_grad_(),
            sampled=sampled,
            logp=logp,
            topk_ids=topk_ids,
            topk_logp=topk_logp,
            advantage=advantage,
        )


@dataclass(kw_only=True)
class Inputs:
    """N tokens and a head, and the buffers that a trainer would keep from step to step."""

    hidden: Tensor
    """[N, D]"""
    weight: Tensor
    """[V, D]"""
    sampled: Tensor
    """[N] ids"""
    logp: Tensor
    """[N] log mu of the sampled tokens"""
    topk_ids: Tensor
    """[N, K]"""
    topk_logp: Tensor
    """[N, K]"""
    advantage: Tensor
    """[N], the same for all tokens of a response"""
    _buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def behaviour(self) -> BehaviourSupport:
        """The behaviour policy's record."""
        return BehaviourSupport.from_topk(self.sampled, self.logp, self.topk_ids, self.topk_logp)

    def buffer(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory that is allocated once."""
        if (name, dtype) not in self._buffers:
            self._buffers[name, dtype] = torch.zeros(shape, dtype=dtype, device=self.hidden.device)
        return self._buffers[name, dtype]

    def weight_grad(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[V, D] where a weight gradient is written to, or added to."""
        return self.buffer("weight_grad", dtype, *self.weight.shape)

    def clear(self) -> None:
        """Drop the gradients."""
        self.hidden.grad = self.weight.grad = None

    def release(self) -> None:
        """Drop gradients and buffers."""
        self.clear()
        self._buffers.clear()

    @torch.no_grad()
    def exact_logp(self) -> Tensor:
        """[N] log-probs of the sampled tokens in float64, a part of the vocabulary at a time."""
        hidden = self.hidden.double()
        log_norm = hidden.new_full(self.sampled.shape, -math.inf)
        for part in self.weight.split(_COLUMNS):
            log_norm = torch.logaddexp(log_norm, (hidden @ part.double().T).logsumexp(-1))
        return (hidden * self.weight[self.sampled].double()).sum(-1) - log_norm

    def save(self, folder: Path) -> None:
        """Write the tensors as raw numbers, with a list of what they are."""
        meta: dict[str, tuple[list[int], str]] = {}
        for name in _TENSORS:
            values: Tensor = getattr(self, name).detach()
            file = torch.from_file(str(folder / name), shared=True, size=values.numel(), dtype=values.dtype)
            file.view(values.shape).copy_(values)
            meta[name] = (list(values.shape), str(values.dtype).removeprefix("torch."))
        (folder / "meta.json").write_text(json.dumps(meta))

    @classmethod
    def load(cls, folder: Path) -> Inputs:
        """What `save` wrote."""
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in json.loads((folder / "meta.json").read_text()).items():
            file = torch.from_file(str(folder / name), size=math.prod(shape), dtype=getattr(torch, dtype))
            found[name] = file.view(shape).clone()
        inputs = cls(**found)
        inputs.hidden.requires_grad_()
        inputs.weight.requires_grad_()
        return inputs


_TENSORS = ("hidden", "weight", "sampled", "logp", "topk_ids", "topk_logp", "advantage")
