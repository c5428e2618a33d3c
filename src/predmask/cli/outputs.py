"""What a verb writes besides what it prints: --figure PATH, --json PATH, and files of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

_NAMES = ("figure", "json", "table", "answers")
"""The arguments that name a file to write."""


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a verb write a figure and every number."""
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw it: .svg or .png (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number")


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse what could not be written, before anything is measured or read."""
    from predmask.plotting import check_path

    for path in _outputs(args):
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a directory; name a file in it")
    if getattr(args, "figure", None):
        check_path(args.figure)


def say_written(args: argparse.Namespace) -> None:
    """Where everything is."""
    for path in _outputs(args):
        print(f"wrote {path}", file=sys.stderr)


def _outputs(args: argparse.Namespace) -> Iterator[Path]:
    return filter(None, (getattr(args, name, None) for name in _NAMES))
