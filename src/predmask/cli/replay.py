"""`predmask replay`: other rules on the recorded tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from predmask.cli.outputs import add_output_arguments, check_outputs, say_written

if TYPE_CHECKING:
    from predmask.analysis.replay import Replay
    from predmask.analysis.replay.sweep import Estimators
    from predmask.core import Rule
    from predmask.traces import TraceInfo

_USAGE = """\
%(prog)s RUN_DIR [--rule NAME [--rule.FIELD VALUE ...] ...] [--sweep DELTA ...]
                       [--json PATH] [--figure PATH]"""
_HELP = """\
Each --rule NAME begins a rule, and the --rule.FIELD VALUE after it belong to it. Fields that the
recorded rule has too are as recorded unless given, as in `predmask train`. Without --rule, every
registered rule is asked (`predmask list rules` has their names and fields).

It prints
  - whether the recorded rule, asked again, decides as it was recorded;
  - what each rule drops, in shares of its trainable tokens (known, and A ≠ 0);
  - which rules agree, on all tokens and on those that at least one of two rules drops;
  - both by the advantage's sign, by the probability mu with which a token was sampled, by its
    position in the response, and by staleness (optimiser steps since it was sampled);
  - what each rule that has a delta would drop at other deltas;
  - where whole distributions were recorded (--traces --traces.full): what the view of the K
    likeliest tokens misses of the divergence, and how far off each tail estimator's rate is.

A replay says what a rule would have done on these tokens, not how a run with it would have gone on.

examples:
  predmask replay runs/...
  predmask replay runs/... --rule dppo --rule predictive --rule.tail exact --rule.delta 0.1
  predmask replay runs/... --sweep 0.01 0.02 0.05 0.1 0.2 --figure replay.svg

