"""Which columns of a table are the question and its gold answer, and what stands in them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from predmask.tasks.math.final import boxed


class Layout(NamedTuple):
    """Two columns that data sets in use have."""

    question: str
    answer: str
    used_by: str


LAYOUTS = (
    Layout("prompt", "reward_model.ground_truth", "verl, DAPO-Math-17k"),
    Layout("problem", "answer", "AIME, MATH-500"),
    Layout("question", "answer", "GSM8K, AIME"),
    Layout("prompt", "answer", "prompts as text"),
    Layout("problem", "solution", "MATH"),
)
"""The layouts that are known, tried from the first on; names of columns match whatever their case."""

IDS = ("id", "unique_id", "problem_id", "problem_idx", "extra_info.index", "index")
"""Columns that may name a row, tried from the first on."""

WORKED = "solution"
"""The column of worked solutions: the gold answer is what its last box holds, and without a box there is none."""

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read, as the table spells them."""

    question: str
    answer: str
    id: str | None

    @property
    def names(self) -> list[str]:
        """The question's, the answer's, and the id's where there is one."""
        return [self.question, self.answer, *([self.id] if self.id else [])]


def find_columns(name: str, columns: Sequence[str], question: str | None, answer: str | None) -> Columns:
    """The columns of the table `name` to read: those that are named, the others by the first layout that fits.

    Raises ValueError, which lists the columns found, for a name that is not among them and where no layout fits.
    """
    find = finder(columns)
    found = ", ".join(columns) or "none"
    for option, column in (("question", question), ("answer", answer)):
        if column is not None and find(column) is None:
            raise ValueError(f"{name} has no column {column!r}, which task.{option}_column names; its columns: {found}")
    for layout in LAYOUTS:
        chosen = find(question or layout.question), find(answer or layout.answer)
        if chosen[0] and chosen[1]:
            ids = (find(column) for column in IDS)
            return Columns(chosen[0], chosen[1], next((column for column in ids if column), None))
    layouts = ", ".join(dict.fromkeys(f"{layout.question} + {layout.answer}" for layout in LAYOUTS))
    raise ValueError(
        f"{name} has no known layout ({layouts}); its columns: {found}. "
        "Set task.question_column and task.answer_column to those that hold them"
    )


def finder(columns: Sequence[str]) -> Callable[[str], str | None]:
    """What finds a column by its name, whatever the case; a name that is spelled as it stands goes first."""
    known = {column.lower(): column for column in reversed(columns)} | {column: column for column in columns}
    return lambda column: known.get(column) or known.get(column.lower())


def question_of(value: Any) -> tuple[str, str]:
    """The system message and the question of a cell, "" for what is not there.

    A cell is a text, or a conversation: one message of the user, after at most one of the system. Raises
    ValueError for anything else.
    """
    if value is None:
        return "", ""
    if isinstance(value, str):
        return "", value.strip()
    if not isinstance(value, list):
        raise ValueError(f"the question is a {type(value).__name__}, neither a text nor a list of messages")
    messages = [(_part(message, "role"), _part(message, "content")) for message in value]
    roles = [role for role, _ in messages]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"its prompt is a conversation of {', '.join(roles) or 'no messages'}, but a question is one message of "
            "the user, after at most one of the system; name another column by task.question_column"
        )
    system = messages[0][1] if len(messages) == 2 else ""
    return system, messages[-1][1].strip()


def answer_of(value: Any, column: str) -> str:
    """The gold answer in a cell, as text; "" where there is none.

    A number is written out ("34" for 34.0), and a list of one is its only item. Of a text, the answer is what
    follows the last `####`, without commas between thousands (GSM8K), or else what the last box holds (`final.boxed`),
    or else, unless the column is that of worked solutions, the whole text. Raises ValueError for anything else.
    """
    if isinstance(value, list) and len(value) <= 1:
        value = value[0] if value else None
    if value is None:
        return ""
    if isinstance(value, str):
        return _stated(value, worked=column.lower() == WORKED)
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _written(value)
    raise ValueError(
        f"the answer is {value!r:.100}, neither a text nor a number nor a list of one of these; "
        "name another column by task.answer_column"
    )


def _stated(text: str, *, worked: bool) -> str:
    _, mark, marked = text.rpartition("####")
    if mark:
        marked = marked.strip()
        return marked.replace(",", "") if _THOUSANDS.fullmatch(marked) else marked
    held = boxed(text)
    if held is None:
        return "" if worked else text.strip()
    return held


def _written(number: float | Decimal) -> str:
    if not math.isfinite(number):
        return ""
    return str(int(number)) if number == int(number) else str(number)


def _part(message: Any, key: str) -> str:
    value = message.get(key) if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"its prompt has a message without {key} as text: {message!r:.100}")
    return value
