"""`predmask train`: train a model as configured."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any

from predmask.cli.options import add_config_arguments, load_config

if TYPE_CHECKING:
    from predmask.train.config import Config

_DRY_RUN = (
    "train nothing: print the configuration (of a recipe with where each value comes from), what memory the run takes "
    "and this machine has, what would lower it, and which files are needed; nothing is loaded or downloaded; "
    "exit code 0 when the run could start here and now, 1 when something is missing or does not fit"
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "train",
        add_help=False,
        help="train a model with a trust-region mask",
        description="Train a model as configured: a preset, then a TOML file, then options, each over the last. "
        "Figures, configuration and checkpoint go to a new run directory.",
    )
    add_config_arguments(parser)
    parser.usage = f"{parser.usage} [--dry-run]"
    parser.add_argument("--dry-run", action="store_true", help=_DRY_RUN)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, or look at what training would take; 130 when interrupted."""
    if not args.rest and args.config is None and not args.help:
        args.parser.error("say what to train: a preset such as 'arithmetic' (predmask list presets), or --config FILE")
    config = load_config(args)
    if args.dry_run:
        return _look(config, preset=args.rest[0] if args.rest else "")
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


def _look(config: Config, preset: str) -> int:
    from predmask.cli.plan_view import plan_lines
    from predmask.train.plan import dry_run
    from predmask.train.presets import PRESETS

    found = dry_run(config)
    print("\n".join(plan_lines(found, PRESETS.get(preset))))
    return 0 if found.ready else 1
