"""Writing a trace: in the background, bounded in memory and on disk, readable whenever the writer is killed.

Every step is two files, written beside their place and renamed when they are whole: `tokens-000012.parquet` and
`samples-000012.parquet`. `vocabulary.parquet` says what each token id looks like.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from predmask.traces.records import SampleTrace, TokenTrace, TraceError, TraceInfo
from predmask.traces.schema import samples_to_arrow, tokens_to_arrow

ROW_GROUP = 32_768
"""Tokens that are written, and read, at once."""
_QUEUE = 16
"""Batches that may wait for the disk before the caller waits too."""


class TraceWriter:
    """Writes tokens and responses, step after step, in a thread of its own.

    With `max_bytes`, the trace stays about below that: when it is full, every second of its steps is deleted, and from
    then on half as many are recorded, so that it always covers the whole run evenly. A disk that cannot be written
    ends the trace and not the run: `problem` says what happened, and later calls do nothing.

    Raises TraceError when the directory already has a trace.
    """

    def __init__(self, directory: Path, info: TraceInfo, *, every: int = 1, max_bytes: float | None = None) -> None:
        if directory.exists() and any(directory.iterdir()):
            raise TraceError(f"{directory} is not empty; a trace needs a directory of its own, nothing is overwritten")
        directory.mkdir(parents=True, exist_ok=True)
        self.problem: str | None = None
        """Why the trace ended early; None while all is well."""
        self._directory, self._info = directory, info
        self._max_bytes = max_bytes
        self._stride = every
        self._sizes: dict[int, int] = {}
        self._step: int | None = None
        self._buffered: list[pa.RecordBatch] = []
        self._samples: list[SampleTrace] = []
        self._file: pq.ParquetWriter | None = None
        self._queue: queue.Queue[TokenTrace | Sequence[SampleTrace] | int | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._work, name="trace-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wants(self, step: int) -> bool:
        """Whether this step (from 1) should be recorded."""
        return self.problem is None and (step - 1) % self._stride == 0

    def add(self, records: TokenTrace | Sequence[SampleTrace]) -> None:
        """Tokens or responses of the step that is going on."""
        self._put(records)

    def commit(self, step: int) -> None:
        """The step is complete: what was added since the last one becomes readable."""
        self._put(step)

    def write_vocabulary(self, texts: Mapping[int, str]) -> None:
        """What token ids look like; at once, in the caller's thread."""
        table = pa.table({"id": pa.array(list(texts), pa.int32()), "text": pa.array(list(texts.values()), pa.string())})
        with self._written("vocabulary.parquet") as path:
            pq.write_table(table, path, compression="zstd")

    def close(self) -> None:
        """Write what is waiting; a step that was begun is kept as far as it came. Calling it twice is allowed."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join()

    def _put(self, item: TokenTrace | Sequence[SampleTrace] | int | None) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=1.0)
                return

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._take(item)
            self._commit(self._step)
        except Exception as error:  # noqa: BLE001  a full disk must not end the run
            self.problem = f"the trace ended early: {error}"

    def _take(self, item: TokenTrace | Sequence[SampleTrace] | int) -> None:
        if isinstance(item, int):
            self._commit(item)
        elif isinstance(item, TokenTrace):
            if len(item):
                self._step = int(item.step[0])
                self._buffered.append(tokens_to_arrow(item, self._info))
                if sum(map(len, self._buffered)) >= ROW_GROUP:
                    self._flush(self._step)
        else:
            self._samples.extend(item)

    def _flush(self, step: int) -> None:
        """The buffered tokens as a row group."""
        if not self._buffered:
            return
        table = pa.Table.from_batches(self._buffered)
        self._buffered = []
        if self._file is None:
            floats = [field.name for field in table.schema if pa.types.is_floating(_inner(field.type))]
            # Random bits do not compress; exponents do, once they stand together.
            encodings: Any = {"use_dictionary": ["run"], "use_byte_stream_split": floats}
            path = self._partial(f"tokens-{step:06d}.parquet")
            self._file = pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=1, **encodings)
        self._file.write_table(table, row_group_size=ROW_GROUP)

    def _commit(self, step: int | None) -> None:
        if step is None:
            return
        self._flush(step)
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._samples:
                with self._written(f"samples-{step:06d}.parquet") as path:
                    pq.write_table(pa.Table.from_batches([samples_to_arrow(self._samples, self._info)]), path)
            name = f"tokens-{step:06d}.parquet"
            self._partial(name).rename(self._directory / name)
            self._sizes[step] = sum(path.stat().st_size for path in self._files(step))
        self._samples, self._step = [], None
        self._thin()

    def _thin(self) -> None:
        """Delete every second step until the rest fits."""
        while self._max_bytes is not None and sum(self._sizes.values()) > self._max_bytes:
            if len(self._sizes) == 1:
                self._max_bytes = None
                self.problem = (
                    f"the trace ended early: one step takes {next(iter(self._sizes.values())) / 1e6:.0f} MB, more than "
                    "traces.max_mb; set traces.responses to trace fewer responses a step"
                )
                return
            self._stride *= 2
            for step in [step for step in self._sizes if (step - 1) % self._stride]:
                for path in self._files(step):
                    path.unlink(missing_ok=True)
                del self._sizes[step]

    def _files(self, step: int) -> list[Path]:
        names = (f"tokens-{step:06d}.parquet", f"samples-{step:06d}.parquet")
        return [self._directory / name for name in names if (self._directory / name).exists()]

    def _partial(self, name: str) -> Path:
        return self._directory / f"{name}.partial"

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[Path]:
        """A path to write to; it is renamed to its place when all went well."""
        yield self._partial(name)
        self._partial(name).rename(self._directory / name)


def _inner(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_fixed_size_list(kind) else kind
