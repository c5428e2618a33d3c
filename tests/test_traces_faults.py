"""What is no trace is refused by name; a disk that fails ends the trace alone; a killed run is readable."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_traces import make_samples, make_tokens, make_trace
from predmask.core import NoMask, Reason
from predmask.traces import TokenTrace, Trace, TraceError, TraceInfo, TraceWriter, rule_settings
from predmask.traces.schema import token_schema

TOKENS, SAMPLES, VOCABULARY = "tokens-000001.parquet", "samples-000001.parquet", "vocabulary.parquet"
KEY = b"predmask_trace"
Edit = Callable[[pa.Table], pa.Table]


def read_all(directory: Path) -> list[TokenTrace]:
    """Everything that a trace has."""
    trace = Trace(directory)
    trace.info.make_rule()
    assert trace.size >= 0
    assert trace.columns
    assert trace.text(1)
    for step in trace.steps:
        for sample in trace.samples(step):
            assert None not in dataclasses.astuple(sample)
    return list(trace.tokens())


def refused(directory: Path, *words: str) -> None:
    """Reading fails with a TraceError of one readable line that has the words."""
    with pytest.raises(TraceError) as caught:
        read_all(directory)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    for word in words:
        assert word in text, text


def edited(directory: Path, name: str, edit: Edit, **settings: Any) -> Path:
    """A trace of one step, one of whose files was changed."""
    make_trace(directory, steps=1, **settings)
    file = directory / "traces" / name
    pq.write_table(edit(pq.read_table(file)), file)
    return directory


def replaced(name: str, values: Callable[[pa.ChunkedArray], Any]) -> Edit:
    """With another column in a column's place."""
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values(table[name]))


def entries(column: pa.ChunkedArray) -> tuple[list[Any], pa.DataType]:
    kind = pa.string() if pa.types.is_dictionary(column.type) else column.type
    return column.to_pylist(), kind


def with_null(column: pa.ChunkedArray) -> pa.Array:
    """The third entry is empty."""
    values, kind = entries(column)
    return pa.array([*values[:2], None, *values[3:]], kind)


def with_null_inside(column: pa.ChunkedArray) -> pa.Array:
    """The third list's first entry is empty."""
    values, kind = entries(column)
    return pa.array([*values[:2], [None, *values[2][1:]], *values[3:]], kind)


def all_of(value: Any) -> Callable[[pa.ChunkedArray], pa.Array]:
    return lambda column: pa.array([value] * len(column), entries(column)[1])


