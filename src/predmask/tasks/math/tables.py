"""Rows out of files and hub data sets, one after the other: a data set need not fit into memory."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Row = tuple[int, tuple[Any, ...]]
"""Where a row stands, counted from 1 (in JSON Lines: its line), and the values asked for, None where one is missing."""

_BATCH = 8192
_LOOKED_AT = 100
"""Rows of a JSON file that say which columns there are."""
_LONGEST_CELL = 2**30
"""Characters of a CSV file's cell; Python's own limit, 131,072, is less than a long response has."""
_DATA_SET = re.compile(r"(?P<name>[^:@]+)(:(?P<subset>[^:@]+))?(@(?P<split>[^:@]+))?")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Table:
    """Rows with named columns; the parts of nested ones are named with dots: `reward_model.ground_truth`."""

    name: str
    """What messages call it: as the user spelled it."""
    columns: tuple[str, ...]
    length: int | None
    """Rows, where that is known before they are read."""
    rows: Callable[[Sequence[str]], Iterator[Row]]
    """The given columns' values, row by row, read anew on each call."""


def open_table(source: str) -> Table:
    """The table of a file (Parquet, JSON, JSON Lines, CSV) or of a data set `NAME[:SUBSET][@SPLIT]`.

    A data set is a name on the Hugging Face hub, or a directory that holds one. A path that exists wins over a
    name. Raises ValueError, with the remedy, for whatever cannot be read, here or while reading the rows.
    """
    path = Path(source).expanduser()
    suffix = _suffix(path)
    if path.is_file():
        if suffix not in _READERS:
            raise ValueError(f"{source} has no known format: the suffixes are {', '.join(_READERS)}")
        return _READERS[suffix](source, path)
    spelled = _DATA_SET.fullmatch(source)
    directory = Path(spelled["name"] if spelled else source).expanduser()
    if spelled and (directory.is_dir() or (_HUB_NAME.fullmatch(spelled["name"]) and suffix not in _READERS)):
        return _data_set(source, str(directory), spelled["subset"], spelled["split"])
    raise ValueError(
        f"the file {source} does not exist; give a file ({', '.join(_READERS)}), a directory with a data set, "
        "or a data set's name on the Hugging Face hub: NAME[:SUBSET][@SPLIT], such as openai/gsm8k:main@test"
    )


def short_name(source: str) -> str:
    """What the problems of a source are called after: a file without directory and suffixes, a data set's last name."""
    name = re.split(r"[/\\]", source.rstrip("/\\"))[-1]
    suffix = _suffix(Path(name))
    return name.removesuffix(".gz").removesuffix(suffix) if suffix in _READERS else name


# --- JSON and CSV --------------------------------------------------------------------------------------------


def _json(source: str, path: Path) -> Table:
    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        with _reading(source), _opened(path) as file:
            rows = _array(file) if _begins_with(file, b"[") else _lines(file)
            for number, row in rows:
                if not isinstance(row, dict):
                    raise ValueError(f"row {number} is no object with named columns, but {_kind(row)}")
                yield number, row

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        for number, row in objects():
            yield number, tuple(_at(row, column) for column in columns)

    first = itertools.islice(objects(), _LOOKED_AT)
    columns = dict.fromkeys(itertools.chain.from_iterable(_leaves(row) for _, row in first))
    return Table(source, tuple(columns), None, rows)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text:
                yield number, json.loads(text)
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 text; save it as UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not valid JSON: {error}") from error


