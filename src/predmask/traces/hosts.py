"""Traces from the batches of verl and of TRL; neither is imported."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from predmask.traces.importers import tokens_from_arrays
from predmask.traces.layout import as_tensor, until_last
from predmask.traces.records import SampleTrace, TokenTrace, TraceError, TraceInfo

_VERL = "give the trainer's batch after generation, with its advantages"
_TRL = "give what GRPOTrainer._generate_and_score_completions returns"


def tokens_from_verl(info: TraceInfo, batch: Any, *, step: int, **more: Any) -> TokenTrace:
    """Tokens of a verl batch: a DataProto, a TensorDict (padded or nested) or a mapping, after the advantages.

    Read are, of the response's T places:

    - `responses` [B, T], the sampled ids, and `response_mask` [B, T], 0 for padding and tool output;
    - `rollout_log_probs` [B, T], as log mu (`actor_rollout_ref.rollout.calculate_log_probs=True`);
    - `old_log_probs` [B, T], as log pi before the first optimiser step on the batch. Under
      `algorithm.rollout_correction.bypass_mode=True` they are a copy of log mu, which is refused: give `policy_logp`,
      the actor's own, then; and likewise at later optimiser steps;
    - `advantages` [B, T], and `uid`, if it is there: responses with the same one are a group;
    - where K > 0, `teacher_ids` and `teacher_logprobs` [B, P + T, K] after a prompt of P places, as the engine's top-K:
      row t is the distribution of the token at t + 1. Give `policy_logits`, or `policy_logp` and `policy_log_tail`,
      with them.

    `more` goes to `tokens_from_arrays`, in place of what was read. Raises what it raises, and TraceError for a missing
    key, with those that are there.
    """
    found = _fields(batch)
    arrays: dict[str, Any] = {
        "tokens": _array(found, "responses", _VERL),
        "response_mask": _array(found, "response_mask", _VERL),
        "behaviour_logp": _array(found, "rollout_log_probs", "set actor_rollout_ref.rollout.calculate_log_probs=True"),
        "advantage": _array(found, "advantages", _VERL),
        "group": _verl_groups(found),
    }
    if not {"policy_logp", "policy_logits"} & set(more):
        arrays["policy_logp"] = _verl_policy(found, arrays["behaviour_logp"], arrays["response_mask"])
    if info.top_k and "topk_ids" not in more:
        for name, key in (("topk_ids", "teacher_ids"), ("topk_logp", "teacher_logprobs")):
            arrays[name] = _verl_rows(
                found, key, "record the engine's top-K there (no stock setting does), or give topk_ids and topk_logp"
            )
    return tokens_from_arrays(info, step=step, **{**arrays, **more})


def samples_from_verl(batch: Any, *, step: int, eos: int | Collection[int]) -> list[SampleTrace]:
    """Responses of the batch that `tokens_from_verl` reads.

    Read besides are `prompts` [B, P] and `attention_mask` [B, P + T]; as the reward, the sum of `token_level_scores` or
    of `rm_scores` [B, T] (NaN without either); as the right answer `reward_model["ground_truth"]`, if it is there. A
    response is finished if its last sampled token is one of `eos`.
    """
    found = _fields(batch)
    scored = [key for key in ("token_level_scores", "rm_scores") if key in found]
    references = found.get("reward_model")
    return _samples(
        step,
        prompts=_verl_prompts(found),
        tokens=_array(found, "responses", _VERL),
        mask=_array(found, "response_mask", _VERL),
        advantage=_array(found, "advantages", _VERL),
        reward=_array(found, scored[0], _VERL).sum(-1) if scored else None,
        group=_verl_groups(found),
        eos=eos,
        references=None if references is None else [str(row.get("ground_truth", "")) for row in _listed(references)],
    )


def tokens_from_trl(info: TraceInfo, batch: Mapping[str, Any], *, step: int, **more: Any) -> TokenTrace:
    """Tokens of what TRL's GRPOTrainer returns from `_generate_and_score_completions`.

    Read are:

    - `completion_ids` [B, T], the sampled ids, and `completion_mask` [B, T], times `tool_mask` [B, T] if it is there: 0
      for padding and tool output, and for completions that `mask_truncated_completions` took out;
    - `sampling_per_token_logps` [B, T], as log mu, which TRL has from vLLM only (`use_vllm=True`);
    - `old_per_token_logps` [B, T], as log pi before the first optimiser step on the batch (TRL computes them with
      `vllm_importance_sampling_correction=True`, its default). Give `policy_logp` in their place at later steps;
    - `advantages` [B];
    - `prompt_ids` and `prompt_mask` [B, P], if they are there: responses to equal prompts are a group.

    TRL records no top-K: `topk_ids`, `topk_logp` and a policy on them are given as `more`, which goes to
    `tokens_from_arrays`, in place of what was read. In `_compute_loss` the batch is a shuffled part of it, which needs
    `sample` and `group` besides. Raises what `tokens_from_arrays` raises, and TraceError for a missing key, with those
    that are there.
    """
    arrays: dict[str, Any] = {
        "tokens": _array(batch, "completion_ids", _TRL),
        "response_mask": _trl_mask(batch),
        "behaviour_logp": _array(batch, "sampling_per_token_logps", "set use_vllm=True in GRPOConfig"),
        "advantage": _array(batch, "advantages", _TRL),
    }
    if "prompt_ids" in batch:
        arrays["group"] = _numbered(_trl_prompts(batch))
    if not {"policy_logp", "policy_logits"} & set(more):
        arrays["policy_logp"] = _array(
            batch,
            "old_per_token_logps",
            "set vllm_importance_sampling_correction=True in GRPOConfig, or give policy_logp",
        )
    return tokens_from_arrays(info, step=step, **{**arrays, **more})


def samples_from_trl(
    batch: Mapping[str, Any], *, step: int, eos: int | Collection[int], reward: Any = None
) -> list[SampleTrace]:
    """Responses of the batch that `tokens_from_trl` reads, with `prompt_ids` and `prompt_mask` [B, P].

    TRL's batch has no rewards; give them as `reward` [B], otherwise they are NaN. A response is finished if its last
    sampled token is one of `eos`.
    """
    prompts = _trl_prompts(batch)
    return _samples(
        step,
        prompts=prompts,
        tokens=_array(batch, "completion_ids", _TRL),
        mask=_trl_mask(batch),
        advantage=_array(batch, "advantages", _TRL),
        reward=reward,
        group=_numbered(prompts),
        eos=eos,
    )


def _samples(
    step: int,
    *,
    prompts: Sequence[tuple[int, ...]],
    tokens: Tensor,
    mask: Tensor,
    advantage: Tensor,
    reward: Any,
    group: Sequence[int],
    eos: int | Collection[int],
    references: Sequence[str] | None = None,
) -> list[SampleTrace]:
    ends = {eos} if isinstance(eos, int) else set(eos)
    sampled = mask != 0
    lengths = until_last(sampled).sum(1).tolist()
    rewards = [math.nan] * len(prompts) if reward is None else as_tensor("reward", reward).tolist()
    if advantage.ndim == 2:
        # In double precision, the mean of equal numbers is that number.
        totals = advantage.double().masked_fill(~sampled, 0.0).sum(1)
        advantage = totals / sampled.sum(1)
    return [
        SampleTrace(
            step=step,
            sample=row,
            group=group[row],
            prompt=prompts[row],
            reward=float(rewards[row]),
            advantage=float(advantage[row]),
            length=length,
            finished=length > 0 and int(tokens[row, length - 1]) in ends,
            reference="" if references is None else references[row],
        )
        for row, length in enumerate(lengths)
    ]


def _fields(batch: Any) -> dict[str, Any]:
    """What a DataProto, a TensorDict or a mapping holds, by name."""
    if hasattr(batch, "non_tensor_batch"):
        return {**_fields(batch.batch), **batch.non_tensor_batch}
    return {key: batch[key] for key in batch.keys()}  # noqa: SIM118  a TensorDict iterates over rows


def _need(found: Mapping[str, Any], key: str, remedy: str) -> Any:
    if key not in found:
        raise TraceError(f"the batch has no {key!r}: {remedy}; it has {', '.join(sorted(found)) or 'nothing'}")
    return found[key]


def _array(found: Mapping[str, Any], key: str, remedy: str) -> Tensor:
    """An array of the batch on the CPU; a nested one with zeros behind its rows."""
    values = as_tensor(key, _need(found, key, remedy)).cpu()
    return values.to_padded_tensor(0) if values.is_nested else values


def _verl_policy(found: Mapping[str, Any], behaviour_logp: Tensor, mask: Tensor) -> Tensor:
    """Log pi, unless it is a copy of log mu."""
    logp = _array(found, "old_log_probs", "give the batch after they are computed, or policy_logp=")
    if mask.any() and torch.equal(logp[mask != 0], behaviour_logp[mask != 0]):
        raise TraceError(
            "old_log_probs are a copy of rollout_log_probs (algorithm.rollout_correction.bypass_mode=True), which says "
            "nothing of the trained policy; give policy_logp=, the actor's own log-probs"
        )
    return logp


def _verl_rows(found: Mapping[str, Any], key: str, remedy: str) -> Tensor:
    """[B, T, K] of the rows that belong to response tokens: the row before each token's own place."""
    rows, prompts, responses = (as_tensor(name, _need(found, name, remedy)) for name in (key, "prompts", "responses"))
    if rows.is_nested:
        parts = zip(rows.unbind(), prompts.unbind(), responses.unbind(), strict=True)
        cut = [row[len(prompt) - 1 : len(prompt) - 1 + len(response)] for row, prompt, response in parts]
        return torch.nn.utils.rnn.pad_sequence(cut, batch_first=True)
    start, length = prompts.shape[1], responses.shape[1]
    if rows.shape[1] != start + length:
        raise TraceError(f"{key} has {rows.shape[1]} rows for prompts of {start} and responses of {length} places")
    return rows[:, start - 1 : start - 1 + length]


def _verl_prompts(found: Mapping[str, Any]) -> list[tuple[int, ...]]:
    prompts = as_tensor("prompts", _need(found, "prompts", _VERL))
    if prompts.is_nested:
        return [tuple(prompt.tolist()) for prompt in prompts.unbind()]
    return _unpadded(prompts, _array(found, "attention_mask", _VERL)[:, : prompts.shape[1]])


def _verl_groups(found: Mapping[str, Any]) -> list[int]:
    if "uid" not in found:
        return list(range(len(found["responses"])))
    return _numbered(_listed(found["uid"]))


def _trl_mask(batch: Mapping[str, Any]) -> Tensor:
    mask = _array(batch, "completion_mask", _TRL)
    return mask * _array(batch, "tool_mask", _TRL) if "tool_mask" in batch else mask


def _trl_prompts(batch: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return _unpadded(_array(batch, "prompt_ids", _TRL), _array(batch, "prompt_mask", _TRL))


def _unpadded(ids: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[kept].tolist()) for row, kept in zip(ids, mask != 0, strict=True)]


def _listed(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _numbered(names: Iterable[Hashable]) -> list[int]:
    """Numbers from 0 in the order in which names appear first."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