def described(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """With another description in the file's metadata."""

    def edit(table: pa.Table) -> pa.Table:
        found = change(json.loads(table.schema.metadata[KEY]))
        text = found if isinstance(found, bytes) else json.dumps(found).encode()
        return table.replace_schema_metadata({KEY: text})

    return edit


SCHEMA = token_schema(TraceInfo(run="", rule={}, vocabulary_size=12, top_k=4))
LISTS = [field.name for field in SCHEMA if pa.types.is_fixed_size_list(field.type)]
OPTIONAL = {
    "tail_sum_squares", "entropy", "after_logp", "after_log_tail", "full_behaviour", "full_policy", "full_after",
}  # fmt: skip
ALONE = {"tail_sum_squares", "entropy", "full_after"}
"""Optional columns that may be missing without another."""


# Files that are no whole Parquet file.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    make_trace(directory, steps=1)
    read_all(directory)
    return directory


@pytest.mark.parametrize("name", [TOKENS, SAMPLES, VOCABULARY])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_anywhere_is_refused(whole: Path, name: str, share: float) -> None:
    file = whole / "traces" / name
    content = file.read_bytes()
    try:
        file.write_bytes(content[: int(share * len(content))])
        refused(whole, str(file), "truncated")
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("name", [TOKENS, SAMPLES, VOCABULARY])
@pytest.mark.parametrize("left", [0, 1, 4, 8, -1, -4, -8, -9])
def test_a_file_that_lost_its_end_is_refused(tmp_path: Path, name: str, left: int) -> None:
    make_trace(tmp_path, steps=1)
    file = tmp_path / "traces" / name
    file.write_bytes(file.read_bytes()[:left])
    refused(tmp_path, str(file), "truncated")


@pytest.mark.parametrize(
    "content", [b"PAR1", b"PAR1PAR1", b"nothing\n" * 9, b"\x00" * 100, b"PAR1\xff\xff\xff\xffPAR1"], ids=ascii
)
@pytest.mark.parametrize("name", [TOKENS, SAMPLES, VOCABULARY])
def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    make_trace(tmp_path, steps=1)
    (tmp_path / "traces" / name).write_bytes(content)
    refused(tmp_path, name, "no Parquet")


@pytest.mark.parametrize("name", [TOKENS, SAMPLES, VOCABULARY])
def test_another_programs_parquet_is_refused(tmp_path: Path, name: str) -> None:
    make_trace(tmp_path, steps=1)
    pq.write_table(pa.table({"tokens": [1, 2], "logprobs": [0.5, 0.25]}), tmp_path / "traces" / name)
    refused(tmp_path, name)


def test_tokens_without_a_description_are_refused(tmp_path: Path) -> None:
    edited(tmp_path, TOKENS, lambda table: table.replace_schema_metadata(None))
    refused(tmp_path, TOKENS, "is no token trace", "predmask.traces")


# Files that are not there, or not called as they should.


def test_a_directory_without_a_trace_says_how_to_record_one(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "--traces")
    (tmp_path / "traces").mkdir()
    refused(tmp_path, str(tmp_path), "--traces")
    (tmp_path / "traces" / f"{TOKENS}.partial").write_bytes(b"PAR1")
    refused(tmp_path, str(tmp_path))


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["tokens-abc.parquet", "tokens-.parquet", "tokens--5.parquet", "tokens-²3.parquet"])
def test_a_file_without_a_step_in_its_name_is_refused(tmp_path: Path, name: str) -> None:
    make_trace(tmp_path, steps=1)
    (tmp_path / "traces" / name).write_bytes((tmp_path / "traces" / TOKENS).read_bytes())
    refused(tmp_path, name, "tokens-000001.parquet and so on")


def test_two_files_of_one_step_are_refused(tmp_path: Path) -> None:
    make_trace(tmp_path, steps=1)
    (tmp_path / "traces" / "tokens-1.parquet").write_bytes((tmp_path / "traces" / TOKENS).read_bytes())
    refused(tmp_path, "tokens-1.parquet")


def test_partial_files_beside_whole_ones_are_left_alone(tmp_path: Path) -> None:
    make_trace(tmp_path, steps=1)
    for name in ("tokens-000002.parquet.partial", "samples-000001.parquet.partial", "note.txt"):
        (tmp_path / "traces" / name).write_bytes(b"half")
    assert len(read_all(tmp_path)) == 1


def test_a_directory_in_a_files_place_is_refused(tmp_path: Path) -> None:
    make_trace(tmp_path, steps=1)
    (tmp_path / "traces" / "tokens-000002.parquet").mkdir()
    refused(tmp_path, "tokens-000002.parquet", "directory")


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_trace(tmp_path / name, steps=2)
    (tmp_path / "b" / "traces" / "tokens-000002.parquet").rename(tmp_path / "a" / "traces" / "tokens-000002.parquet")
    refused(tmp_path / "a", "tokens-000002.parquet", "another run")


def test_responses_of_another_run_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_trace(tmp_path / name, steps=1)
    (tmp_path / "b" / "traces" / SAMPLES).rename(tmp_path / "a" / "traces" / SAMPLES)
    refused(tmp_path / "a", SAMPLES, "another run")


def test_a_file_of_another_step_is_refused(tmp_path: Path) -> None:
    make_trace(tmp_path, steps=1)
    (tmp_path / "traces" / TOKENS).rename(tmp_path / "traces" / "tokens-000007.parquet")
    refused(tmp_path, "tokens-000007.parquet", "step")


