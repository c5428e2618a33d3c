"""Copies of the policy in the numerics of an inference engine, so that mismatch exists on any machine.

Rows are scaled by their largest magnitude and rounded to the format, then computed on in float32 (the rounding
is what matters, not the speed). Every linear layer is rounded, each expert's included, as inference engines do; the
head and what weighs the experts (router, gate of a shared expert) are not. Adapters are merged before.

vLLM 0.32 leaves the routers of Mixtral, OLMoE, Qwen2-MoE and DeepSeek-V2 unquantised, too; that of Qwen3-MoE it
quantises, but only online and where nothing excepts it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from predmask.rollout.weights import base_model, merged_state

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
    """A copy of a causal language model that computes in other numerics than the original.

    In fp8 and int8 the inputs of all rounded layers are rounded, too, token by token; in a mixture of experts these are
    the tokens that enter the experts, and what their gate and up projections make of them. Not rounded in any
    format: biases, norms, attention's products, the activation function, and the weighted sum over experts.

    Raises ValueError for a model that has matrices in other layers.
    """

    def __init__(self, model: nn.Module, numerics: Numerics) -> None:
        if numerics not in MISMATCH_TOLERANCES:
            raise ValueError(f"numerics is {numerics!r}; choose one of {', '.join(MISMATCH_TOLERANCES)}")
        self.numerics = numerics
        self.model = _without_adapters(copy.deepcopy(base_model(model))).eval().requires_grad_(False)
        # The weights alone: rounded rotary frequencies (a buffer) would turn far positions by whole radians.
        dtype = torch.bfloat16 if numerics == "bfloat16" else torch.float32
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        if numerics in _WEIGHTS:
            self._check_layers()
        if numerics in _ACTIVATIONS:
            self._round_activations(_ACTIVATIONS[numerics])
        self.load(model)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Take over the weights of `model`, rounded."""
        self.model.load_state_dict(merged_state(model))
        if self.numerics in _WEIGHTS:
            for weight in self._matrices():
                weight.copy_(_WEIGHTS[self.numerics](weight))

    def _check_layers(self) -> None:
        """Every matrix must be rounded, or be known not to be: a copy that rounds only a part is none."""
        linear = [module for module in self.model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        known = {parameter.data_ptr() for module in (*linear, *self._routers()) for parameter in module.parameters()}
        known |= {weight.data_ptr() for weight in self._matrices()}
        for name, parameter in self.model.named_parameters():
            # Biases of experts are matrices, too.
            if parameter.ndim > 1 and not name.endswith("bias") and parameter.data_ptr() not in known:
                raise ValueError(
                    f"numerics {self.numerics!r} rounds linear layers and experts, but {name} of "
                    f"{type(self.model).__name__} is in none; use numerics 'bfloat16' or 'float32'"
                )

    def _round_activations(self, rounding: Callable[[Tensor], Tensor]) -> None:
        for layer in (*self._layers(), *self._experts()):
            layer.register_forward_pre_hook(_rounding_hook(rounding))
        for experts in self._experts():
            # What the down projection takes; the plain loop over experts does not pass here.
            experts.config._experts_implementation = "grouped_mm"
            gate = type(experts)._apply_gate
            experts._apply_gate = MethodType(lambda self, x, gate=gate: rounding(gate(self, x)), experts)

    def _matrices(self) -> Iterator[Tensor]:
        """What is rounded: matrices [..., outputs, inputs]."""
        for layer in self._layers():
            yield layer.weight
        for experts in self._experts():
            for weight in (experts.gate_up_proj, experts.down_proj):
                yield weight.mT if experts.is_transposed else weight

    def _layers(self) -> list[nn.Linear]:
        head = self.model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        spared = {id(module) for part in (head, *self._routers()) for module in part.modules()}
        return [layer for layer in self.model.modules() if isinstance(layer, nn.Linear) and id(layer) not in spared]

    def _experts(self) -> list[Any]:
        """The modules that hold all experts of a layer, matrix upon matrix, as transformers has them."""
        return [module for module in self.model.modules() if getattr(module, "has_gate", False)]

    def _routers(self) -> list[nn.Module]:
        """What weighs the experts of a layer stands beside them, by these names."""
        experts = {id(module) for module in self._experts()}
        blocks = (dict(module.named_children()) for module in self.model.modules())
        return [
            child
            for block in blocks
            if experts & {id(child) for child in block.values()}
            for name, child in block.items()
            if name.endswith(("gate", "router"))
        ]


def _without_adapters(base: Any) -> Any:
    """The model, with each layer that peft wrapped put back in its place."""
    for name, layer in list(base.named_modules()):
        if hasattr(layer, "base_layer"):
            base.set_submodule(name, layer.base_layer)
    return base


def _rounding_hook(rounding: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    return lambda _module, inputs: (rounding(inputs[0]), *inputs[1:])


def _row_scale(x: Tensor, largest: float) -> Tensor:
    return x.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * largest) / largest


def _round_integers(x: Tensor, largest: int) -> Tensor:
    scale = _row_scale(x, largest)
    return (x / scale).round() * scale
