"""What a rollout engine returns, and the border that checks it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from predmask.core import BehaviourSupport
from predmask.core.support import MASS_TOLERANCE

AGREEMENT = 1e-3
"""How far the log-probs of one token may lie apart where it is both the sampled one and in the top-K, in nats."""


class RolloutError(ValueError):
    """A rollout that cannot be made, or that cannot be trained on."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """B sampled responses as flat per-token arrays of N tokens, sequence after sequence.

    Log-probs are float32 and those of the distribution that the engine really sampled from.
    """

    prompts: tuple[tuple[int, ...], ...]
    """The B prompts as token ids."""
    lengths: Tensor
    """[B] int64, tokens of each response; they sum to N."""
    tokens: Tensor
    """[N] int64, the response's token ids: the ones that are trained on."""
    logp: Tensor
    """[N] float32, behaviour log-prob of each token; NaN where the engine did not know it."""
    topk_ids: Tensor
    """[N, K] int64, the engine's K likeliest ids; K = 0 for an engine that records only the sampled token."""
    topk_logp: Tensor
    """[N, K] float32, their log-probs."""
    sampled: Tensor
    """[N] bool, False for a token that the policy did not sample (tool output, an appended end)."""
    version: Tensor
    """[N] int64, the policy version (optimiser steps so far) that sampled each token."""
    finished: Tensor
    """[B] bool, whether the response ended by itself (False: it was cut at the length limit)."""
    full_logp: Tensor | None = None
    """[N, V] float32, the whole behaviour distribution, where it was asked for (studies on small models)."""

    @property
    def top_k(self) -> int:
        """K, the number of likeliest ids recorded at each position."""
        return self.topk_ids.shape[1]

    @property
    def sequence(self) -> Tensor:
        """[N] int64, the index of the response that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.prompts)), self.lengths)

    @property
    def position(self) -> Tensor:
        """[N] int64, each token's place in its response."""
        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.tokens)) - starts[self.sequence]

    @property
    def totals(self) -> Tensor:
        """[B] int64, tokens of prompt and response together."""
        return self.lengths + torch.tensor([len(prompt) for prompt in self.prompts])

    def responses(self) -> list[list[int]]:
        """The B responses as lists of token ids."""
        return [part.tolist() for part in self.tokens.split(self.lengths.tolist())]

    def behaviour(self, device: torch.device | str = "cpu") -> BehaviourSupport:
        """The behaviour policy on the support of each of the N tokens."""
        records = (self.tokens, self.logp, self.topk_ids, self.topk_logp)
        return BehaviourSupport.from_topk(*(record.to(device) for record in records))

    def token_index(self, sequences: Tensor) -> Tensor:
        """[M] int64, positions in the flat arrays of the given responses' tokens, in the given order."""
        ends = self.lengths.cumsum(0)
        starts = ends - self.lengths
        spans = [torch.arange(int(starts[i]), int(ends[i])) for i in sequences.tolist()]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def select(self, sequences: Tensor) -> Rollout:
        """The given responses, in the given order, as a rollout of their own."""
        index = self.token_index(sequences)
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in sequences.tolist()),
            lengths=self.lengths[sequences],
            tokens=self.tokens[index],
            logp=self.logp[index],
            topk_ids=self.topk_ids[index],
            topk_logp=self.topk_logp[index],
            sampled=self.sampled[index],
            version=self.version[index],
            finished=self.finished[sequences],
            full_logp=None if self.full_logp is None else self.full_logp[index],
        )

    @classmethod
    def cat(cls, parts: Sequence[Rollout]) -> Rollout:
        """The responses of one or more rollouts that recorded alike, one rollout after the other."""
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        prompts = tuple(itertools.chain(*columns.pop("prompts")))
        return cls(prompts=prompts, **{name: _joined(values) for name, values in columns.items()})  # pyright: ignore[reportArgumentType]

    def check(self, *, top_k: int, vocabulary_size: int) -> Rollout:
        """Return the rollout itself, or raise a `RolloutError` that names what is wrong with it.

        `top_k` is the K that was asked for, `vocabulary_size` the rows of the policy's head. Checked are lengths,
        dtypes, id ranges, distinct top-K ids, K finite entries at each sampled position, a probability mass of at
        most 1, and that the sampled token's log-prob fits the top-K. A NaN log-prob of a *sampled* token is let
        through: it stands for "unknown", and such a token is counted and left out of the loss.
        """
        self._check_shapes()
        self._check_ids(vocabulary_size)
        self._check_topk(top_k)
        self._check_mass()
        self._check_sampled_against_topk()
        return self

    def _check_shapes(self) -> None:
        sequences, tokens = len(self.prompts), int(self.lengths.sum())
        for name, per in (("lengths", sequences), ("finished", sequences)):
            _expect_length(name, getattr(self, name), per)
        for name in ("tokens", "logp", "topk_ids", "topk_logp", "sampled", "version"):
            _expect_length(name, getattr(self, name), tokens)
        if self.topk_ids.shape != self.topk_logp.shape:
            raise RolloutError(
                f"topk_ids {tuple(self.topk_ids.shape)} and topk_logp {tuple(self.topk_logp.shape)} differ"
            )
        for name in ("logp", "topk_logp"):
            dtype = getattr(self, name).dtype
            if dtype not in (torch.float32, torch.float64):
                raise RolloutError(f"{name} is {dtype}; log-probs are stored in float32 (16 bits distort ratios)")

    def _check_ids(self, vocabulary_size: int) -> None:
        # A negative id is a missing entry, which only a token that was not sampled may have.
        required = self.sampled[:, None].expand(self.topk_ids.shape)
        for name, ids, needed in (
            ("tokens", self.tokens, torch.ones_like(self.sampled)),
            ("topk_ids", self.topk_ids, required),
        ):
            bad = ids[((ids < 0) & needed) | (ids >= vocabulary_size)]
            if bad.numel():
                raise RolloutError(
                    f"{name} holds id {int(bad[0])}, but the policy has ids 0 to {vocabulary_size - 1}; "
                    "do engine and policy use the same model and vocabulary?"
                )

    def _check_topk(self, top_k: int) -> None:
        if self.top_k == 0 < top_k:
            raise RolloutError(
                f"top-K missing: {top_k} log-probs were asked for at each position, and the engine returned only "
                "the sampled token's; use an engine that records top-K, or a rule that needs none"
            )
        if self.top_k != top_k:
            raise RolloutError(f"the engine returned top-{self.top_k}, but top-{top_k} was asked for")
        finite = torch.isfinite(self.topk_logp).sum(-1)
        short = torch.nonzero(self.sampled & ~torch.isnan(self.logp) & (finite < top_k))
        if short.numel():
            position = int(short[0])
            raise RolloutError(
                f"token {position}: {int(finite[position])} of {top_k} top-K log-probs are finite; does the engine "
                f"cap its log-probs at {int(finite[position])} (vLLM: max_logprobs), or truncate its sampling "
                "(top_p, top_k, min_p must be off)?"
            )
        ordered = self.topk_ids.sort(dim=-1).values
        repeated = torch.nonzero((ordered[:, 1:] == ordered[:, :-1]).any(-1) & self.sampled)
        if repeated.numel():
            raise RolloutError(f"token {int(repeated[0])}: the engine returned an id twice in its top-K")

    def _check_mass(self) -> None:
        known = self.sampled & ~torch.isnan(self.logp)
        logp = self.logp[known]
        impossible = logp[(logp > MASS_TOLERANCE) | torch.isinf(logp)]
        if impossible.numel():
            raise RolloutError(
                f"a sampled token has log-prob {float(impossible[0]):.4g}; what was sampled has a finite log-prob of "
                "at most 0 (None or NaN stands for unknown)"
            )
        if not self.top_k:
            return
        mass = torch.logsumexp(self.topk_logp[known], dim=-1)
        if (mass > MASS_TOLERANCE).any():
            raise RolloutError(f"top-K probabilities sum to {float(mass.max().exp()):.4f} at one position, more than 1")

    def _check_sampled_against_topk(self) -> None:
        """One distribution: the sampled token has its own top-K entry, or is no likelier than all of them."""
        if not self.top_k:
            return
        same = self.topk_ids == self.tokens[:, None]
        listed = torch.where(same, self.topk_logp, -torch.inf).amax(-1)
        differs = same.any(-1) & ((listed - self.logp).abs() > AGREEMENT)
        missing = ~same.any(-1) & (self.logp > self.topk_logp.amin(-1) + AGREEMENT)
        wrong = torch.nonzero((differs | missing) & self.sampled & ~torch.isnan(self.logp))
        if wrong.numel():
            position = int(wrong[0])
            entry = f"{float(listed[position]):.4g}" if same[position].any() else "missing"
            raise RolloutError(
                f"token {position}: the sampled id {int(self.tokens[position])} has log-prob "
                f"{float(self.logp[position]):.4g}, but its entry in the top-K is {entry}; do both belong to one "
                "position and one temperature?"
            )