def test_a_file_that_vanished_is_not_called_truncated(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, steps=2)
    (tmp_path / "traces" / "tokens-000002.parquet").unlink()
    with pytest.raises(TraceError, match=r"tokens-000002\.parquet.*No such file") as caught:
        list(trace.tokens())
    assert "truncated" not in str(caught.value)


# Descriptions.

HUGE = 10**400
DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda _: [1, 2],
    "a number": lambda _: 7,
    "nothing": lambda _: b"",
    "no JSON": lambda _: b"{",
    "no UTF-8": lambda _: b"\xff\xfe\x00{",
    "deep": lambda _: b'{"format_version":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "another key": lambda found: {**found, "mine": 1},
    "rule = pairs": lambda found: {**found, "rule": [["name", "none"]]},
    "rule without a name": lambda found: {**found, "rule": {"delta": 0.1}},
    **{
        f"without {key}": lambda found, key=key: {name: value for name, value in found.items() if name != key}
        for key in ("format_version", "run", "rule", "vocabulary_size", "top_k")
    },
    **{
        f"{key} = {str(value)[:20]}": lambda found, key=key, value=value: {**found, key: value}
        for key, values in {
            "format_version": [None, "x", [1], {}, math.nan, math.inf, -math.inf, 0, -1],
            "run": [None, 5, ["run"], {}],
            "rule": [None, "none", 5, [], {}, {"name": None}, {"name": ["none"]}],
            "vocabulary_size": [None, "12", 12.0, 0, -1, 2**31, 2**64, HUGE, 3, 11],
            "top_k": [None, "4", 4.0, -1, 2**31 - 1, 2**40, HUGE, 3, 5],
            "temperature": [None, "warm", [], math.nan, math.inf, -math.inf, 0, -1.0, HUGE],
        }.items()
        for value in values
    },
    "V and K = 2^31 - 1": lambda found: {**found, "vocabulary_size": 2**31 - 1, "top_k": 2**31 - 1},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    edited(tmp_path, TOKENS, described(DESCRIPTIONS[name]), full=True)
    refused(tmp_path, TOKENS)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(["", "format_version", "run", "rule", "vocabulary_size", "top_k", "temperature"]),
)
def test_any_description_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any, key: str) -> None:
    directory = tmp_path_factory.mktemp("described")
    edited(directory, TOKENS, described(lambda found: {**found, key: value} if key else value), full=True)
    try:
        info = Trace(directory).info
    except TraceError:
        refused(directory, TOKENS)
        return
    assert isinstance(info.run, str)
    assert isinstance(info.rule, dict)
    assert (type(info.vocabulary_size), type(info.top_k)) == (int, int)
    assert 0 < info.temperature < math.inf


@pytest.mark.parametrize("version", [2, 10**9])
def test_a_newer_trace_asks_for_an_upgrade(tmp_path: Path, version: int) -> None:
    # Whatever else a newer version changed.
    edited(tmp_path, TOKENS, described(lambda _: {"format_version": version, "tokens": []}))
    refused(tmp_path, TOKENS, f"format {version}", "upgrade predmask")


RULES_: dict[str, dict[str, Any]] = {
    "unknown": {"name": "grpo_next", "delta": 0.1},
    "a new setting": {"name": "predictive", "horizon": 3},
    "a bad value": {"name": "predictive", "delta": -1},
    "no number": {"name": "predictive", "delta": math.nan},
    "a text": {"name": "predictive", "delta": "small"},
    "a list": {"name": "predictive", "divergence": ["kl"]},
    "an unknown tail": {"name": "predictive", "tail": "fat"},
}


@pytest.mark.parametrize("name", RULES_)
def test_a_rule_that_cannot_be_made_is_named_when_it_is_needed(tmp_path: Path, name: str) -> None:
    edited(tmp_path, TOKENS, described(lambda found: {**found, "rule": RULES_[name]}))
    trace = Trace(tmp_path)
    assert len(list(trace.tokens())) == 1
    with pytest.raises(TraceError, match=rf"'{RULES_[name]['name']}'.*--rule predictive") as caught:
        trace.info.make_rule()
    key, value = list(RULES_[name].items())[-1]
    assert str(value) in str(caught.value)
    assert key in str(caught.value)


