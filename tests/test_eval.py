"""`predmask eval`: whose answers, under which settings, and what is printed and written of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from helpers_math import laid_out, sums, tiny_model_directory, write_rows
from helpers_training import small
from predmask.cli import main
from predmask.cli.progress import Progress
from predmask.rollout import Rollout, Sampling, TransformersEngine
from predmask.tasks import Arithmetic, Problem, Split
from predmask.train import run

FEW = ["embedded", "--rollout.max_new_tokens", "28"]


@dataclass(frozen=True, kw_only=True)
class Shaky:
    """Rewards any 5, cannot score answers that contain a 7, and has nothing by which answers could be compared."""

    name: ClassVar[str] = "shaky"
    inline_verifier: ClassVar[bool] = True

    def problems(self, split: Split) -> Sequence[Problem]:
        return Arithmetic().problems(split)

    def score(self, problem: Problem, response: str) -> float:
        return float("nan") if "7" in response else float("5" in response)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "run"
    config = small(
        {"engine": {"numerics": "int8"}, "rollout": {"temperature": 0.9}},
        steps=1,
        seed=5,
        output=str(output),
    )
    run(config)
    return output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_directory(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1))


def evaluated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, str]:
    """What is printed, by the first word of each line."""
    assert main(["eval", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("model")) <= 100
    return {line.split()[0]: line for line in reversed(lines) if line}


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shares(line: str) -> list[float]:
    return [float(share) for share in re.findall(r"([\d.]+)%", line)]


def test_what_is_printed_is_what_the_answers_come_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answers, table, figures = tmp_path / "answers.jsonl", tmp_path / "table.parquet", tmp_path / "eval.json"
    outputs = ["--answers", str(answers), "--table", str(table), "--json", str(figures)]
    printed = evaluated(capsys, *FEW, "--samples", "4", "--prompts", "30", *outputs)
    rows = written(answers)
    hits = np.array([row["score"] for row in rows if row["sample"]]).reshape(30, 4)
    greedy = [row["score"] for row in rows if row["sample"] is None]
    expected = {
        "greedy": np.mean(greedy),
        "avg@4": hits.mean(),
        "pass@1": hits.mean(),
        "pass@2": np.mean([1 - (4 - c) * (3 - c) / 12 for c in hits.sum(1)]),
        "pass@4": hits.any(1).mean(),
    }
    for name, share in expected.items():
        assert shares(printed[name])[0] == pytest.approx(100 * share, abs=0.05), name
    low, high = shares(printed["avg@4"])[1:]
    assert low < 100 * hits.mean() < high
    assert "95 % interval" in printed["share"]
    assert "30 of 256 held-out problems" in printed["task"]
    lengths = [row["tokens"] for row in rows if row["sample"]]
    assert f"{np.mean(lengths):.1f} tokens" in printed["mean"]
    assert "0 of 150 answers" in printed["not"]
    # The files say the same.
    found = pq.read_table(table).to_pylist()
    assert [row["right"] for row in found] == hits.sum(1).tolist()
    assert [row["id"] for row in found] == [problem.id for problem in Arithmetic().problems("heldout")[:30]]
    dumped = json.loads(figures.read_text())
    assert dumped["figures"]["avg@4"]["value"] == pytest.approx(hits.mean())
    assert (dumped["problems"], dumped["samples"], dumped["unscored"]) == (30, 4, {})
    assert dumped["figures"]["maj@4"]["value"] == pytest.approx(np.mean([row["majority_right"] for row in found]))


def test_the_same_seed_gives_the_same_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = []
    for seed in (0, 0, 1):
        answers = tmp_path / f"{len(texts)}.jsonl"
        evaluated(capsys, *FEW, "--prompts", "5", "--seed", str(seed), "--answers", str(answers))
        texts.append([row["response"] for row in written(answers)])
    assert len(texts[0]) == 5 * 9  # one greedy answer and eight samples a problem
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_one_problem_and_one_sample(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = evaluated(capsys, *FEW, "--samples", "1", "--prompts", "1", "--table", str(tmp_path / "t.parquet"))
    assert "interval" not in printed["share"]
    assert "10 problems are the fewest" in printed["no"]
    assert shares(printed["pass@1"]) in ([0.0], [100.0])
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 1


def test_answers_that_were_cut_or_not_scored_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    options = ["--task", "test_eval:Shaky", "--rollout.max_new_tokens", "6", "--samples", "2", "--prompts", "12"]
    printed = evaluated(capsys, "embedded", *options, "--answers", str(answers))
    rows = written(answers)
    sampled = [row for row in rows if row["sample"]]
    unscored = sum(row["score"] is None for row in rows)
    assert 0 < unscored < len(rows)
    assert f"{unscored} of 36 answers: not_a_number {unscored}; they count as not right" in printed["not"]
    cut = sum(row["truncated"] for row in sampled)
    assert cut > 0
    assert f"{cut} of 24 sampled answers ({cut / 24:.1%})" in printed["truncated"]
    assert "at 6 tokens" in printed["truncated"]
    assert "--rollout.max_new_tokens" in printed["hint"]
    right = sum(row["score"] == 1.0 for row in sampled) / len(sampled)
    assert shares(printed["avg@2"])[0] == pytest.approx(100 * right, abs=0.05)
    assert "no sample has an answer" in printed["maj@2"]


# --- whose answers, under which settings ---------------------------------------------------------------------


def test_a_run_answers_with_its_checkpoint_under_its_own_settings(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = evaluated(capsys, str(run_directory), "--samples", "2")
    assert str(run_directory / "checkpoint") in printed["model"]
    assert "at temperature 0.9, of at most 48 tokens" in printed["answers"]
    assert "256 held-out problems" in printed["task"]  # not the four that training looked at
    assert "2 sampled each" in printed["answers"]
    assert "seed 0" in printed["answers"]  # not that of the run
    assert "the policy itself (transformers, float32)" in printed["engine"]


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        (["--eval.engine", "rollout"], "transformers, int8"),
        (["--engine", "transformers"], "transformers, int8"),
        (["--engine.numerics", "int4"], "transformers, int4"),
        (["--engine.numerics", "int4", "--eval.engine", "policy"], "the policy itself (transformers, float32)"),
    ],
)
def test_what_answers_for_a_run(
    options: list[str], engine: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = evaluated(capsys, str(run_directory), "--prompts", "2", "--samples", "1", *options)
    assert printed["engine"] == f"engine   {engine}"


def test_what_answers_for_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = [*FEW, "--prompts", "2", "--samples", "1"]
    assert "the policy itself (transformers, float32)" in evaluated(capsys, *few)["engine"]
    assert "engine   transformers, fp8" in evaluated(capsys, *few, "--engine.numerics", "fp8")["engine"]
    (tmp_path / "settings.toml").write_text('engine.numerics = "int8"\neval.samples = 3\nseed = 4')
    printed = evaluated(capsys, *few[:-2], "--config", str(tmp_path / "settings.toml"))
    assert "engine   transformers, int8" in printed["engine"]
    assert "8 sampled each" in printed["answers"]  # how much is asked is this verb's to say
    assert "seed 4" in printed["answers"]


def test_options_of_evaluations_are_this_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    printed = evaluated(capsys, *FEW, "--eval.samples", "3", "--eval.prompts", "4", "--eval.temperature", "0.5")
    assert "4 of 256 held-out problems" in printed["task"]
    assert "3 sampled each" in printed["answers"]
    assert "temperature 0.5" in printed["answers"]


def test_responses_end_where_the_context_does(capsys: pytest.CaptureFixture[str]) -> None:
    printed = evaluated(capsys, "embedded", "--prompts", "2", "--samples", "1", "--rollout.max_new_tokens", "8192")
    limit = re.search(r"at most (\d+) tokens", printed["answers"])
    assert limit is not None
    assert int(limit.group(1)) < 128
    assert f"answers end after {limit.group(1)} tokens, not 8192" in printed["note"]


# --- mathematics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_all_problems_of_a_file_are_asked(
    suffix: str, tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / f"aime.{suffix}", laid_out("aime", sums(12)))
    options = ["--task", "math", "--data", str(data), "--task.verifier", "helpers_math:even_length"]
    printed = evaluated(
        capsys,
        tiny,
        *options,
        "--rollout.max_new_tokens",
        "8",
        "--samples",
        "2",
        "--answers",
        str(tmp_path / "a.jsonl"),
    )
    assert "math: 12 held-out problems" in printed["task"]
    rows = written(tmp_path / "a.jsonl")
    assert [row["question"] for row in rows if row["sample"] is None] == [question for question, _ in sums(12)]
    assert {row["gold"] for row in rows} == {answer for _, answer in sums(12)}
    assert [row["score"] for row in rows] == [float(len(row["response"]) % 2 == 0) for row in rows]


def test_data_of_several_files_and_long_questions(
    tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = write_rows(tmp_path / "first.jsonl", laid_out("plain", sums(5)))
    longer = [("What, if you think about it for long enough, is 1 + 1?", "2")]
    second = write_rows(tmp_path / "second.csv", laid_out("aime", longer))
    options = ["--task", "math", "--data", f"{first},{second}", "--task.verifier", "helpers_math:contains"]
    few = ["--rollout.max_new_tokens", "4", "--samples", "1"]
    assert "6 held-out problems" in evaluated(capsys, tiny, *options, *few)["task"]
    assert main(["eval", tiny, *options, *few, "--prompt.max_tokens", "30"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "5 of 6 held-out problems" in out
    assert "left out: 1 of 6 problems" in out
    assert main(["eval", tiny, *options, *few, "--prompt.chat", "--json", str(tmp_path / "eval.json")]) == 0
    assert json.loads((tmp_path / "eval.json").read_text())["prompt"]["chat"] is True


@pytest.mark.slow
def test_math_answers_are_scored_and_vote(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    data = write_rows(tmp_path / "aime.jsonl", laid_out("aime", sums(3)))
    options = ["--task", "math", "--data", str(data), "--rollout.max_new_tokens", "8", "--samples", "2"]
    printed = evaluated(capsys, tiny, *options, "--answers", str(tmp_path / "a.jsonl"))
    assert {row["score"] for row in written(tmp_path / "a.jsonl")} <= {0.0, 1.0}
    assert "0 of 9 answers" in printed["not"]


# --- mistakes, interruptions, progress -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "MODEL comes first"),
        (["--samples", "4"], "MODEL comes first"),
        (["embedded", "embedded"], "MODEL is all that comes before the options, but there are 2 names"),
        (["embedded", "--samples", "0"], "whole number of 1 or more"),
        (["embedded", "--samples", "many"], "whole number of 1 or more"),
        (["embedded", "--sample", "4"], "unknown option 'sample'"),
        (["embedded", "--model", "embedded"], "MODEL, which comes first"),
        (["embedded", "--data", "aime.parquet"], "add --task math"),
        (["embedded", "--task", "math", "--data", "nowhere.parquet"], "nowhere.parquet"),
        (["embedded", "--engine", "vlm"], "did you mean 'vllm'?"),
        (["embedded", "--eval.temperature", "0"], "a greedy answer is measured anyway"),
        (["embedded", "--json", "nowhere/eval.json"], "there is no directory nowhere"),
        (["embedded", "--answers", "/"], "is a directory"),
        (["embedded", "--table", "x.csv"], "x.csv would not be a .csv file; name it x.parquet"),
        (["embedded", "--answers", "x.JSON"], "name it x.jsonl"),
        (["embedded", "--json", "x.parquet"], "name it x.json"),
        (["embedded", "--json", "x", "--answers", "./x"], "x is named twice"),
        (["embedded", "--config", "nowhere.toml"], "cannot read nowhere.toml"),
        (["./nowhere"], "'./nowhere' does not exist"),
        (["embedded", "--prompt.max_tokens", "2"], "prompt.max_tokens = 2 tokens; raise it: the shortest has "),
        (["embedded", "--rollout.top_p", "0.9"], "truncated sampling is refused"),
    ],
)
def test_mistakes_end_with_code_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["eval", *argv])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert "error: " in captured.err.splitlines()[-1]
    assert message in captured.err


@pytest.mark.parametrize(("option", "name"), [("--answers", "a.jsonl"), ("--table", "a.parquet"), ("--json", "a.json")])
def test_no_file_is_replaced(option: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text("hours of work")
    assert main(["eval", *FEW, option, str(tmp_path / name)]) == 2
    assert f"{name} exists already; name another file" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "hours of work"
    (tmp_path / name).write_text("")  # holds nothing that could be lost
    evaluated(capsys, *FEW, "--prompts", "1", "--samples", "1", option, str(tmp_path / name))
    assert (tmp_path / name).stat().st_size


def test_a_verifier_that_is_not_there_is_known_before_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = str(write_rows(tmp_path / "aime.jsonl", laid_out("aime", sums(3))))
    for verifier, reason in (("nowhere:f", "cannot be imported"), ("helpers_math:nosuch", "has no function 'nosuch'")):
        assert main(["eval", "embedded", "--task", "math", "--data", data, "--task.verifier", verifier]) == 2
        printed = capsys.readouterr()
        assert reason in printed.err
        assert "loading" not in printed.err


def test_an_interrupted_evaluation_keeps_its_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    closed: list[bool] = []
    generate = TransformersEngine.generate

    def interrupted(
        self: TransformersEngine, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator
    ) -> Rollout:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, prompts, sampling, generator)

    monkeypatch.setattr(TransformersEngine, "generate", interrupted)
    monkeypatch.setattr(TransformersEngine, "close", lambda self: closed.append(True))
    answers, table = tmp_path / "answers.jsonl", tmp_path / "table.parquet"
    few = ["--prompts", "6", "--samples", "4", "--eval.batch_size", "10"]
    assert main(["eval", *FEW, *few, "--answers", str(answers), "--table", str(table)]) == 130
    captured = capsys.readouterr()
    assert calls == [6, 8, 8]
    assert closed == [True]
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == f"interrupted; {answers} has 14 answers"
    rows = written(answers)
    assert len(rows) == 14
    assert [row["sample"] for row in rows] == [None] * 6 + [1, 2, 3, 4] * 2
    assert not table.exists()


def test_progress_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predmask.cli.progress._SECONDS", 0.0)
    few = ["--prompts", "6", "--samples", "4", "--eval.batch_size", "10"]
    assert main(["eval", *FEW, *few]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "loading embedded",
        "starting engine transformers",
        "answering 30 answers",
        "answering 6 of 30 answers",
        "answering 14 of 30 answers",
        "answering 22 of 30 answers",
    ]


def test_one_of_anything_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("answer") as bar:
        bar("answering", 0, 1)
    assert capsys.readouterr().err == "answering 1 answer\n"


def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for word in ("MODEL", "--samples", "--prompts", "--data", "--table", "--answers", "--json", "examples:", "maj@N"):
        assert word in out


def test_the_examples_of_the_evaluation_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    comparing, calling = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for name, seed in (("before", "1"), ("after", "2")):
        evaluated(capsys, *FEW, "--prompts", "20", "--seed", seed, "--table", f"{name}.parquet")
    exec(compile(comparing, "comparing", "exec"), {})
    difference, low, high = re.findall(r"[-+]?[\d.]+(?:e-\d+)?", capsys.readouterr().out)
    tables = [pq.read_table(tmp_path / f"{name}.parquet")["avg"].to_numpy() for name in ("before", "after")]
    assert float(difference) == pytest.approx(100 * (tables[1] - tables[0]).mean(), abs=0.05)
    assert float(low) < float(difference) / 100 < float(high)
    found: dict[str, Any] = {}
    exec(compile(calling, "calling", "exec"), found)
    assert found["found"].evaluation.accuracy.samples == 4
