"""Copies of the policy in the numerics of an inference engine, so that mismatch exists on any machine.

Rows are scaled by their largest magnitude and rounded to the format, then computed on in float32 (the rounding
is what matters, not the speed). Every linear layer but the head is rounded, as inference engines do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Numerics = Literal["float32", "bfloat16", "fp8", "int8", "int4"]

MISMATCH_TOLERANCES: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.5, "int8": 0.3, "int4": 1.0}
"""Mean |Δ log-prob| against float32, in nats, above which rounding is no explanation (measured: .02 for bfloat16
and .2 for fp8 on a random model, less on a trained one)."""

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def round_fp8(x: Tensor) -> Tensor:
    """Round each row to float8 e4m3 with a scale of its own: max |x| maps to 448."""
    scale = _row_scale(x, _FP8_MAX)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def round_int8(x: Tensor) -> Tensor:
    """Round each row to the integers -127 to 127 with a scale of its own."""
    return _round_integers(x, 127)


def round_int4(x: Tensor) -> Tensor:
    """Round each row to the integers -7 to 7 with a scale of its own."""
    return _round_integers(x, 7)


_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": round_fp8, "int8": round_int8, "int4": round_int4}
# FP8 and int8 engines round activations too (W8A8); int4 is a weight-only format.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": round_fp8, "int8": round_int8}


class NumericsCopy:
    """A copy of a causal language model that computes in other numerics than the original."""

    def __init__(self, model: nn.Module, numerics: Numerics) -> None:
        if numerics not in MISMATCH_TOLERANCES:
            raise ValueError(f"numerics is {numerics!r}; choose one of {', '.join(MISMATCH_TOLERANCES)}")
        self.numerics = numerics
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        if numerics == "bfloat16":
            # The weights alone: rounded rotary frequencies (a buffer) would turn far positions by whole radians.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if numerics in _WEIGHTS:
            self._check_layers()
        if numerics in _ACTIVATIONS:
            for layer in self._layers():
                layer.register_forward_pre_hook(_rounding_hook(_ACTIVATIONS[numerics]))
        self.load(model)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Take over the weights of `model`, rounded."""
        self.model.load_state_dict(model.state_dict())
        if self.numerics in _WEIGHTS:
            for layer in self._layers():
                layer.weight.copy_(_WEIGHTS[self.numerics](layer.weight))

    def _check_layers(self) -> None:
        """Every matrix must be in a linear layer or an embedding: a copy that rounds only a part is none."""
        rounded = [module for module in self.model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        known = {id(parameter) for module in rounded for parameter in module.parameters()}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1 and id(parameter) not in known:
                raise ValueError(
                    f"numerics {self.numerics!r} rounds linear layers, but {name} of {type(self.model).__name__} is in "
                    "none; use numerics 'bfloat16' or 'float32'"
                )

    def _layers(self) -> list[nn.Linear]:
        head = self.model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        return [layer for layer in self.model.modules() if isinstance(layer, nn.Linear) and layer is not head]


def _rounding_hook(rounding: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], tuple[Tensor]]:
    return lambda _module, inputs: (rounding(inputs[0]),)


def _row_scale(x: Tensor, largest: float) -> Tensor:
    return x.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * largest) / largest


def _round_integers(x: Tensor, largest: int) -> Tensor:
    scale = _row_scale(x, largest)
    return (x / scale).round() * scale
