"""The figure of a mismatch: pi against mu, the gap by position, and how many tokens lie beyond a threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from predmask.analysis.mismatch import differences, known_tokens
from predmask.core import Rule
from predmask.core.precision import log1mexp
from predmask.plotting import BLUE, VERMILLION, canvas
from predmask.traces import TokenTrace

_FARTHEST = 16.0
"""Log-odds up to which float32 tells a log-prob from 0."""
_BINS = 64
_SMALLEST = 1e-8
"""Distances below are rounding."""
_ENOUGH = 100
"""Tokens that a 99th percentile is taken of."""


def draw(tokens: TokenTrace, rule: Rule, path: Path) -> None:
    """Draw the known ones of tokens that `rule` has decided about."""
    known = known_tokens(tokens)
    with canvas(path, 12.5, 4.0) as figure:
        if not len(known):
            figure.text(0.5, 0.5, "no token's log-probs are known to both sides", ha="center")
            return
        density, position, threshold = figure.subplots(1, 3)
        _density(figure, density, known)
        _by_position(position, known)
        _beyond(threshold, known.decision.divergence.numpy(), rule)


def _density(figure: Any, axis: Any, known: TokenTrace) -> None:
    from matplotlib.colors import LogNorm

    odds = [_log_odds(side.logp[:, 0]) for side in (known.behaviour, known.policy)]
    low, high = float(np.min(odds)) - 0.5, float(np.max(odds)) + 0.5
    counts, _, _ = np.histogram2d(*odds, bins=_BINS, range=[[low, high], [low, high]])
    image = axis.imshow(
        np.ma.masked_equal(counts.T, 0), origin="lower", extent=(low, high, low, high), norm=LogNorm(), cmap="viridis"
    )
    axis.plot([low, high], [low, high], color=VERMILLION, lw=0.8)
    figure.colorbar(image, ax=axis, label="tokens", shrink=0.8)
    axis.set(xlabel="log-odds of mu (engine)", ylabel="log-odds of pi (trainer)", title="sampled tokens")
    axis.spines[["top", "right"]].set_visible(False)


def _log_odds(logp: torch.Tensor) -> NDArray[np.float64]:
    wide = logp.double().clamp(max=0.0)
    return (wide - log1mexp(wide)).clamp(-_FARTHEST, _FARTHEST).numpy()


def _by_position(axis: Any, known: TokenTrace) -> None:
    gap, position = differences(known).abs().double().numpy(), known.position.numpy()
    width = int(position.max()) // _BINS + 1
    bins = position // width
    places = np.unique(bins)
    groups = [gap[bins == place] for place in places]
    centres = places * width + (width - 1) / 2
    many = np.array([len(group) >= _ENOUGH for group in groups])
    axis.plot(centres, [group.mean() for group in groups], color=BLUE, lw=1.4, marker=".", ms=4, label="mean")
    if many.any():
        tops = [np.quantile(group, 0.99) for group in groups if len(group) >= _ENOUGH]
        axis.plot(centres[many], tops, color=VERMILLION, lw=1.2, ls="--", marker="^", ms=3, label="99 %")
    axis.set(xlabel="position in the response", title="|Δ log-prob| in nats", ylim=(0, None))
    _finish(axis)


def _beyond(axis: Any, divergence: NDArray[np.float32], rule: Rule) -> None:
    """The share of tokens with D above x, against x."""
    ordered = np.sort(divergence.astype(np.float64))
    positive = ordered[ordered > 0]
    if len(positive):
        x = np.geomspace(max(positive[0], min(_SMALLEST, positive[-1] / 1e3)), positive[-1], 200)[:-1]
        share = 1.0 - np.searchsorted(ordered, x, side="right") / len(ordered)
        axis.plot(x[share > 0], share[share > 0], color=BLUE, lw=1.4, label="all tokens")
        axis.set(xscale="log", yscale="log")
    delta = getattr(rule, "delta", None)
    if delta is not None:
        axis.axvline(delta, color=VERMILLION, lw=1.0, ls="--", label=f"delta {delta:g}")
    axis.set(xlabel=f"x ({_unit(rule)})", title="share of tokens with D above x")
    _finish(axis, "lower left")


def _unit(rule: Rule) -> str:
    """What D is: the rule's proximity value."""
    name = getattr(rule, "divergence", "kl" if rule.name == "none" else None)
    return "|pi/mu - 1|" if name is None else f"{name}, {'probability' if name == 'tv' else 'nats'}"


def _finish(axis: Any, legend: str = "best") -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#dddddd", lw=0.6)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, loc=legend)
