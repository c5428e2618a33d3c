"""Token traces: what a mask saw and decided, token by token, in Parquet files that any tool can read."""

from predmask.traces.reader import Trace
from predmask.traces.records import FullRows, SampleTrace, TokenTrace, TraceError, TraceInfo, rule_settings
from predmask.traces.vocabulary import token_texts
from predmask.traces.writer import TraceWriter

__all__ = [
    "FullRows",
    "SampleTrace",
    "TokenTrace",
    "Trace",
    "TraceError",
    "TraceInfo",
    "TraceWriter",
    "rule_settings",
    "token_texts",
]
