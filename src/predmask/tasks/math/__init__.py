"""Mathematics: questions with gold answers out of files and hub data sets."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import Doc

from predmask.tasks.base import Problem, Split
from predmask.tasks.imports import imported
from predmask.tasks.math.collection import Collection, collect, is_held_out
from predmask.tasks.math.tables import short_name

MATH_VERIFY = "math_verify"
"""The verifier that comes with the task."""
_FEW = 10
"""Held-out problems below which accuracy says next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Math:
    """Questions with a gold answer, of your own files or of data sets of the Hugging Face hub.

    Files are Parquet, JSON, JSON Lines or CSV; the question's and the answer's columns are found by the layout
    (see `layouts.LAYOUTS`) or named. Each question counts once: repeats are left out, and so are questions that come
    with different answers and rows without an answer; `notes` has the counts.

    Held out are the problems of `heldout_data`, none of which is trained on, or else a share of `data`, chosen by a
    hash of the question: whatever the data's order and size, a question stays on its side.
    """

    name: ClassVar[str] = "math"
    needs: ClassVar[str] = "extra 'math'"
    inline_verifier: ClassVar[bool] = False

    data: Annotated[
        tuple[str, ...],
        Doc("what to train on: files (Parquet, JSON, JSONL, CSV) or hub data sets NAME[:SUBSET][@SPLIT]"),
    ] = ()
    heldout_data: Annotated[tuple[str, ...], Doc("what to evaluate on, spelled alike; empty: a share of the data")] = ()
    question_column: Annotated[
        str | None, Doc("column of the questions, parts of nested ones after dots; none: by the layout")
    ] = None
    answer_column: Annotated[str | None, Doc("column of the gold answers; none: by the layout")] = None
    heldout_share: Annotated[
        float, Doc("share of the data that is held out, by a hash of the question; without heldout_data")
    ] = 0.02
    verifier: Annotated[
        str, Doc("what scores: math_verify, or a function (response, reference) of yours: package.module:function")
    ] = MATH_VERIFY

    def __post_init__(self) -> None:
        if not self.data and not self.heldout_data:
            raise ValueError(
                "task.data is empty: give files (Parquet, JSON, JSONL, CSV) or hub data sets, such as "
                "--task.data train.parquet or --task.data openai/gsm8k:main"
            )
        if not all((*self.data, *self.heldout_data)):
            raise ValueError("task.data or task.heldout_data holds an empty name; separate names by one comma")
        if not 0 < self.heldout_share < 1:
            raise ValueError(f"task.heldout_share is {self.heldout_share}; it must be between 0 and 1, such as 0.02")
        if self.verifier != MATH_VERIFY and not all(self.verifier.partition(":")):
            raise ValueError(
                f"task.verifier is {self.verifier!r}; choose {MATH_VERIFY}, or name a function of yours "
                "package.module:function"
            )

    def prepare(self) -> None:
        """Import what scoring needs, which a worker does before its first answer is timed."""
        find_verifier(self.verifier)
        try:
            # Of the verifier's packages, some are imported only where an answer is no plain number.
            self.answer("x + 1")
            if self.verifier == MATH_VERIFY:
                self.score(Problem("", "", "x"), "y")
        except ImportError as error:
            raise ImportError(
                f"the task math needs the math-verify package ({error}): install predmask[math] "
                "(in a clone: pip install -e '.[math]')"
            ) from error

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, in the data's order.

        Raises ValueError for data that cannot be read or is empty, and for a verifier that is not there: this is asked
        before a model is loaded, and the verifier only after that.
        """
        if self.verifier != MATH_VERIFY:
            find_verifier(self.verifier)
        if not self.data and split == "train":
            raise ValueError("there is nothing to train on: task.data is empty")
        heldout = _read(self, self.heldout_data) if self.heldout_data else None
        if heldout is not None and split == "heldout":
            chosen = tuple(heldout.problems.values())
        elif heldout is not None:
            # Nor are questions of the held-out data that were left out there.
            problems = _read(self, self.data).problems
            chosen = tuple(found for key, found in problems.items() if key not in heldout.questions)
        else:
            chosen = tuple(
                found
                for key, found in _read(self, self.data).problems.items()
                if is_held_out(key, self.heldout_share) == (split == "heldout")
            )
        if not chosen:
            raise ValueError(self._why_empty(split))
        return chosen

    def score(self, problem: Problem, response: str) -> float | None:
        """The verifier's score of a response; raises ValueError for one above 1, which is that of a right answer."""
        score: float | None = find_verifier(self.verifier)(response, problem.reference)
        if isinstance(score, numbers.Real) and float(score) > 1:
            raise ValueError(
                f"verifier {self.verifier!r} returned {score}, but the highest score is 1, a right answer's"
            )
        return score

    def answer(self, response: str) -> str | None:
        """The answer in a response, by which answers count as equal; None for a response without one."""
        from predmask.tasks.math import answers

        return answers.answer(response)

    def sources(self) -> Sequence[str]:
        """The files and data sets that it reads, as the user spelled them."""
        return tuple(dict.fromkeys((*self.data, *self.heldout_data)))

    def notes(self) -> Sequence[str]:
        """How many rows were read, and what was left out; of data that was not read yet, nothing."""
        train, heldout = _READ.get(_key(self, self.data)), _READ.get(_key(self, self.heldout_data))
        notes = [f"task.data: {train}"] if train else []
        notes += [f"task.heldout_data: {heldout}"] if heldout else []
        if train and not self.heldout_data:
            held_out = sum(is_held_out(key, self.heldout_share) for key in train.problems)
            so_few = "; so few say little: raise task.heldout_share, or give task.heldout_data" * (held_out < _FEW)
            notes.append(f"held out: {held_out:,} of these problems{so_few}")
        elif train and heldout and (shared := train.problems.keys() & heldout.questions):
            problems, are, they = ("problem", "is", "it is") if len(shared) == 1 else ("problems", "are", "they are")
            notes.append(f"{len(shared):,} {problems} of task.data {are} not trained on: {they} held out")
        return notes

    def _why_empty(self, split: Split) -> str:
        if split == "heldout" and self.heldout_data:
            return f"task.heldout_data has no problem: {_read(self, self.heldout_data)}"
        data = _read(self, self.data)
        if not data.problems:
            return f"task.data has no problem: {data}"
        if self.heldout_data:
            return f"all of task.data is held out, too ({data}): give other data to evaluate on"
        remedy = "raise task.heldout_share" if split == "heldout" else "lower task.heldout_share"
        return (
            f"no problem of task.data ({data}) falls to the split {split!r} with a held-out share of "
            f"{self.heldout_share:g}: {remedy}, or give task.heldout_data"
        )