# Columns.


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_column_that_is_missing_is_named(tmp_path: Path, column: str) -> None:
    edited(tmp_path, TOKENS, lambda table: table.drop_columns([column]), after=True, full=True)
    if column in ALONE:
        assert column not in Trace(tmp_path).columns
        assert len(read_all(tmp_path)) == 1
    else:
        refused(tmp_path, TOKENS, column)


@pytest.mark.parametrize("columns", [["after_logp", "after_log_tail"], ["full_behaviour", "full_policy", "full_after"]])
def test_columns_that_belong_together_may_be_missing_together(tmp_path: Path, columns: list[str]) -> None:
    edited(tmp_path, TOKENS, lambda table: table.drop_columns(columns), after=True, full=True)
    (part,) = read_all(tmp_path)
    assert (part.after is None) == ("after_logp" in columns)
    assert (part.full is None) == ("full_policy" in columns)


def test_rows_after_the_step_need_those_before_it(tmp_path: Path) -> None:
    columns = ["full_behaviour", "full_policy"]
    edited(tmp_path, TOKENS, lambda table: table.drop_columns(columns), after=True, full=True)
    refused(tmp_path, TOKENS, "full_after")


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_column_of_another_type_is_named(tmp_path: Path, column: str) -> None:
    def other(found: pa.ChunkedArray) -> pa.Array:
        kind = found.type
        if column in LISTS:
            return pa.array(found.to_pylist(), pa.list_(kind.value_type))
        if pa.types.is_floating(kind):
            return found.cast(pa.float64())
        return pa.array(range(len(found)), pa.int64())

    edited(tmp_path, TOKENS, replaced(column, other), after=True, full=True)
    refused(tmp_path, TOKENS, column, "expected")


@pytest.mark.parametrize("column", ["support_ids", "behaviour_logp", "full_policy"])
def test_lists_of_another_width_are_named(tmp_path: Path, column: str) -> None:
    def wider(found: pa.ChunkedArray) -> pa.Array:
        return pa.array(
            [[*row, 0] for row in found.to_pylist()], pa.list_(found.type.value_type, found.type.list_size + 1)
        )

    edited(tmp_path, TOKENS, replaced(column, wider), full=True)
    refused(tmp_path, TOKENS, column, "expected")


@pytest.mark.parametrize("column", ["keep", "entropy"])
def test_a_column_that_is_there_twice_is_named(tmp_path: Path, column: str) -> None:
    edited(tmp_path, TOKENS, lambda table: table.append_column(column, table[column]))
    refused(tmp_path, TOKENS, column)


@pytest.mark.parametrize("column", [name for name in SCHEMA.names if name != "run"])
def test_an_empty_entry_is_named(tmp_path: Path, column: str) -> None:
    edited(tmp_path, TOKENS, replaced(column, with_null), after=True, full=True)
    refused(tmp_path, TOKENS, column)


@pytest.mark.parametrize("column", LISTS)
def test_an_empty_entry_in_a_list_is_named(tmp_path: Path, column: str) -> None:
    edited(tmp_path, TOKENS, replaced(column, with_null_inside), after=True, full=True)
    refused(tmp_path, TOKENS, column)


def test_a_step_without_tokens_is_read_as_such(tmp_path: Path) -> None:
    edited(tmp_path, TOKENS, lambda table: table.slice(0, 0))
    assert sum(map(len, read_all(tmp_path))) == 0
    assert Trace(tmp_path).size == 0


def test_the_name_of_the_run_may_be_plain_text(tmp_path: Path) -> None:
    edited(tmp_path, TOKENS, replaced("run", lambda column: column.cast(pa.string())))
    assert len(read_all(tmp_path)) == 1


# Values.


