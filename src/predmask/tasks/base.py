"""What a task is: problems in two splits, and a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Problem:
    """One question and what its verifier needs to score a response."""

    id: str
    prompt: str
    """The question, as a user asks it."""
    reference: Any
    system: str = ""
    """What a chat template puts before the question; "" for nothing."""


@runtime_checkable
class Task(Protocol):
    """Problems with a verifier; implementations are frozen keyword-only dataclasses, their fields are the
    configuration.

    `inline_verifier` is True only where `score` is plain string work that always ends: it is then called in
    the trainer's process. Any other verifier runs in a worker process that is killed at a deadline.

    A task may also have `prepare()`, which each worker calls before its first answer; `answer(response)`, the text
    by which answers count as equal where a majority is formed, or None for a response without one; `sources()`, the
    files and data sets that it reads; and `notes()`, what a user should know of what was read.
    """

    inline_verifier: ClassVar[bool]

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, the same on every call; no problem is in both splits."""
        ...

    def score(self, problem: Problem, response: str) -> float | None:
        """The reward of a response, 1.0 for a right one; None when it could not be scored (not: wrong)."""
        ...
