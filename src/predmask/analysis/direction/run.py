"""The direction study on one recorded run, its own or another trainer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from predmask.analysis import AnalysisError
from predmask.analysis.direction.logit_steps import single_steps
from predmask.analysis.direction.outcomes import Outside, Tallies, add, outside_region, tally, top_k_divergence
from predmask.core import Predictive
from predmask.traces import Trace
from predmask.traces.schema import OPTIONAL


@dataclass(frozen=True)
class Direction:
    """What a recorded run says of the criteria."""

    delta: float
    trainable: int
    """Trainable tokens that were recorded."""
    counts: Tallies
    """See `tally`; a cluster is an optimiser step."""
    steps: Tallies
    """See `predmask.analysis.direction.logit_steps`; empty where whole distributions were not recorded."""


def measure(
    trace: Trace, delta: float | None = None, *, progress: Callable[[int], object] = lambda tokens: None
) -> Direction:
    """Read a trace; `delta` is by default that of the recorded rule where it bounds a KL, else that of
    `Predictive`.

    `progress` is told how many tokens were read since the last call.

    Raises AnalysisError where the top-K or the policy after the optimiser step was not recorded, and where no token is
    outside.
    """
    if trace.info.top_k == 0:
        raise AnalysisError(
            f"top-K missing: {trace.directory} holds the sampled tokens' log-probs alone, and there the ratio's "
            "direction is exact already; record with rollout.top_k 20"
        )
    if "after_logp" not in trace.columns:
        raise AnalysisError(
            f"{trace.directory} does not say what became of a token after its optimiser step; record that with "
            "`predmask train PRESET --traces --traces.after` (and --traces.full for the full-vocabulary criterion), or "
            "from another trainer as docs/direction.md says"
        )
    delta = _recorded_delta(trace) if delta is None else delta
    outside, steps, trainable, largest = [], [], 0, 0.0
    # What only some of the steps have is left out: every figure is of the same tokens.
    without = ["entropy", *(name for name in OPTIONAL if name not in trace.columns)]
    for tokens in trace.tokens(without=without):
        divergence = top_k_divergence(tokens)
        divergence = divergence[torch.isfinite(divergence)]
        trainable += len(divergence)
        largest = max(largest, float(divergence.max())) if len(divergence) else largest
        outside.append(outside_region(tokens, delta))
        if tokens.full is not None:
            steps.append(single_steps(tokens))
        progress(len(tokens))
    if not any(map(len, outside)):
        raise AnalysisError(_nothing_outside(trainable, delta, largest))
    return Direction(delta, trainable, tally(Outside.cat(outside)), add(steps))


def _recorded_delta(trace: Trace) -> float:
    rule = trace.info.rule
    delta = rule.get("delta")
    return (
        float(delta) if isinstance(delta, int | float) and rule.get("divergence", "kl") == "kl" else Predictive().delta
    )


def _nothing_outside(trainable: int, delta: float, largest: float) -> str:
    if not trainable:
        return "the trace has no trainable token: in every group all rewards were equal, or all log-probs are unknown"
    smaller = f"{largest / 2:.1g}"
    return (
        f"no token is outside: the largest top-K KL of {trainable:,} trainable tokens is {largest:.2g}, and delta is "
        f"{delta:g}; choose a smaller one, such as --delta {smaller}"
    )
