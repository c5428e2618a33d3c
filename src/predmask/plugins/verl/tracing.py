"""Token traces of a verl run, in the schema of `predmask.traces`: gathered from all workers, written by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from predmask.core.support import each_tensor
from predmask.plugins.verl.batch import listed
from predmask.plugins.verl.loss import Decided
from predmask.traces import SampleTrace, TokenTrace, TraceInfo, TraceWriter, rule_settings, samples_from_verl


class Place(NamedTuple):
    """Where a micro-batch stands."""

    step: int
    optimizer_step: int
    versions: Tensor | None
    """[B] optimiser steps before each response was begun."""


@dataclass(frozen=True)
class _Part:
    """What one worker recorded of a micro-batch; its responses are numbered from 0."""

    keys: list[tuple[str, str]]
    """Of each response: its prompt and its number among that prompt's."""
    samples: list[SampleTrace]
    tokens: TokenTrace
    info: TraceInfo


class Tracer:
    """Records a part of the responses of each optimiser step, where a directory is named."""

    def __init__(self, settings: Any, engine: Any) -> None:
        self._settings = settings.trace_settings()
        self._rule = rule_settings(settings.make_rule())
        self._top_k = settings.top_k
        self._group = engine.get_data_parallel_group()
        self._tokenizer = engine.model_config.tokenizer
        self._on = self._settings.directory is not None and engine.is_mp_src_rank_with_outputs()
        """Of the processes that see the same tokens, one records."""
        self._first: int | None = None
        self._step = 0
        self._left = 0
        self._parts: list[_Part] = []
        self._gathered: _Writer | None = None

    def begin(self, step: int) -> None:
        """An optimiser step of this step begins."""
        self._first = step if self._first is None else self._first
        self._step = step
        workers = dist.get_world_size(self._group)
        wanted = self._on and (step - self._first) % self._settings.every == 0
        everything = math.inf if self._settings.responses == 0 else -(-self._settings.responses // workers)
        self._left = everything if wanted else 0

    def record(self, data: Any, decided: Decided, place: Place) -> None:
        """Take as many responses of a micro-batch as this optimiser step still wants."""
        if not self._left:
            return
        packed = decided.packed
        sample = torch.arange(len(packed.lengths), device=packed.row.device).repeat_interleave(packed.lengths)
        # verl fills its batches up with responses of which no token was sampled.
        there = sample[packed.response_mask].unique()[: int(min(self._left, len(packed.lengths)))]
        if len(there):
            self._left -= len(there)
            self._parts.append(self._part(data, decided, place, there, torch.isin(sample, there)))

    def end(self, *, last: bool) -> None:
        """The optimiser step is over: the first worker takes what all of them recorded."""
        if not self._on:
            return
        parts, self._parts = self._parts, []
        first = dist.get_process_group_ranks(self._group)[0]
        here = dist.get_rank() == first
        gathered: list[Any] | None = [None] * dist.get_world_size(self._group) if here else None
        dist.gather_object(parts, gathered, dst=first, group=self._group)
        if gathered is None:
            return
        found = [part for some in gathered for part in some]
        if found and self._gathered is None:
            self._gathered = _Writer(Path(str(self._settings.directory)), found[0].info, self._settings)
            self._gathered.name_tokens(self._tokenizer)
        if self._gathered is not None:
            self._gathered.write(found, self._step, last=last)

    def _part(self, data: Any, decided: Decided, place: Place, there: Tensor, tokens: Tensor) -> _Part:
        """The responses `there` of a micro-batch, to which the tokens [N] belong where True."""
        packed, there = decided.packed, there.cpu()
        lengths = packed.lengths.cpu()[there]
        total = int(lengths.sum())
        sample = torch.arange(len(there)).repeat_interleave(lengths)
        versions = torch.full(packed.lengths.shape, place.optimizer_step) if place.versions is None else place.versions
        fields = {key: data[key] for key in data.keys()}  # noqa: SIM118  a TensorDict iterates over rows
        samples = samples_from_verl(fields, step=place.step, eos=_ends(self._tokenizer))
        trace = TokenTrace(
            step=torch.full((total,), place.step),
            epoch=torch.zeros(total, dtype=torch.int64),
            minibatch=torch.zeros(total, dtype=torch.int64),
            optimizer_step=torch.full((total,), place.optimizer_step),
            version=versions[there][sample],
            sample=sample,
            group=sample,
            position=torch.arange(total) - (lengths.cumsum(0) - lengths)[sample],
            advantage=packed.advantage[tokens].cpu(),
            behaviour=each_tensor(packed.behaviour, lambda values: values[tokens].cpu()),
            policy=each_tensor(decided.policy, lambda values: values[tokens].cpu()),
            decision=each_tensor(decided.decision, lambda values: values[tokens].cpu()),
        )
        return _Part(
            keys=[_keys(fields)[row] for row in there.tolist()],
            samples=[samples[row] for row in there.tolist()],
            tokens=trace,
            info=TraceInfo(
                run=Path(str(self._settings.directory)).name,
                rule=self._rule,
                vocabulary_size=decided.policy.vocabulary_size,
                top_k=self._top_k,
                temperature=float(torch.as_tensor(fields["temperature"]).flatten()[0]),
            ),
        )


@dataclass
class _Numbers:
    """Numbers within a step: of prompts, of responses, and of passes over them."""

    groups: dict[str, int] = field(default_factory=dict)
    samples: dict[tuple[str, str], int] = field(default_factory=dict)
    passes: dict[tuple[str, str], int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    """At which of the step's optimiser steps each pass began."""
    taken: int = 0
    """Optimiser steps of the step so far."""


class _Writer:
    """The trace's only writer: numbers what the workers recorded, and writes it."""

    def __init__(self, directory: Path, info: TraceInfo, settings: Any) -> None:
        self._writer = TraceWriter(directory, info, every=settings.every, max_bytes=settings.max_mb * 1e6)
        self._numbers = _Numbers()

    def name_tokens(self, tokenizer: Any) -> None:
        """Write what the token ids look like."""
        from predmask.traces.vocabulary import token_texts

        self._writer.write_vocabulary(token_texts(tokenizer, len(tokenizer)))

    def write(self, parts: list[_Part], step: int, *, last: bool) -> None:
        """What one optimiser step recorded; the step is committed with its last one."""
        if self._writer.wants(step):
            for part in parts:
                self._add(part)
        self._numbers.taken += 1
        if last:
            self._writer.commit(step)
            # A worker is ended without notice when the run is over.
            self._writer.wait()
            self._numbers = _Numbers()
            if self._writer.problem is not None:
                raise RuntimeError(self._writer.problem)

    def _add(self, part: _Part) -> None:
        numbers = self._numbers
        new = [key not in numbers.samples for key in part.keys]
        epochs = torch.tensor([numbers.passes.get(key, 0) for key in part.keys])
        for key in part.keys:
            numbers.passes[key] = numbers.passes.get(key, 0) + 1
            numbers.samples.setdefault(key, len(numbers.samples))
            numbers.groups.setdefault(key[0], len(numbers.groups))
        begun = torch.tensor([numbers.begun.setdefault(int(epoch), numbers.taken) for epoch in epochs])
        sample = torch.tensor([numbers.samples[key] for key in part.keys])
        group = torch.tensor([numbers.groups[key[0]] for key in part.keys])
        of = part.tokens.sample
        self._writer.add(
            replace(
                part.tokens,
                epoch=epochs[of],
                minibatch=(numbers.taken - begun)[of],
                sample=sample[of],
                group=group[of],
            )
        )
        # A response is written once, however often it is trained on.
        self._writer.add(
            [
                replace(one, sample=int(number), group=int(of_prompt))
                for one, number, of_prompt, is_new in zip(part.samples, sample, group, new, strict=True)
                if is_new
            ]
        )


def _keys(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (str(prompt), str(number))
        for prompt, number in zip(listed(fields, "uid"), listed(fields, "session_id"), strict=True)
    ]


def _ends(tokenizer: Any) -> set[int]:
    return {tokenizer.eos_token_id} - {None}