@pytest.mark.parametrize("bad", [-1, 12, 2**31 - 1])
@pytest.mark.parametrize("slot", [0, 4])
def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path, bad: int, slot: int) -> None:
    def spoil(found: pa.ChunkedArray) -> pa.Array:
        rows = found.to_pylist()
        rows[-1][slot] = bad
        return pa.array(rows, found.type)

    edited(tmp_path, TOKENS, replaced("support_ids", spoil))
    refused(tmp_path, TOKENS, str(bad), "12")


@pytest.mark.parametrize("bad", [6, 255])
def test_an_unknown_reason_is_named(tmp_path: Path, bad: int) -> None:
    edited(tmp_path, TOKENS, replaced("reason", all_of(bad)))
    refused(tmp_path, TOKENS, f"reason {bad}")


@pytest.mark.parametrize("row", range(0, 60, 7))
def test_keep_and_reason_must_not_contradict_each_other(tmp_path: Path, row: int) -> None:
    def flip(found: pa.ChunkedArray) -> pa.Array:
        return pa.array([value != (i == row) for i, value in enumerate(found.to_pylist())])

    edited(tmp_path, TOKENS, replaced("keep", flip))
    refused(tmp_path, TOKENS, "keep", Reason(int(make_tokens().decision.reason[row])).name)


def test_what_was_not_sampled_has_no_decision(tmp_path: Path) -> None:
    edited(tmp_path, TOKENS, replaced("response", all_of(value=False)))
    refused(tmp_path, TOKENS, "response")


def test_the_sampled_token_has_one_id(tmp_path: Path) -> None:
    edited(tmp_path, TOKENS, replaced("id", all_of(3)))
    refused(tmp_path, TOKENS, "id")


@pytest.mark.parametrize("column", ["step", "epoch", "minibatch", "sample", "group", "position"])
def test_places_are_not_below_zero(tmp_path: Path, column: str) -> None:
    edited(tmp_path, TOKENS, replaced(column, all_of(-5)))
    refused(tmp_path, TOKENS, column)


# Responses and texts.

SAMPLE_COLUMNS = [
    "run", "step", "sample", "group", "prompt", "reward", "advantage", "length", "finished", "problem", "reference",
]  # fmt: skip


@pytest.mark.parametrize("column", SAMPLE_COLUMNS)
def test_a_responses_column_that_is_missing_is_named(tmp_path: Path, column: str) -> None:
    edited(tmp_path, SAMPLES, lambda table: table.drop_columns([column]))
    refused(tmp_path, SAMPLES, column)


@pytest.mark.parametrize("column", [name for name in SAMPLE_COLUMNS if name != "run"])
def test_a_responses_empty_entry_is_refused(tmp_path: Path, column: str) -> None:
    edited(tmp_path, SAMPLES, replaced(column, with_null))
    refused(tmp_path, SAMPLES, "empty")


def test_an_empty_entry_in_a_prompt_is_refused(tmp_path: Path) -> None:
    edited(tmp_path, SAMPLES, replaced("prompt", with_null_inside))
    refused(tmp_path, SAMPLES, "empty")


def test_responses_of_another_type_are_named(tmp_path: Path) -> None:
    edited(tmp_path, SAMPLES, replaced("reward", lambda c: pa.array(["good"] * len(c))))
    refused(tmp_path, SAMPLES, "reward", "expected")


