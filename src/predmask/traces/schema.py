"""The columns of a trace, version 1, and the way between them and tensors.

docs/instruments.md describes them for readers with other tools. A list column has a fixed size: S = K + 1 slots of the
support (slot 0 is the sampled token), or V for whole distributions.
"""

from __future__ import annotations

import json
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

VERSION = 1
_KEY = b"predmask_trace"

_PLACES = ("step", "epoch", "minibatch", "optimizer_step", "version", "sample", "group", "position")
_AFTER = ("after_logp", "after_log_tail")
_FULL = ("full_behaviour", "full_policy")
_OPTIONAL = ("tail_sum_squares", "entropy", *_AFTER, *_FULL, "full_after")
_KEPT = (Reason.KEPT_INSIDE, Reason.KEPT_RETURNING)


def token_schema(info: TraceInfo) -> pa.Schema:
    """Every column that a token can have; those of `_OPTIONAL` may be absent from a file."""
    ids = pa.list_(pa.int32(), info.top_k + 1)
    slots = pa.list_(pa.float32(), info.top_k + 1)
    row = pa.list_(pa.float32(), info.vocabulary_size)
    return pa.schema(
        [
            ("run", pa.dictionary(pa.int32(), pa.string())),
            *((name, pa.int32()) for name in _PLACES),
            ("id", pa.int32()),
            ("advantage", pa.float32()),
            ("response", pa.bool_()),
            ("support_ids", ids),
            ("behaviour_logp", slots),
            ("behaviour_log_tail", pa.float32()),
            ("behaviour_log_kth", pa.float32()),
            ("policy_logp", slots),
            ("policy_log_tail", pa.float32()),
            ("tail_sum_squares", pa.float32()),
            ("entropy", pa.float32()),
            ("divergence", pa.float32()),
            ("rate", pa.float32()),
            ("outside", pa.bool_()),
            ("keep", pa.bool_()),
            ("reason", pa.uint8()),
            ("weight", pa.float32()),
            ("after_logp", slots),
            ("after_log_tail", pa.float32()),
            ("full_behaviour", row),
            ("full_policy", row),
            ("full_after", row),
        ],
        metadata=_metadata(info),
    )


def sample_schema(info: TraceInfo) -> pa.Schema:
    """The columns of a response."""
    return pa.schema(
        [
            ("run", pa.dictionary(pa.int32(), pa.string())),
            ("step", pa.int32()),
            ("sample", pa.int32()),
            ("group", pa.int32()),
            ("prompt", pa.list_(pa.int32())),
            ("reward", pa.float32()),
            ("advantage", pa.float32()),
            ("length", pa.int32()),
            ("finished", pa.bool_()),
            ("problem", pa.string()),
            ("reference", pa.string()),
        ],
        metadata=_metadata(info),
    )