exit code: 0; 1 when the recorded rule decides otherwise than recorded; 2 for a mistake in what was asked
"""

_TITLES = {
    "advantage": "sign of the advantage",
    "probability": "probability of the sampled token, mu",
    "position": "position in the response",
    "staleness": "staleness in optimiser steps",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "replay",
        help="other rules on the recorded tokens: what they drop, who agrees",
        description="Ask other rules about the tokens that a run recorded (predmask train ... --traces).",
        usage=_USAGE,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a run, or of another trainer's trace")
    parser.add_argument(
        "--sweep", type=float, nargs="+", metavar="DELTA", help="thresholds to look at (default: a range)"
    )
    add_output_arguments(parser)
    # Which fields a rule has depends on the rule: they are not argparse's.
    parser.set_defaults(rest=())
    return parser


def run(args: argparse.Namespace) -> int:
    """Replay, and print the tables."""
    from tqdm import tqdm

    from predmask.analysis.replay import replay
    from predmask.analysis.replay.figure import draw
    from predmask.analysis.runs import read_run

    check_outputs(args)
    recorded = read_run(args.run_dir)
    trace = recorded.need_trace()
    rules = _rules(args.rest, trace.info)
    with tqdm(total=trace.size, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        found = replay(trace, rules, deltas=args.sweep, progress=bar.update)
    print(f"{recorded.name}\n" + "\n".join(lines(found)))
    if args.json:
        args.json.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    if args.figure:
        draw(found, args.figure)
    say_written(args)
    return 1 if found.reproduction and not found.reproduction.exact else 0


def lines(found: Replay) -> Iterator[str]:
    """A replay as tables."""
    yield from _heading(found)
    yield from _decided(found)
    yield from _matrix(found, "Agreement: share of the trainable tokens that two rules decide alike", "agreement")
    yield from _matrix(found, "Of the tokens that at least one of two rules drops, share that both drop", "jaccard")
    yield from _splits(found)
    yield from _sweep(found)
    yield from _estimators(found.estimators)


def _rules(arguments: Sequence[str], info: TraceInfo) -> list[Rule] | None:
    """The rules that were named, each over the recorded one; None where none was."""
    from predmask.traces import TraceError, rule_settings
    from predmask.train.config import ConfigError
    from predmask.train.fields import plain
    from predmask.train.options import overrides, resolve

    groups: list[list[str]] = []
    for argument in arguments:
        if argument.partition("=")[0] == "--rule":
            groups.append([])
        if not groups:
            raise ConfigError(f"{argument!r} belongs to no rule; `predmask replay --help` explains what can be given")
        groups[-1].append(argument)
    try:
        recorded = {"rule": {name: plain(value) for name, value in rule_settings(info.make_rule()).items()}}
    except TraceError:
        recorded = {}
    found: list[Rule] = []
    for group in groups:
        layer = overrides(group)
        if layer.keys() != {"rule"}:
            unknown = next(name for name in layer if name != "rule")
            raise ConfigError(f"unknown option --{unknown}; after --rule NAME comes --rule.FIELD VALUE")
        found.append(resolve(recorded, layer).rule)
    return found or None


def _heading(found: Replay) -> Iterator[str]:
    from predmask.analysis.terminal import visible

    fields = ", ".join(f"{name} {value}" for name, value in found.info.rule.items() if name != "name")
    yield (
        f"{found.tokens:,} tokens of {_plural(len(found.steps), 'step')}, K = {found.info.top_k}, "
        f"V = {found.info.vocabulary_size:,}"
    )
    yield visible(f"recorded rule: {found.info.rule['name']}" + (f" ({fields})" if fields else ""))
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
            f"{_percent(count / row.trainable if row.trainable else None):>10}"
            for count in (row.dropped, row.dropped_positive, row.dropped_negative, row.outside)
        )
        yield f"{number:>2}  {row.label:<{width}}{row.trainable:>12,}{shares}{row.unknown:>10,}"


def _matrix(found: Replay, title: str, figure: str) -> Iterator[str]:
    share = getattr(found.overall, figure)
    rules = range(len(found.rules))
    yield f"\n{title}"
    yield " " * 16 + "".join(f"{number + 1:>8}" for number in rules)
    for one in rules:
        yield _name(found, one) + "".join(f"{_percent(share(one, other)):>8}" for other in rules)


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
            dropped = "".join(f"{_percent(table.dropped_share(rule)):>8}" for table in buckets.values())
            others = "".join(f"{_percent(_complement(table.agreement(0, rule))):>8}" for table in buckets.values())
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
            yield f"{delta:>8g}" + "".join(f"{_percent(s):>{width}}" for s, width in zip(shares, widths, strict=True))


def _estimators(found: Estimators | None) -> Iterator[str]:
    if found is None:
        yield (
            "\nEstimator error against K: whole distributions were not recorded\n"
            "(predmask train ... --traces --traces.full, for small vocabularies)"
        )
        return
    yield f"\nEstimator error against K, divergence {found.divergence}, {found.tokens:,} tokens"
    yield (
        f"error: mean |rate - full rate|; D > {found.delta:g} and all: right signs, of the {found.outside:,} tokens "
        "outside and of all"
    )
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
            f"{error:>10.1e}{_percent(outside, 1):>10}{_percent(overall, 1):>8}" for error, outside, overall in figures
        )
        yield f"{row.top_k:>5}{_percent(row.divergence_share, 1):>9}{cells}"
    yield "(K = 0: the sampled token against the rest; its rate has the sign of r - 1)"


def _name(found: Replay, rule: int) -> str:
    row = found.rules[rule]
    return f"{rule + 1:>2}  {row.rule['name'] if rule else row.label:<12.12}"


def _percent(share: float | None, digits: int = 2) -> str:
    """A dash where there is none; 0 % and 100 % only where they are exact."""
    if share is None:
        return "-"
    least = 10.0 ** -(digits + 2)
    if 0 < share < least:
        return f"<{least:.{digits}%}"
    if 1 - least < share < 1:
        return f">{1 - least:.{digits}%}"
    return f"{share:.{digits}%}"


def _complement(share: float | None) -> float | None:
    return None if share is None else 1.0 - share


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
