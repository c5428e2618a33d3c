"""Run directories as the instruments read them: finished, killed, damaged, or of another trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers_traces import make_trace
from predmask.analysis import AnalysisError
from predmask.analysis.runs import read_run
from predmask.traces import TraceError

LINES = (
    '{"step": 0, "heldout": {"sampled": 0.25, "greedy": 0.5}}\n'
    '{"step": 1, "accuracy": 0.5}\n'
    '{"step": 2, "accuracy": 0.75, "heldout": {"sampled": 0.5, "greedy": 1.0}}\n'
)


def write(directory: Path, lines: str = LINES) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text('steps = 2\nseed = 7\n[rule]\nname = "dppo"\n')
    (directory / "metrics.jsonl").write_text(lines)
    return directory


def test_a_finished_run(tmp_path: Path) -> None:
    directory = write(tmp_path / "a")
    (directory / "summary.json").write_text('{"status": "finished"}')
    run = read_run(directory)
    assert (run.name, run.status, run.trace) == ("a", "finished", None)
    assert run.config == {"steps": 2, "seed": 7, "rule": {"name": "dppo"}}
    assert [step["accuracy"] for step in run.steps] == [0.5, 0.75]
    assert run.evaluations == [
        {"step": 0, "sampled": 0.25, "greedy": 0.5},
        {"step": 2, "sampled": 0.5, "greedy": 1.0},
    ]
    with pytest.raises(TraceError, match=r"no token trace.*--traces"):
        run.need_trace()


@pytest.mark.parametrize("cut", range(1, len(LINES.splitlines()[-1])))
def test_a_killed_run_has_what_it_had_written(tmp_path: Path, cut: int) -> None:
    run = read_run(write(tmp_path, LINES[: -1 - cut]))
    assert run.status == "unfinished"
    assert [step["step"] for step in run.steps] == [1]


def test_a_run_that_was_killed_before_its_first_line(tmp_path: Path) -> None:
    assert read_run(write(tmp_path, "")).steps == []
    (tmp_path / "metrics.jsonl").unlink()
    assert read_run(tmp_path).steps == []


@pytest.mark.parametrize(
    "line", ["nonsense", "3", "{}", '{"step": null}', '{"step": Infinity}', '{"step": 1, "heldout": null}', "\x00"]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(AnalysisError, match=r"metrics\.jsonl, line 2 cannot be read"):
        read_run(write(tmp_path, LINES.replace('{"step": 1, "accuracy": 0.5}', line)))


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "metrics.jsonl"])
def test_files_that_are_no_text_are_named(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(b"\xff\xfe = {\n{}\n")
    with pytest.raises(AnalysisError, match=name):
        read_run(tmp_path)


def test_a_summary_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(AnalysisError, match=r"summary\.json.*unfinished"):
        read_run(tmp_path)


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="no directory"):
        read_run(tmp_path / "absent")
    with pytest.raises(AnalysisError, match="no run directory"):
        read_run(tmp_path)


def test_a_trace_alone_is_a_run_without_figures(tmp_path: Path) -> None:
    make_trace(tmp_path / "other")
    for path in (tmp_path / "other", tmp_path / "other" / "traces"):
        run = read_run(path)
        assert (run.config, run.steps, run.summary) == ({}, [], None)
        assert run.need_trace().steps == [1, 2]


def test_a_damaged_trace_stops_only_who_asks_for_it(tmp_path: Path) -> None:
    write(tmp_path)
    make_trace(tmp_path)
    next((tmp_path / "traces").glob("tokens-*.parquet")).write_bytes(b"PAR1")
    run = read_run(tmp_path)
    assert json.dumps(run.steps[0]) == '{"step": 1, "accuracy": 0.5}'
    with pytest.raises(TraceError, match="cannot be read"):
        run.need_trace()
