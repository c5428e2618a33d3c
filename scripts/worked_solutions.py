"""Worked solutions of mixed quality for the arithmetic task: the text that the embedded model starts from.

A worked solution goes through the columns from the right and then copies the answer:

    word a b sum carry   (once a column)   ANS carry sum sum sum sum <eos>
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from predmask.tasks.arithmetic import ANSWER, END

WORDS = """
    so then now next and thus hence therefore well okay right also again further moreover besides still yet
    meanwhile likewise similarly indeed clearly surely simply just here there after before finally lastly
    since because while once thereby accordingly consequently afterwards onward additionally furthermore
    subsequently
""".split()  # noqa: SIM905 (a list literal would take 44 lines)
"""Connective words, likeliest first; they carry no meaning."""

# Geometric: the likeliest 20 of the 44 words hold .93 of the mass. An engine that shows 20 log-probs hides
# the .07 beyond, so that estimators of the tail matter on this model too.
_WORD_WEIGHTS = [0.877**rank for rank in range(len(WORDS))]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How often each kind of solution is written; what the shares leave are direct guesses."""

    careful: float
    """Share of solutions that carry."""
    sloppy: float
    """Share of solutions that drop every carry: right only where there is none."""
    slip: float
    """Probability that a column of a careful solution writes a wrong sum digit."""

    def write(self, prompt: str, rng: random.Random) -> str:
        """One response to a prompt of the arithmetic task."""
        left, right = ([int(digit) for digit in side.split()] for side in prompt.rstrip("= ").split("+"))
        kind = rng.random()
        if kind < self.careful:
            return _worked(left, right, rng, carries=True, slip=self.slip)
        if kind < self.careful + self.sloppy:
            return _worked(left, right, rng, carries=False, slip=0.0)
        return _answer([rng.randrange(2), *(rng.randrange(10) for _ in left)])


NEAR_CLEAN = Mixture(careful=0.90, sloppy=0.05, slip=0.0)
"""Teaches the procedure first; without it the model never learns to add columns from the mixed text."""
MIXED = Mixture(careful=0.30, sloppy=0.45, slip=0.08)
"""The quality the model ends with: the right way is in it, but it is not the likeliest one."""


def _worked(left: list[int], right: list[int], rng: random.Random, *, carries: bool, slip: float) -> str:
    tokens: list[str] = []
    answer: list[int] = []
    carry = 0
    for a, b in zip(reversed(left), reversed(right), strict=True):
        carry, digit = divmod(a + b + carry, 10)
        if not carries:
            carry = 0
        if rng.random() < slip:
            digit = (digit + rng.choice((1, -1))) % 10
        answer.append(digit)
        (word,) = rng.choices(WORDS, _WORD_WEIGHTS)
        tokens += [word, str(a), str(b), str(digit), str(carry)]
    return " ".join([*tokens, _answer([carry, *reversed(answer)])])


def _answer(digits: list[int]) -> str:
    return " ".join([ANSWER, *map(str, digits), END])
