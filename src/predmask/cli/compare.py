"""`predmask compare`: runs side by side."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

from predmask.cli.numbers import positive
from predmask.cli.outputs import add_output_arguments, check_outputs, say_written

_WAYS = """\
Runs whose configurations differ in nothing but the seed are one group: its figures are means over
seeds, with Student's 95 % interval. Not looked at are the options seed, output, device, threads and
tensorboard, and the whole section traces.

A run's own figure is its mean over the last N steps that every run has (counts and seconds: the sum
over all of them). Where two seeds or more are both in a group and in the first one, the differences
between them, paired by seed, are given too. Runs that were killed or still go on can be compared.

examples:
  predmask compare runs/dppo-* runs/predictive-*
  predmask compare runs/a runs/b --last 20 --figure compare.svg --json compare.json
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "compare",
        help="runs side by side, pooled over seeds, with intervals",
        description="Runs side by side: what differs in their configurations, and what came of it.",
        epilog=_WAYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directories of runs, such as runs/...")
    parser.add_argument(
        "--last", type=positive, default=10, metavar="N", help="steps that figures are means of (default: 10)"
    )
    add_output_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compare, and print the tables."""
    from predmask.analysis.compare import compare
    from predmask.analysis.compare_views import draw, text, to_json

    check_outputs(args)
    found = compare(args.run_dirs, last=args.last)
    if args.json:
        args.json.write_text(json.dumps(to_json(found), indent=2) + "\n", encoding="utf-8")
    if args.figure:
        draw(found, args.figure)
    print(text(found, max(60, shutil.get_terminal_size((100, 24)).columns)))
    say_written(args)
    return 0
