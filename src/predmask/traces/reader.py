"""Reading a trace, a chunk at a time, and refusing what is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from predmask.traces.records import DIRECTORY, SampleTrace, TokenTrace, TraceError, TraceInfo
from predmask.traces.schema import (
    check_schema,
    read_info,
    sample_schema,
    samples_from_arrow,
    token_schema,
    tokens_from_arrow,
)
from predmask.traces.writer import ROW_GROUP


class Trace:
    """The trace in a run directory, or in a directory of its own.

    Raises TraceError when there is none, and for files that are truncated, foreign or of a newer version.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.directory = path / DIRECTORY if (path / DIRECTORY).is_dir() else path
        self._files = {_step(file): file for file in sorted(self.directory.glob("tokens-*.parquet"))}
        if not self._files:
            raise TraceError(
                f"{path} has no token trace; record one with `predmask train PRESET --traces`, or write one from your "
                "own trainer (predmask.traces)"
            )
        infos = [self._check(file) for file in self._files.values()]
        self.info: TraceInfo = infos[0]
        """What holds for every token."""
        for file, info in zip(self._files.values(), infos, strict=True):
            if info != self.info:
                raise TraceError(f"{file} belongs to another run than {next(iter(self._files.values()))}")

    @property
    def steps(self) -> list[int]:
        """The steps that were recorded, in order."""
        return list(self._files)

    @cached_property
    def columns(self) -> frozenset[str]:
        """Names of the columns that every file has."""
        names = [set(_schema(file).names) for file in self._files.values()]
        return frozenset(set.intersection(*names))

    @cached_property
    def size(self) -> int:
        """Tokens in all."""
        return sum(_rows(file) for file in self._files.values())

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """What token ids look like; empty where that was not recorded."""
        file = self.directory / "vocabulary.parquet"
        if not file.exists():
            return {}
        with _readable(file):
            table = pq.read_table(file, columns=["id", "text"])
        return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))

    def tokens(self, steps: Sequence[int] | None = None, *, without: Sequence[str] = ()) -> Iterator[TokenTrace]:
        """The tokens of some steps, or of all, in chunks of up to `ROW_GROUP`, `without` some optional columns."""
        for step in self.steps if steps is None else steps:
            file = self._file(step)
            with _readable(file), pq.ParquetFile(file, memory_map=True) as source:
                wanted = [name for name in token_schema(self.info).names if name in source.schema_arrow.names]
                wanted = [name for name in wanted if name not in without and name != "run"]
                for batch in source.iter_batches(ROW_GROUP, columns=wanted, use_threads=False):
                    yield tokens_from_arrow(batch, self.info, file)

    def samples(self, step: int) -> list[SampleTrace]:
        """The responses of a step; empty where they were not recorded."""
        file = self.directory / self._file(step).name.replace("tokens-", "samples-")
        if not file.exists():
            return []
        check_schema(_schema(file), sample_schema(self.info), file)
        with _readable(file):
            table = pq.read_table(file)
        return [sample for batch in table.to_batches() for sample in samples_from_arrow(batch)]

    def text(self, token: int) -> str:
        """A token as people read it: its text, or its id where texts were not recorded."""
        return self.vocabulary.get(token, f"⟨{token}⟩")

    def _file(self, step: int) -> Path:
        if step not in self._files:
            raise TraceError(f"step {step} was not recorded; the trace has steps {_ranges(self.steps)}")
        return self._files[step]

    def _check(self, file: Path) -> TraceInfo:
        schema = _schema(file)
        info = read_info(schema, file)
        check_schema(schema, token_schema(info), file)
        return info


def _schema(file: Path) -> pa.Schema:
    with _readable(file):
        return pq.read_schema(file)


def _rows(file: Path) -> int:
    with _readable(file):
        return pq.read_metadata(file).num_rows


def _step(file: Path) -> int:
    text = file.stem.removeprefix("tokens-")
    if not text.isdecimal():
        raise TraceError(f"{file}: a trace's files are called tokens-000001.parquet and so on, by their step")
    return int(text)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """A TraceError that names the file, instead of Parquet's errors."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise TraceError(f"{file} cannot be read: it is truncated or no Parquet file ({reason})") from error


def _ranges(steps: Sequence[int]) -> str:
    """1, 3 to 7, 9"""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)
