"""The task math: files and data sets to problems, each question once, in two splits."""

from __future__ import annotations

import builtins
import contextlib
import gzip
import hashlib
import json
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_math import FLAT, LAYOUTS, laid_out, sums, tiny_model_directory, write_rows
from predmask.tasks import Problem, parse_task
from predmask.tasks.math import Math
from predmask.tasks.math.layouts import answer_of, question_of
from predmask.tasks.verifier import Verifier, VerifierError

FORMATS = ("parquet", "jsonl", "json", "csv", "jsonl.gz", "csv.gz")


def task_of(*sources: Path | str, **fields: Any) -> Math:
    return Math(data=tuple(map(str, sources)), **fields)


def both(task: Math) -> list[Problem]:
    """The problems of both splits."""
    return [*task.problems("train"), *task.problems("heldout")]


def pairs(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    return [(problem.prompt, problem.reference) for problem in problems]


def held_out_alone(path: Path) -> Math:
    """A task all of whose problems are held out, so that they stand in the data's order."""
    return Math(heldout_data=(str(path),))


def problems_in(tmp_path: Path, rows: list[dict[str, Any]], format: str = "jsonl", **fields: Any) -> list[Problem]:
    path = write_rows(tmp_path / f"data.{format}", rows)
    return list(Math(heldout_data=(str(path),), **fields).problems("heldout"))


# --- layouts and formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "format"),
    [(layout, format) for layout in LAYOUTS for format in FORMATS if layout in FLAT or not format.startswith("csv")],
)
def test_every_layout_in_every_format_gives_the_same_problems(layout: str, format: str, tmp_path: Path) -> None:
    questions = [*sums(3), ('Two\nlines, "quoted": ½ é?', "\\frac{1}{2}")]
    plain_format = format.removesuffix(".gz")
    path = write_rows(tmp_path / f"aime24.{plain_format}", laid_out(layout, questions))
    if format == "csv.gz":
        path = tmp_path / "aime24.csv.gz"
        path.write_bytes(gzip.compress((tmp_path / "aime24.csv").read_bytes()))
    elif format == "jsonl.gz":
        path = write_rows(tmp_path / "aime24.jsonl.gz", laid_out(layout, questions))
    problems = held_out_alone(path).problems("heldout")
    assert pairs(problems) == questions
    assert [problem.id for problem in problems] == ["aime24/1", "aime24/2", "aime24/3", "aime24/4"]
    assert {problem.system for problem in problems} == {""}


def test_a_system_message_goes_along(tmp_path: Path) -> None:
    row = LAYOUTS["dapo"]("1 + 1?", "2")
    row["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    for format in ("parquet", "jsonl"):
        (problem,) = problems_in(tmp_path, [row], format)
        assert (problem.system, problem.prompt, problem.reference) == ("Be brief.", "1 + 1?", "2")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("user", "a"), ("assistant", "b"), ("user", "c")], "conversation of user, assistant, user"),
        ([("user", "a"), ("user", "b")], "conversation of user, user"),
        ([("user", "a"), ("assistant", "b")], "conversation of user, assistant"),
        ([("system", "a")], "conversation of system"),
        ([], "conversation of no messages"),
        ([("user", ["part"])], "a message without content as text"),
        ([("user", None)], "a message without content"),
    ],
)
def test_a_conversation_that_is_no_single_question_is_refused(
    messages: list[tuple[str, Any]], reason: str, tmp_path: Path
) -> None:
    rows = laid_out("dapo", sums(2))
    rows[1]["prompt"] = [{"role": role, "content": content} for role, content in messages]
    with pytest.raises(ValueError, match=rf"data.jsonl, row 2: .*{reason}"):
        problems_in(tmp_path, rows)


