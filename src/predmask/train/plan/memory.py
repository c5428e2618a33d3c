"""The memory that a run will take, item by item, before anything is loaded.

The numbers follow from the configuration and the model's sizes. Those of a forward and backward pass were checked on a
CPU, where they were within 20 % (tests/test_plan.py). Nothing was measured on a GPU, and what other libraries keep
for themselves is an allowance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from predmask.ops.sweep import chunk_tokens
from predmask.rollout import TransformersConfig, VLLMConfig
from predmask.train.config import Config
from predmask.train.lora import adapted_layers
from predmask.train.plan.architectures import Architecture

Place = Literal["accelerator", "host"]
Phase = Literal["always", "loading", "sampling", "evaluation", "micro-batch", "weights to the engine"]

_PHASES: tuple[Phase, ...] = (
    "loading",
    "sampling",
    "evaluation",
    "micro-batch",
    "weights to the engine",
)
"""Those that come one after the other."""
_PROMPT = 1024
"""Tokens that a prompt is taken to have at most, where prompt.max_tokens is not set."""
_GPU_WORKSPACE = 3 * 2**29
"""Bytes of the operator's workspace on a GPU: `triton_sweep.WORKSPACE_BYTES`."""
# Allowances for what libraries keep: CUDA's context, cuBLAS, fragments of freed memory; the engine's own activations
# and CUDA graphs; Python, torch and transformers in memory.
_TRAINER_OVERHEAD = int(3e9)
_ENGINE_OVERHEAD = int(5e9)
_PROCESS = int(1.5e9)


@dataclass(frozen=True)
class Item:
    """One thing that takes memory, and when."""

    name: str
    bytes: int
    place: Place
    phase: Phase
    how: str
    """How the bytes were computed."""
    shards: bool = False
    """Whether several GPUs could hold a part each."""


@dataclass(frozen=True)
class MemoryPlan:
    """All that a run keeps in memory. A phase's items are there in that phase alone."""

    items: tuple[Item, ...]

    def peak(self, place: Place) -> int:
        """Bytes at the worst moment: what is always there, and the largest phase."""
        return self.total(place, "always") + self.total(place, self.worst(place))

    def worst(self, place: Place) -> Phase:
        """The phase that takes most."""
        return max(_PHASES, key=lambda phase: self.total(place, phase))

    def total(self, place: Place, phase: Phase) -> int:
        """Bytes of one phase's items."""
        return sum(item.bytes for item in self.items if (item.place, item.phase) == (place, phase))

    @property
    def state(self) -> int:
        """Bytes of what a trainer that shards spreads over its GPUs: weights, gradients, optimiser state."""
        return sum(item.bytes for item in self.items if item.shards)


def plan_memory(config: Config, model: Architecture, *, gpu: bool) -> MemoryPlan:
    """The memory of a run with this configuration; without a GPU everything is in the host's."""
    items = _Items(config, model, gpu)
    return MemoryPlan(tuple(item for item in items.all() if item.bytes > 0))


def layer_bytes(model: Architecture, *, autocast: bool, base: int) -> int:
    """Bytes that one layer keeps of a token for its backward pass; `base` are those of a weight, 4 or 2.

    With D, Q, K, F the widths of the residual stream, queries, keys and feed-forward layer, k experts a token, in
    float32: 4·(6D + 4Q + 4K + 4F), and under autocast, where norms and the residual stream stay float32: 26D + 10Q +
    10K + 8F. Experts take base·k·(2D + 4F) in place of F's term: their products are computed in the weights' type.
    Attention itself keeps no scores.
    """
    D, Q, K, F = model.hidden, model.queries, model.keys, model.intermediate  # noqa: N806
    experts = model.experts_per_token
    around = 26 * D + 10 * Q + 10 * K if autocast else 4 * (6 * D + 4 * Q + 4 * K)
    if experts:
        return around + (base if autocast else 4) * experts * (2 * D + 4 * F)
    return around + (8 if autocast else 16) * F


def cache_bytes(model: Architecture, dtype: int) -> int:
    """Bytes of a token's keys and values in all layers: 2·L·K·dtype."""
    return 2 * model.layers * model.keys * dtype


