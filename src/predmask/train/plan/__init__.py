"""A run before it is started: would it fit, and is everything here?"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from predmask.train.config import Config
from predmask.train.directory import refuse_existing
from predmask.train.lora import add_adapters
from predmask.train.plan.architectures import Architecture
from predmask.train.plan.memory import MemoryPlan, Place, plan_memory
from predmask.train.plan.needs import Machine, Need, needs_of
from predmask.train.plan.remedies import Remedy, remedies


@dataclass(frozen=True)
class DryRun:
    """What a run would take, what this machine has, and what is missing."""

    config: Config
    model: Architecture
    machine: Machine
    memory: MemoryPlan
    needs: tuple[Need, ...]
    remedies: tuple[Remedy, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """Where there is something to fit in."""
        return ("accelerator", "host") if self.machine.gpu else ("host",)

    def fits(self, place: Place, memory: MemoryPlan | None = None) -> bool | None:
        """Whether the plan (or another one) fits into what is free; None where that is not known."""
        free = self.machine.free(place)
        if free is None:
            return False if place == "accelerator" else None
        return (memory or self.memory).peak(place) <= free

    @property
    def ready(self) -> bool:
        """Whether the run could be started here and now."""
        return all(need.met for need in self.needs) and all(self.fits(place) is not False for place in self.places)

    @property
    def gpus(self) -> int | None:
        """Over how many GPUs like this one a trainer that shards must spread weights, gradients and optimiser state.

        Everything else is on each of them. None where even that is too much, or the GPU is not known.
        """
        free = self.machine.accelerator
        if free is None:
            return None
        room = free - (self.memory.peak("accelerator") - self.memory.state)
        return math.ceil(self.memory.state / room) if room > 0 else None


def dry_run(config: Config, machine: Machine | None = None) -> DryRun:
    """Look at a run without loading a model, reading more of data than their beginning, or fetching anything.

    Raises ConfigError for a model whose sizes cannot be known here or that cannot be adapted as configured, and for an
    output that exists.
    """
    refuse_existing(config)
    machine = machine or Machine.of(config.device)
    model = Architecture.of(config.model)
    if config.lora.enabled and importlib.util.find_spec("peft") is not None:
        add_adapters(Architecture.of(config.model).model, config.lora, config.seed)  # refuses what cannot be adapted
    return DryRun(
        config=config,
        model=model,
        machine=machine,
        memory=plan_memory(config, model, gpu=machine.gpu),
        needs=tuple(needs_of(config, model, gpu=machine.gpu)),
        remedies=tuple(remedies(config, model, gpu=machine.gpu)),
    )