def test_other_questions_are_refused_and_none_is_none() -> None:
    assert question_of(None) == question_of("  ") == ("", "")
    with pytest.raises(ValueError, match="question is a int"):
        question_of(3)
    with pytest.raises(ValueError, match="message without role"):
        question_of(["1 + 1?"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (34, "34"),
        (-3, "-3"),
        (34.0, "34"),
        (1e22, "10000000000000000000000"),
        (0.5, "0.5"),
        (Decimal("34.00"), "34"),
        (" 34 ", "34"),
        ("34.0", "34.0"),
        (["34"], "34"),
        ([34.0], "34"),
        ("1,234", "1,234"),  # only GSM8K's mark says that this is one number
        ("It is 9, 1,000 in all\n#### 1,234,567", "1234567"),
        ("#### -1,234.50", "-1234.50"),
        ("#### 1,23", "1,23"),
        ("#### 1 #### 72\n", "72"),
        ("so \\boxed{7}", "7"),
        (None, ""),
        ("", ""),
        ("  ", ""),
        ([], ""),
        ([None], ""),
        (float("nan"), ""),
        (float("inf"), ""),
    ],
)
def test_answers_become_text(value: Any, text: str) -> None:
    assert answer_of(value, "answer") == text


@pytest.mark.parametrize("value", [["1", "2"], {"a": 1}, True, b"34"])
def test_other_answers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the answer is .* neither a text nor .* task.answer_column"):
        answer_of(value, "answer")


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} then $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x \in \{1, 2\} \right\}}", r"\left\{ x \in \{1, 2\} \right\}"),
        (r"\boxed{\{}", r"\{"),
        (r"it is $\boxed 5$.", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed", ""),
        (r"\boxedfoo{3}", ""),
        ("none, though it ends with 3", ""),
    ],
)
def test_the_answer_of_a_worked_solution_is_its_last_box(text: str, boxed: str) -> None:
    assert answer_of(text, "Solution") == boxed


BALANCED = st.recursive(
    st.sampled_from(["x", "12", r"\frac", r"\{", r"\}", "a b"]),
    lambda inner: st.builds("{}{{{}}}".format, inner, inner),
)


@given(BALANCED)
def test_boxes_hold_whatever_is_balanced(inside: str) -> None:
    assert answer_of(rf"thus \boxed{{{inside}}}, as {{said}}", "solution") == inside


def test_columns_of_ones_own_are_named(tmp_path: Path) -> None:
    rows = [{"q": {"Text": f"{n}?"}, "final.value": n, "question": "not this", "answer": "nor this"} for n in range(3)]
    expected = [("0?", "0"), ("1?", "1"), ("2?", "2")]
    for format in ("parquet", "jsonl"):
        named = {"question_column": "q.text", "answer_column": "Final.Value"}
        assert pairs(problems_in(tmp_path, rows, format, **named)) == expected
    # With one of them named, the layout finds the other.
    (problem, *_) = problems_in(tmp_path, rows, "json", question_column="q.text")
    assert problem.reference == "nor this"


def test_an_unknown_column_or_layout_is_an_error_with_the_columns_found(tmp_path: Path) -> None:
    rows = [{"text": "1 + 1?", "meta": {"gold": {"value": 2}, "level": 1}}]
    for format in ("parquet", "jsonl"):
        columns = r"columns: text, meta\.gold\.value, meta\.level"
        with pytest.raises(ValueError, match=rf"data.{format} has no known layout .*; its {columns}\. Set task.quest"):
            problems_in(tmp_path, rows, format)
        with pytest.raises(
            ValueError, match=rf"no column 'meta.golden', which task.answer_column names; its {columns}"
        ):
            problems_in(tmp_path, rows, format, question_column="text", answer_column="meta.golden")


# --- each question once --------------------------------------------------------------------------------------