def engine_cache_bytes(engine: VLLMConfig, model: Architecture) -> int:
    """Bytes of a token's keys and values in vLLM's cache."""
    return cache_bytes(model, 1 if engine.kv_cache == "fp8" else 4 if engine.dtype == "float32" else 2)


def longest(config: Config, model: Architecture) -> int:
    """Tokens that prompt and response come to at most."""
    wanted = (config.prompt.max_tokens or _PROMPT) + config.rollout.max_new_tokens
    limits = (getattr(config.engine, "max_length", None), model.context)
    return min([wanted, *(limit for limit in limits if limit is not None)])


def micro_batch_tokens(config: Config, model: Architecture) -> int:
    """Padded tokens of the largest forward pass in training."""
    update, rollout = config.update, config.rollout
    minibatch = -(-rollout.prompts * rollout.group_size // update.steps_per_rollout)
    full = longest(config, model)
    tokens = min(update.micro_batch_size, minibatch) * full
    return tokens if update.micro_batch_tokens is None else min(tokens, max(update.micro_batch_tokens, full))


def checkpoint_bytes(config: Config, model: Architecture) -> int:
    """Bytes of the weights that a run writes: the policy's, and its adapters."""
    merged = _merged(config, model)
    adapters = adapter_parameters(config, model) if config.lora.enabled else 0
    return (model.parameters - merged) * _base(config) + 4 * (merged + adapters)


def _base(config: Config) -> int:
    """Bytes of each of the model's own weights."""
    return 2 if config.lora.enabled and config.lora.base_dtype == "bfloat16" else 4


class _Items:
    """The items of a plan, one method a subject."""

    def __init__(self, config: Config, model: Architecture, gpu: bool) -> None:
        self._config, self._model, self._gpu = config, model, gpu
        self._place: Place = "accelerator" if gpu else "host"
        self._base = _base(config)

    def all(self) -> Iterator[Item]:
        yield from self._weights()
        yield from self._training()
        yield from self._engine()
        yield from self._evaluation()
        yield from self._host()

    def _weights(self) -> Iterator[Item]:
        model, lora = self._model, self._config.lora
        trained = adapter_parameters(self._config, model) if lora.enabled else model.parameters

        def state(name: str, each: int, weights: int) -> Item:
            return Item(name, each * weights, self._place, "always", f"{_count(weights)} x {each} B", shards=True)

        yield state(f"weights, {'bfloat16' if self._base == 2 else 'float32'}", self._base, model.parameters)
        if lora.enabled:
            yield state(f"adapters of rank {lora.rank}, float32", 4, trained)
        yield state("gradients, float32", 4, trained)
        yield state("AdamW: means and squares of gradients", 8, trained)

    def _training(self) -> Iterator[Item]:
        config, model = self._config, self._model
        update, tokens = config.update, micro_batch_tokens(config, model)
        layer = layer_bytes(model, autocast=update.autocast, base=self._base)
        if update.gradient_checkpointing:
            # The residual stream before each layer, and one layer at a time in full.
            kept = model.layers * model.hidden * self._base + layer
            how = f"{tokens:,} tokens x ({model.layers} x {model.hidden * self._base:,} + {layer:,} B)"
        else:
            kept, how = model.layers * layer, f"{tokens:,} tokens x {model.layers} x {layer:,} B"
        yield self._item("activations", tokens * kept, "micro-batch", how)
        if update.autocast and self._base == 4:
            name = "weights rounded by autocast, bfloat16"
            yield self._item(name, 2 * model.linear, "micro-batch", f"{_count(model.linear)}, of linear layers")
        if update.head == "dense":
            name, each = "all logits, log-probs and their gradients", 5 * 4 * model.vocabulary
        else:
            name, each = "hidden states at the head, gradients", 24 * model.hidden
            yield self._item("workspace of the head", self._workspace(tokens), "micro-batch", "chunk x vocabulary")
        yield self._item(name, tokens * each, "micro-batch", f"{tokens:,} tokens x {each:,} B")

    def _workspace(self, tokens: int) -> int:
        size = self._model.vocabulary
        whole = 4 * tokens * size
        return min(whole, _GPU_WORKSPACE if self._gpu else 4 * chunk_tokens(size, tokens) * size)

    def _engine(self) -> Iterator[Item]:
        engine, rollout = self._config.engine, self._config.rollout
        responses = rollout.prompts * rollout.group_size
        if isinstance(engine, TransformersConfig):
            each = self._base
            if engine.numerics != "float32":  # a copy, which computes in float32 but for bfloat16
                each, weights = 2 if engine.numerics == "bfloat16" else 4, self._model.parameters
                yield self._item(f"engine: weights in {engine.numerics}", each * weights, "always", _count(weights))
            yield from self._sampling("sampling", min(engine.batch_size, responses), each)
            return
        each = 4 if isinstance(engine, VLLMConfig) and engine.dtype == "float32" else 2
        if isinstance(engine, VLLMConfig):
            yield self._item("engine: weights", *self._vllm_weights(engine, each))
            yield self._item("engine: key-value cache", int(engine.kv_cache_gb * 1e9), "always", "engine.kv_cache_gb")
        else:
            cache = cache_bytes(self._model, 2) * longest(self._config, self._model)
            share = f"it takes its share of what is free, engine.mem_fraction_static = {engine.mem_fraction_static:g}"
            yield self._item("engine: weights", 2 * self._model.parameters, "always", share)
            yield self._item("engine: cache of 8 full responses", 8 * cache, "always", share)
        yield self._item("engine: what it keeps besides", _ENGINE_OVERHEAD if self._gpu else 0, "always", "allowance")
        copy = each * self._model.parameters
        transfer = copy + max(copy, 4 * _merged(self._config, self._model))
        yield Item("engine: weights on their way", transfer, "host", "weights to the engine", "a copy and a file")

    def _vllm_weights(self, engine: VLLMConfig, each: int) -> tuple[int, Phase, str]:
        model = self._model
        if engine.quantization is None:
            return each * model.parameters, "always", f"{_count(model.parameters)}, {engine.dtype}"
        # Embedding and head stay as they are.
        tables = (1 if model.config.tie_word_embeddings else 2) * model.vocabulary * model.hidden
        rounded = model.parameters - tables
        return rounded + each * tables, "always", f"{_count(rounded)} in 1 byte, {_count(tables)} in {each}"

    def _evaluation(self) -> Iterator[Item]:
        settings = self._config.eval
        if settings.engine == "policy":
            answers = settings.prompts * max(settings.samples, 1)
            yield from self._sampling("evaluation", min(settings.batch_size, answers), self._base)

    def _sampling(self, phase: Phase, rows: int, each: int) -> Iterator[Item]:
        tokens, token = longest(self._config, self._model), cache_bytes(self._model, each)
        how = f"{rows} responses x {tokens:,} tokens x {token:,} B"
        yield self._item(f"key-value cache ({phase})", rows * tokens * token, phase, how)
        # Logits, their exponentials and their sum, which is float64 where that exists.
        size = self._model.vocabulary
        yield self._item(f"distributions ({phase})", 20 * rows * size, phase, f"{rows} responses x {size:,} x 20 B")

    def _host(self) -> Iterator[Item]:
        processes = 1 if isinstance(self._config.engine, TransformersConfig) else 3
        how = f"allowance for {processes} process{'es' if processes > 1 else ''}"
        yield Item("Python and its libraries", processes * _PROCESS, "host", "always", how)
        if self._gpu:
            weights = self._model.parameters
            yield Item("weights, before they are moved", self._base * weights, "host", "loading", _count(weights))
            yield self._item("CUDA's context and fragments", _TRAINER_OVERHEAD, "always", "allowance")

    def _item(self, name: str, size: int, phase: Phase, how: str) -> Item:
        return Item(name, size, self._place, phase, how)


def adapter_parameters(config: Config, model: Architecture) -> int:
    """How many weights LoRA trains: rank · (inputs + outputs) a layer."""
    return sum(config.lora.rank * sum(layer.weight.shape) for layer in adapted_layers(model.model, config.lora))


def _merged(config: Config, model: Architecture) -> int:
    """How many weights are in layers with adapters; merged, they are float32."""
    layers = adapted_layers(model.model, config.lora) if config.lora.enabled else []
    return sum(layer.weight.numel() for layer in layers)


def _count(number: int) -> str:
    """A number of weights."""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit} weights"
    return f"{number:,} weights"
