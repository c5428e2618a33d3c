"""One streaming pass over a trace: every number that a report shows of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from predmask.core import DPPO, BehaviourSupport, PolicySupport, PPOClip, Predictive, Reason, Rule
from predmask.core.metrics import MaskedToken, Metrics, mask_metrics, masked_tokens, merge_masked_tokens
from predmask.core.precision import log1mexp
from predmask.traces import TokenTrace, Trace, TraceError
from predmask.traces.records import make_rule
from predmask.traces.schema import AFTER, FULL

UNREAD = (*AFTER, *FULL)
"""Columns that a report does not need: the widest of all."""

DIVERGENCE_BINS = torch.logspace(-8, 3, 89, dtype=torch.float64)
"""[bins + 1] edges of the divergence histogram, eight bins a decade; values beyond count in the outermost bins."""
LIMIT = 6.0
"""Where the map of probabilities ends: log-odds of ±6 decades, that is 1e-6 and 1 - 1e-6; tokens beyond count there."""
CELLS = 120
"""Cells of that map along either axis, ten a decade."""


@dataclass
class StepDigest:
    """The tokens of one step."""

    metrics: Metrics = field(default_factory=Metrics)
    """The curves (`mask_metrics`), and `reward` and `response_length` where responses were recorded."""
    reasons: Tensor = field(default_factory=lambda: torch.zeros(len(Reason), dtype=torch.int64))
    """[6] tokens by `Reason`."""
    known: int = 0
    """Response tokens whose log-probs are known."""


@dataclass
class ProbabilityMap:
    """How many known response tokens have which mu (first axis) and pi (second), and which ones a rule drops there."""

    rule: Rule
    recorded: bool
    """Whether this is the rule that decided; the others are asked now."""
    positive: Tensor = field(default_factory=lambda: torch.zeros(CELLS, CELLS, dtype=torch.int64))
    """[CELLS, CELLS] dropped, A > 0."""
    negative: Tensor = field(default_factory=lambda: torch.zeros(CELLS, CELLS, dtype=torch.int64))
    """[CELLS, CELLS] dropped, A < 0."""

    @property
    def dropped(self) -> int:
        """Tokens that the rule drops."""
        return int(self.positive.sum() + self.negative.sum())


@dataclass
class Digest:
    """What a trace comes to."""

    rule: Rule | None
    """The rule that decided; None where this version cannot make it."""
    maps: list[ProbabilityMap]
    """The rule that decided and those that it is compared with."""
    occurrences: Counter[int] = field(default_factory=Counter[int])
    """How often each id was sampled, among the known response tokens."""
    steps: dict[int, StepDigest] = field(default_factory=dict[int, StepDigest])
    tokens: int = 0
    divergences: Tensor = field(default_factory=lambda: torch.zeros(len(Reason), len(DIVERGENCE_BINS) - 1).long())
    """[6, bins] known response tokens by `Reason` and divergence."""
    cells: Tensor = field(default_factory=lambda: torch.zeros(CELLS, CELLS, dtype=torch.int64))
    """[CELLS, CELLS] known response tokens by mu and pi."""
    masked: list[MaskedToken] = field(default_factory=list[MaskedToken])
    """Which ids were dropped, most often first."""

    @property
    def metrics(self) -> Metrics:
        """The curves over all steps together."""
        whole = Metrics()
        for step in self.steps.values():
            whole = whole.merge(step.metrics)
        return whole

    @property
    def reasons(self) -> Tensor:
        """[6] tokens by `Reason`."""
        return torch.stack([step.reasons for step in self.steps.values()]).sum(0)

    @property
    def known(self) -> int:
        """Response tokens whose log-probs are known."""
        return sum(step.known for step in self.steps.values())


def digest(trace: Trace, progress: Callable[[int], object] | None = None) -> Digest:
    """Read a trace once, a chunk at a time; `progress` is called with the number of tokens of each chunk.

    TraceError for a trace that cannot be read.
    """
    rule = known_rule(trace.info.rule)
    found = Digest(rule, list(_maps(trace, rule)))
    for number in trace.steps:
        step = found.steps[number] = StepDigest()
        tables = [found.masked]
        for tokens in trace.tokens([number], without=UNREAD):
            _count(found, step, tokens)
            tables.append(masked_tokens(tokens.decision, tokens.id))
            if progress is not None:
                progress(len(tokens))
        found.masked = merge_masked_tokens(*tables)
        for sample in trace.samples(number):
            step.metrics.mean("response_length", torch.tensor([float(sample.length)]))
            if math.isfinite(sample.reward):
                step.metrics.mean("reward", torch.tensor([sample.reward]))
    return found


def known_rule(settings: Mapping[str, Any]) -> Rule | None:
    """The rule of these settings; None where this version cannot make it."""
    try:
        return make_rule(settings)
    except TraceError:
        return None


def late_step(found: Digest) -> int | None:
    """Of the later half of the recorded steps, that in which most tokens were dropped; None without tokens."""
    filled = [number for number, step in found.steps.items() if step.reasons.sum()]
    return max(filled[len(filled) // 2 :], key=lambda number: (_dropped(found.steps[number]), number), default=None)


def log_odds(logp: Tensor) -> Tensor:
    """log10(p / (1 - p)) within ±LIMIT: logarithmic at both ends, near 0 as near 1."""
    logp = logp.clamp(max=0.0)
    return ((logp - log1mexp(logp)) / math.log(10)).clamp(-LIMIT, LIMIT)


def outside(rule: Rule, mu: Tensor, pi: Tensor) -> Tensor:
    """[...] bool, whether a rule finds a token outside that has these probabilities, as far as they alone tell.

    The rule's own proximity criterion on the binary support. For a top-K divergence that is a lower bound: such a token
    is outside whatever the other tokens do.
    """
    behaviour = BehaviourSupport.from_topk(torch.zeros(mu.shape, dtype=torch.int64), mu.log())
    log_tail = log1mexp(pi.log())
    policy = PolicySupport(
        logp=pi.log()[..., None], log_tail=log_tail, vocabulary_size=2, tail_sum_squares=(2 * log_tail).exp()
    )
    return rule.criteria(behaviour, policy).outside


def _maps(trace: Trace, recorded: Rule | None) -> Iterator[ProbabilityMap]:
    """The recorded rule as it is; of the others PPO's clip and both divergence masks, with its delta and divergence."""
    shared = {name: getattr(recorded, name) for name in ("delta", "divergence") if hasattr(recorded, name)}
    topk = trace.info.top_k > 0
    rules: list[Rule] = [PPOClip(), DPPO(**shared, support="topk" if topk else "binary")]
    if topk:
        tail = "exact" if "tail_sum_squares" in trace.columns else "aggregated"
        rules.append(Predictive(**shared, tail=tail))
    if recorded is not None and recorded.can_fire and recorded.name not in {rule.name for rule in rules}:
        yield ProbabilityMap(recorded, recorded=True)
    for rule in rules:
        if recorded is not None and rule.name == recorded.name:
            yield ProbabilityMap(recorded, recorded=True)
        else:
            yield ProbabilityMap(rule, recorded=False)