def test_repeats_conflicts_and_gaps_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = laid_out(
        "plain",
        [
            ("What is  1 + 1?", "2"),
            ("caf\u00e9?", "4"),
            ("\nWhat is\t1 + 1?", "2"),  # a repeat but for white space
            ("cafe\u0301?", "4"),  # a repeat by NFC
            ("2⁵?", "32"),  # not 25
            ("25?", "25"),
            ("x2?", "6"),
            ("X2?", "5"),  # another question: case counts
            ("2 + 2?", "4"),
            ("2 + 2?", "5"),  # a conflict
            ("2 + 2?", "4"),
            ("3 + 3?", ""),
            ("", "6"),
            ("1 + 1, then?", "2"),
        ],
    )
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = held_out_alone(path)
    assert task.notes() == []  # nothing was read yet
    assert pairs(task.problems("heldout")) == [
        ("What is  1 + 1?", "2"),
        ("caf\u00e9?", "4"),
        ("2⁵?", "32"),
        ("25?", "25"),
        ("x2?", "6"),
        ("X2?", "5"),
        ("1 + 1, then?", "2"),
    ]
    assert task.notes() == [
        "task.heldout_data: 14 rows, 7 problems; left out: repeats 2, conflicting answers 3 (questions: 1), "
        "no question or no answer 2"
    ]


def test_instructions_of_known_data_sets_do_not_make_another_question(tmp_path: Path) -> None:
    """DAPO-Math-17k wraps each question in instructions; the same question stands bare in other data sets."""
    wrapped = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    questions = [(wrapped.replace("{}", question), answer) for question, answer in sums(6)]
    train = write_rows(tmp_path / "train.parquet", laid_out("dapo", questions))
    boxed = " Let's think step by step and output the final answer within \\boxed{}."
    elsewhere = [*sums(2), *((question + boxed, answer) for question, answer in sums(2, start=2))]
    test = write_rows(tmp_path / "test.jsonl", laid_out("aime", elsewhere))
    task = task_of(train, heldout_data=(str(test),))
    assert pairs(task.problems("train")) == questions[4:]  # as the data has them
    assert task.notes()[-1] == "4 problems of task.data are not trained on: they are held out"


def test_ids_are_the_datas_own_where_they_tell_rows_apart(tmp_path: Path) -> None:
    def ids(name: str, *labels: Any, column: str = "id") -> list[str]:
        rows = [{"problem": f"{n}?", "answer": n, column: label} for n, label in enumerate(labels)]
        return [p.id for p in held_out_alone(write_rows(tmp_path / name, rows)).problems("heldout")]

    assert ids("a.jsonl", 60, 61) == ["a/60", "a/61"]
    assert ids("b.parquet", "2024-I-4", "2024-I-5", column="ID") == ["b/2024-I-4", "b/2024-I-5"]
    assert ids("c.jsonl", "x", "x") == ["c/1", "c/2"]
    assert ids("d.jsonl", "x", None) == ["d/1", "d/2"]
    assert ids("e.jsonl", 0, 1) == ["e/0", "e/1"]
    dapo = [LAYOUTS["dapo"](f"{n}?", str(n)) | {"extra_info": {"index": f"uuid-{n}"}} for n in (0, 1)]
    path = write_rows(tmp_path / "dapo.parquet", [*dapo, *dapo])
    assert [p.id for p in held_out_alone(path).problems("heldout")] == ["dapo/uuid-0", "dapo/uuid-1"]


def test_rows_are_numbered_through_large_files(tmp_path: Path) -> None:
    rows = laid_out("plain", [*sums(1) * 9000, *sums(2)])
    for format in ("parquet", "csv"):
        assert [problem.id for problem in problems_in(tmp_path, rows, format)] == ["data/1", "data/9002"]


def test_ids_differ_where_files_have_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = write_rows(tmp_path / "test.jsonl", laid_out("plain", sums(2)))
    second = write_rows(tmp_path / "other" / "test.parquet", laid_out("plain", sums(2, start=2)))
    task = Math(heldout_data=(str(first), str(second)))
    assert [p.id for p in task.problems("heldout")] == ["test/1", "test/2", "test-2/1", "test-2/2"]


# --- splits --------------------------------------------------------------------------------------------------

