"""Reading a trace, a chunk at a time, and refusing what is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from predmask.traces.columns import samples_from_arrow, tokens_from_arrow
from predmask.traces.records import DIRECTORY, SampleTrace, TokenTrace, TraceError, TraceInfo
from predmask.traces.schema import (
    OPTIONAL,
    VOCABULARY,
    check_schema,
    read_info,
    rows_at_once,
    sample_schema,
    token_schema,
)


class Trace:
    """The trace in a run directory, or in a directory of its own.

    Raises TraceError when there is none, and for files that are truncated, foreign or of a newer version.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        if not path.is_dir():
            raise TraceError(f"{str(path)!r} is no directory; name a run directory, or one with a trace")
        self.directory = path / DIRECTORY if (path / DIRECTORY).is_dir() else path
        self._files = _files(self.directory)
        if not self._files:
            begun = any(self.directory.glob("tokens-*.partial"))
            raise TraceError(
                f"{path} has no whole step of a token trace yet"
                if begun
                else f"{path} has no token trace; record one with `predmask train PRESET --traces`, or write one from "
                "your own trainer (predmask.traces)"
            )
        footers = [_footer(file) for file in self._files.values()]
        infos = [_check(schema, file) for (schema, _), file in zip(footers, self._files.values(), strict=True)]
        self.info: TraceInfo = infos[0]
        """What holds for every token."""
        self.columns = frozenset.intersection(*(frozenset(schema.names) for schema, _ in footers))
        """Names of the columns that every file has."""
        self.size = sum(rows for _, rows in footers)
        """Tokens in all."""
        for file, info in zip(self._files.values(), infos, strict=True):
            if info != self.info:
                raise TraceError(f"{file} belongs to another run than {next(iter(self._files.values()))}")

    @property
    def steps(self) -> list[int]:
        """The steps that were recorded, in order."""
        return list(self._files)

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """What token ids look like; empty where that was not recorded."""
        file = self.directory / "vocabulary.parquet"
        if not file.exists():
            return {}
        check_schema(_footer(file)[0], VOCABULARY, file)
        with _readable(file):
            table = pq.read_table(file, columns=VOCABULARY.names)
            if any(column.null_count for column in table.columns):
                raise TraceError(f"{file} has empty entries; write the trace anew")
            return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))

    def tokens(self, steps: Sequence[int] | None = None, *, without: Sequence[str] = ()) -> Iterator[TokenTrace]:
        """The tokens of some steps, or of all, in chunks that fit in memory, `without` some optional columns."""
        left_out = {together for name in without for together in OPTIONAL[name]}
        for step in self.steps if steps is None else steps:
            file = self._file(step)
            with _readable(file), pq.ParquetFile(file, memory_map=True, page_checksum_verification=True) as source:
                schema = source.schema_arrow
                wanted = [name for name in token_schema(self.info).names if name in schema.names]
                wanted = [name for name in wanted if name not in left_out and name != "run"]
                rows = rows_at_once(pa.schema([schema.field(name) for name in wanted]))
                for batch in source.iter_batches(rows, columns=wanted, use_threads=False):
                    yield tokens_from_arrow(batch, self.info, step, file)

    def samples(self, step: int) -> list[SampleTrace]:
        """The responses of a step; empty where they were not recorded."""
        file = self.directory / self._file(step).name.replace("tokens-", "samples-")
        if not file.exists():
            return []
        schema, _ = _footer(file)
        check_schema(schema, sample_schema(self.info), file)
        if read_info(schema, file) != self.info:
            raise TraceError(f"{file} belongs to another run than {self._file(step)}")
        with _readable(file):
            table = pq.read_table(file, columns=[name for name in sample_schema(self.info).names if name != "run"])
            return samples_from_arrow(table, step, file)

    def text(self, token: int) -> str:
        """A token as people read it: its text, or its id where texts were not recorded."""
        return self.vocabulary.get(token, f"⟨{token}⟩")

    def _file(self, step: int) -> Path:
        if step not in self._files:
            raise TraceError(f"step {step} was not recorded; the trace has steps {ranges(self.steps)}")
        return self._files[step]


def _check(schema: pa.Schema, file: Path) -> TraceInfo:
    """What a file of tokens says of its trace."""
    info = read_info(schema, file)
    check_schema(schema, token_schema(info), file)
    return info


def _files(directory: Path) -> dict[int, Path]:
    """The files of tokens by their step, in order."""
    found: dict[int, Path] = {}
    for file in directory.glob("tokens-*.parquet"):
        text = file.stem.removeprefix("tokens-")
        if not (text.isascii() and text.isdecimal()):
            raise TraceError(f"{file}: a trace's files are called tokens-000001.parquet and so on, by their step")
        if int(text) in found:
            raise TraceError(f"{file} and {found[int(text)]} are both of step {int(text)}; remove one")
        found[int(text)] = file
    return dict(sorted(found.items()))


def _footer(file: Path) -> tuple[pa.Schema, int]:
    """A file's columns and number of rows."""
    with _readable(file):
        footer = pq.read_metadata(file)
        schema = footer.schema.to_arrow_schema()
        str(schema)  # decodes every name
        return schema, footer.num_rows


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """A TraceError that names the file, instead of Parquet's errors."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise TraceError(f"{file} cannot be read: it has text that is not UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise TraceError(f"{file} cannot be read: {error.strerror}") from error
        reason = str(error).partition("\n")[0]
        raise TraceError(
            f"{file} cannot be read: it is damaged, truncated or no Parquet file ({reason}); without it, the other "
            "steps can be read"
        ) from error


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as people write them: `1, 3 to 7`, or `0, 8, ... 248` where all are equally far apart."""
    gaps = {later - earlier for earlier, later in pairwise(numbers)}
    if len(numbers) > 4 and len(gaps) == 1 and gaps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)
