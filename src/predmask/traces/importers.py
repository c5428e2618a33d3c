"""A trace from the arrays of any trainer, so that everybody gets the same report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from predmask.core import RULES, BehaviourSupport, MaskDecision, PolicySupport, Reason, Rule
from predmask.core.precision import check_log_probs
from predmask.core.support import each_tensor
from predmask.traces.layout import Layout, as_tensor, ranks
from predmask.traces.records import TokenTrace, TraceError, TraceInfo, rule_settings

AGREEMENT = 1e-3
"""How far the log-probs of one token may lie apart where it is both the sampled one and in the top-K, in nats."""
_ENTRIES = 1 << 20
"""Entries of the widest array that are worked on at once; bounds the memory beyond arrays and trace."""


def tokens_from_arrays(
    info: TraceInfo,
    *,
    step: int,
    tokens: Any,
    behaviour_logp: Any,
    advantage: Any,
    topk_ids: Any = None,
    topk_logp: Any = None,
    policy_logits: Any = None,
    policy_logp: Any = None,
    policy_log_tail: Any = None,
    policy_tail_sum_squares: Any = None,
    policy_entropy: Any = None,
    response_mask: Any = None,
    epoch: Any = 0,
    minibatch: Any = 0,
    optimizer_step: Any = None,
    version: Any = None,
    sample: Any = None,
    group: Any = None,
    position: Any = None,
    keep: Any = None,
    rule: Rule | None = None,
) -> TokenTrace:
    """Tokens for `TraceWriter.add`, decided once by the rule that `info` names.

    Arrays are torch's, NumPy's or lists, padded [B, T] or flat [N]; [...] stands for either. Log-probs are natural,
    float32 or float64, and at the sampling temperature. None and NaN are unknown: such a token is counted, and neither
    masked nor in any mean.

    Args:
        info: the rule, V, K and temperature, as the `TraceWriter` has them.
        step: number of the rollout, from 1.
        tokens: [...] the sampled ids.
        behaviour_logp: [...] their log mu, as the engine reported it when it sampled (not computed again).
        advantage: [B] or [...].
        topk_ids: [..., K] the engine's likeliest ids, where K > 0; the sampled one may be among them.
        topk_logp: [..., K] their log mu.
        policy_logits: [..., V] of pi before the optimiser step, not yet divided by the temperature, of any float type.
        policy_logp: instead of logits, log pi [..., K + 1] of the sampled token and `topk_ids`, in this order; where
            K = 0 also [...].
        policy_log_tail: [...] log of pi's mass on all other ids; needed with `policy_logp` where K > 0.
        policy_tail_sum_squares: [...] sum of pi_i² over them, which the exact tail reads.
        policy_entropy: [...] in nats.
        response_mask: [...] 0 for padding and for tokens that the policy did not sample. In a padded row, what follows
            the last sampled token leaves the trace; what stands before it, such as tool output, is recorded as not
            sampled.
        epoch: pass over the rollout, from 0. This, and all that follow up to `position`: a number, [B] or [...].
        minibatch: optimiser step within the epoch, from 0.
        optimizer_step: optimiser steps of the run before this update; by default `step` - 1.
        version: optimiser steps before the sampling; by default `optimizer_step`, which is no staleness.
        sample: number of the response within its step; by default the row. Flat arrays need it, and so does a part of a
            step's batch.
        group: number of the prompt within its step; by default that of the response.
        position: place in the response, from 0; by default counted over this call's tokens of the response.
        keep: [...] a mask that was made elsewhere, under a name of its own, such as `info.rule = {"name": "my-mask"}`.
            It says which known tokens with A ≠ 0 are kept, and the reasons follow it; divergence, rate and outside are
            those of `rule`, so that a token may be dropped inside the region.
        rule: with `keep`, what measures; alone, a rule of your own, with `info.rule = rule_settings(rule)`.

    Raises TraceError for what is missing or does not fit, TypeError for 16-bit log-probs, ValueError where the rule
    reads what the arrays do not have.
    """
    rule = _rule(info, rule, decided_elsewhere=keep is not None)
    layout = Layout.of(tokens, response_mask)
    sample = layout.row_numbers() if sample is None else sample
    optimizer_step = step - 1 if optimizer_step is None else optimizer_step
    places = {
        "step": step,
        "epoch": epoch,
        "minibatch": minibatch,
        "optimizer_step": optimizer_step,
        "version": optimizer_step if version is None else version,
        "sample": sample,
        "group": sample if group is None else group,
    }
    arrays = {name: layout.spread(name, value).long() for name, value in places.items()}
    arrays["position"] = ranks(arrays["sample"]) if position is None else layout.spread("position", position).long()
    arrays["advantage"] = layout.spread("advantage", advantage)
    arrays["response_mask"] = layout.sampled
    arrays |= _behaviour_arrays(layout, info, tokens, behaviour_logp, topk_ids, topk_logp)
    arrays |= _policy_arrays(
        layout,
        info,
        policy_logits,
        policy_logp,
        log_tail=policy_log_tail,
        tail_sum_squares=policy_tail_sum_squares,
        entropy=policy_entropy,
    )
    if keep is not None:
        arrays["keep"] = layout.each("keep", keep) != 0
    widest = max(values.shape[-1] if values.ndim > 1 else 1 for values in arrays.values())
    parts = layout.recorded.split(max(1, _ENTRIES // widest))
    return TokenTrace.cat([_decided(info, rule, _cut(arrays, part)) for part in parts])


def _behaviour_arrays(
    layout: Layout, info: TraceInfo, tokens: Any, logp: Any, topk_ids: Any, topk_logp: Any
) -> dict[str, Tensor]:
    if logp is None:
        raise TraceError(
            "behaviour_logp is missing: a mask is anchored on what the engine reported when it sampled; have it return "
            "log-probs (what the trainer computes again is those of another policy)"
        )
    arrays = {"tokens": layout.each("tokens", tokens), "behaviour_logp": layout.each("behaviour_logp", logp)}
    check_log_probs("behaviour_logp", arrays["behaviour_logp"])
    if (topk_ids is None) != (topk_logp is None) or (topk_ids is not None) != (info.top_k > 0):
        given = [name for name, value in (("topk_ids", topk_ids), ("topk_logp", topk_logp)) if value is not None]
        missing = "top-K missing: " if len(given) < 2 and info.top_k else ""
        raise TraceError(
            f"{missing}the trace is one of K = {info.top_k}, and {' and '.join(given) or 'no top-K'} was given; give "
            "topk_ids and topk_logp where K > 0, and neither where K = 0 (TraceInfo.top_k)"
        )
    if topk_ids is not None:
        arrays["topk_ids"] = layout.each("topk_ids", topk_ids, info.top_k)
        arrays["topk_logp"] = layout.each("topk_logp", topk_logp, info.top_k)
        check_log_probs("topk_logp", arrays["topk_logp"])
    return arrays


def _policy_arrays(layout: Layout, info: TraceInfo, logits: Any, logp: Any, **tail: Any) -> dict[str, Tensor]:
    if (logits is None) == (logp is None):
        raise TraceError("the trained policy: give policy_logits or policy_logp, and not both")
    if logits is not None:
        return {"policy_logits": layout.each("policy_logits", logits, info.vocabulary_size)}
    found = as_tensor("policy_logp", logp)
    check_log_probs("policy_logp", found)
    if tuple(found.shape) == layout.shape:
        if info.top_k:
            raise TraceError(
                f"policy_logp is that of the sampled token alone, and the trace has K = {info.top_k}; give log pi "
                f"[..., {info.top_k + 1}] of the sampled token and topk_ids with policy_log_tail, or policy_logits, or "
                "record a trace of the sampled token (TraceInfo.top_k = 0)"
            )
        found = found[..., None]
    if info.top_k and tail["log_tail"] is None:
        raise TraceError(
            "policy_log_tail is missing: log of pi's mass on all ids but the sampled one and topk_ids, summed over "
            "them; from policy_logits it is computed here"
        )
    given = {f"policy_{name}": value for name, value in tail.items() if value is not None}
    return {
        "policy_logp": layout.each("policy_logp", found, info.top_k + 1),
        **{name: layout.each(name, value) for name, value in given.items()},
    }


def _cut(arrays: Mapping[str, Tensor], part: Tensor) -> dict[str, Tensor]:
    """Some of the tokens: floats in float32 and, but for logits, on the CPU."""

    def cut(name: str, values: Tensor) -> Tensor:
        values = values[part.to(values.device)]
        values = values.float() if values.is_floating_point() else values
        return values if name == "policy_logits" else values.cpu()

    return {name: cut(name, values) for name, values in arrays.items()}


def _decided(info: TraceInfo, rule: Rule, arrays: dict[str, Tensor]) -> TokenTrace:
    """What the rule says of some tokens."""
    advantage = arrays["advantage"].float()
    behaviour = BehaviourSupport.from_topk(
        arrays["tokens"], arrays["behaviour_logp"], arrays.get("topk_ids"), arrays.get("topk_logp")
    )
    behaviour.check_ids(info.vocabulary_size)
    if info.top_k:
        _check_topk(info, arrays)
    policy = _policy(info, behaviour, arrays)
    decision = rule(behaviour, policy, advantage, arrays["response_mask"])
    if "keep" in arrays:
        decision = _decided_elsewhere(decision, arrays["keep"], advantage)
    return TokenTrace(
        step=arrays["step"],
        epoch=arrays["epoch"],
        minibatch=arrays["minibatch"],
        optimizer_step=arrays["optimizer_step"],
        version=arrays["version"],
        sample=arrays["sample"],
        group=arrays["group"],
        position=arrays["position"],
        advantage=advantage,
        behaviour=behaviour,
        policy=policy,
        decision=decision,
    )


def _policy(info: TraceInfo, behaviour: BehaviourSupport, arrays: Mapping[str, Tensor]) -> PolicySupport:
    if "policy_logits" in arrays:
        logits = arrays["policy_logits"]
        there = each_tensor(behaviour, lambda values: values.to(logits.device))
        policy = PolicySupport.from_logits(logits, there, temperature=info.temperature)
        return each_tensor(policy, lambda values: values.cpu())
    logp, log_tail = arrays["policy_logp"], arrays.get("policy_log_tail")
    if log_tail is None:
        # With the sampled token alone, the rest has what it leaves, to either policy.
        log_tail = BehaviourSupport.from_topk(arrays["tokens"], logp[:, 0]).log_tail
    return PolicySupport(
        logp=logp.masked_fill(~behaviour.valid, -torch.inf),
        log_tail=log_tail,
        vocabulary_size=info.vocabulary_size,
        tail_sum_squares=arrays.get("policy_tail_sum_squares"),
        entropy=arrays.get("policy_entropy"),
    )


def _check_topk(info: TraceInfo, arrays: Mapping[str, Tensor]) -> None:
    """K entries at each sampled position, of the distribution that the sampled token came from."""
    tokens, logp = arrays["tokens"], arrays["behaviour_logp"]
    top_ids, top_logp = arrays["topk_ids"], arrays["topk_logp"]
    known = arrays["response_mask"] & torch.isfinite(logp) & ~torch.isnan(top_logp).any(-1)

    def refuse(wrong: Tensor, text: Callable[[int], str]) -> None:
        for row in torch.nonzero(wrong & known)[:1, 0].tolist():
            where = f"sample {int(arrays['sample'][row])}, position {int(arrays['position'][row])}"
            raise TraceError(f"{where}: {text(row)}")

    present = (top_ids >= 0) & torch.isfinite(top_logp)
    found = present.sum(-1)
    refuse(
        found < info.top_k,
        lambda row: (
            f"{int(found[row])} of {info.top_k} top-K entries are there; does the engine cap its log-probs at "
            f"{int(found[row])} (vLLM: max_logprobs), or truncate its sampling (top_p, top_k, min_p must be off)?"
        ),
    )
    same = top_ids == tokens[:, None]
    listed, entry = same.any(-1), top_logp.masked_fill(~same, -torch.inf).amax(-1)
    # The sampled token has its own entry, or is no likelier than all of them.
    apart = torch.where(listed, (entry - logp).abs(), logp - top_logp.amin(-1))
    refuse(
        apart > AGREEMENT,
        lambda row: (
            f"the sampled id {int(tokens[row])} has log-prob {float(logp[row]):.4g}, but its entry in the top-K is "
            f"{f'{float(entry[row]):.4g}' if listed[row] else 'missing'}; do both belong to one position, one policy "
            "and one temperature?"
        ),
    )


def _rule(info: TraceInfo, rule: Rule | None, *, decided_elsewhere: bool) -> Rule:
    """The rule that decides, or measures what was decided elsewhere; the trace must name who decided."""
    if decided_elsewhere:
        if rule is None:
            raise TraceError("keep needs rule=, the rule whose divergence and rate are recorded beside it")
        if info.rule.get("name") in RULES:
            raise TraceError(
                f"keep was made elsewhere, but the trace says that rule {info.rule['name']!r} decided; give your mask "
                'a name of its own, such as TraceInfo(rule={"name": "my-mask"}, ...)'
            )
    elif rule is not None and dict(info.rule) != rule_settings(rule):
        raise TraceError(f"the trace says that {dict(info.rule)} decided; say TraceInfo(rule=rule_settings(rule), ...)")
    return info.make_rule() if rule is None else rule


def _decided_elsewhere(decision: MaskDecision, keep: Tensor, advantage: Tensor) -> MaskDecision:
    """The decision with another mask's `keep`, and the reasons that follow from it."""
    keep = decision.trainable & keep
    dropped = decision.trainable & ~keep
    reason = decision.reason.clone()
    reason[keep & ~decision.outside] = Reason.KEPT_INSIDE
    reason[keep & decision.outside] = Reason.KEPT_RETURNING
    reason[dropped & (advantage > 0)] = Reason.DROPPED_POSITIVE
    reason[dropped & (advantage < 0)] = Reason.DROPPED_NEGATIVE
    return replace(decision, keep=keep, reason=reason)
