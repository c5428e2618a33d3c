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
    from predmask.analysis.report import write_report
    from predmask.analysis.runs import read_run

    found = read_run(args.run_dir)
    path = args.output or found.path / "report.html"
    progress = _Progress(found.trace.size if found.trace is not None else 0)
    write_report(found, path, progress)
    progress.close()
    print(path)
    if args.open and not webbrowser.open(path.absolute().as_uri()):
        print(f"no web browser could be started; open {path} in one", file=sys.stderr)
    return 0


class _Progress:
    """How much of the trace is read: a line that changes on a terminal, else one a quarter."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._terminal = sys.stderr.isatty()
        self._quarters = 0

    def __call__(self, read: int) -> None:
        """Show it."""
        if self._terminal:
            print(f"\rreading the trace: {read / self._tokens:4.0%}", end="", file=sys.stderr, flush=True)
        elif self._tokens >= 500_000 and 4 * read // self._tokens > self._quarters:
            self._quarters = 4 * read // self._tokens
            print(f"reading the trace: {read:,} of {self._tokens:,} tokens", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave an empty line to what follows."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
