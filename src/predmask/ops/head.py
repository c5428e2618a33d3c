"""What turns hidden states into logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Head:
    """A language model's head: logits = cap(scale · (hidden · weightᵀ + bias)) / temperature.

    cap(z) is softcap · tanh(z / softcap) (Gemma 2, arXiv 2408.00118), or nothing. `scale` is Cohere's logit scale,
    or one over Granite's `logits_scaling`. The last division belongs to sampling, not to the model.
    """

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None
    scale: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.is_floating_point():
            raise ValueError(
                f"weight is {self.weight.dtype} of shape {tuple(self.weight.shape)}; a head's weight is [V, D] of "
                "floating point (dequantise a quantised head)"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias has shape {tuple(self.bias.shape)}, but the head has {len(self.weight)} rows")
        for name in ("scale", "temperature", "softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a finite number above 0")

    def accumulation(self, hidden: Tensor) -> torch.dtype:
        """In what everything from the products on is summed: float64 if an input is float64, else float32."""
        inputs = (hidden, self.weight, *(() if self.bias is None else (self.bias,)))
        return torch.float64 if any(values.dtype == torch.float64 for values in inputs) else torch.float32

    def detach(self) -> Head:
        """The same head outside the graph."""
        return replace(self, weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] logits at the sampling temperature, in the accumulation type."""
        dtype = self.accumulation(hidden)
        with torch.autocast(hidden.device.type, enabled=False):  # or the product would be rounded to 16 bits
            raw = hidden.to(dtype) @ self.weight.to(dtype).T
        if self.bias is not None:
            raw = raw + self.bias.to(dtype)
        raw = raw * self.scale
        if self.softcap is not None:
            raw = self.softcap * torch.tanh(raw / self.softcap)
        return raw / self.temperature