def tokens_to_arrow(tokens: TokenTrace, info: TraceInfo) -> pa.RecordBatch:
    """The columns of tokens; TraceError where they do not fit the trace's information."""
    behaviour, policy, decision, full = tokens.behaviour, tokens.policy, tokens.decision, tokens.full
    if behaviour.top_k != info.top_k or policy.vocabulary_size != info.vocabulary_size:
        raise TraceError(
            f"tokens with K = {behaviour.top_k} and V = {policy.vocabulary_size} do not fit a trace of K = "
            f"{info.top_k} and V = {info.vocabulary_size}"
        )
    values: dict[str, Tensor | None] = {name: getattr(tokens, name) for name in _PLACES}
    values |= {
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
    schema = token_schema(info)
    present = [field for field in schema if field.name == "run" or values[field.name] is not None]
    columns = [
        _run_column(info, len(tokens)) if field.name == "run" else _column(field, cast("Tensor", values[field.name]))
        for field in present
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(present, metadata=schema.metadata))


def samples_to_arrow(samples: Sequence[SampleTrace], info: TraceInfo) -> pa.RecordBatch:
    """The columns of responses."""
    rows = [{"run": info.run, **asdict(sample)} for sample in samples]
    return pa.RecordBatch.from_pylist(rows, schema=sample_schema(info))


def tokens_from_arrow(batch: pa.RecordBatch, info: TraceInfo, source: Path) -> TokenTrace:
    """Tokens from their columns, which `check_schema` let through; TraceError for impossible values."""

    def read(name: str) -> Tensor:
        column = batch.column(name)
        empty = column.null_count + (column.flatten().null_count if _is_list(column.type) else 0)
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
        **{name: read(name).long() for name in _PLACES},
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
    _check_values(tokens, info, source)
    return tokens


def samples_from_arrow(batch: pa.RecordBatch) -> list[SampleTrace]:
    """Responses from their columns."""
    rows = batch.drop_columns(["run"]).to_pylist()
    return [SampleTrace(**{**row, "prompt": tuple(row["prompt"])}) for row in rows]


def read_info(schema: pa.Schema, source: Path) -> TraceInfo:
    """What a file says of its trace; TraceError for a foreign file and for a newer version."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        raise TraceError(
            f"{source} is no token trace of predmask's format; predmask.traces writes one from arrays of other trainers"
        )
    try:
        found = json.loads(text)
        version = int(found.pop("format_version"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(source, error) from error
    if version > VERSION:
        raise TraceError(
            f"{source} has trace format {version}, and this predmask reads formats up to {VERSION}: upgrade predmask"
        )
    try:
        info = TraceInfo(**found)
        rule, temperature = dict(info.rule), float(info.temperature)
        sizes = info.vocabulary_size, info.top_k
        if not all(isinstance(size, int) for size in sizes) or not 0 <= info.top_k <= info.vocabulary_size < 2**31:
            raise ValueError(f"V and K are {sizes}")
        if not isinstance(info.run, str) or not temperature > 0 or not isinstance(rule.get("name"), str):
            raise ValueError(f"run {info.run!r}, temperature {temperature}, rule {rule}")
    except (TypeError, ValueError) as error:
        raise _unreadable(source, error) from error
    return info


def check_schema(schema: pa.Schema, expected: pa.Schema, source: Path) -> None:
    """Raise TraceError for a column that is missing or of another type; further columns are left alone."""
    for field in expected:
        at = schema.get_field_index(field.name)
        if at < 0:
            if field.name in _OPTIONAL:
                continue
            raise TraceError(f"{source}: column {field.name!r} is missing; it has {', '.join(schema.names)}")
        found = schema.field(at).type
        if found != field.type and not (pa.types.is_dictionary(field.type) and found == pa.string()):
            raise TraceError(f"{source}: column {field.name!r} is {found}; expected {field.type}")
    for together in (_AFTER, _FULL):
        if len(present := [name for name in together if name in schema.names]) == 1:
            raise TraceError(f"{source}: it has column {present[0]!r}, but not all of {', '.join(together)}")


def _unreadable(source: Path, error: Exception) -> TraceError:
    return TraceError(f"{source}: the trace's description cannot be read ({error!r}); write the trace anew")


def _metadata(info: TraceInfo) -> dict[bytes, bytes]:
    described = {"format_version": VERSION, **asdict(info)}
    return {_KEY: json.dumps(described).encode()}


def _check_values(tokens: TokenTrace, info: TraceInfo, source: Path) -> None:
    """What no predmask writes: ids outside the vocabulary, unknown reasons, decisions that contradict them."""
    if not len(tokens):
        return
    ids, reason = tokens.behaviour.ids, tokens.decision.reason
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocabulary_size:
        bad = ids[(ids < 0) | (ids >= info.vocabulary_size)]
        raise TraceError(f"{source}: token id {int(bad[0])} is outside the vocabulary of {info.vocabulary_size}")
    if int(reason.max()) > max(Reason):
        raise TraceError(f"{source}: reason {int(reason.max())} is unknown; reasons are 0 to {int(max(Reason))}")
    kept = (reason == _KEPT[0]) | (reason == _KEPT[1])
    contradicting = torch.nonzero(kept != tokens.decision.keep)
    if contradicting.numel():
        row = int(contradicting[0])
        raise TraceError(
            f"{source}: a token's reason is {Reason(int(reason[row])).name}, but keep is "
            f"{bool(tokens.decision.keep[row])}; write the trace anew"
        )


def _run_column(info: TraceInfo, size: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, dtype=np.int32)), pa.array([info.run]))


def _column(field: pa.Field, values: Tensor) -> pa.Array:
    inner = field.type.value_type if _is_list(field.type) else field.type
    flat = values.detach().cpu().reshape(-1).numpy()
    if pa.types.is_boolean(inner):
        array = pa.array(flat)
    else:
        array = pa.array(flat.astype(inner.to_pandas_dtype(), copy=False))
    if _is_list(field.type):
        if values.shape[-1] != field.type.list_size:
            raise TraceError(f"column {field.name!r} holds rows of {field.type.list_size}, not of {values.shape[-1]}")
        return pa.FixedSizeListArray.from_arrays(array, type=field.type)
    return array


def _tensor(column: Any) -> Tensor:
    """A column as a tensor of its own (Arrow's memory is read-only)."""
    if _is_list(column.type):
        flat = column.flatten().to_numpy(zero_copy_only=False)
        return torch.from_numpy(flat.reshape(len(column), column.type.list_size).copy())
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind)
