"""The transformers engine: a batched sampling loop over any Hugging Face causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Doc

from predmask.core.precision import wide_dtype
from predmask.rollout.engine import (
    ANY_TEMPERATURE,
    Engine,
    Sampling,
    check_counts,
    check_request,
    end_token_ids,
    evaluation_mode,
)
from predmask.rollout.numerics import MISMATCH_TOLERANCES, Numerics, NumericsCopy
from predmask.rollout.records import Rollout, RolloutError
from predmask.rollout.weights import base_model


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """Sample with the policy itself, in this process."""

    name: ClassVar[str] = "transformers"
    summary: ClassVar[str] = "batched sampling in this process, any Hugging Face causal language model"
    needs: ClassVar[str] = "extra 'train'"
    startup: ClassVar[str] = ""
    temperatures: ClassVar[tuple[float, float]] = ANY_TEMPERATURE

    numerics: Annotated[Numerics, Doc("float32: the policy's own weights; else a rounded copy of it")] = "float32"
    batch_size: Annotated[int, Doc("responses sampled at once; bounds the memory of the key-value cache")] = 256

    def __post_init__(self) -> None:
        check_counts(self, "batch_size")

    @property
    def mismatch_tolerance(self) -> float:
        """Mean |Δ log-prob| against the trainer, in nats, that these numerics explain."""
        return MISMATCH_TOLERANCES[self.numerics]

    def start(self, model: nn.Module) -> Engine:
        """An engine that answers with the weights of `model`, a Hugging Face causal language model."""
        return TransformersEngine(model, numerics=self.numerics, batch_size=self.batch_size)


@dataclass(frozen=True)
class _Step:
    """What one decoding step recorded for the rows that were still active."""

    rows: Tensor
    tokens: Tensor
    logp: Tensor
    topk_ids: Tensor
    topk_logp: Tensor
    full_logp: Tensor | None


class TransformersEngine:
    """Samples by inverse CDF with a key-value cache; finished responses leave the batch.

    With numerics "float32" it reads the policy's own weights, without a copy; otherwise it holds a rounded
    copy, which `update_weights` refreshes.
    """

    def __init__(self, model: nn.Module, *, numerics: Numerics = "float32", batch_size: int = 256) -> None:
        self._copy = None if numerics == "float32" else NumericsCopy(model, numerics)
        self._model: Any = base_model(model) if self._copy is None else self._copy.model
        self._batch_size = batch_size
        self._version = 0
        self._end_ids = end_token_ids(model)
        # transformers renamed this argument in 5.24.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Answer with the weights of `model` from now on; nothing is cached between calls."""
        if self._copy is None:
            self._model = base_model(model)
        else:
            self._copy.load(model)
        self._version = version

    def close(self) -> None:
        """Nothing to free."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        """Sample one response a prompt, `batch_size` at a time; equal neighbouring prompts share their prefill.

        Raises RolloutError for an empty prompt, an id or a K above the vocabulary, a length above the model's
        context, and logits that are not finite.
        """
        config = self._model.config
        context = getattr(config, "max_position_embeddings", None)
        check_request(prompts, sampling, vocabulary_size=config.vocab_size, context=context)
        with evaluation_mode(self._model):
            steps: list[_Step] = []
            for first in range(0, len(prompts), self._batch_size):
                batch = prompts[first : first + self._batch_size]
                steps += self._generate_batch(batch, first, sampling, generator)
        return _assemble(prompts, steps, self._end_ids, self._version)

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], first: int, sampling: Sampling, generator: torch.Generator
    ) -> list[_Step]:
        """The decoding steps of one batch, whose first response has the index `first`."""
        decoder = _Decoder(self._model, self._cache_argument, prompts)
        end_ids = torch.tensor(sorted(self._end_ids), dtype=torch.int64, device=decoder.device)
        rows = torch.arange(first, first + len(prompts))
        logits = decoder.prefill()
        steps: list[_Step] = []
        while True:
            step = _sample(logits, rows, sampling, generator)
            steps.append(step)
            ended = torch.isin(step.tokens, end_ids)
            if len(steps) == sampling.max_new_tokens or ended.all():
                return steps
            tokens = step.tokens
            if ended.any():
                places = _close_gaps(ended)
                rows, tokens = rows[places.cpu()], tokens[places]
                decoder.keep(places)
            logits = decoder.decode(tokens)


class _Decoder:
    """The model with its key-value cache over one batch of left-padded prompts."""

    def __init__(self, model: Any, cache_argument: str, prompts: Sequence[Sequence[int]]) -> None:
        from predmask.rollout.cache import in_place_cache

        self.device = next(model.parameters()).device
        self._model = model
        self._cache = in_place_cache(model.config)
        self._cache_argument = cache_argument
        unique, expand = _unique_neighbours(prompts)
        self._expand = expand.to(self.device)
        width = max(map(len, unique))
        ids = torch.zeros(len(unique), width, dtype=torch.int64)
        mask = torch.zeros(len(unique), width, dtype=torch.int64)
        for row, prompt in enumerate(unique):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._ids = ids.to(self.device)
        self._padded = bool((mask == 0).any())
        self._mask = mask.to(self.device)
        self._next_position = self._mask.sum(-1, keepdim=True)

    def prefill(self) -> Tensor:
        """[B, V] logits after the prompts; each distinct prompt is computed once."""
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(self._ids, positions)
        if len(self._expand) > len(self._ids):
            self.keep(self._expand)
            logits = logits[self._expand]
        return logits

    def decode(self, tokens: Tensor) -> Tensor:
        """[B, V] logits after one more token a row."""
        if self._padded:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=-1)
        logits = self._forward(tokens[:, None], self._next_position)
        self._next_position = self._next_position + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self._next_position = self._next_position[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask if self._padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        return output.logits[:, -1]


def _close_gaps(ended: Tensor) -> Tensor:
    """[M] the rows that go on, in an order that leaves those among the first M where they are."""
    going = torch.nonzero(~ended)[:, 0]
    count = len(going)
    places = torch.arange(count, device=ended.device)
    places[ended[:count]] = going[going >= count]
    return places


def _unique_neighbours(prompts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], Tensor]:
    """The prompts without repeats of a neighbour, and which of them each prompt is."""
    unique: list[Sequence[int]] = []
    expand: list[int] = []
    for prompt in prompts:
        if not unique or list(unique[-1]) != list(prompt):
            unique.append(prompt)
        expand.append(len(unique) - 1)
    return unique, torch.tensor(expand)


def _sample(logits: Tensor, rows: Tensor, sampling: Sampling, generator: torch.Generator) -> _Step:
    """Draw the next token of each row, and record what it was drawn from."""
    scores = logits.float()
    if sampling.temperature == 0:
        highest, tokens = scores.max(-1)
        _check_finite(highest)
        none = scores.new_empty(len(scores), 0)  # not a view, which would keep the logits of every step
        return _Step(rows, tokens, torch.zeros_like(scores[:, 0]), none.long(), none, None)
    scores = scores / sampling.temperature
    log_norm = torch.logsumexp(scores, dim=-1, keepdim=True)
    _check_finite(log_norm)
    # Wide, since a parallel scan in float32 need not be monotone, and rounds unlikely tokens away.
    wide = wide_dtype(scores.device)
    cumulative = (scores - log_norm).exp().cumsum(-1, dtype=wide)
    # Uniform on (0, 1]: the first place where the sum reaches u has a probability above zero.
    uniform = 1 - torch.rand(len(rows), 1, generator=generator, device=generator.device, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform.to(scores.device, wide) * cumulative[:, -1:])[:, 0]
    top = scores.topk(sampling.top_k, dim=-1)
    return _Step(
        rows=rows,
        tokens=tokens,
        logp=(scores.gather(-1, tokens[:, None]) - log_norm)[:, 0],
        topk_ids=top.indices,
        topk_logp=top.values - log_norm,
        full_logp=scores - log_norm if sampling.record_full else None,
    )


def _check_finite(values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise RolloutError(
            "the model's logits are NaN or infinite; look at its weights (did training diverge?) and engine.numerics"
        )


def _assemble(prompts: Sequence[Sequence[int]], steps: list[_Step], end_ids: frozenset[int], version: int) -> Rollout:
    """Flat arrays, sequence after sequence, from records that lie step after step."""
    rows = torch.cat([step.rows for step in steps])
    order = torch.argsort(rows, stable=True)

    def flat(parts: Iterator[Tensor]) -> Tensor:
        return torch.cat(list(parts)).cpu()[order]

    tokens = flat(step.tokens for step in steps)
    lengths = torch.bincount(rows, minlength=len(prompts))
    full = [step.full_logp for step in steps if step.full_logp is not None]
    return Rollout(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        lengths=lengths,
        tokens=tokens,
        logp=flat(step.logp for step in steps),
        topk_ids=flat(step.topk_ids for step in steps),
        topk_logp=flat(step.topk_logp for step in steps),
        sampled=torch.ones_like(tokens, dtype=torch.bool),
        version=torch.full_like(tokens, version),
        finished=torch.isin(tokens[lengths.cumsum(0) - 1], torch.tensor(sorted(end_ids))),
        full_logp=flat(iter(full)) if full else None,
    )