# What was read is the process's, not the task's: the task stays a plain value that travels to the workers.
_READ: dict[Hashable, Collection] = {}


def _read(task: Math, sources: tuple[str, ...]) -> Collection:
    key = _key(task, sources)
    if key not in _READ:
        names = _names(task.sources())
        _READ[key] = collect({names[source]: source for source in sources}, task.question_column, task.answer_column)
    return _READ[key]


def _key(task: Math, sources: tuple[str, ...]) -> Hashable:
    return sources, task.sources(), task.question_column, task.answer_column


def _names(sources: Sequence[str]) -> dict[str, str]:
    """A short name for each source, which its problems' ids begin with; a second one of that name gets a number."""
    names: dict[str, str] = {}
    for source in sources:
        short = short_name(source)
        numbered = (short if number == 1 else f"{short}-{number}" for number in itertools.count(1))
        names[source] = next(name for name in numbered if name not in names.values())
    return names


@functools.cache
def find_verifier(path: str) -> Callable[[str, str], Any]:
    """The function that a verifier's name means; raises ValueError where there is none."""
    if path == MATH_VERIFY:
        from predmask.tasks.math import answers

        return answers.score
    try:
        function: Any = imported(path, "verifier")
    except ValueError:
        raise
    except Exception as error:  # whatever the module does as it is imported
        raise ValueError(f"verifier {path!r}: its module fails ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ValueError(
            f"verifier {path!r}: the module has no function {path.partition(':')[2]!r}; "
            "write one that takes (response, reference) and returns a score, 1 for a right answer, or None"
        )
    return function
