"""`predmask verify`: score answers against gold answers, with the verifier alone."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from predmask.cli.numbers import above_zero, positive
from predmask.cli.outputs import check_outputs, say_written
from predmask.cli.progress import Progress

if TYPE_CHECKING:
    from predmask.tasks.math.tables import Table
    from predmask.tasks.verifier import Grade

_RESPONSES = ("response", "completion", "prediction", "answer")
_GOLDS = ("gold", "reference", "ground_truth", "reward_model.ground_truth", "answer")
_SCORE = "score"
"""The column in which a file has the scores of another time."""
_HELP = f"""\
Each row of FILE holds a response and a gold answer. The verifier says for each whether it is right,
in processes that are killed and replaced where an answer takes too long: what could not be scored
is counted apart, for it is not wrong. FILE is JSON Lines, JSON, Parquet or CSV, or - for JSON Lines
on standard input.

The columns are the first of these that are there, or those that are named; parts of nested ones
are named with dots, such as reward_model.ground_truth:
  response   {", ".join(_RESPONSES)}
  gold       {", ".join(_GOLDS)}

Which part of a response is its answer, and what is equal, is said in docs/math.md. In short: the
last \\boxed{{...}}, or else what follows "Answer:", or else the last formula or number; equal as
math-verify has it. A verifier of your own is a function (response, gold) that returns 1.0 for a
right answer, 0.0 for a wrong one, and None for one that it cannot score. A row whose response is
null or empty counts as an answer, too. Where the file has a column score, as after `predmask eval`,
it is said how many decisions differ from it.

examples:
  predmask verify answers.jsonl                  rows such as {{"answer": "1/3", "gold": "\\\\frac26"}}
  predmask verify answers.jsonl --output scored.jsonl    each row with score, extracted, why
  predmask verify samples.parquet --response text --gold solution
  predmask verify answers.jsonl --verifier my_checks:exact --workers 8 --deadline 2
  predmask eval runs/... --answers answers.jsonl && predmask verify answers.jsonl  of the task math
  zcat answers.jsonl.gz | predmask verify -

exit code: 0; 1 if not a single answer could be scored; 2 for a mistake in what was asked
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "verify",
        help="score answers against gold answers: the verifier alone",
        description="Score the answers of a file against the gold answers beside them.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="rows with a response and a gold answer; - for standard input")
    parser.add_argument("--response", metavar="COLUMN", help="column of the responses")
    parser.add_argument("--gold", metavar="COLUMN", help="column of the gold answers")
    parser.add_argument(
        "--verifier",
        type=_verifier,
        default="math_verify",
        metavar="NAME",
        help="math_verify, or a function of yours: package.module:function (default: math_verify)",
    )
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="processes that score (default: 2)")
    parser.add_argument(
        "--deadline", type=above_zero, default=10.0, metavar="SECONDS", help="that an answer may take (default: 10)"
    )
    parser.add_argument(
        "--output", dest="answers", type=Path, metavar="PATH", help="write each row with its score, as JSON lines"
    )
    return parser


def _verifier(name: str) -> str:
    if name != "math_verify" and not all(name.partition(":")):
        raise argparse.ArgumentTypeError(f"{name!r} is neither math_verify nor a function's package.module:function")
    return name


class _Row(NamedTuple):
    number: int
    response: str
    gold: str
    cells: dict[str, Any]
    """What stands in it: the columns that are read, and where they are to be written, all."""


def run(args: argparse.Namespace) -> int:
    """Score and print the table."""
    from predmask.analysis.text import visible
    from predmask.tasks import Problem
    from predmask.tasks.math import MATH_VERIFY, Math, find_verifier
    from predmask.tasks.verifier import Verifier, VerifierError
    from predmask.train.config import ConfigError

    check_outputs(args)
    try:
        with _table(args.file) as table:
            columns = _columns(table, args.response, args.gold)
            rows = list(_rows(table, *columns, whole=args.answers is not None))
        task = Math(heldout_data=(args.file,), verifier=args.verifier)
        if args.verifier != MATH_VERIFY:
            find_verifier(args.verifier)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    begun, ready = time.monotonic(), None
    with (
        Progress("answer") as bar,
        Verifier(task, workers=args.workers, deadline=args.deadline, batch_deadline=math.inf) as verifier,
    ):
        bar("starting processes", 0, 0)

        def show(done: int) -> None:
            nonlocal ready
            ready = ready or time.monotonic()
            bar("scoring", done, len(rows))

        try:
            problems = [Problem(f"row {row.number}", "", row.gold) for row in rows]
            grades: Sequence[Grade] = verifier.grade(problems, [row.response for row in rows], show)
        except VerifierError as error:
            if not error.grades:
                raise
            grades = error.grades
        ended = time.monotonic()
    count = f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
    print(f"file       {_shown(args.file)}: {count}, response {columns[0]!r}, gold {columns[1]!r}")
    processes = f"{args.workers} process{'es' if args.workers > 1 else ''}"
    print(f"verifier   {args.verifier}, {processes}, {args.deadline:g} s an answer")
    print("\n".join(_lines(rows, grades)))
    seconds, starting = ended - (ready or begun), (ready or begun) - begun
    print(f"speed      {len(rows) / seconds:,.0f} answers/s: {seconds:.1f} s, after {starting:.1f} s of starting")
    if args.answers:
        _write(args.answers, rows, grades)
    say_written(args)
    if all(grade.score is None for grade in grades):
        reason = visible(f"row {rows[0].number}: {grades[0].reason}")
        print(f"predmask: not a single answer could be scored; the first, in {reason}", file=sys.stderr)
        return 1
    return 0


