"""What is recorded of a token, and of the response that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from predmask.core import RULES, BehaviourSupport, MaskDecision, PolicySupport, Reason, Rule

DIRECTORY = "traces"
"""Where a run directory keeps its trace."""


class TraceError(ValueError):
    """A trace that cannot be read or written; the text names the file or column and the remedy."""


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """What holds for every token of a trace."""

    run: str
    """Name of the run; rows of several runs stay apart by it."""
    rule: Mapping[str, Any]
    """The rule that decided: its name, and its fields (see `rule_settings`)."""
    vocabulary_size: int
    """V, rows of the policy's head."""
    top_k: int
    """K, likeliest ids that the engine recorded; 0: the sampled token alone."""
    temperature: float = 1.0
    """Sampling temperature of both policies."""

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Mapping):
            raise TraceError(f"rule is {self.rule!r}; give rule_settings(Predictive(delta=0.15)), for one")

    def make_rule(self) -> Rule:
        """The rule that decided; TraceError for one that this version does not know."""
        return make_rule(self.rule)


def rule_settings(rule: Rule) -> dict[str, Any]:
    """A rule as its name and its fields, ready for JSON."""
    if not isinstance(rule, Rule):
        raise TraceError(f"rule is {rule!r}; give an instance, such as Predictive(delta=0.15)")
    return {"name": rule.name, **asdict(rule)}


def make_rule(settings: Mapping[str, Any]) -> Rule:
    """The rule of these settings, as `rule_settings` gives them; TraceError for one that this version does not know."""
    fields_of = dict(settings)
    name = fields_of.pop("name", None)
    try:
        return RULES[name](**fields_of)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"the trace was decided by rule {name!r} with {fields_of or 'no settings'}, which this version of predmask "
            f"cannot make ({error}); name the rules to use, such as --rule predictive"
        ) from error


@dataclass(frozen=True, kw_only=True)
class FullRows:
    """Whole distributions, for studies on small vocabularies."""

    behaviour: Tensor
    """[N, V] float32, log mu."""
    policy: Tensor
    """[N, V] float32, log pi before the optimiser step."""
    after: Tensor | None = None
    """[N, V] float32, log pi after it."""


@dataclass(frozen=True, kw_only=True)
class TokenTrace:
    """N tokens as a mask saw them: where they stand, both policies on their support, and what was decided.

    All tensors are on the CPU and floats are float32: the numbers that the rule read, so that asking it again gives
    the same decisions.
    """

    step: Tensor
    """[N] int64, the rollout's number, from 1."""
    epoch: Tensor
    """[N] int64, pass over the rollout, from 0."""
    minibatch: Tensor
    """[N] int64, optimiser step within the epoch, from 0."""
    optimizer_step: Tensor
    """[N] int64, optimiser steps of the run before this update: the version of `policy`."""
    version: Tensor
    """[N] int64, the version of the policy that sampled the token."""
    sample: Tensor
    """[N] int64, the response's number within its step, from 0."""
    group: Tensor
    """[N] int64, the prompt's number within its step, from 0."""
    position: Tensor
    """[N] int64, place in the response, from 0."""
    advantage: Tensor
    """[N] float32, as the rule was given it."""
    behaviour: BehaviourSupport
    """mu on the support."""
    policy: PolicySupport
    """pi on the support, before the optimiser step."""
    decision: MaskDecision
    """What the rule decided."""
    after: PolicySupport | None = None
    """pi on the support after the optimiser step, where it was measured (`tail_sum_squares`, `entropy`: None)."""
    full: FullRows | None = None
    """Whole distributions, where they were recorded."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, tokens: Any) -> TokenTrace:
        """Some of the tokens, by any index over N."""
        return _map(lambda values: values[tokens], self)

    @property
    def id(self) -> Tensor:
        """[N] int64, the sampled tokens' ids."""
        return self.behaviour.ids[:, 0]

    @property
    def staleness(self) -> Tensor:
        """[N] int64, optimiser steps between sampling and update."""
        return self.optimizer_step - self.version

    @property
    def known(self) -> Tensor:
        """[N] bool, response tokens whose log-probs are known to both policies."""
        ratio = self.policy.logp[:, 0] - self.behaviour.logp[:, 0]
        decided = self.decision.response_mask & (self.decision.reason != Reason.UNKNOWN)
        return decided & torch.isfinite(ratio) & torch.isfinite(self.decision.divergence)

    def decide(self, rule: Rule) -> MaskDecision:
        """What a rule decides about these tokens: the recorded rule decides as it did."""
        return rule(self.behaviour, self.policy, self.advantage, response_mask=self.decision.response_mask)

    @staticmethod
    def cat(parts: Sequence[TokenTrace]) -> TokenTrace:
        """Several traces of the same kind, one after the other."""
        return _map(lambda *values: torch.cat(values), *parts)


@dataclass(frozen=True, kw_only=True)
class SampleTrace:
    """One response: what was asked, and what came of it."""

    step: int
    sample: int
    """Number within the step, from 0."""
    group: int
    """Number of the prompt within the step, from 0."""
    prompt: tuple[int, ...]
    """The prompt's token ids."""
    reward: float
    """NaN where the answer could not be scored."""
    advantage: float
    """NaN where the answer could not be scored."""
    length: int
    """Tokens of the response."""
    finished: bool
    """Whether it ended by itself (False: it was cut at the length limit)."""
    problem: str = ""
    """The problem's id."""
    reference: str = ""
    """The right answer, as text."""


def _map(function: Any, *records: Any) -> Any:
    """The record with a function applied to its tensors, and to those of the records in it."""
    first = records[0]
    changed = {}
    for field in fields(first):
        values = [getattr(record, field.name) for record in records]
        if isinstance(values[0], Tensor):
            changed[field.name] = function(*values)
        elif is_dataclass(values[0]):
            changed[field.name] = _map(function, *values)
    return replace(first, **changed)
