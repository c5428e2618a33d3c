"""A replay as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from predmask.analysis.replay.decisions import Replay
from predmask.analysis.replay.estimators import Estimators
from predmask.analysis.text import percent, rule_text

_TITLES = {
    "advantage": "sign of the advantage",
    "probability": "probability of the sampled token, mu",
    "position": "position in the response",
    "staleness": "staleness in optimiser steps",
}


def lines(found: Replay) -> Iterator[str]:
    """A replay as tables."""
    yield from _heading(found)
    yield from _decided(found)
    yield from _matrix(found, "Agreement: share of the trainable tokens that two rules decide alike", "agreement")
    yield from _matrix(found, "Of the tokens that at least one of two rules drops, share that both drop", "jaccard")
    yield from _splits(found)
    yield from _sweep(found)
    yield from _estimators(found.estimators)


def _heading(found: Replay) -> Iterator[str]:
    yield (
        f"{found.tokens:,} tokens of {_plural(len(found.steps), 'step')}, K = {found.info.top_k}, "
        f"V = {found.info.vocabulary_size:,}"
    )
    yield f"recorded rule: {rule_text(found.info.rule)}"
    if again := found.reproduction:
        yield f"recorded decisions reproduced: {again.reproduced:,} of {again.tokens:,}"
        if not again.exact:
            yield (
                f"NOT reproduced: {again.tokens - again.reproduced:,}, whose divergences are up to "
                f"{again.largest_difference:.2g} from the recorded ones"
            )
            yield "(tiny differences are another machine's rounding; others mean another rule than the trace names)"
    for note in found.notes:
        yield f"note: {note}"


def _decided(found: Replay) -> Iterator[str]:
    width = max(len(row.label) for row in found.rules)
    yield "\nWhat each rule drops, in shares of the trainable tokens"
    yield f"    {'':<{width}}{'trainable':>12}{'dropped':>10}{'A>0':>10}{'A<0':>10}{'outside':>10}{'unknown':>10}"
    for number, row in enumerate(found.rules, 1):
        shares = "".join(
            f"{percent(count / row.trainable if row.trainable else None):>10}"
            for count in (row.dropped, row.dropped_positive, row.dropped_negative, row.outside)
        )
        yield f"{number:>2}  {row.label:<{width}}{row.trainable:>12,}{shares}{row.unknown:>10,}"


def _matrix(found: Replay, title: str, figure: str) -> Iterator[str]:
    share = getattr(found.overall, figure)
    rules = range(len(found.rules))
    yield f"\n{title}"
    yield " " * 16 + "".join(f"{number + 1:>8}" for number in rules)
    for one in rules:
        yield _name(found, one) + "".join(f"{percent(share(one, other)):>8}" for other in rules)


def _splits(found: Replay) -> Iterator[str]:
    for name, buckets in found.splits.items():
        if not buckets:
            continue
        wide = 8 * len(buckets)
        head = "".join(f"{bucket:>8}" for bucket in buckets)
        yield f"\nBy {_TITLES[name]}"
        yield f"{'':16}{'dropped':>{wide}}  {'decided otherwise than recorded':>{max(wide, 31)}}"
        yield f"{'':16}{head}  {head:>{max(wide, 31)}}"
        for rule in range(len(found.rules)):
            dropped = "".join(f"{percent(table.dropped_share(rule)):>8}" for table in buckets.values())
            others = "".join(f"{percent(_complement(table.agreement(0, rule))):>8}" for table in buckets.values())
            yield f"{_name(found, rule)}{dropped}  {others if rule else '':>{max(wide, 31)}}".rstrip()
        tokens = "".join(f"{int(table.trainable[0, 0]):>8,}" for table in buckets.values())
        yield f"    {'tokens':<12}{tokens}"


def _sweep(found: Replay) -> Iterator[str]:
    yield "\nThreshold sweep: share of the trainable tokens dropped at each delta"
    without = dict.fromkeys(row.rule["name"] for row in found.rules[1:] if "delta" not in row.rule)
    if without:
        yield f"(no delta: {', '.join(without)})"
    for start in range(0, len(found.sweep), 3):
        curves = found.sweep[start : start + 3]
        widths = [max(8, len(curve.label)) + 2 for curve in curves]
        yield f"{'delta':>8}" + "".join(f"{c.label:>{width}}" for c, width in zip(curves, widths, strict=True))
        for delta, *shares in zip(found.deltas, *(curve.shares for curve in curves), strict=True):
            yield f"{delta:>8g}" + "".join(f"{percent(s):>{width}}" for s, width in zip(shares, widths, strict=True))


def _estimators(found: Estimators | None) -> Iterator[str]:
    if found is None:
        yield (
            "\nEstimator error against K: whole distributions were not recorded\n"
            "(predmask train ... --traces --traces.full, for small vocabularies)"
        )
        return
    yield f"\nEstimator error against K, divergence {found.divergence}, {found.tokens:,} tokens"
    yield "D seen: share of the full divergence; error: mean |rate - full rate|; right signs:"
    yield f"of the {found.outside:,} tokens outside (D > {found.delta:g}) and of all"
    if found.unknown:
        yield f"left out, since a distribution is not finite or does not sum to 1: {found.unknown:,} tokens"
    if not found.rows:
        return
    tails = list(found.rows[0].error)
    head = f"{'error':>10}{f'D > {found.delta:g}':>10}{'all':>8}"
    yield f"{'':>14}" + "".join(f"{f'{tail} tail':>{len(head)}}" for tail in tails)
    yield f"{'K':>5}{'D seen':>9}" + head * len(tails)
    for row in found.rows:
        figures = ((row.error[tail], row.right_outside.get(tail), row.right.get(tail)) for tail in tails)
        cells = "".join(
            f"{error:>10.1e}{percent(outside, 1):>10}{percent(overall, 1):>8}" for error, outside, overall in figures
        )
        yield f"{row.top_k:>5}{percent(row.divergence_share, 1):>9}{cells}"
    yield "(K = 0: the sampled token against the rest; its rate has the sign of r - 1)"


def _name(found: Replay, rule: int) -> str:
    row = found.rules[rule]
    return f"{rule + 1:>2}  {row.rule['name'] if rule else row.label:<12.12}"


def _complement(share: float | None) -> float | None:
    return None if share is None else 1.0 - share


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
