"""The method once more, in NumPy float64 and by other routes, and the inputs of the property tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from predmask import BehaviourSupport, PolicySupport

Array = NDArray[np.float64]
STEP = 1e-5


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def softmax(logits: Array) -> Array:
    return np.exp(log_softmax(logits))


def kl(p: Array, q: Array) -> float:
    some = p > 0
    return float((p[some] * np.log(p[some] / q[some])).sum())


DIVERGENCE = {
    "kl": kl,
    "reverse_kl": lambda mu, pi: kl(pi, mu),
    "tv": lambda mu, pi: float(np.maximum(pi - mu, 0).sum()),
    "js": lambda mu, pi: (kl(mu, (mu + pi) / 2) + kl(pi, (mu + pi) / 2)) / 2,
}
"""Textbook formulas on probabilities."""


@dataclass(frozen=True)
class Case:
    """One sampled token."""

    mu_logits: Array
    pi_logits: Array
    sampled: int
    top_k: int

    @property
    def mu(self) -> Array:
        return softmax(self.mu_logits)

    @property
    def pi(self) -> Array:
        return softmax(self.pi_logits)

    @property
    def top(self) -> list[int]:
        return np.argsort(-self.mu_logits, kind="stable")[: self.top_k].tolist()

    @property
    def support(self) -> list[int]:
        return [self.sampled, *(i for i in self.top if i != self.sampled)]

    @property
    def tail(self) -> list[int]:
        return [i for i in range(len(self.mu_logits)) if i not in self.support]

    @property
    def step(self) -> Array:
        """The logit step of unit advantage."""
        return np.eye(len(self.pi))[self.sampled] - self.pi

    def coarse(self, p: Array) -> Array:
        """The masses of the support's tokens, then of the tail (where there is one)."""
        masses = [p[i] for i in self.support]
        return np.array(masses + ([sum(p[i] for i in self.tail)] if self.tail else []))

    def supports(self, dtype: torch.dtype = torch.float64) -> tuple[BehaviourSupport, PolicySupport]:
        """Both policies on the top-K support, as one token [1]."""
        logp = log_softmax(self.mu_logits)
        behaviour = BehaviourSupport.from_topk(
            torch.tensor([self.sampled]),
            torch.tensor([logp[self.sampled]], dtype=dtype),
            torch.tensor([self.top], dtype=torch.int64),
            torch.tensor([[logp[i] for i in self.top]], dtype=dtype),
        )
        return behaviour, PolicySupport.from_logits(torch.tensor(self.pi_logits[None], dtype=dtype), behaviour)

    def full(self, dtype: torch.dtype = torch.float64) -> tuple[BehaviourSupport, PolicySupport]:
        """Both policies on the whole vocabulary, as one token [1]."""
        logp = torch.tensor(log_softmax(self.mu_logits)[None], dtype=dtype)
        behaviour = BehaviourSupport.full(torch.tensor([self.sampled]), logp)
        return behaviour, PolicySupport.from_logits(torch.tensor(self.pi_logits[None], dtype=dtype), behaviour)

    def topk_divergence(self, name: str) -> float:
        return DIVERGENCE[name](self.coarse(self.mu), self.coarse(self.pi))

    def binary_divergence(self, name: str) -> float:
        mu, pi = self.mu[self.sampled], self.pi[self.sampled]
        return DIVERGENCE[name](np.array([mu, 1 - mu]), np.array([pi, 1 - pi]))

    def full_rate(self, name: str) -> float:
        """The slope of the full divergence along the real logit step, by finite differences."""
        return slope(lambda h: DIVERGENCE[name](self.mu, softmax(self.pi_logits + h * self.step)))

    def topk_rate(self, name: str, tail: str) -> float:
        """The slope of the top-K divergence along the real step, with the tail as the estimator believes it to be."""
        mu, size = self.coarse(self.mu), len(self.support)
        if tail == "exact" or not self.tail:
            return slope(lambda h: DIVERGENCE[name](mu, self.coarse(softmax(self.pi_logits + h * self.step))))
        parts = 1 if tail == "aggregated" else len(self.tail)
        pi = self.coarse(self.pi)
        believed = np.concatenate([pi[:size], np.full(parts, pi[size] / parts)])
        step = np.eye(len(believed))[0] - believed

        def value(h: float) -> float:
            moved = softmax(np.log(believed) + h * step)
            return DIVERGENCE[name](mu, np.append(moved[:size], moved[size:].sum()))

        return slope(value)

    def gap(self) -> float:
        """How far the closest category is from mu = pi, where total variation has a kink."""
        return float(min(abs(self.mu - self.pi).min(), abs(self.coarse(self.mu) - self.coarse(self.pi)).min()))


def slope(value) -> float:
    return (value(STEP) - value(-STEP)) / (2 * STEP)


@st.composite
def cases(draw: st.DrawFn, *, min_tail: int = 0) -> Case:
    size = draw(st.integers(2 + min_tail, 7))
    logits = st.lists(st.floats(-6, 6, width=32), min_size=size, max_size=size).map(np.array)
    return Case(
        mu_logits=draw(logits),
        pi_logits=draw(logits),
        sampled=draw(st.integers(0, size - 1)),
        top_k=draw(st.integers(1, size - min_tail)),
    )


def random_case(generator: np.random.Generator, size: int = 12, top_k: int = 4, drift: float = 1.0) -> Case:
    """A token sampled from mu, with a policy that drifted from it."""
    mu_logits = generator.normal(0, 2, size)
    pi_logits = mu_logits + generator.normal(0, drift, size)
    return Case(mu_logits, pi_logits, int(generator.choice(size, p=softmax(mu_logits))), top_k)


def stack(cases: list[Case], dtype: torch.dtype = torch.float64) -> tuple[BehaviourSupport, Array]:
    """The behaviour support of many tokens [N] of one vocabulary and K, and their policy logits [N, V]."""
    logp = np.stack([log_softmax(case.mu_logits) for case in cases])
    top = np.array([case.top for case in cases], dtype=np.int64).reshape(len(cases), -1)
    sampled = np.array([case.sampled for case in cases])
    behaviour = BehaviourSupport.from_topk(
        torch.tensor(sampled),
        torch.tensor(logp[np.arange(len(cases)), sampled], dtype=dtype),
        torch.tensor(top),
        torch.tensor(np.take_along_axis(logp, top, -1), dtype=dtype),
    )
    return behaviour, np.stack([case.pi_logits for case in cases])


def sampled_only(mu: list[float], pi: list[float]) -> tuple[BehaviourSupport, PolicySupport]:
    """Tokens [N] of a two-token vocabulary, given by the sampled token's probability under both policies."""
    p = torch.tensor(pi, dtype=torch.float64)
    behaviour = BehaviourSupport.from_topk(
        torch.zeros(len(mu), dtype=torch.int64), torch.tensor(mu, dtype=torch.float64).log()
    )
    return behaviour, PolicySupport.from_logits(torch.stack([p.log(), (1 - p).log()], -1), behaviour)


def ratios(values: list[float]) -> tuple[BehaviourSupport, PolicySupport]:
    """Tokens [N] with the given ratios pi / mu."""
    return sampled_only([0.1 / max(r, 1) for r in values], [0.1 / max(r, 1) * r for r in values])
