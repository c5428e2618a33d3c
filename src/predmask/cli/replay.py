"""`predmask replay`: other rules on the recorded tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from predmask.cli.numbers import above_zero
from predmask.cli.outputs import add_output_arguments, check_outputs, say_written

if TYPE_CHECKING:
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
        "--sweep", type=above_zero, nargs="+", metavar="DELTA", help="thresholds to look at (default: a range)"
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
    from predmask.analysis.replay.view import lines
    from predmask.analysis.runs import read_run
    from predmask.analysis.text import visible

    check_outputs(args)
    recorded = read_run(args.run_dir)
    trace = recorded.need_trace()
    rules = _rules(args.rest, trace.info)
    with tqdm(total=trace.size, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        found = replay(trace, rules, deltas=args.sweep, progress=bar.update)
    if args.json:
        args.json.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    if args.figure:
        draw(found, args.figure)
    print(f"{visible(recorded.name)}\n" + "\n".join(lines(found)))
    say_written(args)
    return 1 if found.reproduction and not found.reproduction.exact else 0


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
            raise ConfigError(
                f"{argument!r} belongs to no rule; RUN_DIR comes first, then --rule NAME, then --rule.FIELD VALUE"
            )
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
