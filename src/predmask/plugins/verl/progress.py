"""How far the actor is, which verl tells its workers only in part, and how old a batch is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from predmask.plugins.verl.batch import listed
from predmask.plugins.verl.loss import Decided
from predmask.plugins.verl.settings import PolicyLossConfig
from predmask.plugins.verl.tracing import Place, Tracer


class Progress:
    """Counts steps and optimiser steps of this worker, from what its batches say."""

    def __init__(self, settings: PolicyLossConfig, engine: Any) -> None:
        self.step = 0
        """verl's step that is going on, from 1."""
        self.optimizer_step = 0
        """Optimiser steps taken since this worker started."""
        self._first = True
        self._reached: dict[int, int] = {}
        """Optimiser steps taken by the end of each step: version v of the weights is what step v left."""
        self._tracer = Tracer(settings, engine)

    @contextmanager
    def minibatch(self, data: Any) -> Iterator[Progress]:
        """One optimiser step on a mini-batch; verl marks the last one of its step."""
        if self._first:
            # A run that was resumed does not begin with 1.
            steps = listed(data, "global_steps")
            self.step = max(steps, default=1)
            self._reached[self.step - 1] = 0
            self._first = False
        self._tracer.begin(self.step)
        yield self
        last = any(listed(data, "update_lr_scheduler"))
        self._tracer.end(last=last)
        self.optimizer_step += 1
        if last:
            self._reached[self.step] = self.optimizer_step
            self.step += 1

    def versions(self, data: Any) -> Tensor | None:
        """[B] optimiser steps before each response was begun; None where the server did not say."""
        oldest = min(self._reached)
        found: list[int] = []
        for fields in listed(data, "extra_fields"):
            version = fields.get("min_global_steps")
            if version is None:
                return None
            found.append(self._reached.get(max(int(version), oldest), self.optimizer_step))
        return torch.tensor(found) if found else None

    def staleness(self, data: Any, decided: Decided) -> Tensor | None:
        """[N] optimiser steps between the sampling of a token's response and this update."""
        versions = self.versions(data)
        if versions is None:
            return None
        lengths = decided.packed.lengths
        return (self.optimizer_step - versions.to(lengths.device)).repeat_interleave(lengths)

    def record(self, data: Any, decided: Decided) -> None:
        """Hand a micro-batch to the trace."""
        self._tracer.record(data, decided, Place(self.step, self.optimizer_step, self.versions(data)))