def rollout_from_entries(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    entries: Sequence[Sequence[Mapping[int, float | None]]],
    *,
    top_k: int,
    version: int = 0,
    finished: Sequence[bool] | None = None,
) -> Rollout:
    """A rollout from engines that answer with a mapping id -> log-prob at each position.

    The sampled token is found by its id, wherever it stands; the other entries, likeliest first, are the
    top-K, and the sampled one is among them when it is likely enough. A log-prob of None or NaN is unknown.
    Raises `RolloutError` for missing ids, wrong lengths, and a sampled token that is not in its mapping.
    """
    if len(responses) != len(prompts) or len(entries) != len(prompts):
        raise RolloutError(
            f"{len(prompts)} prompts, {len(responses)} responses and {len(entries)} lists of log-probs; a record "
            "needs the token ids of each response (text cannot be turned back into the sampled ids)"
        )
    logp: list[float] = []
    topk: list[list[tuple[float, int]]] = []
    for sequence, (response, positions) in enumerate(zip(responses, entries, strict=True)):
        if len(response) != len(positions):
            raise RolloutError(f"response {sequence} has {len(response)} tokens but {len(positions)} log-probs")
        for position, (token, entry) in enumerate(zip(response, positions, strict=True)):
            try:
                value, row = _position(token, entry, top_k)
            except RolloutError as error:
                raise RolloutError(f"response {sequence}, token {position}: {error}") from None
            logp.append(value)
            topk.append(row)
    total = len(logp)
    return Rollout(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        lengths=torch.tensor([len(response) for response in responses], dtype=torch.int64),
        tokens=torch.tensor([t for response in responses for t in response], dtype=torch.int64),
        logp=torch.tensor(logp, dtype=torch.float32),
        topk_ids=torch.tensor([[i for _, i in row] for row in topk], dtype=torch.int64).reshape(total, top_k),
        topk_logp=torch.tensor([[v for v, _ in row] for row in topk], dtype=torch.float32).reshape(total, top_k),
        sampled=torch.ones(total, dtype=torch.bool),
        version=torch.full((total,), version, dtype=torch.int64),
        finished=torch.tensor(finished if finished is not None else [True] * len(prompts), dtype=torch.bool),
    )


