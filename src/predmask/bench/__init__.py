"""Benchmarks: the operator side by side with what others offer, where that is installed."""

from predmask.bench.cases import BenchError, Case
from predmask.bench.ops import Clock, Result, Row, heading, measure, read_json, table, write_json
from predmask.bench.variants import VARIANTS, Variant

__all__ = [
    "VARIANTS",
    "BenchError",
    "Case",
    "Clock",
    "Result",
    "Row",
    "Variant",
    "heading",
    "measure",
    "read_json",
    "table",
    "write_json",
]