QUESTIONS = st.lists(
    st.tuples(st.sampled_from([f"{n} + {n}?" for n in range(40)]), st.sampled_from(["1", "2"])), min_size=8, max_size=60
)


@pytest.fixture(scope="module")
def workshop() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(workshop: Path, questions: Sequence[tuple[str, str]], format: str = "jsonl") -> Path:
    """A file of its own for each example: what was read is remembered by name."""
    directory = Path(tempfile.mkdtemp(dir=workshop))
    return write_rows(directory / f"data.{format}", laid_out("plain", questions))


def split_of(task: Math) -> dict[str, set[tuple[str, str]]]:
    """The problems of each split, an empty one for a split that has none."""
    found: dict[str, set[tuple[str, str]]] = {"train": set(), "heldout": set()}
    for split, problems in found.items():
        with contextlib.suppress(ValueError):
            problems.update(pairs(task.problems(split)))  # type: ignore[arg-type]
    return found


@given(data=st.data(), questions=QUESTIONS, share=st.floats(0.05, 0.95))
@settings(max_examples=25)
def test_splits_do_not_depend_on_order_or_format_or_other_questions(
    workshop: Path, data: st.DataObject, questions: list[tuple[str, str]], share: float
) -> None:
    answers: dict[str, set[str]] = {}
    for question, answer in questions:
        answers.setdefault(question, set()).add(answer)
    expected = {(question, *given) for question, given in answers.items() if len(given) == 1}
    splits = split_of(task_of(written(workshop, questions), heldout_share=share))
    assert splits["train"] | splits["heldout"] == expected
    assert not splits["train"] & splits["heldout"]
    shuffled = data.draw(st.permutations(questions))
    format = data.draw(st.sampled_from(["csv", "json", "parquet"]))
    assert split_of(task_of(written(workshop, shuffled, format), heldout_share=share)) == splits
    fewer = [(question, answer) for question, answer in questions if question < "2"]
    if fewer:
        part = split_of(task_of(written(workshop, fewer), heldout_share=share))
        assert part["train"] <= splits["train"]
        assert part["heldout"] <= splits["heldout"]


@given(train=QUESTIONS, heldout=QUESTIONS)
@settings(max_examples=25)
def test_nothing_that_is_held_out_is_trained_on(
    workshop: Path, train: list[tuple[str, str]], heldout: list[tuple[str, str]]
) -> None:
    task = task_of(written(workshop, train), heldout_data=(str(written(workshop, heldout, "csv")),))
    splits = split_of(task)
    # Those that are left out of the held-out data are not trained on either: their answers conflict.
    assert not {q for q, _ in splits["train"]} & {q for q, _ in heldout}
    assert split_of(task) == splits
    if splits["train"] and splits["heldout"]:
        ids = [problem.id for problem in both(task)]
        assert len(set(ids)) == len(ids)


