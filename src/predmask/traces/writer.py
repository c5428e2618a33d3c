"""Writing a trace: in the background, bounded in memory and on disk, readable whenever the writer is killed.

Every step is two files, written beside their place and renamed when they are whole: `tokens-000012.parquet` and
`samples-000012.parquet`. `vocabulary.parquet` says what each token id looks like.
"""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from predmask.traces.columns import samples_to_arrow, schema_of, tokens_to_arrow
from predmask.traces.records import SampleTrace, TokenTrace, TraceError, TraceInfo
from predmask.traces.schema import VOCABULARY, check_info, item_type, rows_at_once

_QUEUE = 16
"""Batches that may wait for the disk before the caller waits too."""
_Item = TokenTrace | Sequence[SampleTrace] | Mapping[int, str] | int | threading.Event | None


class TraceWriter:
    """Writes tokens and responses, step after step, in a thread of its own.

    With `max_bytes`, the trace stays about below that: when it is full, every second of its steps is deleted, and from
    then on half as many are recorded, so that it always covers the whole run evenly. What cannot be written (a full
    disk, tokens that do not fit the trace) ends the trace and not the run: `problem` says what happened, and later
    calls do nothing. As a context manager it raises a TraceError for a problem at its end.

    Raises TraceError when the directory is not empty.
    """

    def __init__(
        self, directory: Path | str, info: TraceInfo, *, every: int = 1, max_bytes: float | None = None
    ) -> None:
        directory = Path(directory)
        if directory.exists() and any(directory.iterdir()):
            raise TraceError(f"{directory} is not empty; a trace needs a directory of its own, nothing is overwritten")
        self.problem: str | None = None
        """Why the trace ended early; None while all is well."""
        # A run is often named after its directory, whose name need not be text.
        self._info = replace(
            info,
            run=info.run.encode("utf-8", "replace").decode(),
            temperature=float(info.temperature),
            vocabulary_size=operator.index(info.vocabulary_size),
            top_k=operator.index(info.top_k),
        )
        check_info(self._info)
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._max_bytes = max_bytes
        self._spacing = every
        self._asked: int | None = None
        """The first step that was asked about."""
        self._sizes: dict[int, int] = {}
        """Bytes of each step that is there."""
        self._step: int | None = None
        """The step that is going on."""
        self._schema: pa.Schema | None = None
        """The columns of that step."""
        self._buffered: list[TokenTrace] = []
        self._samples: list[SampleTrace] = []
        self._file: pq.ParquetWriter | None = None
        self._closed = False
        self._queue: queue.Queue[_Item] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._work, name="trace-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close()
        if self.problem is None and self._step is not None:
            self.problem = f"step {self._step} was never committed, and is left out"
        if self.problem is not None and error is None:
            raise TraceError(self.problem)

    def wants(self, step: int) -> bool:
        """Whether this step should be recorded."""
        if self.problem is not None or self._closed:
            return False
        if self._asked is None:
            self._asked = step
        return self._regular(step)

    def add(self, records: TokenTrace | Sequence[SampleTrace]) -> None:
        """Tokens or responses of the step that is going on."""
        self._put(records)

    def commit(self, step: int) -> None:
        """The step is complete: what was added since the last one becomes readable."""
        self._put(operator.index(step))

    def write_vocabulary(self, texts: Mapping[int, str]) -> None:
        """What token ids look like (`token_texts`)."""
        self._put(dict(texts))

    def wait(self) -> None:
        """Return when all that was handed over is on the disk: for a process that may be killed without notice."""
        written = threading.Event()
        self._put(written)
        while self._thread.is_alive() and not written.wait(0.1):
            pass

    def close(self) -> None:
        """Write what is waiting; a step that was not committed is left out. Calling it twice is allowed."""
        if not self._closed:
            self._put(None)
            self._closed = True
        self._thread.join()

    def _put(self, item: _Item) -> None:
        if self._closed:
            raise TraceError("the trace is closed; nothing can be added")
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=1.0)
                return

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._take(item)
            if self._file is not None:
                self._file.close()
                self._partial(f"tokens-{self._step:06d}.parquet").unlink()
        except Exception as error:  # noqa: BLE001  a full disk must not end the run
            self.problem = f"the trace ended early: {error}"

    def _take(self, item: TokenTrace | Sequence[SampleTrace] | Mapping[int, str] | int | threading.Event) -> None:
        if isinstance(item, int):
            self._commit(item)
        elif isinstance(item, threading.Event):
            item.set()
        elif isinstance(item, TokenTrace):
            self._take_tokens(item)
        elif isinstance(item, Mapping):
            table = pa.table([list(item), list(item.values())], schema=VOCABULARY)
            with self._written("vocabulary.parquet") as path:
                pq.write_table(table, path, compression="zstd")
        else:
            self._samples.extend(item)

    def _take_tokens(self, tokens: TokenTrace) -> None:
        if not len(tokens):
            return
        steps = {int(tokens.step.min()), int(tokens.step.max())} | ({self._step} if self._step is not None else set())
        if len(steps) > 1:
            raise TraceError(f"tokens of the steps {sorted(steps)} were added together; commit a step before the next")
        (self._step,) = steps
        schema = schema_of(tokens, self._info)
        expected = self._schema = schema if self._schema is None else self._schema
        if schema != expected:
            differing = sorted(set(schema.names) ^ set(expected.names))
            raise TraceError(f"some tokens of step {self._step} have {', '.join(differing)}, and others have not")
        self._buffered.append(tokens)
        if sum(map(len, self._buffered)) >= rows_at_once(schema):
            self._flush()

    def _flush(self) -> None:
        """The buffered tokens as row groups."""
        if not self._buffered:
            return
        # Together: a batch of few tokens costs nearly as much as one of many.
        table = pa.Table.from_batches([tokens_to_arrow(TokenTrace.cat(self._buffered), self._info)])
        self._buffered = []
        if self._file is None:
            floats = [field.name for field in table.schema if pa.types.is_floating(item_type(field.type))]
            # Random bits do not compress; exponents do, once they stand together.
            encodings: Any = {"use_dictionary": ["run"], "use_byte_stream_split": floats, "write_page_checksum": True}
            path = self._partial(f"tokens-{self._step:06d}.parquet")
            self._file = pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=1, **encodings)
        self._file.write_table(table, row_group_size=rows_at_once(table.schema))

    def _commit(self, step: int) -> None:
        if self._step not in (None, step):
            raise TraceError(f"tokens of step {self._step} were added, and step {step} was committed")
        self._flush()
        samples, self._samples, self._step, self._schema = self._samples, [], None, None
        if others := {sample.step for sample in samples} - {step}:
            raise TraceError(f"responses of step {min(others)} were added, and step {step} was committed")
        if self._file is None:
            return
        self._file.close()
        self._file = None
        name = f"tokens-{step:06d}.parquet"
        if not self._regular(step):  # it was begun before the trace was thinned
            self._partial(name).unlink()
            return
        if step in self._sizes:
            raise TraceError(f"step {step} was committed twice; a step's tokens belong in one commit")
        if samples:
            with self._written(f"samples-{step:06d}.parquet") as path:
                pq.write_table(pa.Table.from_batches([samples_to_arrow(samples, self._info)]), path)
        self._partial(name).rename(self._directory / name)
        self._sizes[step] = sum(path.stat().st_size for path in self._files(step))
        self._thin()

    def _thin(self) -> None:
        """Delete every second step until the rest fits."""
        while self._max_bytes is not None and sum(self._sizes.values()) > self._max_bytes:
            if len(self._sizes) == 1:
                size = next(iter(self._sizes.values()))
                raise TraceError(
                    f"a step takes {size / 1e6:.3g} MB, and the whole trace may take {self._max_bytes / 1e6:.3g} MB; "
                    "record fewer responses a step (traces.responses), or allow more (traces.max_mb)"
                )
            self._spacing = 2 * min(later - earlier for earlier, later in pairwise(sorted(self._sizes)))
            for step in [step for step in self._sizes if not self._regular(step)]:
                for path in self._files(step):
                    path.unlink()
                del self._sizes[step]

    def _regular(self, step: int) -> bool:
        """Whether a step is one of those that the trace keeps at present."""
        first = min(self._sizes, default=step if self._asked is None else self._asked)
        return (step - first) % self._spacing == 0

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