# --- rows in and out -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _table(file: str) -> Iterator[Table]:
    from predmask.tasks.math.tables import open_table

    if file != "-":
        yield open_table(file)
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as spooled:
        spooled.write(sys.stdin.buffer.read())
        spooled.flush()
        try:
            yield open_table(spooled.name)
        except ValueError as error:
            raise ValueError(str(error).replace(spooled.name, _shown(file))) from error


def _columns(table: Table, response: str | None, gold: str | None) -> tuple[str, str]:
    """The columns of responses and gold answers; ValueError names those that were found."""
    from predmask.tasks.math.layouts import finder

    if not table.columns:
        raise ValueError(f"{table.name} has no rows")
    find = finder(table.columns)
    found = f"its columns: {', '.join(table.columns)}"

    def named(column: str | None, option: str) -> str | None:
        if column is not None and find(column) is None:
            raise ValueError(f"{table.name} has no column {column!r}, which {option} names; {found}")
        return column and find(column)

    def first(names: Sequence[str], what: str, taken: str | None, option: str) -> str:
        for column in map(find, names):
            if column is not None and column != taken:
                return column
        besides = "" if taken is None else f" besides {taken!r}, which holds the other"
        raise ValueError(
            f"{table.name} has no column of {what} ({', '.join(names)}){besides}; {found}. Name one by {option}"
        )

    response, gold = named(response, "--response"), named(gold, "--gold")
    gold = gold or first(_GOLDS, "gold answers", response, "--gold")
    return response or first(_RESPONSES, "responses", gold, "--response"), gold


def _rows(table: Table, response: str, gold: str, *, whole: bool) -> Iterator[_Row]:
    from predmask.tasks.math.layouts import answer_of

    empty = True
    scored = [column for column in table.columns if column == _SCORE]
    columns = list(dict.fromkeys((response, gold, *scored, *(table.columns if whole else ()))))
    for number, values in table.rows(columns):
        empty, cells = False, dict(zip(columns, values, strict=True))
        try:
            text = cells[response] if isinstance(cells[response], str) else answer_of(cells[response], response)
            reference = answer_of(cells[gold], gold)
        except ValueError as error:
            raise ValueError(
                f"{table.name}, row {number}: {response!r} and {gold!r} must be texts or numbers, but one is a list or "
                "an object; name other columns by --response and --gold"
            ) from error
        yield _Row(number, text, reference, cells)
    if empty:
        raise ValueError(f"{table.name} has no rows")


def _write(path: Path, rows: Sequence[_Row], grades: Sequence[Grade]) -> None:
    # A lone surrogate, which JSON may hold and UTF-8 may not, is written as its escape.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row, grade in zip(rows, grades, strict=True):
            why = f"{grade.kind}: {grade.reason}" if grade.score is None else None
            scored = row.cells | {"score": grade.score, "extracted": grade.answer, "why": why}
            file.write(json.dumps(scored, ensure_ascii=False, default=str) + "\n")


# --- the table -----------------------------------------------------------------------------------------------


def _lines(rows: Sequence[_Row], grades: Sequence[Grade]) -> Iterator[str]:
    from predmask.analysis.text import percent, visible

    def wrapped(line: str) -> list[str]:
        return textwrap.wrap(visible(line), 100, subsequent_indent=" " * 11)

    scores = [grade.score for grade in grades if grade.score is not None]
    right = sum(score >= 1.0 for score in scores)

    def line(name: str, count: int) -> str:
        return f"{name:<20}{count:>10,}{percent(count / len(grades), 1):>9}"

    yield ""
    yield f"{'':<20}{'answers':>10}{'share':>9}"
    yield line("right", right)
    yield line("wrong", len(scores) - right)
    yield line("not scored", len(grades) - len(scores))
    yield ""
    kinds: dict[str, list[int]] = {}
    for place, grade in enumerate(grades):
        if grade.score is None:
            kinds.setdefault(grade.kind, []).append(place)
    for kind, places in kinds.items():
        first = f"{len(places):,}, the first in row {rows[places[0]].number}: {grades[places[0]].reason}"
        yield from wrapped(f"{kind:<10} {first}")
    if empty := [row.number for row in rows if not row.response.strip()]:
        yield from wrapped(f"empty      {len(empty):,}, the first in row {empty[0]}: nothing stands in the response")
    if scores and kinds:
        yield f"right      {percent(right / len(scores), 1)} of the answers that could be scored"
    if scores and set(scores) - {0.0, 1.0}:
        yield f"mean       {math.fsum(scores) / len(scores):.3f}, of scores from {min(scores):g} to {max(scores):g}"
    yield from itertools.chain.from_iterable(map(wrapped, _differences(rows, grades)))


def _differences(rows: Sequence[_Row], grades: Sequence[Grade]) -> Iterator[str]:
    """How the decisions differ from those of the file, if it has any."""
    known = [
        (row.number, _decision(row.cells[_SCORE]), _decision(grade.score))
        for row, grade in zip(rows, grades, strict=True)
        if _SCORE in row.cells and isinstance(row.cells[_SCORE], int | float | None)
    ]
    differing = [each for each in known if each[1] != each[2]]
    if differing:
        number, before, now = differing[0]
        yield (
            f"differing  {len(differing):,} of {len(known):,} decisions from the file's column {_SCORE!r}, the first "
            f"in row {number}: {before} there, {now} here. math_verify is for mathematics; answers of another task, "
            "or under another verifier, are scored by a function that --verifier names"
        )
    elif known:
        yield f"differing  none of {len(known):,} decisions from the file's column {_SCORE!r}"


def _decision(score: float | None) -> str:
    return "not scored" if score is None else "right" if score >= 1.0 else "wrong"


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file
