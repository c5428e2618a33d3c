"""What many responses to one prompt say: pass@k, avg@k and maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of `k` responses is right, estimated without bias from `n` of which
    `c` were right: `1 - C(n-c, k) / C(n, k)` (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Raises `ValueError` unless `1 <= k <= n` and `0 <= c <= n`: from fewer than `k` responses there is no
    unbiased estimate.
    """
    _check_k(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: c is the number of right responses among n={n}, so 0 to {n}, not {c}")
    # In integers: the difference is exact, and Python rounds the one division correctly at any size.
    all_draws = math.comb(n, k)
    return (all_draws - math.comb(n - c, k)) / all_draws


def average_at_k(scores: Sequence[float], k: int) -> float:
    """The mean score of `k` responses, estimated from all `n >= k` scores of one prompt.

    Raises `ValueError` unless `1 <= k <= n` and every score is a finite number: leave out the responses that
    could not be scored, they are not wrong.
    """
    _check_k(len(scores), k)
    _check_scores("avg@k", scores)
    return math.fsum(scores) / len(scores)


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The score of the answer that most of `k` responses to one prompt give, those without an answer (None) not voting.

    With `T` the answers that are given most often: the mean of `scores[i]` over all i with `answers[i]` in `T`. That is
    the expected score where a tie is broken at random, and where equal answers got different scores, one of them is
    taken at random (self-consistency: Wang et al. 2022, arXiv 2203.11171). 0 where no response has an answer.

    Raises `ValueError` unless there are as many answers as scores, and for a score that is not a finite number.
    """
    if len(answers) != len(scores):
        raise ValueError(f"maj@k: {len(answers)} answers but {len(scores)} scores")
    _check_scores("maj@k", scores)
    winners = set(most_given(answers))
    votes = [score for answer, score in zip(answers, scores, strict=True) if answer in winners]
    return math.fsum(votes) / len(votes) if votes else 0.0


def most_given(answers: Sequence[str | None]) -> list[str]:
    """The answers that are given most often, in the order in which they first come; [] where there is none."""
    votes = Counter(answer for answer in answers if answer is not None)
    highest = max(votes.values(), default=0)
    return [answer for answer, count in votes.items() if count == highest]


def _check_scores(name: str, scores: Sequence[float]) -> None:
    for score in scores:
        if score is None or not math.isfinite(score):
            raise ValueError(f"{name}: {score!r} is not a score; leave out what could not be scored")


def _check_k(n: int, k: int) -> None:
    if k < 1:
        raise ValueError(f"k is a number of responses, at least 1, not {k}")
    if k > n:
        raise ValueError(f"k={k} needs at least {k} responses to a prompt, there are {n}")
