"""`predmask report`: a run on one page."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path
from typing import Any

_ABOUT = """\
The page is one HTML file without scripts, fonts or anything else from the network: it can be sent,
printed and read on a phone. It shows the run's curves; from a token trace which tokens the mask
dropped and why, how far tokens are from the policy that sampled them, where PPO's clip, DPPO and the
predictive mask draw their borders, and a response token by token; and the configuration. Each figure
says what a healthy one looks like.

examples:
  predmask train arithmetic --traces          a run with a token trace, into runs/...
  predmask report runs/... --open             write runs/.../report.html and show it
  predmask report traces/ --output run.html   a trace of your own trainer (predmask.traces)
"""
_MANY = 500_000
"""Tokens of a trace that take seconds to read."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "report",
        help="a run on one HTML page: curves, dropped tokens, regions of the rules",
        description="Write a run's report: one self-contained HTML file.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run's directory, such as runs/..., or a trace's")
    parser.add_argument("--open", action="store_true", help="show it in the web browser")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the file (default: RUN_DIR/report.html)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    from tqdm import tqdm

    from predmask.analysis.report import write_report
    from predmask.analysis.runs import read_run

    found = read_run(args.run_dir)
    path = args.output or found.path / "report.html"
    tokens = 0 if found.trace is None else found.trace.size
    with tqdm(total=tokens, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        if bar.disable and tokens > _MANY:
            print(f"reading {tokens:,} tokens", file=sys.stderr, flush=True)
        write_report(found, path, bar.update)
    print(path)
    if args.open and not webbrowser.open(path.absolute().as_uri()):
        print(f"no web browser could be started; open {path} in one", file=sys.stderr)
    return 0