def _count(found: Digest, step: StepDigest, tokens: TokenTrace) -> None:
    """Add a chunk."""
    behaviour, policy, decision, known = tokens.behaviour, tokens.policy, tokens.decision, tokens.known
    found.tokens += len(tokens)
    step.metrics = step.metrics.merge(mask_metrics(behaviour, policy, decision, staleness=tokens.staleness))
    step.reasons += torch.bincount(decision.reason, minlength=len(Reason))
    step.known += int(known.sum())
    # A vocabulary may be said to be of any size, and most of its ids are never sampled.
    ids, counts = tokens.id[known].unique(return_counts=True)
    found.occurrences.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    bins = torch.bucketize(decision.divergence[known].double(), DIVERGENCE_BINS, right=True) - 1
    found.divergences += _counted(decision.reason[known], bins, found.divergences.shape)
    mu, pi = _cells(behaviour.logp[:, 0]), _cells(policy.logp[:, 0])
    found.cells += _counted(mu[known], pi[known], found.cells.shape)
    for each in found.maps:
        asked = decision if each.recorded else tokens.decide(each.rule)
        for counts, reason in ((each.positive, Reason.DROPPED_POSITIVE), (each.negative, Reason.DROPPED_NEGATIVE)):
            which = known & (asked.reason == reason)
            counts += _counted(mu[which], pi[which], counts.shape)


def _cells(logp: Tensor) -> Tensor:
    """[N] the cell of a probability; NaN, which is not known, may fall anywhere."""
    return ((log_odds(logp).nan_to_num() + LIMIT) * (CELLS / (2 * LIMIT))).long()


def _counted(rows: Tensor, columns: Tensor, shape: Sequence[int]) -> Tensor:
    """[rows, columns] how often each pair occurs; indices beyond the ends count there."""
    flat = rows.long().clamp(0, shape[0] - 1) * shape[1] + columns.clamp(0, shape[1] - 1)
    return torch.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape[0], shape[1])


def _dropped(step: StepDigest) -> int:
    return int(step.reasons[Reason.DROPPED_POSITIVE] + step.reasons[Reason.DROPPED_NEGATIVE])
