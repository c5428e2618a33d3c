"""What a task is: problems in two splits, and a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Problem:
    """One prompt and what its verifier needs to score a response."""

    id: str
    prompt: str
    reference: Any


@runtime_checkable
class Task(Protocol):
    """Problems with a verifier; implementations are frozen keyword-only dataclasses, their fields are the
    configuration.

    `inline_verifier` is True only where `score` is plain string work that always ends: it is then called in
    the trainer's process. Any other verifier runs in a worker process that is killed at a deadline.
    """

    inline_verifier: ClassVar[bool]

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, the same on every call; no problem is in both splits."""
        ...

    def score(self, problem: Problem, response: str) -> float | None:
        """The reward of a response, 1.0 for a right one; None when it could not be scored (not: wrong)."""
        ...
