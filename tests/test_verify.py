"""`predmask verify`: rows in, a table and scored rows out."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from predmask.cli import main

pytest.importorskip("math_verify")

ROWS = [
    {"answer": r"\boxed{1/3}", "gold": r"\frac{2}{6}"},
    {"answer": "2", "gold": 3},
    {"answer": "x", "gold": r"\frac{1}{0}"},
    {"answer": "and so it is 34.", "gold": "34"},
]
OWN = """
def exact(response, gold):
    if response == "hang":
        while True:
            pass
    if response == "half":
        return 0.5
    if response == "much":
        return 7.0
    return None if response == "?" else float(response == gold)

def broken(response, gold):
    raise RuntimeError("it is broken")
"""


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def table(text: str) -> dict[str, int]:
    """The counts of the printed table."""
    return {name: int(count) for name, count in re.findall(r"^(right|wrong|not scored) +(\d+) +[\d.]+%$", text, re.M)}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_checks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_pairs_of_answer_and_gold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "scored.jsonl"
    assert main(["verify", write(tmp_path / "answers.jsonl", ROWS), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert table(printed.out) == {"right": 2, "wrong": 1, "not scored": 1}
    assert "4 rows, response 'answer', gold 'gold'" in printed.out
    assert re.search(
        r"^raised +1, the first in row 3: ValueError: the gold answer .* cannot be parsed$", printed.out, re.M
    )
    assert "66.7% of the answers that could be scored" in printed.out
    assert re.search(r"^speed +[\d,]+ answers/s", printed.out, re.M)
    assert max(map(len, printed.out.splitlines())) <= 100 + len(str(tmp_path))
    assert "scoring 4 answers" in printed.err
    scored = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{"answer": row["answer"], "gold": row["gold"]} for row in scored] == ROWS
    assert [row["score"] for row in scored] == [1.0, 0.0, None, 1.0]
    assert [row["extracted"] for row in scored] == ["1/3", "2", "x", "34"]
    assert [row["why"] is None for row in scored] == [True, True, False, True]
    assert scored[2]["why"].startswith("raised: ValueError")
    # Scored rows can be scored again.
    assert main(["verify", str(output)]) == 0
    assert table(capsys.readouterr().out) == {"right": 2, "wrong": 1, "not scored": 1}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("response", "gold"), ()),
        (("response", "answer"), ()),
        (("completion", "reference"), ()),
        (("prediction", "ground_truth"), ()),
        (("answer", "reference"), ()),
        (("said", "true"), ("--response", "said", "--gold", "true")),
        (("answer", "true"), ("--gold", "true")),
        (("Response", "Answer"), ()),
        (("gold", "answer"), ("--response", "gold", "--gold", "answer")),
    ],
)
def test_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, str], options: tuple[str, ...]
) -> None:
    rows = [{"id": 7, names[0]: "Answer: 5", names[1]: "5"}]
    assert main(["verify", write(tmp_path / "a.jsonl", rows), "--workers", "1", *options]) == 0
    assert f": 1 row, response {names[0]!r}, gold {names[1]!r}" in capsys.readouterr().out


def test_parquet_with_nested_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"response": "#### 5", "reward_model": {"ground_truth": "5", "style": "rule"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    output = tmp_path / "scored.jsonl"
    assert main(["verify", str(tmp_path / "a.parquet"), "--workers", "1", "--output", str(output)]) == 0
    assert table(capsys.readouterr().out) == {"right": 1, "wrong": 0, "not scored": 0}
    row = json.loads(output.read_text())
    assert row["reward_model.style"] == "rule"
    assert row["score"] == 1.0


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[:2]).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(["verify", "-", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert table(printed) == {"right": 1, "wrong": 1, "not scored": 0}
    assert "file       standard input" in printed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{")))
    assert main(["verify", "-"]) == 2
    assert "standard input cannot be read: line 1 is not valid JSON" in capsys.readouterr().err


@pytest.mark.usefixtures("own")
def test_a_verifier_of_your_own_runs_under_the_same_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"response": text, "gold": "a"} for text in ("a", "b", "half", "?", "hang", "a", "much")]
    options = ["--verifier", "own_checks:exact", "--deadline", "0.5"]
    assert main(["verify", write(tmp_path / "a.jsonl", rows), *options]) == 0
    printed = capsys.readouterr().out
    assert "returned 7.0, but the highest score is 1" in " ".join(printed.split())
    assert table(printed) == {"right": 2, "wrong": 2, "not scored": 3}
    assert re.search(r"^declined +1, the first in row 4: ", printed, re.M)
    assert re.search(r"^late +1, the first in row 5: .* deadline of 0\.5 s$", printed, re.M)
    assert "mean       0.625, of scores from 0 to 1" in printed


@pytest.mark.usefixtures("own")
def test_nothing_scored_is_exit_code_1_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = write(tmp_path / "a.jsonl", ROWS), tmp_path / "scored.jsonl"
    assert main(["verify", file, "--verifier", "own_checks:broken", "--output", str(output)]) == 1
    printed = capsys.readouterr()
    assert table(printed.out) == {"right": 0, "wrong": 0, "not scored": 4}
    assert "RuntimeError: it is broken" in printed.err
    assert [json.loads(line)["why"] for line in output.read_text().splitlines()] == [
        "raised: RuntimeError: it is broken"
    ] * 4
    for count in (1, 2):
        declined = write(tmp_path / "b.jsonl", [{"response": "?", "gold": "a"}] * count)
        assert main(["verify", declined, "--verifier", "own_checks:exact"]) == 1
        assert "the first, in row 1: its verifier returned None" in capsys.readouterr().err


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, ["--gold", "truth"], "no column 'truth', which --gold names; its columns: answer, gold"),
        (ROWS, ["--response", "said"], "no column 'said', which --response names; its columns: answer, gold"),
        (
            [{"q": "1", "gold": "2"}],
            [],
            "no column of responses (response, completion, prediction, answer) besides 'gold', which holds the other; "
            "its columns: q, gold. Name one by --response",
        ),
        ([{"answer": "1", "question": "?"}], [], "besides 'answer', which holds the other; its columns: answer, quest"),
        ([{"response": "1"}], [], "Name one by --gold"),
        ([{"answer": "1", "gold": ["1", "2"]}], [], "row 1: 'answer' and 'gold' must be texts or numbers"),
        ([], [], "has no rows"),
        (ROWS, ["--verifier", "own_checks:missing"], "the module has no function 'missing'"),
        (ROWS, ["--verifier", "no_such_module:f"], "cannot be imported"),
        (ROWS, ["--output", "scored.csv"], "scored.csv would not be a .csv file; name it scored.jsonl"),
        (ROWS, ["--output", "no/such/directory/scored.jsonl"], "there is no directory"),
    ],
)
def test_a_mistake_in_what_was_asked_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], options: list[str], message: str
) -> None:
    assert main(["verify", write(tmp_path / "a.jsonl", rows), *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_nothing_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", ROWS)
    before = Path(file).read_bytes()
    assert main(["verify", file, "--output", file]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path(file).read_bytes() == before


def test_an_empty_response_is_a_wrong_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"answer": answer, "gold": "1"} for answer in ("1", None, " ")]
    output = tmp_path / "scored.jsonl"
    assert main(["verify", write(tmp_path / "a.jsonl", rows), "--workers", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert table(printed) == {"right": 1, "wrong": 2, "not scored": 0}
    assert re.search(r"^empty +2, the first in row 2:", printed, re.M)
    assert [json.loads(line)["answer"] for line in output.read_text().splitlines()] == ["1", None, " "]


def test_decisions_that_differ_from_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where the answers are of another task, whose verifier does not look for mathematics."""
    answers = [("1 7 ANS 2 1 #", "21", 1.0), ("ANS 1 #", "2", 0.0), ("3", "3", None), ("4", "4", 1)]
    rows = [{"response": response, "gold": gold, "score": score} for response, gold, score in answers]
    assert main(["verify", write(tmp_path / "a.jsonl", rows), "--workers", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "differing 2 of 4 decisions from the file's column 'score', the first in row 1: right there, wrong" in printed
    )
    assert "another task" in printed
    assert main(["verify", write(tmp_path / "b.jsonl", rows[1::2]), "--workers", "1"]) == 0
    assert "none of 2 decisions" in capsys.readouterr().out
    words = [{"response": "1", "gold": "1", "score": "high"}]
    assert main(["verify", write(tmp_path / "c.jsonl", words), "--workers", "1"]) == 0
    assert not re.search("^differing", capsys.readouterr().out, re.M)


def test_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_other_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("answer,gold\n")
    assert main(["verify", str(tmp_path / "a.csv")]) == 2
    assert "a.csv has no rows" in capsys.readouterr().err
    assert main(["verify", "no-such-file.jsonl"]) == 2
    assert "no-such-file.jsonl does not exist" in capsys.readouterr().err
    for options in (["--verifier", "exact"], ["--deadline", "0"], ["--workers", "0"], []):
        with pytest.raises(SystemExit) as stopped:
            main(["verify", *(["a.jsonl"] if options else []), *options])
        assert stopped.value.code == 2
    assert "package.module:function" in capsys.readouterr().err
