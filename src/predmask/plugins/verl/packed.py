"""A micro-batch of verl as one row of tokens, and the statistics of its logits on their way through it.

verl packs sequences without padding; a row of logits predicts the token after it. Sequence parallelism cuts the
packed rows, tensor parallelism the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, PolicySupport

TOPK_IDS, TOPK_LOGP = "teacher_ids", "teacher_logprobs"
"""The batch fields that carry the top-K: those of verl's distillation, the only ones that its batches pad and cut."""
_COLUMN = "predmask_"


@dataclass(frozen=True)
class Packed:
    """The response tokens of a micro-batch, one after the other."""

    behaviour: BehaviourSupport
    """[N] mu"""
    advantage: Tensor
    """[N]"""
    response_mask: Tensor
    """[N] bool"""
    row: Tensor
    """[N] int64, the packed row whose logits predict the token"""
    lengths: Tensor
    """[B] tokens of each response"""
    offsets: Tensor
    """[B + 1] where each sequence begins in the packed rows"""

    @classmethod
    def of(cls, data: Mapping[str, Any], top_k: int) -> Packed:
        """The tokens of a micro-batch of verl's V1 trainer, whose fields are nested.

        Read are `input_ids` [B, P + T], `response_mask`, `old_log_probs` and `advantages` [B, T]; where K > 0 also
        `teacher_ids` and `teacher_logprobs` [B, P + T, K].
        """
        ids, mask = data["input_ids"], data["response_mask"]
        if not (ids.is_nested and mask.is_nested):
            raise ValueError("predmask reads the nested batches of verl's V1 trainer; set trainer.use_v1=True")
        offsets, lengths = ids.offsets(), mask.offsets().diff()
        # The last row of a sequence predicts nothing.
        first = offsets[1:] - lengths - 1
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        place = torch.arange(len(sequence), device=lengths.device) - mask.offsets()[:-1][sequence]
        row = first[sequence] + place
        topk_ids = topk_logp = None
        if top_k:
            topk_ids, topk_logp = _topk(data, top_k)
            topk_ids, topk_logp = topk_ids[row].long(), topk_logp[row].float()
        behaviour = BehaviourSupport.from_topk(
            ids.values()[row + 1], data["old_log_probs"].values().float(), topk_ids, topk_logp
        )
        return cls(
            behaviour=behaviour,
            advantage=data["advantages"].values().float(),
            response_mask=mask.values() != 0,
            row=row,
            lengths=lengths,
            offsets=offsets,
        )

    @cached_property
    def marks(self) -> Tensor:
        """[B, P + T] nested int64: n + 1 in the row that predicts token n of the response mask, 0 elsewhere.

        The host cuts it as it cuts the batch, and pads it with zeros.
        """
        marks = torch.zeros(int(self.offsets[-1]), dtype=torch.int64, device=self.row.device)
        numbers = torch.arange(1, len(self.row) + 1, device=self.row.device)
        marks[self.row[self.response_mask]] = numbers[self.response_mask]
        return torch.nested.nested_tensor_from_jagged(marks, self.offsets)

    def padded(self, values: Tensor, width: int) -> Tensor:
        """[B, T] from [N], with zeros behind each response."""
        there = torch.arange(width, device=values.device) < self.lengths[:, None]
        # masked_scatter keeps the graph.
        return torch.zeros(there.shape, dtype=values.dtype, device=values.device).masked_scatter(there, values)

    def flat(self, values: Tensor) -> Tensor:
        """[N] from [B, T]."""
        there = torch.arange(values.shape[1], device=values.device) < self.lengths[:, None]
        return values[there]


def columns(policy: PolicySupport, marks: Tensor) -> dict[str, Tensor]:
    """The statistics of the tokens that are marked, as the host carries them: a number a row, NaN where there is none.

    `marks` is what is here of `Packed.marks`, of any shape, with n tokens; `policy` [n] is that of these tokens.
    """
    numbers = [*policy.logp.unbind(-1), policy.log_tail, policy.tail_sum_squares, policy.entropy]
    found: dict[str, Tensor] = {}
    for i, values in enumerate(numbers):
        column = torch.full(marks.shape, torch.nan, dtype=torch.float32, device=marks.device)
        found[f"{_COLUMN}{i}"] = column.masked_scatter_(marks > 0, values.float())
    return found


def policy_from(model_output: dict[str, Any], packed: Packed, vocabulary_size: int) -> PolicySupport:
    """What `columns` made, after the host has put the rows together; it is taken out of `model_output`."""
    count = packed.behaviour.ids.shape[-1] + 3
    found = [model_output.pop(f"{_COLUMN}{i}").values()[packed.row] for i in range(count)]
    logp = torch.stack(found[:-3], dim=-1).masked_fill(~packed.behaviour.valid, -torch.inf)
    # Outside the response mask nothing was measured.
    policy = PolicySupport(
        logp=logp,
        log_tail=found[-3],
        vocabulary_size=vocabulary_size,
        tail_sum_squares=found[-2],
        entropy=found[-1],
    )
    return replace(policy, logp=policy.logp.masked_fill(~packed.response_mask[:, None], torch.nan))


def _topk(data: Mapping[str, Any], top_k: int) -> tuple[Tensor, Tensor]:
    """[rows, K] ids and log-probs; ValueError where the rollout did not record K of them."""
    missing = [name for name in (TOPK_IDS, TOPK_LOGP) if name not in data.keys()]  # noqa: SIM118
    if missing:
        raise ValueError(
            f"top-K missing: the batch has no {' and no '.join(missing)}; set "
            "actor_rollout_ref.rollout.agent.default_agent_loop=predmask (`predmask verl args` prints all that is "
            "needed), and leave agent_name out of the data"
        )
    ids, logp = data[TOPK_IDS].values(), data[TOPK_LOGP].values()
    if ids.shape[-1:] != (top_k,) or ids.shape != logp.shape:
        raise ValueError(
            f"the batch carries top-K of shapes {tuple(ids.shape)} and {tuple(logp.shape)}, and policy_loss.top_k is "
            f"{top_k}; does another part of the configuration write {TOPK_IDS} (distillation)?"
        )
    return ids, logp
