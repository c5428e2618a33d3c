"""What a verb writes besides what it prints: --figure PATH, --json PATH, and files of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_SUFFIXES = {"json": ".json", "table": ".parquet", "answers": ".jsonl"}
"""The arguments that name a file to write, and what is written there; a figure is checked where it is drawn."""
_FORMATS = {".csv", ".gz", ".json", ".jsonl", ".parquet", ".tsv", ".txt", ".xlsx"}
"""Suffixes that promise a format."""


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a verb write a figure and every number."""
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw it: .svg or .png (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number")


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse what could not be written, before anything is measured or read.

    A figure may be drawn again. Every other file may be hours of work, or what is read: it is never replaced.
    """
    from predmask.plotting import check_path
    from predmask.train.config import ConfigError

    paths = _outputs(args)
    for name, path in paths.items():
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a directory; name a file in it")
        if [each.absolute() for each in paths.values()].count(path.absolute()) > 1:
            raise ConfigError(f"{path} is named twice; give each output a file of its own")
        if name == "figure":
            check_path(path)
            continue
        if path.suffix.lower() in _FORMATS - {_SUFFIXES[name]}:
            right = path.with_suffix(_SUFFIXES[name])
            raise ConfigError(f"{path} would not be a {path.suffix} file; name it {right}, which is what is written")
        if path.is_file() and path.stat().st_size:
            raise ConfigError(f"{path} exists already; name another file, nothing is overwritten")


def say_written(args: argparse.Namespace) -> None:
    """Where everything is."""
    for path in _outputs(args).values():
        print(f"wrote {path}", file=sys.stderr)


def _outputs(args: argparse.Namespace) -> dict[str, Path]:
    return {name: path for name in ("figure", *_SUFFIXES) if (path := getattr(args, name, None)) is not None}