def _position(token: int, entry: Mapping[int, float | None], top_k: int) -> tuple[float, list[tuple[float, int]]]:
    """The sampled token's log-prob at one position, and the top-K as (log-prob, id), likeliest first."""
    if token not in entry:
        raise RolloutError(f"the sampled id {token} is not among the returned ids {sorted(entry)}")
    known = {i: v for i, v in entry.items() if v is not None and not math.isnan(v)}
    top = sorted(((v, i) for i, v in known.items()), key=lambda pair: (-pair[0], pair[1]))[:top_k]
    if len(entry) < top_k:
        raise RolloutError(f"{len(entry)} log-probs were returned, but top-{top_k} was asked for")
    if len(top) < top_k:
        # An unknown entry leaves its whole position unknown, not one log-prob short.
        return math.nan, [(-math.inf, i) for i in list(entry)[:top_k]]
    return known.get(token, math.nan), top


def _joined(values: list[Tensor | None]) -> Tensor | None:
    """One after the other; None where nothing was recorded."""
    tensors = [value for value in values if value is not None]
    return torch.cat(tensors) if tensors else None


def _expect_length(name: str, value: Tensor, length: int) -> None:
    if value.shape[0] != length:
        raise RolloutError(f"{name} has {value.shape[0]} entries where {length} were expected")
