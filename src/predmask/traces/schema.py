"""The columns of a trace, version 1, and what refuses other files.

docs/instruments.md describes them for readers with other tools. A list column has a fixed size: S = K + 1 slots of the
support (slot 0 is the sampled token), or V for whole distributions.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from predmask.traces.records import TraceError, TraceInfo

VERSION = 1
ROW_GROUP = 32_768
"""Most tokens that are written, and read, at once."""
_CHUNK_BYTES = 64e6
"""About the most that a chunk of tokens takes in memory: rows of a whole vocabulary are long."""
VOCABULARY = pa.schema([("id", pa.int32()), ("text", pa.string())])
"""The columns of vocabulary.parquet."""
_KEY = b"predmask_trace"

PLACES = ("step", "epoch", "minibatch", "optimizer_step", "version", "sample", "group", "position")
AFTER, FULL = ("after_logp", "after_log_tail"), ("full_behaviour", "full_policy", "full_after")
"""Columns that come and go together: the policy after the optimiser step, and whole distributions."""
OPTIONAL = {
    "tail_sum_squares": ("tail_sum_squares",),
    "entropy": ("entropy",),
    "after_logp": AFTER,
    "after_log_tail": AFTER,
    "full_behaviour": FULL,
    "full_policy": FULL,
    "full_after": ("full_after",),
}
"""Columns that may be absent from a file, each with the columns that are absent with it."""


def token_schema(info: TraceInfo) -> pa.Schema:
    """Every column that a token can have; those of `OPTIONAL` may be absent from a file."""
    ids = pa.list_(pa.int32(), info.top_k + 1)
    slots = pa.list_(pa.float32(), info.top_k + 1)
    row = pa.list_(pa.float32(), info.vocabulary_size)
    return pa.schema(
        [
            ("run", pa.dictionary(pa.int32(), pa.string())),
            *((name, pa.int32()) for name in PLACES),
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
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("length", pa.int32()),
            ("finished", pa.bool_()),
            ("problem", pa.string()),
            ("reference", pa.string()),
        ],
        metadata=_metadata(info),
    )


def rows_at_once(schema: pa.Schema) -> int:
    """How many tokens fit into a chunk, by the size of their lists."""
    size = sum(4 * (kind.list_size if is_list(kind) else 1) for kind in schema.types)
    return int(max(1, min(ROW_GROUP, _CHUNK_BYTES // size)))


def item_type(kind: pa.DataType) -> pa.DataType:
    """What a column holds, or what its lists hold."""
    return kind.value_type if is_list(kind) else kind


def read_info(schema: pa.Schema, source: Path) -> TraceInfo:
    """What a file says of its trace; TraceError for a foreign file and for a newer version."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        raise TraceError(
            f"{source} is no token trace of predmask's format; predmask.traces writes one from arrays of other trainers"
        )
    try:
        found = json.loads(text)
        version = found.pop("format_version")
        if type(version) is not int or version < 1:
            raise ValueError(f"format_version is {version!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(source, error) from error
    if version > VERSION:
        raise TraceError(
            f"{source} has trace format {version}, and this predmask reads formats up to {VERSION}: upgrade predmask"
        )
    try:
        info = TraceInfo(**found)
        check_info(info)
    except (TypeError, ValueError) as error:
        raise _unreadable(source, error) from error
    return info


def check_schema(schema: pa.Schema, expected: pa.Schema, source: Path) -> None:
    """Raise TraceError for a column that is missing or of another type; further columns are left alone."""
    for field in expected:
        found = schema.get_all_field_indices(field.name)
        if len(found) > 1:
            raise TraceError(f"{source}: column {field.name!r} is there {len(found)} times")
        if not found and field.name not in OPTIONAL:
            raise TraceError(f"{source}: column {field.name!r} is missing; it has {', '.join(schema.names)}")
        if not found:
            left = [name for name in OPTIONAL[field.name] if name in schema.names]
            if left:
                raise TraceError(f"{source}: it has column {left[0]!r}, but column {field.name!r} is missing")
            continue
        kind = schema.field(found[0]).type
        if kind != field.type and not (pa.types.is_dictionary(field.type) and kind == pa.string()):
            raise TraceError(f"{source}: column {field.name!r} is {kind}; expected {field.type}")


def check_info(info: TraceInfo) -> None:
    """Raise TraceError for a description that no trace can have."""
    sizes = info.vocabulary_size, info.top_k
    if any(type(size) is not int for size in sizes) or not 0 <= info.top_k <= info.vocabulary_size < 2**31 - 1:
        raise TraceError(f"vocabulary_size and top_k are {sizes}; expected whole numbers with 0 <= K <= V")
    if type(info.temperature) is not float or not 0 < info.temperature < math.inf:
        raise TraceError(f"temperature is {info.temperature!r}; expected a number above 0")
    if not isinstance(info.rule, dict) or not isinstance(info.rule.get("name"), str):
        raise TraceError(f"rule is {info.rule!r}; expected its name and its fields (rule_settings)")
    if not isinstance(info.run, str) or info.run != info.run.encode("utf-8", "replace").decode():
        raise TraceError(f"run is {info.run!r}; expected text")


def _unreadable(source: Path, error: Exception) -> TraceError:
    return TraceError(f"{source}: the trace's description cannot be read ({error!r}); write the trace anew")


def _metadata(info: TraceInfo) -> dict[bytes, bytes]:
    described = {"format_version": VERSION, **asdict(info)}
    return {_KEY: json.dumps(described).encode()}


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists of one size."""
    return pa.types.is_fixed_size_list(kind)
