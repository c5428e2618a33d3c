"""`predmask train`: train a model as configured."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from predmask.cli.options import add_config_arguments, load_config


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "train",
        add_help=False,
        help="train a model with a trust-region mask",
        description="Train a model as configured: a preset, then a TOML file, then options, each over the last. "
        "Figures, configuration and checkpoint go to a new run directory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train; 130 when interrupted."""
    if not args.rest and args.config is None and not args.help:
        args.parser.error("say what to train: a preset such as 'arithmetic' (predmask list presets), or --config FILE")
    config = load_config(args)
    from predmask.cli.display import Console
    from predmask.train import AgreementError, TrainingError
    from predmask.train import run as train

    # Ended by a scheduler or by Ctrl-C, a run writes down what it has reached.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        train(config, display=Console())
    except (AgreementError, TrainingError) as error:
        print(f"predmask: error: {error}", file=sys.stderr)
        return 1
    return 0
