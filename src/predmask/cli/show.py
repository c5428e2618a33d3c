"""`predmask show`: the text of a rollout, each token marked by what the mask decided."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any

_WAYS = """\
Dropped tokens are on blue (A > 0) or orange (A < 0), and tokens that are kept outside the trust
region are underlined. Where there are no colours (a file, NO_COLOR, TERM=dumb) they are [+dropped+],
[-dropped-] and (kept). Control characters in tokens are shown and never acted on; ⏎ is a newline.

examples:
  predmask show runs/...                                    the last step's response with most dropped tokens
  predmask show runs/... --step 12 --sample 3 --table       with each token's numbers
  predmask show runs/... --color always | less -R
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "show",
        help="the text of a rollout, each token coloured by what the mask decided",
        description="The text of a response from a run's token trace, each token marked by what the mask decided.",
        epilog=_WAYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a run with a trace, such as runs/...")
    parser.add_argument("--step", type=int, help="default: the last one recorded")
    parser.add_argument("--sample", type=int, help="the response's number (default: the one with most dropped tokens)")
    parser.add_argument("--epoch", type=int, help="pass over the rollout, from 0 (default: as --sample)")
    parser.add_argument("--table", action="store_true", help="also a line a token: probabilities, divergence, rate")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the response."""
    from predmask.analysis.runs import read_run
    from predmask.analysis.show import find_response, table, text

    trace = read_run(args.run_dir).need_trace()
    response = find_response(trace, step=args.step, sample=args.sample, epoch=args.epoch)
    if args.sample is None:
        which = f"step {response.step}" + ("" if args.epoch is None else f", epoch {args.epoch}")
        if response.tokens.decision.dropped.any():
            print(f"Of {which}, sample {response.sample} has the most dropped tokens.\n")
        else:
            print(f"No token of {which} was dropped; this is its first response.\n")
    print(text(response, colour=_colour(args.color), width=shutil.get_terminal_size((100, 24)).columns))
    if args.table:
        print("\n" + table(response))
    return 0


def _colour(choice: str) -> bool:
    """Whether to colour: on a terminal that can, unless NO_COLOR is set (https://no-color.org)."""
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return choice == "always"