def _array(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    return enumerate(values, 1)


def _begins_with(file: IO[bytes], mark: bytes) -> bool:
    start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return start.startswith(mark)


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _at(value: Any, column: str) -> Any:
    """The value of a column in an object; a key may hold dots itself."""
    if not isinstance(value, dict):
        return None
    if column in value:
        return value[column]
    key, dot, rest = column.partition(".")
    return _at(value.get(key), rest) if dot else None


def _csv(source: str, path: Path) -> Table:
    def records() -> Iterator[list[str]]:
        with _reading(source), _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            csv.field_size_limit(_LONGEST_CELL)
            # Strict: otherwise a quotation mark that is never closed swallows the rest of the file.
            yield from csv.reader(text, strict=True)

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        places = [header.index(column) for column in columns]
        for number, record in enumerate(itertools.islice(records(), 1, None), 1):
            if record and len(record) != len(header):
                raise ValueError(f"{source}: row {number} has {len(record)} values, but the header {len(header)}")
            if record:
                yield number, tuple(record[place] for place in places)

    header = next(records(), [])
    _check_names(source, header)
    return Table(source, tuple(header), None, rows)


def _check_names(source: str, columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        raise ValueError(f"{source} names a column twice: {', '.join(columns)}; rename one")


# --- Parquet and data sets -----------------------------------------------------------------------------------


def _parquet(source: str, path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    def batches(columns: Sequence[str]) -> Iterator[Any]:
        with _reading(source, pyarrow.ArrowException), pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH, columns=list(columns))

    with _reading(source, pyarrow.ArrowException), pyarrow.parquet.ParquetFile(path) as file:
        _check_names(source, file.schema_arrow.names)
        columns, length = tuple(_paths(file.schema_arrow)), file.metadata.num_rows
    return Table(source, columns, length, lambda columns: _rows(batches(columns), columns))


def _data_set(source: str, name: str, subset: str | None, split: str | None) -> Table:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ImportError(
            f"{source} is no file, and a data set of the hub needs the datasets package ({error}): "
            "install predmask[math] (in a clone: pip install -e '.[math]'), or give a file"
        ) from error
    try:
        splits: Any = datasets.load_dataset(name, subset)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        cause = error.__cause__ or error  # a file that cannot be read is named there
        raise ValueError(
            f"the data set {source} cannot be read ({type(cause).__name__}: {cause}); check its name, spelled "
            "NAME[:SUBSET][@SPLIT], and the network, or give a local file"
        ) from error
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "train"
    if split not in splits:
        raise ValueError(f"the data set {source} has the splits {', '.join(splits)}: choose one by {name}@SPLIT")
    chosen = splits[split].with_format("arrow")

    def batches(columns: Sequence[str]) -> Iterator[Any]:
        top = dict.fromkeys(column if column in chosen.column_names else column.split(".")[0] for column in columns)
        with _reading(source):
            yield from chosen.select_columns(list(top)).iter(_BATCH)

    columns = tuple(_paths(chosen.features.arrow_schema))
    return Table(source, columns, len(chosen), lambda columns: _rows(batches(columns), columns))


def _paths(fields: Iterable[Any], prefix: str = "") -> Iterator[str]:
    """The columns of an Arrow schema or struct, parts of structs with dots."""
    import pyarrow

    for field in fields:
        if pyarrow.types.is_struct(field.type) and field.type.num_fields:
            yield from _paths(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _rows(batches: Iterator[Any], columns: Sequence[str]) -> Iterator[Row]:
    number = 1
    for batch in batches:
        values = [_column(batch, column).to_pylist() for column in columns]
        yield from zip(itertools.count(number), zip(*values, strict=True), strict=False)
        number += batch.num_rows


def _column(batch: Any, column: str) -> Any:
    import pyarrow.compute

    if column in batch.schema.names:
        return batch.column(column)
    top, *path = column.split(".")
    return pyarrow.compute.struct_field(batch.column(top), path)  # pyright: ignore[reportAttributeAccessIssue]


# --- files ---------------------------------------------------------------------------------------------------

_READERS: dict[str, Callable[[str, Path], Table]] = {
    ".parquet": _parquet,
    ".jsonl": _json,
    ".json": _json,  # an array, or one object a line
    ".csv": _csv,
}
"""The formats by suffix; `.gz` may follow those that are text."""


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    return _suffix(path.with_suffix("")) if suffix == ".gz" else suffix


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _kind(value: Any) -> str:
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


@contextlib.contextmanager
def _reading(source: str, *errors: type[Exception]) -> Iterator[None]:
    """Whatever goes wrong with a file becomes a ValueError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text; save it as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{source} is not valid CSV: {error}") from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{source} is cut short or damaged: {error}; fetch it again") from error
    except (OSError, ValueError, *errors) as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
