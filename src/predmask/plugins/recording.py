"""Token traces of a trainer with several processes: each records a part, one numbers and writes them all."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, MaskDecision, PolicySupport
from predmask.core.support import each_tensor
from predmask.traces import SampleTrace, TokenTrace, TraceInfo, TraceWriter

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Which tokens are recorded for `predmask report`, and where."""

    directory: str | None = None
    """Where to; of one that is not empty, a folder of its own in it. None records nothing."""
    every: int = 1
    """Record every so many steps."""
    responses: int = 64
    """Responses of each optimiser step that are recorded, over all workers; 0: all."""
    max_mb: float = 2000.0
    """Size at which every second step is deleted."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("responses", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"traces.{name} is {value}; it must be {least} or more")
        if not self.max_mb > 0:
            raise ValueError(f"traces.max_mb is {self.max_mb}; it must be above 0")


Key = tuple[str, str]
"""Of a response: its prompt's name, and its own among that prompt's."""


def chosen(keys: Sequence[Key], count: float) -> list[bool]:
    """Which of the responses are recorded, where `count` of them may be: by what their names hash to.

    So the choice does not depend on lengths, by which trainers order micro-batches, nor on the process.
    """
    order = sorted(range(len(keys)), key=lambda row: zlib.crc32("/".join(keys[row]).encode()))
    taken = set(order[: int(min(count, len(keys)))])
    return [row in taken for row in range(len(keys))]


@dataclass(frozen=True)
class Part:
    """What one process recorded of a micro-batch; its responses are numbered from 0."""

    keys: list[Key]
    samples: list[SampleTrace]
    tokens: TokenTrace
    info: TraceInfo


def tokens_of(
    *,
    step: int,
    optimizer_step: int,
    versions: Tensor,
    lengths: Tensor,
    advantage: Tensor,
    behaviour: BehaviourSupport,
    policy: PolicySupport,
    decision: MaskDecision,
) -> TokenTrace:
    """N tokens of R responses, one response after the other, as a process records them.

    `versions` [R] are the optimiser steps before each response was begun, `lengths` [R] its tokens; the others are [N].
    """
    lengths = lengths.cpu()
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    zeros = torch.zeros(len(sample), dtype=torch.int64)
    return TokenTrace(
        step=zeros + step,
        epoch=zeros,
        minibatch=zeros,
        optimizer_step=zeros + optimizer_step,
        version=versions.cpu()[sample],
        sample=sample,
        group=sample,
        position=torch.arange(len(sample)) - (lengths.cumsum(0) - lengths)[sample],
        advantage=advantage.cpu(),
        behaviour=each_tensor(behaviour, lambda values: values.cpu()),
        policy=each_tensor(policy, lambda values: values.cpu()),
        decision=each_tensor(decision, lambda values: values.cpu()),
    )


@dataclass
class _Numbers:
    """Numbers within a step: of prompts, of responses, and of passes over them."""

    groups: dict[str, int] = field(default_factory=dict)
    samples: dict[Key, int] = field(default_factory=dict)
    passes: dict[Key, int] = field(default_factory=dict)
    """How often a response was trained on, recorded or not."""
    begun: dict[int, int] = field(default_factory=dict)
    """At which of the step's optimiser steps each pass began."""
    taken: int = 0
    """Optimiser steps of the step so far."""


class GatheredTrace:
    """The trace's only writer: numbers what the processes recorded, and writes it.

    Where the directory holds a trace already, that of a run that was resumed goes into a folder of its own in it. What
    cannot be written ends the trace and not the run: it is said once.
    """

    def __init__(self, settings: TraceSettings, info: TraceInfo, tokenizer: Any, *, step: int) -> None:
        from predmask.traces.vocabulary import token_texts

        self._numbers = _Numbers()
        self._writer: TraceWriter | None = None
        directory = Path(str(settings.directory))
        try:
            # A run may be resumed at the same step more than once.
            while directory.exists() and any(directory.iterdir()):
                directory = directory / f"from-{step:06d}"
                _LOG.warning("predmask: the directory is not empty; this trace goes to %s", directory)
            self._writer = TraceWriter(directory, info, every=settings.every, max_bytes=settings.max_mb * 1e6)
            # Its thread ends with this object.
            weakref.finalize(self, self._writer.close)
            self._writer.write_vocabulary(token_texts(tokenizer, len(tokenizer)))
        except OSError as error:
            _LOG.warning("predmask: there will be no trace: %s", error)

    def write(self, parts: Sequence[Part], trained: Sequence[Key], step: int, *, last: bool) -> None:
        """What one optimiser step recorded, of all the responses that it trained on; its last one commits a step."""
        writer, numbers = self._writer, self._numbers
        if writer is None:
            return
        for key in trained:
            numbers.begun.setdefault(numbers.passes.get(key, 0), numbers.taken)
        if writer.wants(step):
            for part in parts:
                self._add(writer, part)
        for key in trained:
            numbers.passes[key] = numbers.passes.get(key, 0) + 1
        numbers.taken += 1
        if last:
            writer.commit(step)
            # A process is ended without notice when the run is over.
            writer.wait()
            self._numbers = _Numbers()
        if writer.problem is not None:
            _LOG.warning("predmask: %s", writer.problem)
            self._writer = None

    def _add(self, writer: TraceWriter, part: Part) -> None:
        numbers = self._numbers
        new = [key not in numbers.samples for key in part.keys]
        for key in part.keys:
            numbers.samples.setdefault(key, len(numbers.samples))
            numbers.groups.setdefault(key[0], len(numbers.groups))
        epochs = torch.tensor([numbers.passes.get(key, 0) for key in part.keys])
        begun = torch.tensor([numbers.begun[int(epoch)] for epoch in epochs])
        sample = torch.tensor([numbers.samples[key] for key in part.keys])
        group = torch.tensor([numbers.groups[key[0]] for key in part.keys])
        of = part.tokens.sample
        writer.add(
            replace(
                part.tokens,
                epoch=epochs[of],
                minibatch=(numbers.taken - begun)[of],
                sample=sample[of],
                group=group[of],
            )
        )
        # A response is written once, however often it is trained on.
        writer.add(
            [
                replace(one, sample=int(number), group=int(of_prompt))
                for one, number, of_prompt, is_new in zip(part.samples, sample, group, new, strict=True)
                if is_new
            ]
        )