def test_a_question_that_is_held_out_without_an_answer_is_not_trained_on(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", laid_out("plain", sums(4)))
    rows = laid_out("plain", [(sums(4)[1][0], ""), (sums(4)[2][0], "1"), (sums(4)[2][0], "2"), ("5 + 5?", "10")])
    task = task_of(train, heldout_data=(str(write_rows(tmp_path / "test.jsonl", rows)),))
    assert pairs(task.problems("train")) == [sums(4)[0], sums(4)[3]]
    assert pairs(task.problems("heldout")) == [("5 + 5?", "10")]
    assert task.notes()[-1] == "2 problems of task.data are not trained on: they are held out"


def test_few_held_out_problems_are_said_to_be_few(tmp_path: Path) -> None:
    task = task_of(write_rows(tmp_path / "sums.csv", laid_out("gsm8k", sums(100))), heldout_share=0.05)
    count = len(task.problems("heldout"))
    assert 0 < count < 10
    assert task.notes()[-1].startswith(f"held out: {count} of these problems; so few say little: raise task.heldout_sh")


def test_the_share_held_out_is_that_asked_for(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "sums.csv", laid_out("gsm8k", sums(4000)))
    for share in (0.02, 0.3):
        task = task_of(path, heldout_share=share)
        count = len(task.problems("heldout"))
        assert count == pytest.approx(4000 * share, abs=4 * (4000 * share * (1 - share)) ** 0.5)
        assert task.notes() == ["task.data: 4,000 rows, 4,000 problems", f"held out: {count:,} of these problems"]
        # The data's order is kept.
        numbers = [int(problem.id.partition("/")[2]) for problem in task.problems("train")]
        assert numbers == sorted(numbers)


def test_the_split_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """Known hashes: SHA-256 of the question, its first eight bytes over 2^64."""
    path = write_rows(tmp_path / "sums.json", laid_out("plain", sums(100)))
    held = pairs(task_of(path, heldout_share=0.05).problems("heldout"))
    expected = [q for q in sums(100) if int(hashlib.sha256(q[0].encode()).hexdigest()[:16], 16) / 2**64 < 0.05]
    assert held == expected
    assert 0 < len(held) < 15


def test_empty_splits_are_errors_with_their_remedy(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", laid_out("plain", sums(1)))
    none = write_rows(tmp_path / "none.jsonl", laid_out("plain", [("1 + 1?", "")]))
    with pytest.raises(
        ValueError, match=r"no problem of task.data \(1 row, 1 problem\) falls to the split 'heldout'.*raise task.h"
    ):
        task_of(one, heldout_share=1e-9).problems("heldout")
    with pytest.raises(ValueError, match=r"falls to the split 'train'.*lower task.heldout_share"):
        task_of(one, heldout_share=1 - 1e-9).problems("train")
    with pytest.raises(ValueError, match=r"all of task.data is held out, too \(1 row, 1 problem\)"):
        task_of(one, heldout_data=(str(one),)).problems("train")
    with pytest.raises(
        ValueError, match=r"task.data has no problem: 1 row, 0 problems; left out: no question or no answer 1"
    ):
        task_of(none).problems("train")
    with pytest.raises(ValueError, match=r"task.heldout_data has no problem: 1 row,"):
        task_of(one, heldout_data=(str(none),)).problems("heldout")
    with pytest.raises(ValueError, match=r"nothing to train on: task.data is empty"):
        held_out_alone(one).problems("train")


def test_evaluation_reads_nothing_but_what_is_evaluated(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "aime.jsonl", laid_out("aime", sums(3)))
    task = task_of(tmp_path / "missing.parquet", heldout_data=(str(path),))
    assert len(task.problems("heldout")) == 3
    assert task.sources() == (str(tmp_path / "missing.parquet"), str(path))
    with pytest.raises(ValueError, match=r"missing.parquet does not exist"):
        task.problems("train")


# --- the task as a value -------------------------------------------------------------------------------------


def test_the_task_is_a_small_value_that_travels(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "sums.parquet", laid_out("dapo", sums(500)))
    task = task_of(path)
    before = pickle.dumps(task)
    first = task.problems("train")
    assert task.problems("train") == first
    assert len(pickle.dumps(task)) == len(before)
    assert pickle.loads(before) == task == task_of(path)
    path.unlink()  # read once a process
    assert task_of(path).problems("train") == first


def test_the_data_may_follow_the_name() -> None:
    assert parse_task("math") == (Math, {})
    assert parse_task("math:openai/gsm8k:main@test") == (Math, {"data": ("openai/gsm8k:main@test",)})
    assert parse_task("math:a.parquet,b.csv") == (Math, {"data": ("a.parquet", "b.csv")})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "task.data is empty: give files .* --task.data"),
        ({"data": ("a.csv", "")}, "holds an empty name"),
        ({"data": ("a.csv",), "heldout_share": 0.0}, "heldout_share is 0.0; it must be between 0 and 1"),
        ({"data": ("a.csv",), "heldout_share": float("nan")}, "heldout_share is nan"),
        ({"data": ("a.csv",), "verifier": "mathverify"}, "task.verifier is 'mathverify'; choose math_verify, or"),
        ({"data": ("a.csv",), "verifier": ":"}, "task.verifier is ':'; choose math_verify, or"),
        ({"data": ("a.csv",), "verifier": "my_checks:"}, "task.verifier is 'my_checks:'; choose math_verify, or"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Math(**fields)


# --- what cannot be read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"prompt": "1?", "answer": 1}\n\n{"prompt": "2?",\n',
            "a.jsonl cannot be read: line 3 is not valid",
        ),
        ("a.jsonl", b'{"prompt": "1?", "answer": 1}\n[1, 2]\n', "row 2 is no object with named columns, but a list"),
        ("a.jsonl", b'{"prompt": "\xff", "answer": 1}\n', "line 1 is not UTF-8 text; save it as UTF-8"),
        ("a.jsonl", b'{"prompt": "\\ud800", "answer": 1}\n', "a.jsonl, row 1: .*surrogates"),
        ("a.jsonl", b"", "no known layout .*columns: none"),
        ("a.json", b'[{"prompt": "1?", "answer": 1},\n', "a.json cannot be read: it is not valid JSON: .* line 2"),
        ("a.json", b"[" * 100_000, "it is not valid JSON"),
        ("a.json", b'["1?"]', "row 1 is no object with named columns, but a str"),
        ("a.json", '[{"prompt": "é", "answer": 1}]'.encode("latin-1"), "a.json is not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "1?", "answer": 1}\n' * 99)[:-12], "a.jsonl.gz is cut short"),
        ("a.jsonl.gz", b'{"prompt": "1?"}', "a.jsonl.gz cannot be read: Not a gzipped file"),
        ("a.csv", b"prompt,answer\n1?,1,2\n", "a.csv: row 1 has 3 values, but the header 2"),
        ("a.csv", b"prompt,answer\n1?\n", "row 1 has 1 values"),
        ("a.csv", b'prompt,answer\n1?,1\n"2?,2\n3?,3\n', "a.csv is not valid CSV: unexpected end of data"),
        ("a.csv", b"prompt,answer\n\xe9?,1\n", "a.csv is not UTF-8 text"),
        ("a.csv", b"prompt,answer,answer\n1?,1,2\n", "names a column twice"),
        ("a.csv", b"prompt,answer\n", "a.csv has no rows"),
        ("a.parquet", b"prompt,answer\n1?,1\n", "a.parquet cannot be read: .*not a parquet file"),
        ("a.parquet", b"", "a.parquet cannot be read"),
        ("a.txt", b"1 + 1 = 2", "a.txt has no known format: the suffixes are .parquet, .jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        held_out_alone(tmp_path / name).problems("heldout")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "whole.parquet", laid_out("dapo", sums(2000)))
    content = path.read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut.parquet cannot be read"):
        held_out_alone(cut).problems("heldout")
    scratched = tmp_path / "scratched.parquet"
    scratched.write_bytes(content[:4] + bytes(2000) + content[2004:])
    with pytest.raises(ValueError, match=r"scratched.parquet cannot be read"):
        held_out_alone(scratched).problems("heldout")


def test_a_parquet_file_that_names_a_column_twice_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table([["1?"], ["1"], ["2"]], names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet names a column twice: prompt, answer, answer"):
        held_out_alone(tmp_path / "a.parquet").problems("heldout")


def test_a_cell_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    question = "1 + " * 100_000 + "1?"
    path = write_rows(tmp_path / "a.csv", laid_out("aime", [(question, "100001")]))
    assert pairs(held_out_alone(path).problems("heldout")) == [(question, "100001")]


def test_files_begin_with_a_byte_order_mark_or_end_without_a_newline(tmp_path: Path) -> None:
    for name, content in (
        ("a.csv", b"\xef\xbb\xbfprompt,answer\r\n1?,1"),
        ("a.jsonl", b'\xef\xbb\xbf{"prompt": "1?", "answer": 1}'),
        ("b.json", b'\xef\xbb\xbf \n[{"prompt": "1?", "answer": 1}]'),
        ("c.json", b'{"prompt": "1?", "answer": 1}\r\n'),  # one object a line
    ):
        (tmp_path / name).write_bytes(content)
        assert pairs(held_out_alone(tmp_path / name).problems("heldout")) == [("1?", "1")]


def test_a_row_may_lack_a_column(tmp_path: Path) -> None:
    rows = [{"prompt": "1?", "answer": 1}, {"prompt": "2?"}, {"answer": 3}, {"prompt": "4?", "answer": 4}]
    assert pairs(problems_in(tmp_path, rows)) == [("1?", "1"), ("4?", "4")]
    nested = laid_out("dapo", sums(3))
    nested[1]["reward_model"] = None
    assert pairs(problems_in(tmp_path, nested, "parquet")) == [sums(3)[0], sums(3)[2]]
    assert pairs(problems_in(tmp_path, nested, "json")) == [sums(3)[0], sums(3)[2]]


# --- data sets -----------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data sets library without a network, its cache in a directory of its own; starts in an empty directory."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def data_set(directory: Path, **splits: Sequence[tuple[str, str]]) -> Path:
    directory.mkdir(parents=True)
    for split, questions in splits.items():
        write_rows(directory / f"{split}.parquet", laid_out("dapo", questions))
    return directory


def test_a_data_set_is_loaded_by_its_name(offline: Path) -> None:
    data_set(offline / "openai" / "gsm8k", train=sums(5), test=sums(2, start=5))
    task = Math(data=("openai/gsm8k",), heldout_data=("openai/gsm8k@test",))
    assert pairs(task.problems("train")) == sums(5)
    assert pairs(task.problems("heldout")) == sums(2, start=5)
    assert [p.id for p in task.problems("heldout")] == ["gsm8k@test/1", "gsm8k@test/2"]
    assert pairs(Math(heldout_data=("openai/gsm8k:default@test",)).problems("heldout")) == sums(2, start=5)
    with pytest.raises(ValueError, match=r"gsm8k@dev has the splits train, test: choose one by openai/gsm8k@SPLIT"):
        task_of("openai/gsm8k@dev").problems("train")
    with pytest.raises(ValueError, match=r"gsm8k:socratic cannot be read .*socratic"):
        task_of("openai/gsm8k:socratic").problems("train")


def test_a_data_sets_only_split_needs_no_name(offline: Path) -> None:
    only = data_set(offline / "only", test=sums(3))
    assert pairs(held_out_alone(only).problems("heldout")) == sums(3)
    several = data_set(offline / "several", test=sums(1), validation=sums(1))
    with pytest.raises(ValueError, match="has the splits validation, test"):
        task_of(several).problems("train")
    assert len(Math(heldout_data=(f"{several}@test",)).problems("heldout")) == 1


def test_a_data_set_that_cannot_be_had_is_named_with_the_remedy(offline: Path) -> None:
    with pytest.raises(ValueError, match=r"org/missing cannot be read .*Hub.*check its name.*network, or give a local"):
        task_of("org/missing").problems("train")
    (offline / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the data set empty cannot be read .*contain any data files"):
        task_of("empty").problems("train")
    (offline / "broken").mkdir()
    (offline / "broken" / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"the data set broken cannot be read"):
        task_of("broken").problems("train")


@pytest.mark.parametrize("source", ["./train", "~/train.parquet", "missing.JSONL", "/no/such", "a/b/c", "data.csv.gz"])
def test_a_path_that_does_not_exist_is_no_data_set(source: str) -> None:
    with pytest.raises(
        ValueError, match=rf"the file {source} does not exist; give a file \(.parquet, .* NAME\[:SUBSET"
    ):
        task_of(source).problems("train")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'", name="datasets")
        return imports(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ImportError, match=r"openai/gsm8k .*datasets package .*install predmask\[math\]"):
        task_of("openai/gsm8k").problems("train")


# --- verifiers of one's own ----------------------------------------------------------------------------------


def test_a_verifier_of_ones_own_scores_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_verifier.py").write_text(
        "def score(response, reference):\n"
        "    if response == 'skip':\n"
        "        return None\n"
        "    return 0.5 if reference in response else 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    path = write_rows(tmp_path / "sums.jsonl", laid_out("aime", sums(1, start=21)))
    task = Math(heldout_data=(str(path),), verifier="my_verifier:score")
    problems = task.problems("heldout")
    with Verifier(task, workers=1) as verifier:
        assert verifier.score([*problems] * 3, ["it is 42", "41", "skip"]) == [0.5, 0.0, None]


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("no_such_module:score", "verifier 'no_such_module:score': the module 'no_such_module' cannot be imported"),
        ("helpers_math:missing", "verifier 'helpers_math:missing': the module has no function 'missing'"),
        ("helpers_math:CONTEXT", "has no function 'CONTEXT'"),
    ],
)
def test_a_verifier_that_is_none_is_named(verifier: str, message: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", laid_out("aime", sums(2)))
    task = Math(heldout_data=(str(path),), verifier=verifier)
    for asked in (task.prepare, lambda: task.problems("heldout")):
        with pytest.raises(ValueError, match=message):
            asked()
    with pytest.raises(VerifierError, match=message), Verifier(task, workers=1) as guarded:
        guarded.score([Problem("x", "", "1")], ["1"])


def test_a_verifier_whose_module_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_checks.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"verifier 'failing_checks:f': its module fails \(ZeroDivisionError: "):
        Math(data=("a.csv",), verifier="failing_checks:f").problems("train")


def percents(response: str, reference: str) -> float:
    return float(response)


def test_no_score_is_above_that_of_a_right_answer() -> None:
    """One in percent would make 2 % a right answer; below 0 is a penalty."""
    task = Math(data=("a.csv",), verifier="test_math_data:percents")
    problem = Problem("x", "", "1")
    assert [task.score(problem, response) for response in ("1", "0.5", "-1")] == [1.0, 0.5, -1.0]
    with pytest.raises(ValueError, match=r"returned 85.0, but the highest score is 1"):
        task.score(problem, "85")


def test_a_missing_math_verify_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(response: str) -> str:
        raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")

    monkeypatch.setattr("predmask.tasks.math.answers.answer", without)
    with pytest.raises(ImportError, match=r"math-verify package .*install predmask\[math\]"):
        Math(data=("a.csv",)).prepare()


def test_math_verify_scores_by_default(tmp_path: Path) -> None:
    task = held_out_alone(write_rows(tmp_path / "halves.jsonl", laid_out("math", [("1/2?", r"\frac{1}{2}")])))
    problems = task.problems("heldout")
    with Verifier(task, workers=1) as verifier:
        assert verifier.score([*problems] * 2, [r"so it is \boxed{\frac{2}{4}}", r"\boxed{2}"]) == [1.0, 0.0]


# --- the tiny models of other tests --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_tiny_models_load_as_policies_and_know_every_text(kind: str, tmp_path: Path) -> None:
    import torch

    from predmask.train.models import load_policy

    directory = tiny_model_directory(tmp_path / kind, kind, num_hidden_layers=1)
    loaded: Any = load_policy(str(directory), torch.device("cpu"))
    model, tokenizer = loaded[0], loaded[1]
    assert model.config.model_type == kind
    assert model.config.vocab_size == 300
    assert model.config.max_position_embeddings == 512
    text = "Was ist 3 × 4?\n\\boxed{12} <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] in model.generation_config.eos_token_id
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 1
