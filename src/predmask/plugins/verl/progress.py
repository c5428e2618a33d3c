"""How far the actor is, which verl tells its workers only in part, and how old a batch is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from predmask.plugins.verl.batch import listed
from predmask.plugins.verl.host import MODE, SYNC_STEP, key_of
from predmask.plugins.verl.loss import Decided
from predmask.plugins.verl.settings import PolicyLossConfig
from predmask.plugins.verl.tracing import Place, Tracer


class Progress:
    """Counts steps and optimiser steps of this worker, from what its batches say.

    A step of verl ends with new weights for the servers: version v of the weights is what step v left.
    """

    def __init__(self, settings: PolicyLossConfig, engine: Any) -> None:
        self.optimizer_step = 0
        """Optimiser steps taken since this worker started."""
        self._group = engine.get_data_parallel_group()
        self._first = 1
        """verl's number of the first step that this worker took part in."""
        self._reached = [0]
        """Optimiser steps taken before that step, and by the end of each step since."""
        self._rounds_a_step = _rounds_a_step(settings.host)
        self._rounds = 0
        """Batches that the step going on has been given and is through with."""
        self._begun = False
        self._tracer = Tracer(settings, engine)

    @property
    def step(self) -> int:
        """verl's step that is going on, from 1."""
        return self._first + len(self._reached) - 1

    @contextmanager
    def minibatch(self, data: Any) -> Iterator[Progress]:
        """One optimiser step on a mini-batch; verl marks the last one of each batch."""
        if not self._begun:
            self._catch_up(data)
            self._begun = True
        self._tracer.begin(self.step, data)
        yield self
        self._rounds += any(listed(data, "update_lr_scheduler"))
        last = self._rounds == self._rounds_a_step
        self._tracer.end(last=last)
        self.optimizer_step += 1
        if last:
            self._reached.append(self.optimizer_step)
            self._rounds, self._begun = 0, False

    def versions(self, data: Any) -> Tensor | None:
        """[B] optimiser steps before each response was begun; None where the server did not say.

        A response of several versions counts as its oldest. What is older than this worker counts as its beginning.
        """
        found: list[int] = []
        for fields in listed(data, "extra_fields"):
            version = fields.get("min_global_steps")
            if version is None:
                return None
            place = int(version) - (self._first - 1)
            found.append(self._reached[min(max(place, 0), len(self._reached) - 1)])
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

    def _catch_up(self, data: Any) -> None:
        """Number the step by what is newest in its first mini-batch, over all workers.

        A run that was resumed does not begin with 1. No prompt was sent out after the step that trains on it, and no
        response was sampled by weights that the step before had not left; in the asynchronous modes all may be older.
        """
        newest = [1, *listed(data, "global_steps")]
        for fields in listed(data, "extra_fields"):
            version = fields.get("max_global_steps")
            newest += [] if version is None else [version + 1]
        of_all: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(of_all, int(max(newest)), group=self._group)
        self._first += max(max(of_all) - self.step, 0)


def _rounds_a_step(host: Mapping[str, Any]) -> int:
    """Batches that verl trains on before it sends the weights: the mode `separate_async` takes several."""
    return int(host.get(key_of(SYNC_STEP)) or 1) if host.get(key_of(MODE)) == "separate_async" else 1
