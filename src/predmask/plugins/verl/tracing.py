"""Token traces of a verl run, in the schema of `predmask.traces`: gathered from all workers, written by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from predmask.core.support import each_tensor
from predmask.plugins.recording import GatheredTrace, Key, Part, chosen, tokens_of
from predmask.plugins.verl.batch import listed
from predmask.plugins.verl.loss import Decided
from predmask.plugins.verl.settings import PolicyLossConfig
from predmask.traces import TraceInfo, rule_settings, samples_from_verl


class Place(NamedTuple):
    """Where a micro-batch stands."""

    step: int
    optimizer_step: int
    versions: Tensor | None
    """[B] optimiser steps before each response was begun."""


class Tracer:
    """Records a part of the responses of each optimiser step, where a directory is named."""

    def __init__(self, settings: PolicyLossConfig, engine: Any) -> None:
        self._settings = settings.trace_settings()
        self._rule = rule_settings(settings.make_rule())
        self._top_k = settings.top_k
        self._group = engine.get_data_parallel_group()
        self._tokenizer = engine.model_config.tokenizer
        self._ends = _ends(engine.model_config)
        self._on = self._settings.directory is not None and engine.is_mp_src_rank_with_outputs()
        """Of the processes that see the same tokens, one records."""
        self._first: int | None = None
        self._step = 0
        self._trained: list[Key] = []
        """The responses of the optimiser step."""
        self._wanted: set[Key] = set()
        """Those of them that are recorded."""
        self._parts: list[Part] = []
        self._gathered: GatheredTrace | None = None

    def begin(self, step: int, data: Any) -> None:
        """An optimiser step of this step begins, on a mini-batch."""
        if not self._on:
            return
        settings = self._settings
        self._first = step if self._first is None else self._first
        self._step = step
        # verl fills its batches up with responses of which no token was sampled.
        there = [bool(mask.any()) for mask in data["response_mask"].unbind()]
        self._trained = [key for key, sampled in zip(_keys(data), there, strict=True) if sampled]
        share = -(-settings.responses // dist.get_world_size(self._group)) or math.inf
        regular = (step - self._first) % settings.every == 0
        taken = chosen(self._trained, share if regular else 0)
        self._wanted = {key for key, is_taken in zip(self._trained, taken, strict=True) if is_taken}

    def record(self, data: Any, decided: Decided, place: Place) -> None:
        """Take what is wanted of a micro-batch."""
        if not self._wanted:
            return
        keys = _keys(data)
        rows = [row for row, key in enumerate(keys) if key in self._wanted]
        if rows:
            self._parts.append(self._part(data, decided, place, rows, [keys[row] for row in rows]))

    def end(self, *, last: bool) -> None:
        """The optimiser step is over: the first worker takes what all of them recorded."""
        if not self._on:
            return
        mine = self._parts, self._trained
        self._parts = []
        first = dist.get_process_group_ranks(self._group)[0]
        here = dist.get_rank() == first
        gathered: list[Any] | None = [None] * dist.get_world_size(self._group) if here else None
        dist.gather_object(mine, gathered, dst=first, group=self._group)
        if gathered is None:
            return
        parts = [part for some, _ in gathered for part in some]
        if parts and self._gathered is None:
            self._gathered = GatheredTrace(self._settings, parts[0].info, self._tokenizer, step=self._step)
        if self._gathered is not None:
            trained = [key for _, keys in gathered for key in keys]
            self._gathered.write(parts, trained, self._step, last=last)

    def _part(self, data: Any, decided: Decided, place: Place, rows: list[int], keys: list[Key]) -> Part:
        """Some responses of a micro-batch."""
        packed = decided.packed
        there = torch.tensor(rows)
        response = torch.arange(len(packed.lengths), device=packed.row.device).repeat_interleave(packed.lengths)
        recorded = torch.isin(response, there.to(response.device))
        versions = torch.full(packed.lengths.shape, place.optimizer_step) if place.versions is None else place.versions
        fields = {key: _rows(data[key], rows) for key in _SAMPLE_FIELDS if key in data.keys()}  # noqa: SIM118
        return Part(
            keys=keys,
            samples=samples_from_verl(fields, step=place.step, eos=self._ends),
            tokens=tokens_of(
                step=place.step,
                optimizer_step=place.optimizer_step,
                versions=versions[there],
                lengths=packed.lengths.cpu()[there],
                advantage=packed.advantage[recorded],
                behaviour=packed.behaviour[recorded],
                policy=each_tensor(decided.policy, lambda values: values[recorded]),
                decision=each_tensor(decided.decision, lambda values: values[recorded]),
            ),
            info=TraceInfo(
                run=Path(str(self._settings.directory)).name,
                rule=self._rule,
                vocabulary_size=decided.policy.vocabulary_size,
                top_k=self._top_k,
                temperature=float(torch.as_tensor(data["temperature"]).flatten()[0]),
            ),
        )


_SAMPLE_FIELDS = ("prompts", "responses", "response_mask", "advantages", "rm_scores", "uid", "reward_model")


def _rows(values: Any, rows: list[int]) -> Any:
    """Some rows of a field."""
    if isinstance(values, Tensor):
        parts = values.unbind()
        return torch.nested.as_nested_tensor([parts[row] for row in rows], layout=torch.jagged)
    whole = values.tolist() if hasattr(values, "tolist") else list(values)
    return [whole[row] for row in rows]


def _keys(data: Any) -> list[Key]:
    return [
        (str(prompt), str(number))
        for prompt, number in zip(listed(data, "uid"), listed(data, "session_id"), strict=True)
    ]


def _ends(model_config: Any) -> set[int]:
    """The ids that end a response, by the model's generation settings; a tokenizer knows one of them."""
    found = getattr(model_config.generation_config, "eos_token_id", None)
    found = model_config.tokenizer.eos_token_id if found is None else found
    return {found} if isinstance(found, int) else set(found or ())
