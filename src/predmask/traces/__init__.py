"""Token traces: what a mask saw and decided, token by token, in Parquet files that any tool can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from predmask.traces.hosts import samples_from_trl, samples_from_verl, tokens_from_trl, tokens_from_verl
from predmask.traces.importers import tokens_from_arrays
from predmask.traces.records import FullRows, SampleTrace, TokenTrace, TraceError, TraceInfo, rule_settings
from predmask.traces.vocabulary import token_texts

if TYPE_CHECKING:
    from predmask.traces.reader import Trace
    from predmask.traces.writer import TraceWriter


def __getattr__(name: str) -> Any:
    # Parquet is loaded by those who read or write it; records need torch alone.
    if name == "Trace":
        from predmask.traces.reader import Trace

        return Trace
    if name == "TraceWriter":
        from predmask.traces.writer import TraceWriter

        return TraceWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FullRows",
    "SampleTrace",
    "TokenTrace",
    "Trace",
    "TraceError",
    "TraceInfo",
    "TraceWriter",
    "rule_settings",
    "samples_from_trl",
    "samples_from_verl",
    "token_texts",
    "tokens_from_arrays",
    "tokens_from_trl",
    "tokens_from_verl",
]