VOCABULARIES: dict[str, tuple[Edit, str]] = {
    "text is missing": (lambda table: table.drop_columns(["text"]), "'text' is missing"),
    "id is missing": (lambda table: table.drop_columns(["id"]), "'id' is missing"),
    "an empty text": (replaced("text", with_null), "empty"),
    "an empty id": (replaced("id", with_null), "empty"),
    "texts are numbers": (replaced("text", lambda c: pa.array(range(len(c)))), "expected string"),
    "ids are texts": (replaced("id", lambda c: pa.array(list(map(str, range(len(c)))))), "expected int32"),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    edit, words = VOCABULARIES[name]
    edited(tmp_path, VOCABULARY, edit)
    refused(tmp_path, VOCABULARY, words)


def no_text(column: pa.ChunkedArray) -> pa.Array:
    """As many bytes that no text has."""
    return pa.array([b"\xff\xfe"] * len(column), pa.binary()).view(pa.string())


@pytest.mark.parametrize(("name", "column"), [(VOCABULARY, "text"), (SAMPLES, "problem")])
def test_text_that_is_no_text_is_refused(tmp_path: Path, name: str, column: str) -> None:
    edited(tmp_path, name, replaced(column, no_text))
    refused(tmp_path, name)


@pytest.mark.parametrize("name", [TOKENS, SAMPLES, VOCABULARY])
def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    make_trace(tmp_path, steps=1)
    file = tmp_path / "traces" / name
    table = pq.read_table(file)
    pq.write_table(table.append_column("mine#", table[0].cast(pa.string())), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"mine#", b"\xff\xfe\xff\xfe#"))
    refused(tmp_path, name)


# A disk that fails, a process that dies, a writer that is too slow.


def info_of(tokens: TokenTrace) -> TraceInfo:
    return TraceInfo(run="run", rule=rule_settings(NoMask()), vocabulary_size=12, top_k=tokens.behaviour.top_k)


SIXTY = make_tokens()


def step_tokens(step: int) -> TokenTrace:
    """Sixty tokens that tell their step by their advantages, too."""
    return dataclasses.replace(SIXTY, step=torch.full((60,), step), advantage=SIXTY.advantage + step)


def writers_left() -> list[str]:
    """Threads that write traces."""
    return [thread.name for thread in threading.enumerate() if thread.name == "trace-writer"]


