"""`predmask verl`: the mask inside verl, for many machines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from predmask.cli.numbers import above_zero, natural, positive
from predmask.plugins.verl import RATIO_CAP, TOP_K

if TYPE_CHECKING:
    from predmask.core import Rule

_ARGS_USAGE = "%(prog)s [--rule NAME [--rule.FIELD VALUE ...]] [--top-k K] [--ratio-cap C] [--traces DIR ...]"
_ARGS_HELP = """\
Rules and their fields are those of `predmask list rules`; what is not given is the rule's default.

examples:
  python -m verl.trainer.main_ppo ... $(predmask verl args)
  python -m verl.trainer.main_ppo ... $(predmask verl args --rule dppo --rule.delta 0.05)
  python -m verl.trainer.main_ppo ... $(predmask verl args --rule ppo_clip --rule.eps_high 0.28)

Overrides that come after it on the command line win over it. docs/verl.md has the rest.
"""
_FAILED = "+predmask=args_failed"
"""Printed where there are no overrides: Hydra stops at it, and verl does not train without a mask."""
_DOCTOR_USAGE = "%(prog)s [CONFIG.yaml | -- OVERRIDE ...]"
_DOCTOR_HELP = """\
examples:
  predmask verl doctor
  predmask verl doctor outputs/2026-01-01/12-00-00/.hydra/config.yaml
  predmask verl doctor -- algorithm.adv_estimator=grpo ... $(predmask verl args)

exit code: 0; 1 when there is a problem
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "verl",
        help="the mask inside verl: what to add to a launch command, and whether it will work",
        description="Train with a mask of predmask inside verl, on many machines.",
    )
    what = parser.add_subparsers(metavar="WHAT", required=True)
    _add_args(what)
    _add_doctor(what)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print overrides, or look at an installation."""
    return args.what(args)


def _add_args(what: Any) -> None:
    parser = what.add_parser(
        "args",
        help="print the overrides that a launch command needs",
        description="Print, on one line, what a verl launch command needs besides for a mask.",
        usage=_ARGS_USAGE,
        epilog=_ARGS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--top-k",
        type=natural,
        metavar="K",
        help=f"likeliest ids that the server reports (default: {TOP_K}; 0 for rules of the sampled token alone)",
    )
    parser.add_argument(
        "--ratio-cap",
        type=_cap,
        default=RATIO_CAP,
        metavar="C",
        help=f"cap of the importance weight, or none (default: {RATIO_CAP:g})",
    )
    traces = parser.add_argument_group("traces", "tokens to record for `predmask report`")
    traces.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        dest="directory",
        help="directory for them; a resumed run's go into a folder in it",
    )
    traces.add_argument(
        "--traces.every", type=positive, metavar="N", dest="every", help="record every N steps (default: 1)"
    )
    traces.add_argument(
        "--traces.responses",
        type=natural,
        metavar="N",
        dest="responses",
        help="responses of each optimiser step, over all workers; 0: all (default: 64)",
    )
    traces.add_argument(
        "--traces.max-mb", type=above_zero, metavar="MB", dest="max_mb", help="size of the whole (default: 2000)"
    )
    parser.set_defaults(rest=(), what=_args)
    parser.error = _stopping(parser.error)


def _add_doctor(what: Any) -> None:
    parser = what.add_parser(
        "doctor",
        help="check the installation, and a configuration if one is given",
        description="Check that verl and predmask fit and find each other, and that a configuration can be honoured.",
        usage=_DOCTOR_USAGE,
        epilog=_DOCTOR_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG",
        help="the YAML of a composed configuration, or, after --, what follows `python -m verl.trainer.main_ppo`",
    )
    parser.set_defaults(what=_doctor)


def _args(args: argparse.Namespace) -> int:
    from predmask.plugins.verl.launch import LaunchError, launch_args
    from predmask.train.config import ConfigError

    names = ("directory", "every", "responses", "max_mb")
    traces = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        words = launch_args(_rule(args.rest), top_k=args.top_k, ratio_cap=args.ratio_cap, traces=traces)
    except (LaunchError, ConfigError) as error:
        print(_FAILED)
        raise ConfigError(str(error)) from error
    print(" ".join(words))
    return 0


def _stopping(error: Callable[[str], NoReturn]) -> Callable[[str], NoReturn]:
    """As the parser's `error`, and with a word for the launch command that this was called in."""

    def stopping(message: str) -> NoReturn:
        print(_FAILED)
        error(message)

    return stopping


def _rule(arguments: Sequence[str]) -> Rule:
    """The rule that --rule and --rule.FIELD name."""
    from predmask.train.config import ConfigError
    from predmask.train.options import overrides, resolve

    layer = overrides(arguments)
    if unknown := [name for name in layer if name != "rule"]:
        raise ConfigError(
            f"unknown option --{unknown[0]}; there are --rule NAME, --rule.FIELD VALUE, --top-k, --ratio-cap and "
            "--traces (predmask verl args --help). verl's own options are Hydra overrides, beside what this prints"
        )
    return resolve(layer).rule


def _cap(text: str) -> float | None:
    return None if text == "none" else above_zero(text)


def _doctor(args: argparse.Namespace) -> int:
    from predmask.plugins.verl.doctor import examine

    findings = list(examine(args.config))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<8} {finding.what:<{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    return 1 if any(finding.state == "problem" for finding in findings) else 0
