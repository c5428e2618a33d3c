"""Token traces of a TRL run, in the schema of `predmask.traces`: gathered from all processes, written by the first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from predmask.core.support import each_tensor
from predmask.ops import MaskedPolicyLoss
from predmask.plugins.recording import GatheredTrace, Key, Part, TraceSettings, chosen, tokens_of
from predmask.traces import SampleTrace, TraceInfo, rule_settings


class Tracer:
    """Records a part of the completions of each generation, where a directory is named; a step is a generation."""

    def __init__(self, args: Any, trainer: Any) -> None:
        self._settings = TraceSettings(
            directory=args.traces, every=args.traces_every, responses=args.traces_responses, max_mb=args.traces_max_mb
        )
        self._args = args
        self._trainer = trainer
        self._step = 0
        self._rewards = torch.empty(0)
        self._wanted: set[Key] = set()
        self._trained: list[Key] = []
        """The completions of the optimiser step that is going on."""
        self._parts: list[Part] = []
        self._gathered: GatheredTrace | None = None

    def generated(self, numbers: Tensor, rewards: Tensor) -> None:
        """A generation begins: `numbers` [B] are those of this process's completions, `rewards` are of all of them."""
        self._step += 1
        self._rewards = rewards.cpu()
        settings = self._settings
        keys = self._keys(numbers)
        share = -(-settings.responses // self._trainer.accelerator.num_processes) or math.inf
        regular = settings.directory is not None and (self._step - 1) % settings.every == 0
        taken = chosen(keys, share if regular else 0)
        self._wanted = {key for key, is_taken in zip(keys, taken, strict=True) if is_taken}

    def record(self, inputs: dict[str, Any], result: MaskedPolicyLoss, *, numbers: Tensor, versions: Tensor) -> None:
        """Take what is wanted of a micro-batch.

        `numbers` [B] are those of the completions within their generation, `versions` [B] the optimiser steps before
        it.
        """
        if self._settings.directory is None:
            return
        keys = self._keys(numbers)
        self._trained += keys
        there = result.decision.response_mask.any(1).tolist()
        rows = [row for row, key in enumerate(keys) if key in self._wanted and there[row]]
        if rows:
            index = torch.tensor(rows, device=numbers.device)
            self._parts.append(self._part(inputs, result, index, numbers[index].tolist(), versions[index]))

    def end(self, *, last: bool) -> None:
        """An optimiser step is over, or with `last` a generation."""
        if self._settings.directory is None:
            return
        parts, trained = gather_object(self._parts), gather_object(self._trained)
        self._parts, self._trained = [], []
        if not self._trainer.accelerator.is_main_process:
            return
        if parts and self._gathered is None:
            tokenizer = self._trainer._tokenizer
            self._gathered = GatheredTrace(self._settings, parts[0].info, tokenizer, step=self._step)
        if self._gathered is not None:
            self._gathered.write(parts, trained, self._step, last=last)

    def _keys(self, numbers: Tensor) -> list[Key]:
        return [(str(number // self._trainer.num_generations), str(number)) for number in numbers.tolist()]

    def _part(
        self, inputs: dict[str, Any], result: MaskedPolicyLoss, rows: Tensor, numbers: list[int], versions: Tensor
    ) -> Part:
        # What stands behind a completion leaves the trace.
        there = result.decision.response_mask[rows]

        def flat(values: Tensor) -> Tensor:
            return values[rows][there]

        groups = [number // self._trainer.num_generations for number in numbers]
        lengths = there.sum(1)
        advantage = inputs["advantages"][rows].float()
        return Part(
            keys=self._keys(torch.tensor(numbers)),
            samples=[
                SampleTrace(
                    step=self._step,
                    sample=number,
                    group=group,
                    prompt=tuple(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()),
                    reward=float(self._rewards[number]),
                    advantage=float(inputs["advantages"][row]),
                    length=int(inputs["completion_mask"][row].sum()),
                    finished=int(inputs["completion_ids"][row][inputs["completion_mask"][row].bool()][-1])
                    in self._trainer.eos_token_ids,
                )
                for row, number, group in zip(rows.tolist(), numbers, groups, strict=True)
            ],
            tokens=tokens_of(
                step=self._step,
                optimizer_step=self._trainer.state.global_step,
                versions=versions,
                lengths=lengths,
                advantage=advantage.repeat_interleave(lengths),
                behaviour=each_tensor(result.behaviour, flat),
                policy=each_tensor(result.policy, flat),
                decision=each_tensor(result.decision, flat),
            ),
            info=TraceInfo(
                run=Path(str(self._settings.directory)).name,
                rule=rule_settings(self._args.rule),
                vocabulary_size=result.policy.vocabulary_size,
                top_k=self._args.behaviour_top_k,
                temperature=self._trainer.temperature,
            ),
        )
