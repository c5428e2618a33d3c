"""Recording a run token by token, for `predmask report`, `replay`, `direction` and `show`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, PolicySupport
from predmask.core.support import each_tensor
from predmask.ops import MaskedPolicyLoss
from predmask.rollout import Rollout
from predmask.tasks import Problem
from predmask.traces import FullRows, SampleTrace, TokenTrace, TraceInfo, rule_settings
from predmask.train.batches import Batch
from predmask.train.config import Config, ConfigError
from predmask.train.forward import Forward

LARGEST_FULL = 4096
"""Largest vocabulary of which whole distributions are recorded: 48 kB a token."""


class Recorder(Protocol):
    """Takes what is recorded, as `predmask.traces.TraceWriter` does."""

    def wants(self, step: int) -> bool:
        """Whether this step should be recorded."""
        ...

    def add(self, records: TokenTrace | Sequence[SampleTrace]) -> None:
        """Tokens or responses of the step that is going on."""
        ...

    def commit(self, step: int) -> None:
        """The step is complete."""
        ...


def trace_info(config: Config, vocabulary_size: int, run: str) -> TraceInfo:
    """What holds for every token of a run."""
    return TraceInfo(
        run=run,
        rule=rule_settings(config.rule),
        vocabulary_size=vocabulary_size,
        top_k=config.rollout.top_k,
        temperature=config.rollout.temperature,
    )


class StepTrace:
    """The step that is going on, and what of it is recorded: nothing, where there is no recorder that wants it."""

    def __init__(self, recorder: Recorder | None, config: Config, forward: Forward, step: int) -> None:
        self._recorder = recorder if recorder is not None and recorder.wants(step) else None
        self.settings = config.traces
        self.forward = forward
        self.step = step
        self.group_size = config.rollout.group_size
        self.full = self._recorder is not None and self.settings.full
        """Whether whole distributions are recorded."""
        self.chosen = torch.empty(0, dtype=torch.bool)
        """[B] the responses that are recorded."""

    def responses(self, problems: Sequence[Problem], rollout: Rollout, rewards: Tensor, advantage: Tensor) -> None:
        """Choose `traces.responses` of them, spread evenly over the prompts, and record what came of them."""
        if self.full and rollout.full_logp is None:
            raise ConfigError("traces.full is on, but the engine records no whole distributions; turn it off")
        total = len(rollout.prompts)
        count = 0 if self._recorder is None else min(self.settings.responses or total, total)
        chosen = torch.arange(count) * total // max(count, 1)
        self.chosen = torch.zeros(total, dtype=torch.bool).index_fill_(0, chosen, True)
        self.record(
            [
                SampleTrace(
                    step=self.step,
                    sample=sample,
                    group=sample // self.group_size,
                    prompt=rollout.prompts[sample],
                    reward=float(rewards[sample]),
                    advantage=float(advantage[sample]),
                    length=int(rollout.lengths[sample]),
                    finished=bool(rollout.finished[sample]),
                    problem=problems[sample].id,
                    reference=str(problems[sample].reference),
                )
                for sample in chosen.tolist()
            ]
        )

    @contextmanager
    def minibatch(self, epoch: int, number: int, optimizer_step: int) -> Iterator[MinibatchTrace]:
        """An optimiser step; one that fails is recorded all the same, for it is the one to look at."""
        minibatch = MinibatchTrace(self, epoch, number, optimizer_step, [])
        try:
            yield minibatch
        except Exception:
            minibatch.applied(moved=False)
            self.commit()
            raise

    def record(self, records: TokenTrace | Sequence[SampleTrace]) -> None:
        """Hand them to the recorder."""
        if self._recorder is not None:
            self._recorder.add(records)

    def commit(self) -> None:
        """The step is complete."""
        if self._recorder is not None:
            self._recorder.commit(self.step)


@dataclass
class MinibatchTrace:
    """The optimiser step that is going on: its tokens are recorded when it was taken."""

    of: StepTrace
    epoch: int
    number: int
    optimizer_step: int
    decided: list[tuple[Batch, TokenTrace]]

    def add(self, batch: Batch, result: MaskedPolicyLoss) -> None:
        """What the rule read and decided for the tokens of a micro-batch."""
        kept = torch.nonzero(self.of.chosen[batch.sample])[:, 0]
        if not len(kept):
            return
        index = slice(None)
        if len(kept) < len(batch.sample):
            index = batch.rollout.token_index(kept)
            batch = batch.select(kept)
        rollout = batch.rollout
        sample = batch.sample[rollout.sequence]
        tokens = len(rollout.tokens)

        def same(value: int) -> Tensor:
            return torch.full((tokens,), value)

        trace = TokenTrace(
            step=same(self.of.step),
            epoch=same(self.epoch),
            minibatch=same(self.number),
            optimizer_step=same(self.optimizer_step),
            version=rollout.version,
            sample=sample,
            group=sample // self.of.group_size,
            position=rollout.position,
            advantage=batch.advantage,
            behaviour=_recorded(result.behaviour, index),
            policy=_recorded(result.policy, index),
            decision=_recorded(result.decision, index),
            full=self._full(rollout),
        )
        self.decided.append((batch, trace))

    @torch.no_grad()
    def applied(self, *, moved: bool) -> None:
        """The update is over: measure the tokens again, where that is asked for, and hand them on."""
        decided, self.decided = self.decided, []
        for batch, trace in decided:
            self.of.record(self._after(batch.rollout, trace, moved) if self.of.settings.after else trace)

    def _after(self, rollout: Rollout, trace: TokenTrace, moved: bool) -> TokenTrace:
        """With the policy that there is now; NaN where no step was taken to measure it after."""
        policy, full = trace.policy, trace.full
        if moved:
            policy = _cpu(self.of.forward.support(rollout)[1])
        if full is not None:
            rows = self._rows(rollout, full.behaviour) if moved else torch.full_like(full.policy, torch.nan)
            full = replace(full, after=rows)
        after = PolicySupport(logp=policy.logp, log_tail=policy.log_tail, vocabulary_size=policy.vocabulary_size)
        if not moved:
            after = each_tensor(after, lambda values: torch.full_like(values, torch.nan))
        return replace(trace, after=after, full=full)

    @torch.no_grad()
    def _full(self, rollout: Rollout) -> FullRows | None:
        if not self.of.full or rollout.full_logp is None:
            return None
        return FullRows(behaviour=rollout.full_logp, policy=self._rows(rollout, rollout.full_logp))

    def _rows(self, rollout: Rollout, behaviour: Tensor) -> Tensor:
        """[N, V] log pi now."""
        everything = BehaviourSupport.full(rollout.tokens, behaviour)
        policy = _cpu(self.of.forward.support(rollout, everything)[1])
        return torch.empty_like(policy.logp).scatter_(-1, everything.ids, policy.logp)


def _recorded(record: Any, index: Tensor | slice) -> Any:
    """The tokens of a record that are traced, outside the graph and on the CPU."""
    return each_tensor(record, lambda values: values.detach().cpu()[index])


def _cpu(policy: PolicySupport) -> PolicySupport:
    return each_tensor(policy, lambda values: values.detach().cpu())
