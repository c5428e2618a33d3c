"""A run directory as the instruments read it, finished or not."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from predmask.analysis import AnalysisError
from predmask.traces import Trace
from predmask.traces.reader import DIRECTORY


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

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `failed: ` and why; `unfinished` where it goes on still, or was killed."""
        return "unfinished" if self.summary is None else str(self.summary.get("status", "unfinished"))

    @cached_property
    def trace(self) -> Trace | None:
        """The token trace, opened when it is first asked for; TraceError where it cannot be read."""
        return Trace(self.path) if _has_trace(self.path) else None

    def need_trace(self) -> Trace:
        """The trace; TraceError with the remedy where there is none."""
        return self.trace if self.trace is not None else Trace(self.path)


def read_run(path: Path | str) -> Run:
    """The run in a directory: that of `predmask train`, or a trace of another trainer alone.

    Raises AnalysisError for a directory that is neither, and for files that cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise AnalysisError(f"{str(path)!r} is no directory; name a run directory, such as one under runs/")
    if not (path / "config.toml").is_file() and not _has_trace(path):
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
    )


def _has_trace(path: Path) -> bool:
    return any(path.glob("tokens-*.parquet")) or any((path / DIRECTORY).glob("tokens-*.parquet"))


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
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise AnalysisError(
            f"{file} cannot be read ({error}); without that file the run reads as unfinished"
        ) from error
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file with one a line; the last line of a killed run may be cut."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
            if not isinstance(record.get("heldout", {}), dict):
                raise TypeError("heldout is no object")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if number == len(lines):
                break
            raise AnalysisError(f"{file}, line {number} cannot be read: {error!r}") from error
        records.append(record)
    return records