def limited(function: Callable[[], Any], seconds: float = 20.0) -> None:
    """Fail when the function is not done in time."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not done in {seconds} s"


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")


@needs_full_device
@pytest.mark.parametrize("name", ["tokens-000002.parquet", "samples-000002.parquet"])
def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, name: str) -> None:
    writer = TraceWriter(tmp_path, info_of(make_tokens()))
    (tmp_path / f"{name}.partial").symlink_to("/dev/full")

    def work() -> None:
        for step in range(1, 60):
            writer.add(make_samples(step_tokens(step)))
            writer.add(step_tokens(step))
            writer.commit(step)
        writer.close()
        writer.close()

    limited(work)
    assert writer.problem is not None
    assert "No space left" in writer.problem
    assert "\n" not in writer.problem
    assert not writer.wants(61)
    assert Trace(tmp_path).steps == [1]
    assert torch.equal(read_all(tmp_path)[0].advantage, step_tokens(1).advantage)
    assert not writers_left()


def test_a_directory_that_vanishes_ends_the_trace(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", info_of(make_tokens()))
    (tmp_path / "t").rmdir()

    def work() -> None:
        writer.add(step_tokens(1))
        writer.commit(1)
        writer.close()

    limited(work)
    assert writer.problem is not None
    assert "tokens-000001" in writer.problem


@needs_full_device
def test_texts_that_cannot_be_written_end_the_trace_too(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, info_of(make_tokens()))
    (tmp_path / "vocabulary.parquet.partial").symlink_to("/dev/full")
    writer.write_vocabulary(dict.fromkeys(range(12), "x" * 1000))
    writer.add(step_tokens(1))
    writer.commit(1)
    writer.close()
    assert writer.problem is not None
    assert "No space left" in writer.problem
    assert not writers_left()


def test_a_slow_disk_makes_the_caller_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from predmask.traces import writer as module

    go_on, real, added = threading.Event(), module.schema_of, []

    def slow(*args: Any) -> Any:
        assert go_on.wait(20)
        return real(*args)

    monkeypatch.setattr(module, "schema_of", slow)
    writer = TraceWriter(tmp_path, info_of(make_tokens()))
    tokens = step_tokens(1)

    def work() -> None:
        for _ in range(100):
            writer.add(tokens)
            added.append(1)
        writer.commit(1)
        writer.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.3)
    waiting = len(added)
    time.sleep(0.1)
    assert 1 <= waiting == len(added) <= 20
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()
    assert len(added) == 100
    assert Trace(tmp_path).size == 6000


def test_an_error_in_the_background_never_hangs_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from predmask.traces import writer as module

    def broken(*_: Any) -> Any:
        time.sleep(0.1)  # until the queue is full
        raise RuntimeError("a fault of this program")

    monkeypatch.setattr(module, "schema_of", broken)
    writer = TraceWriter(tmp_path, info_of(make_tokens()))
    tokens = step_tokens(1)

    def work() -> None:
        for _ in range(100):
            writer.add(tokens)
        writer.commit(1)
        writer.close()

    limited(work)
    assert writer.problem is not None
    assert "a fault of this program" in writer.problem
    assert not writers_left()


def test_an_error_of_the_caller_leaves_what_was_committed(tmp_path: Path) -> None:
    def fail() -> None:
        with TraceWriter(tmp_path, info_of(make_tokens())) as writer:
            writer.add(step_tokens(1))
            writer.commit(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert Trace(tmp_path).steps == [1]
    assert not writers_left()


def test_wide_rows_are_not_gathered_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole distributions of 4000 ids: 48 kB a token."""
    from predmask.traces import writer as module

    waiting: list[int] = []
    real = module.tokens_to_arrow

    def seen(*args: Any) -> Any:
        batch = real(*args)
        waiting.append(batch.nbytes)
        return batch

    sizes: list[int] = []
    write = pq.ParquetWriter.write_table

    def written(self: Any, table: pa.Table, *args: Any, **settings: Any) -> None:
        sizes.append(table.nbytes)
        write(self, table, *args, **settings)

    monkeypatch.setattr(module, "tokens_to_arrow", seen)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", written)
    tokens = make_tokens(vocabulary_size=4000, after=True, full=True)
    info = dataclasses.replace(info_of(tokens), vocabulary_size=4000)
    with TraceWriter(tmp_path, info) as writer:
        for _ in range(32):
            writer.add(tokens)
        writer.commit(1)
    assert writer.problem is None
    assert sum(waiting) > 90e6
    assert max(sizes) < 70e6
    rows = [len(part) for part in Trace(tmp_path).tokens()]
    assert sum(rows) == 32 * 60
    assert max(rows) < 1500


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from test_traces_faults import info_of, make_samples, step_tokens
from predmask.traces import TraceWriter

steps = [step_tokens(step) for step in range(1, 400)]
samples = [make_samples(step) for step in steps]
draw = random.Random(0)
for attempt in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        writer = TraceWriter(Path(sys.argv[1]) / str(attempt), info_of(steps[0]))
        for number, tokens in enumerate(steps, 1):
            writer.add(samples[number - 1])
            for start in range(0, 60, 10):
                writer.add(tokens[start : start + 10])
            writer.commit(number)
        time.sleep(60)
    written = draw.randrange(1, 60)  # somewhere in the steps after these
    while len(list((Path(sys.argv[1]) / str(attempt)).glob("tokens-*.parquet"))) < written:
        time.sleep(draw.uniform(0, 0.005))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_run_leaves_what_it_had_committed(tmp_path: Path) -> None:
    attempts = 6
    subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(attempts)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        cwd=Path(__file__).parent,
        timeout=120,
    )
    lengths = []
    for attempt in range(attempts):
        trace = Trace(tmp_path / str(attempt))
        assert trace.steps == list(range(1, len(trace.steps) + 1))
        lengths.append(len(trace.steps))
        for step, part in zip(trace.steps, trace.tokens(), strict=True):
            expected = step_tokens(step)
            assert torch.equal(part.advantage, expected.advantage)
            assert torch.equal(part.behaviour.logp, expected.behaviour.logp)
            assert part.step.unique().tolist() == [step]
            assert trace.samples(step) == make_samples(expected)
    assert len(set(lengths)) > 1
