"""A run directory as the instruments read it, finished or not."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predmask.analysis import AnalysisError
from predmask.traces import Trace


@dataclass(frozen=True)
class Run:
    """What a run wrote down; a run that was killed has what it had written by then."""

    path: Path
    config: Mapping[str, Any]
    """config.toml; empty for a trace of another trainer."""
    steps: list[Mapping[str, Any]]
    """The lines of metrics.jsonl from step 1 on, each with `step`."""
    evaluations: list[Mapping[str, Any]]
    """Held-out accuracy where it was measured: `step`, `sampled`, `greedy`, ..."""
    summary: Mapping[str, Any] | None
    """summary.json, where the run came to its end."""
    trace: Trace | None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    def need_trace(self) -> Trace:
        """The trace; TraceError with the remedy where there is none."""
        return self.trace if self.trace is not None else Trace(self.path)


def read_run(path: Path | str) -> Run:
    """The run in a directory: that of `predmask train`, or a trace of another trainer alone.

    Raises AnalysisError for a directory that is neither, TraceError for a trace that cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise AnalysisError(f"{str(path)!r} is no directory; name a run directory, such as one under runs/")
    trace = _trace(path)
    if not (path / "config.toml").is_file() and trace is None:
        raise AnalysisError(
            f"{str(path)!r} is no run directory: it has neither config.toml nor traces/; `predmask train` prints where "
            "a run lies"
        )
    records = _lines(path / "metrics.jsonl")
    return Run(
        path=path,
        config=_toml(path / "config.toml"),
        steps=[record for record in records if record["step"] > 0],
        evaluations=[{"step": record["step"], **record["heldout"]} for record in records if "heldout" in record],
        summary=_json(path / "summary.json"),
        trace=trace,
    )


def _trace(path: Path) -> Trace | None:
    found = any(path.glob("tokens-*.parquet")) or any((path / "traces").glob("tokens-*.parquet"))
    return Trace(path) if found else None


def _toml(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AnalysisError(f"{file} cannot be read: {error}") from error


def _json(file: Path) -> Mapping[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AnalysisError(f"{file} cannot be read: {error}") from error


def _lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file with one a line; the last line of a killed run may be cut."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise AnalysisError(f"{file}, line {number} cannot be read: {error!r}") from error
        records.append(record)
    return records
