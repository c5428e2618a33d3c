"""The order in which training visits the problems."""

from __future__ import annotations

import random
from collections.abc import Sequence

from predmask.tasks.base import Problem


class PromptSampler:
    """Draws problems in a seeded order, newly shuffled each epoch, each problem once an epoch.

    The order depends on `seed` and the number of problems alone, so `position` is the whole state: a sampler
    made with `position=p` continues exactly where another one stood after `p` problems.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, position: int = 0) -> None:
        if not problems:
            raise ValueError("there are no problems to sample from")
        if position < 0:
            raise ValueError(f"position is the number of problems taken so far, not {position}")
        self._problems = problems
        self._seed = seed
        self._position = position
        self._shuffled: tuple[int, list[int]] = (-1, [])

    @property
    def position(self) -> int:
        """The number of problems taken so far."""
        return self._position

    def take(self, n: int) -> list[Problem]:
        """The next `n` problems; where an epoch ends within them, the next one begins."""
        if n < 0:
            raise ValueError(f"cannot take {n} problems")
        taken: list[Problem] = []
        for place in range(self._position, self._position + n):
            epoch, offset = divmod(place, len(self._problems))
            taken.append(self._problems[self._order(epoch)[offset]])
        self._position += n
        return taken

    def _order(self, epoch: int) -> list[int]:
        if self._shuffled[0] != epoch:
            order = list(range(len(self._problems)))
            # A text seed is hashed whole, so that (seed 1, epoch 2) and (seed 2, epoch 1) are unrelated.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311
            self._shuffled = (epoch, order)
        return self._shuffled[1]
