"""Between tensors and a trace's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from predmask.core import BehaviourSupport, MaskDecision, PolicySupport, Reason
from predmask.traces.records import FullRows, SampleTrace, TokenTrace, TraceError, TraceInfo
from predmask.traces.schema import PLACES, is_list, item_type, sample_schema, token_schema


def schema_of(tokens: TokenTrace, info: TraceInfo) -> pa.Schema:
    """The columns that these tokens have; TraceError where they do not fit the trace's information."""
    behaviour, policy = tokens.behaviour, tokens.policy
    if behaviour.top_k != info.top_k or policy.vocabulary_size != info.vocabulary_size:
        raise TraceError(
            f"tokens with K = {behaviour.top_k} and V = {policy.vocabulary_size} do not fit a trace of K = "
            f"{info.top_k} and V = {info.vocabulary_size}"
        )
    schema, columns = token_schema(info), _columns(tokens)
    present = [field for field in schema if field.name == "run" or columns[field.name] is not None]
    return pa.schema(present, metadata=schema.metadata)


def tokens_to_arrow(tokens: TokenTrace, info: TraceInfo) -> pa.RecordBatch:
    """Tokens as columns; TraceError for values that no trace can have."""
    schema, columns = schema_of(tokens, info), _columns(tokens)
    _check_values(tokens, info)
    arrays = [
        _run_column(info, len(tokens)) if field.name == "run" else _column(field, cast("Tensor", columns[field.name]))
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def samples_to_arrow(samples: Sequence[SampleTrace], info: TraceInfo) -> pa.RecordBatch:
    """The columns of responses."""
    rows = [{"run": info.run, **asdict(sample)} for sample in samples]
    return pa.RecordBatch.from_pylist(rows, schema=sample_schema(info))


def tokens_from_arrow(batch: pa.RecordBatch, info: TraceInfo, step: int, source: Path) -> TokenTrace:
    """Tokens of a step from their columns, which `check_schema` let through; TraceError for impossible values."""

    def read(name: str) -> Tensor:
        column = batch.column(name)
        empty = column.null_count + (column.flatten().null_count if is_list(column.type) else 0)
        if empty:
            raise TraceError(f"{source}: column {name!r} has {empty} empty entries; write the trace anew")
        return _tensor(column)

    def optional(name: str) -> Tensor | None:
        return read(name) if name in batch.schema.names else None

    ids, logp = read("support_ids").long(), read("behaviour_logp")
    valid = logp != -math.inf
    valid[:, 0] = True
    behaviour = BehaviourSupport(
        ids=ids,
        valid=valid,
        logp=logp,
        log_tail=read("behaviour_log_tail"),
        log_kth=read("behaviour_log_kth"),
        top_k=info.top_k,
    )
    policy = PolicySupport(
        logp=read("policy_logp"),
        log_tail=read("policy_log_tail"),
        vocabulary_size=info.vocabulary_size,
        tail_sum_squares=optional("tail_sum_squares"),
        entropy=optional("entropy"),
    )
    decision = MaskDecision(
        **{name: read(name) for name in ("keep", "divergence", "rate", "outside", "reason", "weight")},
        response_mask=read("response"),
    )
    after_logp, full_behaviour = optional("after_logp"), optional("full_behaviour")
    tokens = TokenTrace(
        **{name: read(name).long() for name in PLACES},
        advantage=read("advantage"),
        behaviour=behaviour,
        policy=policy,
        decision=decision,
        after=None
        if after_logp is None
        else PolicySupport(logp=after_logp, log_tail=read("after_log_tail"), vocabulary_size=info.vocabulary_size),
        full=None
        if full_behaviour is None
        else FullRows(behaviour=full_behaviour, policy=read("full_policy"), after=optional("full_after")),
    )
    if (tokens.step != step).any():
        raise TraceError(f"{source} has tokens of step {int(tokens.step[tokens.step != step][0])}")
    try:
        _check_values(tokens, info)
    except TraceError as error:
        raise TraceError(f"{source}: {error}; write the trace anew") from error
    if (read("id") != tokens.id).any():
        raise TraceError(f"{source}: column 'id' differs from the first of 'support_ids'; it is the sampled token")
    return tokens


def samples_from_arrow(table: pa.Table, step: int, source: Path) -> list[SampleTrace]:
    """The responses of a step from their columns; TraceError for empty entries and for those of another step."""
    rows = table.to_pylist()
    for row in rows:
        if any(value is None for value in row.values()) or None in row["prompt"]:
            raise TraceError(f"{source}: a response has empty entries; write the trace anew")
        if row["step"] != step:
            raise TraceError(f"{source} has a response of step {row['step']}")
    return [SampleTrace(**{**row, "prompt": tuple(row["prompt"])}) for row in rows]


def _columns(tokens: TokenTrace) -> dict[str, Tensor | None]:
    """Every column but the run's; None where it was not recorded."""
    behaviour, policy, decision, full = tokens.behaviour, tokens.policy, tokens.decision, tokens.full
    columns: dict[str, Tensor | None] = {name: getattr(tokens, name) for name in PLACES}
    columns |= {
        "id": tokens.id,
        "advantage": tokens.advantage,
        "response": decision.response_mask,
        "support_ids": behaviour.ids,
        "behaviour_logp": behaviour.logp,
        "behaviour_log_tail": behaviour.log_tail,
        "behaviour_log_kth": behaviour.log_kth,
        "policy_logp": policy.logp,
        "policy_log_tail": policy.log_tail,
        "tail_sum_squares": policy.tail_sum_squares,
        "entropy": policy.entropy,
        "divergence": decision.divergence,
        "rate": decision.rate,
        "outside": decision.outside,
        "keep": decision.keep,
        "reason": decision.reason,
        "weight": decision.weight,
        "after_logp": None if tokens.after is None else tokens.after.logp,
        "after_log_tail": None if tokens.after is None else tokens.after.log_tail,
        "full_behaviour": None if full is None else full.behaviour,
        "full_policy": None if full is None else full.policy,
        "full_after": None if full is None else full.after,
    }
    return columns


def _check_values(tokens: TokenTrace, info: TraceInfo) -> None:
    """Raise TraceError for ids outside the vocabulary, places below 0 and decisions that contradict their reasons."""
    ids, decision = tokens.behaviour.ids, tokens.decision
    outside = ids[(ids < 0) | (ids >= info.vocabulary_size)]
    if outside.numel():
        raise TraceError(f"token id {int(outside[0])} is outside the vocabulary of {info.vocabulary_size}")
    for name in PLACES:
        places = getattr(tokens, name)
        if (places < 0).any():
            raise TraceError(f"{name} is {int(places.min())}; it must be 0 or more")
    reason = decision.reason
    if (reason > max(Reason)).any():
        raise TraceError(f"reason {int(reason.max())} is unknown; reasons are 0 to {int(max(Reason))}")
    kept = (reason == Reason.KEPT_INSIDE) | (reason == Reason.KEPT_RETURNING)
    decided = reason != Reason.NOT_TRAINABLE
    contradicting = torch.nonzero((kept != decision.keep) | (decided & ~decision.response_mask))
    if contradicting.numel():
        row = int(contradicting[0])
        raise TraceError(
            f"a token's reason is {Reason(int(reason[row])).name}, but keep is {bool(decision.keep[row])} and "
            f"response is {bool(decision.response_mask[row])}"
        )


def _run_column(info: TraceInfo, size: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, dtype=np.int32)), pa.array([info.run]))


def _column(field: pa.Field, values: Tensor) -> pa.Array:
    kind = item_type(field.type)
    flat = values.detach().cpu().reshape(-1)
    if flat.dtype == torch.float64:
        raise TraceError(f"{field.name} is float64, and a trace holds float32: convert it before the rule decides")
    if flat.dtype == torch.int64 and flat.numel() and int(flat.max()) >= 2**31:
        raise TraceError(f"{field.name} is {int(flat.max())}; a trace holds whole numbers below 2^31")
    numbers = flat.numpy()
    array = pa.array(numbers if pa.types.is_boolean(kind) else numbers.astype(kind.to_pandas_dtype(), copy=False))
    if is_list(field.type):
        if values.shape[-1] != field.type.list_size:
            raise TraceError(f"{field.name} has rows of {values.shape[-1]}; expected {field.type.list_size}")
        return pa.FixedSizeListArray.from_arrays(array, type=field.type)
    return array


def _tensor(column: Any) -> Tensor:
    """A column as a tensor of its own (Arrow's memory is read-only)."""
    if is_list(column.type):
        flat = column.flatten().to_numpy(zero_copy_only=False)
        return torch.from_numpy(flat.reshape(len(column), column.type.list_size).copy())
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
