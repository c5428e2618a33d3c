"""From rows to problems: each question once, whatever repeats it."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from predmask.tasks.base import Problem
from predmask.tasks.math.layouts import answer_of, find_columns, question_of
from predmask.tasks.math.tables import Table, open_table

_PREFIXES = (
    # DAPO-Math-17k, and slime's copy of it.
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "\\boxed{$Answer} where $Answer is the answer to the problem.",
)
_SUFFIXES = (
    'Remember to put your answer on its own line after "Answer:".',
    # verl's GSM8K and MATH.
    'Let\'s think step by step and output the final answer after "####".',
    "Let's think step by step and output the final answer within \\boxed{}.",
)


@dataclass(frozen=True)
class Collection:
    """The problems of some tables by their questions' keys, in the data's order, and what was left out.

    Every row is in one of the counts: `rows = len(problems) + repeats + conflicting_rows + incomplete`.
    """

    problems: Mapping[bytes, Problem]
    questions: Set[bytes]
    """The keys of all questions, those that were left out among them."""
    rows: int
    repeats: int
    """Rows whose question and answer came before."""
    conflicts: int
    """Questions that came with different answers."""
    conflicting_rows: int
    incomplete: int
    """Rows without a question or without an answer."""

    def __str__(self) -> str:
        left_out = [
            *([f"repeats {self.repeats:,}"] if self.repeats else []),
            *(
                [f"conflicting answers {self.conflicting_rows:,} (questions: {self.conflicts:,})"]
                if self.conflicts
                else []
            ),
            *([f"no question or no answer {self.incomplete:,}"] if self.incomplete else []),
        ]
        counts = f"{_counted(self.rows, 'row')}, {_counted(len(self.problems), 'problem')}"
        return f"{counts}; left out: {', '.join(left_out)}" if left_out else counts


@dataclass(slots=True)
class _Found:
    """A question, as it was first met."""

    problem: Problem
    source: str
    label: str | None
    rows: int = 1
    conflicting: bool = False


def collect(sources: Mapping[str, str], question: str | None, answer: str | None) -> Collection:
    """The problems of the sources (by the names that their problems' ids begin with), read one after the other.

    Ids are `NAME/LABEL`, the label being the row's own id where those of the source are all there and differ, or
    else the row's number. Memory grows with the questions, not with the rows. Raises ValueError for what cannot be
    read.
    """
    found: dict[bytes, _Found] = {}
    unanswered: set[bytes] = set()
    keys: dict[str, bytes] = {}  # most rows of some data sets are copies: a text's key is computed once
    rows = incomplete = 0
    for name, source in sources.items():
        before = rows
        for number, label, system, prompt, reference in _cells(open_table(source), question, answer):
            rows += 1
            key = keys.get(prompt) or keys.setdefault(prompt, question_key(prompt))
            if not (prompt and reference):
                incomplete += 1
                unanswered.add(key)
                continue
            known = found.get(key)
            if known is None:
                found[key] = _Found(Problem(f"{name}/{number}", prompt, reference, system), name, label)
            else:
                known.rows += 1
                known.conflicting |= known.problem.reference != reference
        if rows == before:
            raise ValueError(f"{source} has no rows")
    kept = {key: entry for key, entry in found.items() if not entry.conflicting}
    dropped = [entry.rows for entry in found.values() if entry.conflicting]
    return Collection(
        problems=_labelled(kept),
        questions=found.keys() | unanswered,
        rows=rows,
        repeats=sum(entry.rows - 1 for entry in kept.values()),
        conflicts=len(dropped),
        conflicting_rows=sum(dropped),
        incomplete=incomplete,
    )


def look_at(source: str, question: str | None, answer: str | None) -> None:
    """Raise the ValueError that reading a source would raise, as far as its columns and its first row show it."""
    if next(_cells(open_table(source), question, answer), None) is None:
        raise ValueError(f"{source} has no rows")


def question_key(question: str) -> bytes:
    """[32 bytes] what tells two questions apart.

    It ignores white space, how Unicode composes a character (NFC; not NFKC, to which 2⁵ is 25), and the instructions
    that common data sets put around a question, so that training on one data set and evaluating on another finds what
    they share. It does not ignore case: x and X name different things.
    """
    text = " ".join(unicodedata.normalize("NFC", question).split())
    bare = text
    for prefix in _PREFIXES:
        bare = bare.removeprefix(prefix)
    for suffix in _SUFFIXES:
        bare = bare.removesuffix(suffix)
    return hashlib.sha256((bare.strip() or text).encode()).digest()


def is_held_out(key: bytes, share: float) -> bool:
    """Whether a question is among the `share` that is held out, the same on every machine and in every data set."""
    return int.from_bytes(key[:8]) < share * 2**64


def _cells(table: Table, question: str | None, answer: str | None) -> Iterator[tuple[int, str | None, str, str, str]]:
    """Each row's number, its own id, system message, question and answer."""
    columns = find_columns(table.name, table.columns, question, answer)
    for number, (asked, gold, *own) in _with_progress(table, table.rows(columns.names)):
        try:
            system, prompt = question_of(asked)
            reference = answer_of(gold, columns.answer)
            f"{system}{prompt}{reference}".encode()  # JSON can spell what is no text
        except ValueError as error:
            raise ValueError(f"{table.name}, row {number}: {error}") from error
        label = str(own[0]).strip() if own and own[0] is not None else ""
        yield number, label or None, system, prompt, reference


def _labelled(found: Mapping[bytes, _Found]) -> dict[bytes, Problem]:
    """The problems, by their own ids in each source where these are all there and differ."""
    labels: dict[str, list[str | None]] = {}
    for entry in found.values():
        labels.setdefault(entry.source, []).append(entry.label)
    own = {name for name, given in labels.items() if None not in given and len(set(given)) == len(given)}
    return {
        key: replace(entry.problem, id=f"{entry.source}/{entry.label}") if entry.source in own else entry.problem
        for key, entry in found.items()
    }


def _counted(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def _with_progress(table: Table, rows: Iterable[Any]) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(
        rows, desc=f"reading {table.name}", total=table.length, unit="row", unit_scale=True,
        leave=False, delay=2, disable=None,
    )  # fmt: skip
