"""`predmask config`: print a configuration, ready to be edited and run."""

from __future__ import annotations

import argparse
from typing import Any

from predmask.cli.options import add_config_arguments, load_config


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb."""
    parser = subparsers.add_parser(
        "config",
        add_help=False,
        help="print a resolved configuration as TOML",
        description="Print the configuration that these arguments give as TOML, with what each option means. "
        "Written to a file, it can be edited and run by --config.",
    )
    add_config_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the configuration."""
    from predmask.train.options import to_toml

    print(to_toml(load_config(args)), end="")
    return 0
