"""What many responses to one prompt say: pass@k and avg@k."""

from __future__ import annotations

import math
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
    for score in scores:
        if score is None or not math.isfinite(score):
            raise ValueError(f"avg@k: {score!r} is not a score; leave out what could not be scored")
    return math.fsum(scores) / len(scores)


def _check_k(n: int, k: int) -> None:
    if k < 1:
        raise ValueError(f"k is a number of responses, at least 1, not {k}")
    if k > n:
        raise ValueError(f"k={k} needs at least {k} responses to a prompt, there are {n}")
