"""A mismatch as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from predmask.analysis.mismatch import Mismatch, Spread
from predmask.analysis.mismatch.sample import Sample, Verdict
from predmask.analysis.text import columns, percent, rule_text, visible
from predmask.core import NoMask
from predmask.traces import rule_settings

_WIDTH = 100
_LABEL = 34
"""Columns of a row's name."""
_TITLES = {"probability": "probability of the sampled token, mu", "position": "position in the response"}
_LOOK_AT = (
    "weights: does the engine answer with the trainer's? (a failed or partial update, a tied head left "
    "behind, another checkpoint, a stale prefix cache)",
    "numerics: does the engine use fewer bits than its options say? (dtype, quantization, key-value cache)",
    "prompts: does one side add a chat template or a beginning-of-sequence token?",
    "padding: left-padded prompts need their attention mask and position ids",
    "dropout: are both sides in evaluation mode?",
    "sampling: top-p, top-k, min-p and penalties must be off, or log-probs are not those of the whole policy",
)


def lines(sample: Sample, found: Mismatch) -> Iterator[str]:
    """What was compared, how far both sides are apart, where, and the verdict."""
    yield from _heading(sample, found)
    if found.tokens:
        yield from _figures(sample, found)
        yield from _groups(found)
        yield from _worst(sample, found)
    yield ""
    yield from _verdict(sample.verdict)


def to_json(sample: Sample, found: Mismatch) -> dict[str, Any]:
    """The same as numbers, every one of them, ready for JSON."""
    config, verdict = sample.config, sample.verdict
    worst = [{**asdict(token), "text": sample.texts.get(token.id)} for token in found.worst]
    return {
        "model": config.model,
        "other": sample.other,
        "engine": {"name": config.engine.name, **asdict(config.engine)},
        "rollout": asdict(config.rollout),
        "rule": rule_settings(config.rule),
        "seed": config.seed,
        **asdict(found),
        "worst": worst,
        "verdict": None if verdict is None else {**asdict(verdict), "passed": verdict.passed},
    }


def _heading(sample: Sample, found: Mismatch) -> Iterator[str]:
    config = sample.config
    weights = "" if sample.other is None else f" with the weights of {sample.other}"
    pi = "float32" if not config.update.autocast else "float32, forward pass in bfloat16"
    yield from _entry("trainer", f"pi: {config.model}, {pi}")
    yield from _entry("engine", f"mu: {config.engine.name}, {config.engine.numerics}{weights}")
    lost = f"{found.unknown:,} unknown" + (" (not trained on: look at the engine's records)" if found.unknown else "")
    yield from _entry(
        "sampled",
        f"{found.responses:,} responses of up to {config.rollout.max_new_tokens} tokens, {found.tokens:,} known "
        f"tokens, {lost}; K = {found.top_k}, temperature {config.rollout.temperature:g}",
    )


def _figures(sample: Sample, found: Mismatch) -> Iterator[str]:
    yield f"\n{'in nats':<{_LABEL}}{'mean':>11}{'median':>11}{'99 %':>11}{'largest':>11}"
    yield _spread("|Δ log-prob| of sampled tokens", found.gap)
    if found.top_k:
        yield _spread(f"KL(mu‖pi), top-{found.top_k} and tail", found.kl)
    else:
        yield f"{'KL(mu‖pi)':<{_LABEL}}the engine recorded no top-K (rollout.top_k is 0)"
    error = "" if found.signed_error is None else f"   ± {found.signed_error:.2g}, standard error over responses"
    yield f"{'log mu - log pi, estimates KL':<{_LABEL}}{found.signed:>11.3g}{error}"
    rule = sample.config.rule
    region = "rule none has no trust region" if isinstance(rule, NoMask) else rule_text(rule_settings(rule))
    yield f"{'outside, before any update':<{_LABEL}}{percent(found.outside):>11}   {region}"


def _spread(label: str, spread: Spread | None) -> str:
    values = () if spread is None else (spread.mean, spread.median, spread.p99, spread.largest)
    return f"{label:<{_LABEL}}" + "".join(f"{value:>11.3g}" for value in values)


def _groups(found: Mismatch) -> Iterator[str]:
    for name, buckets in found.groups.items():
        yield f"\nBy {_TITLES[name]}"
        yield " " * 20 + "".join(f"{bucket:>11}" for bucket in buckets)
        yield f"{'tokens':<20}" + "".join(f"{bucket.tokens:>11,}" for bucket in buckets.values())
        yield f"{'mean |Δ log-prob|':<20}" + "".join(f"{bucket.gap:>11.3g}" for bucket in buckets.values())
        yield f"{'outside':<20}" + "".join(f"{percent(bucket.outside):>11}" for bucket in buckets.values())


def _worst(sample: Sample, found: Mismatch) -> Iterator[str]:
    """The text comes last, since it may be of any width."""
    count = len(found.worst)
    yield f"\nThe {count} tokens that differ most" if count > 1 else "\nThe token that differs most"
    heads = ("mu", "pi", "Δ log-prob", "D")
    yield f"{'response':>8}{'position':>10}" + "".join(f"{head:>12}" for head in heads) + "  token"
    for token in found.worst:
        numbers = (token.mu, token.pi, token.difference, token.divergence)
        text = visible(sample.texts.get(token.id) or f"⟨{token.id}⟩")
        while columns(text) > 30:
            text = text[:-2] + "…"
        cells = "".join(f"{number:>12.4g}" for number in numbers)
        yield f"{token.response:>8}{token.position:>10}{cells}  '{text}'"


def _verdict(verdict: Verdict | None) -> Iterator[str]:
    if verdict is None:
        yield from _entry("verdict", "none: two models are meant to differ")
    elif verdict.agreement is None:
        yield from _entry("verdict", f"FAULT: {verdict.fault}")
    else:
        figures = f"mean disagreement {verdict.agreement.mean:.2g} nats, tolerance {verdict.tolerance:g}"
        if verdict.passed:
            yield from _entry("verdict", f"within what the numerics explain ({figures})")
            return
        yield from _entry("verdict", f"MORE than the numerics explain ({figures})")
        for number, hint in enumerate(_LOOK_AT):
            yield from _entry("" if number else "look at", hint)


def _entry(label: str, text: str) -> list[str]:
    return wrap(
        visible(text),
        _WIDTH,
        initial_indent=f"{label:<10}",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
