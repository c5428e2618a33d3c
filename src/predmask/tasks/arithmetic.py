"""Addition in columns: the embedded task, whose tiny model trains on a laptop in seconds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from typing_extensions import Doc

from predmask.tasks.base import Problem, Split

ANSWER = "ANS"
"""The token after which a response gives its answer."""
END = "<eos>"
"""The token that ends a response."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Addition of two numbers of `digits` digits, rewarded for the exact sum.

    A prompt is `3 1 4 1 + 2 7 1 8 =`: digits apart, leading zeros kept. A response may think aloud; only what
    follows its last `ANS` counts, which must be `digits + 1` digits, the leading one even where it is 0:
    `ANS 0 5 8 5 9`.

    Operands are uniform on 0 .. 10^digits - 1, and no pair comes twice in a split. One pair in 16 is held
    out, chosen by a hash that ignores the operands' order: where a + b is in one split, b + a is never in the
    other. The first n problems of a split do not depend on its size.
    """

    name: ClassVar[str] = "arithmetic"
    inline_verifier: ClassVar[bool] = True

    digits: Annotated[int, Doc("digits of each number; the embedded model knows 4")] = 4
    train_problems: Annotated[int, Doc("problems to train on")] = 8192
    heldout_problems: Annotated[int, Doc("problems to evaluate on, never trained on")] = 256

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"digits is {self.digits}; it must be 1 or more")
        # Well below what the hash leaves to each split (15/16 and 1/16): drawing distinct pairs ends soon.
        pairs = 10 ** (2 * self.digits)
        for field, limit in (("train_problems", pairs * 3 // 4), ("heldout_problems", pairs // 32)):
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise ValueError(
                    f"{field} is {value}; it must be 1 to {limit} with digits = {self.digits} "
                    "(more digits leave room for more problems)"
                )

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, the same on every call and every machine."""
        count = self.train_problems if split == "train" else self.heldout_problems
        rng = random.Random(f"arithmetic {self.digits} {split}")  # noqa: S311 (nothing here is secret)
        pairs: dict[tuple[int, int], None] = {}  # a dict keeps the order of drawing
        while len(pairs) < count:
            pair = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
            if _held_out(pair) == (split == "heldout"):
                pairs[pair] = None
        return tuple(self._problem(left, right) for left, right in pairs)

    def score(self, problem: Problem, response: str) -> float:
        """1.0 if exactly the digits of the sum stand between the last `ANS` and the end, else 0.0.

        The end is the first `<eos>`, or that of the text. White space between digits is optional.
        """
        return float(self.answer(response) == problem.reference)

    def answer(self, response: str) -> str | None:
        """What stands between the last `ANS` and the end, without white space; None where there is nothing."""
        text = response.partition(END)[0]
        _, marker, answer = text.rpartition(ANSWER)
        return ("".join(answer.split()) or None) if marker else None

    def _problem(self, left: int, right: int) -> Problem:
        a, b = (f"{number:0{self.digits}d}" for number in (left, right))
        return Problem(
            id=f"{a}+{b}",
            prompt=f"{' '.join(a)} + {' '.join(b)} =",
            reference=f"{left + right:0{self.digits + 1}d}",
        )


def _held_out(pair: tuple[int, int]) -> bool:
    key = f"{min(pair)}+{max(pair)}"
    return hashlib.sha256(key.encode()).digest()[0] < 16  # 16 of a byte's 256 values: one pair in 16
